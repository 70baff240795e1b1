"""Gradient norms and clipping, after unscaling, without a host read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """`l2` and `inf` limit the norm over all gradients, `value` each entry. A limit of 0 means no clipping."""

    limit: float = 0.0
    kind: Literal["l2", "inf", "value"] = "l2"

    def __post_init__(self) -> None:
        if self.kind not in ("l2", "inf", "value"):
            raise ConfigError(f"unknown clipping {self.kind!r}", fix="clip_type: l2, inf or value")
        if not 0 <= self.limit < float("inf"):
            raise ConfigError(f"clip_norm must be a number from 0 up, not {self.limit}", fix="0 turns clipping off")

    def norm_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm that is judged and reported: the one that is clipped, L2 under value clipping."""
        kind = float("inf") if self.kind == "inf" else 2.0
        return torch.nn.utils.get_total_norm(list(gradients), norm_type=kind, error_if_nonfinite=False)

    def apply_(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        if self.limit == 0 or not gradients:
            return
        if self.kind == "value":
            torch._foreach_clamp_min_(list(gradients), -self.limit)
            torch._foreach_clamp_max_(list(gradients), self.limit)
            return
        # The same expression as torch's clip_grad_norm_, so that results are bit-equal to a plain loop's.
        share = torch.clamp(self.limit / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(list(gradients), share)
