"""Does low precision cost accuracy? SlotContrast and STEVE on generated clips, paired seeds, by `halfstep train`.

    python benchmarks/slots_parity.py [--workload slotcontrast] [--precisions fp32,bf16,fp16] [--seeds 5] [--out DIR]

slotcontrast: 8 clips of 4 frames at 224 pixels, a backbone of ViT-S's size with random weights, 300 steps. The loss is
judged by max(1 % of fp32's mean, twice its deviation between seeds), FG-ARI by half a point or twice its deviation.
`--data DIR` takes other videos than the generated ones. On a CPU add --simulate and small sizes by --set.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from halfstep_train.workloads.slots.demo import write_demo
from parity import compare, parity_flags

SLOTCONTRAST: dict[str, object] = {
    "data.image_size": 224,
    "model.backbone": "vit_small_patch14_dinov2",
    "model.backbone_weights": "random",
    "model.slots": 7,
    "schedule.warmup_steps": 50,
    "schedule.half_life_steps": 250,
}
STEVE: dict[str, object] = {"data.image_size": 64, "schedule.warmup_steps": 50}
SETTINGS = {"slotcontrast": SLOTCONTRAST, "steve": STEVE}


def main() -> None:
    parser = parity_flags(__doc__, name="slots_parity", needs_data=False)
    parser.add_argument("--workload", choices=sorted(SETTINGS), default="slotcontrast")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    arguments.name = f"{arguments.workload}_parity" if arguments.name == "slots_parity" else arguments.name
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.data is None:
            arguments.data = str(Path(scratch) / "clips")
            write_demo(Path(arguments.data), side=128)
        settings = {
            **SETTINGS[arguments.workload],
            "data.dir": arguments.data,
            "data.num_workers": 0,
            "train.fast": "off",
            "train.batch_size": arguments.batch,
            "train.val_batch_size": 4,
            "train.max_steps": arguments.steps,
            "train.validate_every_steps": 0,
            "train.epochs": 10_000,
        }
        compare(arguments, arguments.workload, settings, Path(scratch), also=("loss",))


if __name__ == "__main__":
    main()
