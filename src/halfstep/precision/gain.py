"""What one part of a mode gained, by timed steps. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """A step without this part and with it, all else equal."""

    part: str
    """channels_last, compile, graph, cudnn.benchmark or kernel tuning."""
    before_ms: float
    after_ms: float
    is_taken: bool

    @property
    def factor(self) -> float:
        return self.before_ms / self.after_ms

    def __str__(self) -> str:
        left_out = "" if self.is_taken else " (not taken)"
        return f"{self.part} {self.factor:.2f}x, {self.before_ms:.1f} -> {self.after_ms:.1f} ms{left_out}"
