"""A row of a Plan: one module. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RowKind = Literal["default", "module", "frozen", "island"]

WHOLE_MODEL = "*"  # name of the one row a plan has for all modules when it was made without a model
ROOT = "(root)"  # name of the model itself, if it has parameters outside its submodules


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One module: how its weights are stored, what it computes in, and why."""

    module: str
    storage: str
    compute: str
    reason: str
    kind: RowKind = "default"
    precision: str = ""  # what this module was granted; empty if the plan's own precision applies

    @property
    def is_part(self) -> bool:
        """True if a pattern of the request names the module, so that it is treated separately."""
        return self.kind in ("module", "frozen")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The step time without and with one lever of the mode, everything else equal."""

    part: str  # channels_last, compile, graph, cudnn.benchmark or kernel tuning
    before_ms: float
    after_ms: float
    is_taken: bool

    @property
    def factor(self) -> float:
        return self.before_ms / self.after_ms

    def __str__(self) -> str:
        left_out = "" if self.is_taken else " (not taken)"
        return f"{self.part} {self.factor:.2f}x, {self.before_ms:.1f} -> {self.after_ms:.1f} ms{left_out}"
