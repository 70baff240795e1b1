"""What a training step needs, counted without running it: on torch's meta device tensors have shapes but no content.

Forward and backward run there at the real sizes, and every storage is counted while it lives. The numbers are
estimates: kernels' workspaces and the allocator's gaps come on top, which is what USABLE_MEMORY leaves room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from halfstep.config.schema import RunConfig
from halfstep.measure.live_bytes import LiveBytes
from halfstep.precision.advice import USABLE_MEMORY
from halfstep.step.batches import batch_length
from halfstep.workloads import KINDS
from halfstep.workloads.kind import Store
from halfstep.workloads.workload import Batch, Workload

FIXED_BYTES = {"sgd": 12}  # of one parameter: weight, gradient and momentum in fp32
ADAM_FIXED_BYTES = 16  # the same with two moments
SAMPLES = 64  # of the counted step; many, since weight gradients on their way are counted with the activations
SEEN = 2  # samples that are really prepared; BatchNorm refuses to train on one value a channel
HALF_COPY_BYTES = 2  # autocast keeps a half copy of every weight for the length of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    num_parameters: int
    fixed_bytes: int
    sample_bytes: int
    sample_flops: int  # forward and backward, nothing recomputed; a multiplication and an addition are two
    usable: float = USABLE_MEMORY
    """The share of a device's memory that may be taken: less where workspaces are not counted."""

    def bytes_at(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.sample_bytes

    def largest_batch(self, memory_bytes: int) -> int:
        """Samples that fit a device; 0 where not even one does."""
        return max(0, int((memory_bytes * self.usable - self.fixed_bytes) / self.sample_bytes))


class NoSamples:
    def __len__(self) -> int:
        return SAMPLES

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        raise AssertionError("counting reads no data")


def step_cost(config: RunConfig, store: Store, precision: str) -> StepCost:
    """What a step of one of our models costs; `store` says what the data are, as a run would store it."""
    kind = KINDS.of(config.workload)
    small = config.model_copy(update={"train": config.train.model_copy(update={"batch_size": SEEN})})
    with torch.device("meta"):
        workload: Workload = kind.part("over")(config, store, NoSamples())
    batch = workload.prepared(kind.make_batch(small, store), key=(), training=True)
    num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    num_frozen = sum(p.numel() for part in workload.frozen.values() for p in part.module.parameters())
    is_half = precision not in ("fp32", "tf32")
    a_parameter = FIXED_BYTES.get(config.optimizer.name, ADAM_FIXED_BYTES) + HALF_COPY_BYTES * is_half
    return StepCost(
        num_parameters=num_parameters,
        fixed_bytes=num_parameters * a_parameter + num_frozen * (HALF_COPY_BYTES if is_half else 4),
        sample_bytes=_peak_bytes(workload, batch) // SAMPLES // (2 if is_half else 1),
        sample_flops=_flops(workload, batch) // SEEN,
    )


def _peak_bytes(workload: Workload, batch: Batch) -> int:
    """Bytes alive at the worst moment of forward and backward, besides weights and gradients."""
    for parameter in workload.model.parameters():
        parameter.grad = torch.empty_like(parameter)  # made here, so not counted as activations
    with LiveBytes() as live:
        _loss(workload, _of_size(batch, SAMPLES)).backward()
    peak: int = live.peak
    return peak


def _flops(workload: Workload, batch: Batch) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        workload.forward(workload.model.eval(), _of_size(batch, SEEN))
    return 3 * int(counter.get_total_flops())  # backward: one product for the input's gradient, one for the weight's


def _loss(workload: Workload, batch: Batch) -> Tensor:
    loss, _ = workload.weighed_loss(workload.forward(workload.model.train(), batch), batch)
    return loss


def _of_size(batch: Batch, num_samples: int) -> Batch:
    seen = batch_length(batch)
    return {
        name: torch.empty((num_samples, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in batch.items()
        if value.ndim and len(value) == seen
    }
