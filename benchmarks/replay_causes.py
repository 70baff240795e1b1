"""How often replay names the cause, and whether its change works: faults planted in all families and in own loops.

    python benchmarks/replay_causes.py [--out DIR] [--only gram,teacher]

Each is a training of a few steps whose first capsule is replayed. Those of planted_in_families.py and
planted_in_loops.py were in view when replay was written or mended; those of planted_blind.py and
planted_blind_again.py were labelled before their first replay, which results/replay_causes_blind.json holds. Named
right means the cause, and the sample where one is to be named. A change with a line for the config is put into it,
and the training run again: it has to end without a fault. A change of code or data is held to the step itself, where
replay has tried it. What replay says it cannot try on one step (a kernel to mend, a sign) counts as not shown to
work, and a fault that is gone when it is run again needs no change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import halfstep as hs
from halfstep.errors import HalfstepError
from halfstep.evidence.capsule import list_capsules
from halfstep.evidence.causes import NOT_REPRODUCED
from halfstep.evidence.replay import Replayed
from halfstep_train.run.capsules import replay_run
from halfstep_train.run.train import train
from halfstep_train.workloads import KINDS, load
from halfstep_train.workloads.diffusion.demo import write_demo as write_pictures
from halfstep_train.workloads.radio.demo import write_demo as write_maps
from halfstep_train.workloads.radio.first_stage import write_first_stage
from halfstep_train.workloads.radio.vae import RadioVAE
from halfstep_train.workloads.slots.demo import write_demo as write_clips
from planted_blind import FIRST_IN_FAMILIES, FIRST_IN_LOOPS, SECOND_IN_FAMILIES, SECOND_IN_LOOPS
from planted_blind_again import THIRD_IN_FAMILIES, THIRD_IN_LOOPS
from planted_in_families import IN_FAMILIES, Cause
from planted_in_loops import IN_LOOPS, Loop
from recording import store

ALWAYS: Mapping[str, Any] = {
    "device": "cpu", "log.quiet": True, "train.fast": "off", "data.num_workers": 0,
    "train.batch_size": 4, "train.epochs": 1000, "train.validate_every": 1000, "precision.default": "fp32",
    "train.max_steps": 14,
}  # fmt: skip
STAGE = {"width": 8, "multipliers": [1, 2], "num_blocks": 1, "z_channels": 2, "latent_channels": 2, "dropout": 0.0}
RADIO = {
    "data.image_size": 16, "optimizer.lr": 3e-3, **{f"model.first_stage.{name}": value for name, value in STAGE.items()}
}  # fmt: skip
PICTURES = {"data.image_size": 8, "train.batch_size": 6, "model.channels": [8, 16], "model.layers": 1}
TINY: Mapping[str, Mapping[str, Any]] = {
    "unet": {"data.image_size": 32, "model.base_channels": 4, "model.depth": 2},
    "resnet50": {"data.image_size": 32, "model.width": 8, "model.blocks": [1, 1, 1, 1], "train.batch_size": 8,
                 "train.max_steps": 126},
    "vit_s_16": {"data.image_size": 32, "model.depth": 2, "model.dim": 32, "model.heads": 2, "model.patch": 8},
    "gpt2": {"model.depth": 2, "model.heads": 2, "model.dim": 32, "model.context": 32},
    "vae": {**PICTURES, "optimizer.lr": 2e-3},
    "diffusion": {**PICTURES, "noise.steps": 20, "noise.beta_end": 0.5, "sample.num": 4, "sample.steps": 4,
                  "model.attention": [1]},
    "radiodiff_vae": {**RADIO, "model.discriminator.enabled": False, "train.batch_size": 3},
    "radiodiff": {**RADIO, "model.width": 8, "model.multipliers": [1], "model.windows": [[2, 2]],
                  "model.feature_windows": [[2, 2]], "model.pyramid.width": 8, "model.pyramid.depths": [1],
                  "model.pyramid.num_heads": [2], "model.pyramid.window": 4, "model.scale_factor": 0.5},
    "slotcontrast": {"data.image_size": 32, "data.chunk_size": 2, "model.backbone": "filters", "model.patch": 8,
                     "model.slots": 3, "model.slot_dim": 8, "model.decoder_hidden": [16], "train.clip_norm": 1,
                     "train.val_batch_size": 2, "train.validate_every_steps": 0},
    "steve": {"data.image_size": 16, "model.vocabulary": 16, "model.slots": 3, "model.slot_dim": 16,
              "model.cnn_channels": 8, "model.mlp_dim": 16, "model.dim": 16, "model.decoder_blocks": 1,
              "model.tau_steps": 20, "schedule.warmup_steps": 5},
}  # fmt: skip
DATA: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "vae": ("pictures", lambda folder: write_pictures(folder, num_images=24, side=12)),
    "radiodiff_vae": ("maps", lambda folder: write_maps(
        folder, side=16, num_maps={"train": 3, "val": 1, "test": 1}, num_transmitters=4)),
    "slotcontrast": ("clips", lambda folder: write_clips(
        folder, num_train=8, num_val=2, frames=5, side=32, per_shard=4)),
    "steve": ("short", lambda folder: write_clips(folder, num_train=4, num_val=2, frames=6, side=16)),
}  # fmt: skip
SETS: Mapping[str, Mapping[str, Cause | Callable[[], Loop]]] = {
    "in view": {**IN_FAMILIES, **IN_LOOPS},
    "first blind": {**FIRST_IN_FAMILIES, **FIRST_IN_LOOPS},
    "second blind": {**SECOND_IN_FAMILIES, **SECOND_IN_LOOPS},
    "third blind": {**THIRD_IN_FAMILIES, **THIRD_IN_LOOPS},
}
PLANTED = {name: cause for planted in SETS.values() for name, cause in planted.items()}
SAME_DATA = {"diffusion": "vae", "radiodiff": "radiodiff_vae", "vit_s_16": "resnet50"}


def data_of(workload: str, folder: Path) -> Path:
    workload = SAME_DATA.get(workload, workload)
    name, write = DATA.get(workload, (workload, lambda path: KINDS[workload].write_demo(workload, path, seed=0)))
    if not (folder / name).exists():
        write(folder / name)
    return folder / name


def first_stage(folder: Path) -> Path:
    if not (folder / "stage").exists():
        (folder / "stage" / "model").mkdir(parents=True)
        torch.manual_seed(0)
        vae = RadioVAE(**{**STAGE, "multipliers": (1, 2)})
        with torch.no_grad():
            vae.quant_conv.bias[2:] = -8
        write_first_stage(vae.state_dict(), STAGE, 0.5, folder / "stage" / "model")
    return folder / "stage"


def trained(name: str, cause: Cause, folder: Path, more: Mapping[str, Any], tag: str = "run") -> list[Path]:
    """The capsules that it leaves."""
    values = {**ALWAYS, **TINY[cause.workload], "data.dir": str(data_of(cause.workload, folder)), **cause.settings}
    if cause.workload == "radiodiff":
        values["model.vae"] = str(first_stage(folder))
    words = [f"{key}={json.dumps(value)}" for key, value in {**values, **more}.items()]
    out = folder / f"{name}-{tag}"
    sources = {"planted_in_families": IN_FAMILIES, "planted_blind_again": THIRD_IN_FAMILIES}
    source = next((source for source, planted in sources.items() if name in planted), "planted_blind")
    # The planted error, or the end that faults in a row make.
    with contextlib.suppress(HalfstepError, RuntimeError, IndexError):
        train(load(f"{source}:{name}", overrides=words), out=out)
    return list_capsules(out / "capsules")


def of_family(name: str, cause: Cause, folder: Path) -> tuple[Replayed, str]:
    """What replay found, and how its change was shown to work."""
    capsules = trained(name, cause, folder, {})
    assert capsules, f"{name} left no capsule: it is not planted as it should be"
    found = replay_run(capsules[0])
    line = found.remedy.line if found.remedy is not None else ""
    if line.partition(":")[0] in ("precision.modules", "precision.default", "optimizer.lr"):
        return found, "" if trained(name, cause, folder, yaml.safe_load(line), "again") else "run"
    return found, _on_step(found)


def of_loop(name: str, loop: Loop, folder: Path) -> tuple[Replayed, str]:
    optimizer = torch.optim.SGD(loop.model.parameters(), loop.lr, fused=True)
    step = hs.Step(loop.model, optimizer, capsules=folder / name, **{"precision": "fp32", **loop.options})
    with contextlib.suppress(HalfstepError, RuntimeError, IndexError), step:
        for batch in loop.batches:
            step(loop.loss_fn, [batch])
    found = hs.replay(list_capsules(folder / name)[0], loop.model, loop.loss_fn)
    return found, _on_step(found)


def _on_step(found: Replayed) -> str:
    return "step" if found.remedy is not None and found.remedy.works else ""


def row_of(name: str, planted: Cause | Callable[[], Loop], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    label = planted if isinstance(planted, Cause) else planted()
    found, works = of_family(name, label, folder) if isinstance(label, Cause) else of_loop(name, label, folder)
    named = [sample.partition(" (")[0] for sample in found.diagnosis.samples]
    is_right = found.cause == label.expected and (not label.sample or named == [label.sample])
    change = found.remedy.change.replace(str(Path(__file__).parent), "benchmarks") if found.remedy is not None else ""
    print(f"{name:14} {'right' if is_right else 'WRONG'} {found.cause:40} {works or '-':5} {change}", flush=True)
    return {
        "name": name,
        "workload": label.workload if isinstance(label, Cause) else "own loop",
        "expected": label.expected,
        "cause": found.cause,
        "named_right": is_right,
        "place_shown": label.place in str(found) if label.place else None,
        "change": change,
        "works_on": works,
    }


def score(rows: list[dict[str, Any]]) -> dict[str, int]:
    to_change = [row for row in rows if row["cause"] != NOT_REPRODUCED or not row["named_right"]]
    return {
        "planted": len(rows),
        "named_right": sum(row["named_right"] for row in rows),
        "places_labelled": sum(row["place_shown"] is not None for row in rows),
        "place_shown": sum(row["place_shown"] is True for row in rows),
        "to_change": len(to_change),
        "change_works": sum(bool(row["works_on"]) for row in to_change),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--only", default="", help="names, by commas")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = arguments.only.split(",") if arguments.only else [*PLANTED]
    with tempfile.TemporaryDirectory() as temporary:
        rows = [row_of(name, PLANTED[name], Path(temporary)) for name in chosen]
    scores = {}
    for name, planted in SETS.items():
        if own := [row for row in rows if row["name"] in planted]:
            scores[name] = score(own)
            print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in scores[name].items()))
    store("replay_causes", {"scores": scores, "rows": rows}, torch.device("cpu"), arguments.out)


if __name__ == "__main__":
    main()
