"""One row: who ran, how fast, how much memory and energy; or why it could not run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

LISTS = ("remarks", "window_ms", "clock_limits")
"""Fields that JSON knows as lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Numbers of one runner; without windows it was not measured, and `reason` says why."""

    name: str
    variant: str
    precision: str
    reason: str = ""
    simulated: bool = False
    """Numerics without the hardware: its time is not a statement about the format."""
    remarks: tuple[str, ...] = ()
    window_ms: tuple[float, ...] = ()
    """Milliseconds a step, of each window."""
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    start_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    joules_per_sample: float | None = None
    floor_ms: float | None = None
    loss: float | None = None
    start_s: float | None = None
    cache: str = ""
    """How `start_s` found the compiler's cache: cold, warm, or empty where nothing was compiled."""
    clock_limits: tuple[str, ...] = ()
    """What held the device's clocks down at its end."""
    speedup_fp32: float | None = None
    speedup_tf32: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant} {self.precision}"

    @property
    def is_measured(self) -> bool:
        return bool(self.window_ms)

    @property
    def ms(self) -> float:
        """The median window."""
        return statistics.median(self.window_ms)

    @property
    def spread_ms(self) -> float:
        """Slowest window less fastest."""
        return max(self.window_ms) - min(self.window_ms)

    @property
    def floor_share(self) -> float | None:
        return self.floor_ms / self.ms if self.is_measured and self.floor_ms is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with what follows from the windows written out for readers."""
        values = dataclasses.asdict(self)
        values |= {name: list(values[name]) for name in LISTS}
        if self.loss is not None and not math.isfinite(self.loss):
            values["loss"] = None  # JSON has no NaN; a warning tells of it
        if self.is_measured:
            values |= {"ms": self.ms, "ms_min": min(self.window_ms), "ms_max": max(self.window_ms)}
            values["floor_share"] = self.floor_share
        return values
