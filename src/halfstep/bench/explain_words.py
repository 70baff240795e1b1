"""What a change is called by whom it is advised to: a setting of halfstep, or a line in the user's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

OURS = "halfstep"
TF32 = 'torch.set_float32_matmul_precision("high")'


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """One way to say each change."""

    compile: str
    graph: str
    channels_last: str
    precisions: Mapping[str, str]
    batch_size: str
    """With `{}` for the number."""
    fused: str
    """Empty where an optimizer is fused anyhow if torch can."""
    prefetch: str = "halfstep.prefetch(loader, device) over pinned uint8 batches"


HALFSTEP = Words(
    compile="train.fast=compile",
    graph="train.fast=graph",
    channels_last="train.channels_last=true",
    precisions={name: f"--precision {name}" for name in ("bf16", "fp16", "tf32")},
    batch_size="train.batch_size={}",
    fused="",
)
PLAIN = Words(
    compile="torch.compile(model)",
    graph='torch.compile(..., mode="reduce-overhead")',
    channels_last="model and images .to(memory_format=torch.channels_last)",
    precisions={
        "bf16": "torch.autocast(..., torch.bfloat16)",
        "fp16": "torch.autocast(..., torch.float16), GradScaler",
        "tf32": TF32,
    },
    batch_size="DataLoader(..., batch_size={})",
    fused="AdamW(..., fused=True)",
)
LIGHTNING = replace(
    PLAIN,
    precisions={"bf16": 'Trainer(precision="bf16-mixed")', "fp16": 'Trainer(precision="16-mixed")', "tf32": TF32},
)
ACCELERATE = replace(
    PLAIN,
    precisions={
        "bf16": 'Accelerator(mixed_precision="bf16")',
        "fp16": 'Accelerator(mixed_precision="fp16")',
        "tf32": TF32,
    },
)
_BY_RUNNER = {OURS: HALFSTEP, "lightning": LIGHTNING, "accelerate": ACCELERATE}


def words_for(runner: str) -> Words:
    """Those of a runner by its name; of a loop that nobody knows, PyTorch's own."""
    return _BY_RUNNER.get(runner, PLAIN)
