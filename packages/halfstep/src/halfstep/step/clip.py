"""Gradient norms and clipping, without a host read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.step.flat import get_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """`l2` and `inf` limit the norm over all gradients, `value` each entry. A limit of 0 means no clipping."""

    limit: float = 0.0
    kind: Literal["l2", "inf", "value"] = "l2"

    def __post_init__(self) -> None:
        if self.kind not in ("l2", "inf", "value"):
            raise ConfigError(f"unknown clipping {self.kind!r}", fix="set clip_type to l2, inf or value")

    def measure(
        self, gradients: list[Tensor], unscale: Tensor | None = None, compute_norm: ComputeNorm | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norm of the unscaled gradients, and the factor, if any, that unscales and clips them. Of gradients
        that are shards, `compute_norm` returns the norm over all ranks.

        Nothing but clipping by value writes into the gradients."""
        compute_norm = compute_norm or compute_total_norm
        if self.kind == "value" and self.limit:
            return self._clamp(gradients, unscale, compute_norm), None
        norm = compute_norm(gradients, self.norm_kind)
        if unscale is not None:
            norm = norm * unscale
        if self.limit == 0:
            return norm, unscale
        # The expression of torch's clip_grad_norm_, so that clipped gradients are bit-identical to a plain loop's.
        share = (norm + 1e-6).reciprocal_().mul_(self.limit).clamp_(max=1.0)
        return norm, share if unscale is None else unscale * share

    @property
    def norm_kind(self) -> float:
        """Return the order of the norm that is judged and reported: the clipped one, or L2 if values are clipped."""
        return float("inf") if self.kind == "inf" else 2.0

    def _clamp(self, gradients: list[Tensor], unscale: Tensor | None, compute_norm: ComputeNorm) -> Tensor:
        if unscale is not None:
            torch._foreach_mul_(gradients, unscale)
        norm = compute_norm(gradients, self.norm_kind)
        torch._foreach_clamp_min_(gradients, -self.limit)
        torch._foreach_clamp_max_(gradients, self.limit)
        return norm


ComputeNorm = Callable[[list[Tensor], float], Tensor]


def compute_total_norm(tensors: list[Tensor], kind: float = 2.0) -> Tensor:
    """Return torch.nn.utils.get_total_norm, with its bits, in half of the host's time for tensors of one dtype."""
    is_plain = tensors[0].device.type in ("cpu", "cuda") and set(map(type, tensors)) == {Tensor}
    if is_plain and len(set(map(get_dtype, tensors))) == len(set(map(Tensor.get_device, tensors))) == 1:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, kind)), kind)
    return torch.nn.utils.get_total_norm(tensors, norm_type=kind, error_if_nonfinite=False)
