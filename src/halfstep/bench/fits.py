"""Whether a bench can fit a CPU's memory: where it cannot, the system ends the process, and no row is left to tell.

Counted is only what is surely there at the same time, so that nothing is refused that would have run, unless out of
swap, whose times would mean nothing: weights twice (each row begins with a copy), gradients, AdamW's moments, and in
eager rows the inputs of all convolutions and linear layers, which backward needs for their weights' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.bench.problem import stored_facts
from halfstep.config.schema import RunConfig
from halfstep.errors import MemoryLimitError
from halfstep.guide.memory import model_for
from halfstep.measure.memory import format_bytes

WEIGHTED = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
MOMENTS = {"adam": 2, "adamw": 2}
"""Numbers of optimizer state to a parameter; others may keep none."""
SAMPLES = 2
"""Of the counted batch: BatchNorm refuses to train on one value a channel."""

TAKEN = 3
"""Times as much as is counted here a process takes for its rows: 2.6 to 2.9 in fp32 for small forms of unet, resnet50
and vit_s_16 on an Arm Neoverse-N1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """Memory below which no row of a bench can run."""

    num_parameters: int
    parameter_bytes: int
    """Of one parameter, with all that is kept for it."""
    sample_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return self.num_parameters * self.parameter_bytes


def refuse_too_large(config: RunConfig, precisions: Sequence[str], ways: Sequence[str], free_bytes: int) -> None:
    """Raise MemoryLimitError where a row would need more memory than is free."""
    least, batch_size = least_memory(config, precisions, ways), config.train.batch_size
    needed = least.fixed_bytes + batch_size * least.sample_bytes
    if needed <= free_bytes:
        return
    model = f"{least.num_parameters:,} parameters of {least.parameter_bytes} bytes with gradient and optimizer"
    fits = (free_bytes - least.fixed_bytes) // least.sample_bytes if least.sample_bytes else 0
    smaller = f"--batch-size {max(1, fits // TAKEN)} or less" if fits > 0 else "a smaller model"
    raise MemoryLimitError(
        f"{config.workload} at batch {batch_size} needs {format_bytes(needed)} or more, and {format_bytes(free_bytes)} "
        "of this machine's memory are free",
        why=f"{model}, and {format_bytes(least.sample_bytes)} a sample; the system would end the bench without a word",
        fix=f"{smaller}, or --device cuda on a machine with a GPU",
    )


def least_memory(config: RunConfig, precisions: Sequence[str], ways: Sequence[str]) -> Least:
    """What the most demanding of the rows cannot do without, counted on tensors that have shapes but no content."""
    number_bytes = 4 if {"fp32", "tf32"} & set(precisions) else 2
    saves_memory = config.train.memory == "low"
    moments = 0 if saves_memory else MOMENTS.get(config.optimizer.name, 0)
    keeps_inputs = "eager" in ways and not saves_memory and not config.train.activation_checkpointing
    with torch.device("meta"):
        model = model_for(config, stored_facts(config)).train()
    return Least(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=(3 + moments) * number_bytes,
        sample_bytes=_inputs(model, config) * number_bytes if keeps_inputs else 0,
    )


def _inputs(model: nn.Module, config: RunConfig) -> int:
    """Numbers of one sample that enter layers with weights; what enters several is kept once."""
    kept: dict[int, Tensor] = {}

    def keep(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        kept[arguments[0].untyped_storage()._cdata] = arguments[0]

    for module in model.modules():
        if isinstance(module, WEIGHTED):
            module.register_forward_pre_hook(keep)
    side = config.data.image_size
    model(torch.empty(SAMPLES, int(stored_facts(config).get("channels", 3)), side, side, device="meta"))
    return sum(tensor.numel() for tensor in kept.values()) // SAMPLES
