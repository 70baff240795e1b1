"""Loss scaling for fp16, entirely on the device.

fp16 gradients below 6e-8 vanish; multiplying the loss by a large power of two lifts them, and dividing the fp32
gradients by it afterwards is exact. The right factor drifts, so it is searched for: halve on overflow, double after
`growth_interval` clean steps. torch's GradScaler does the same but reads its flag on the host in `step()`; here the
flag, the scale and the growth tracker never leave the device. The arithmetic is torch's own update kernel, plus a
floor: a scale that sinks for ever is a diverged model, not an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError

USUAL_FIRST = 65536.0
FAR_BELOW = 1024
"""A scale that is this factor below its first value is no longer being searched for: overflows are a fault then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerOptions:
    init_scale: float = USUAL_FIRST
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        moves = self.growth_factor > 1 and 0 < self.backoff_factor < 1 and self.growth_interval >= 1
        if not moves or not 0 < self.min_scale <= self.init_scale:
            raise ConfigError(
                f"loss scaling cannot work with these settings: {self}",
                why="the scale must rise after clean steps, and fall on overflow, but not below min_scale",
                fix="growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1, 0 < min_scale <= init_scale",
            )


class Scaler:
    """Scale and growth tracker as device tensors. Disabled (bf16, tf32, fp32) it is the identity, never None."""

    def __init__(
        self, device: torch.device, *, enabled: bool, options: ScalerOptions | None = None, accumulate: int = 1
    ) -> None:
        self.enabled = enabled
        self.options = options or ScalerOptions()
        # Usual loops divide the loss by `accumulate` before scaling, while a window here divides at its end. With a
        # lower initial scale fp16 sees the same numbers, and as many first steps overflow.
        power_of_two = 1 << (accumulate - 1).bit_length()
        self.first = max(self.options.init_scale / power_of_two, self.options.min_scale) if enabled else 1.0
        self.value = torch.full((), self.first, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def low(self) -> float:
        """Return the scale above which overflows are routine. A search that begins at 2**32 takes longer."""
        return max(min(self.first, USUAL_FIRST) / FAR_BELOW, self.options.min_scale)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on, in fp32: a half-precision loss times 65536 would overflow."""
        return loss.float() * self.value if self.enabled else loss

    @torch.no_grad()
    def update(self, overflow: Tensor, unjudged: Tensor | None = None) -> None:
        """Halve after an overflow, double after `growth_interval` clean steps, never fall below the floor.

        `unjudged` steps (an empty window, a skipped spike) say nothing about the scale and leave it alone.
        """
        if not self.enabled:
            return
        o, value, tracker = self.options, self.value.clone(), self.growth_tracker.clone()
        torch._amp_update_scale_(value, tracker, overflow.float(), o.growth_factor, o.backoff_factor, o.growth_interval)
        value.clamp_(min=o.min_scale)
        if unjudged is not None:
            value = torch.where(unjudged, self.value, value)
            tracker = torch.where(unjudged, self.growth_tracker, tracker)
        self.value.copy_(value)
        self.growth_tracker.copy_(tracker)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with torch GradScaler's keys. Waits for the device."""
        if not self.enabled:
            return {}
        o = self.options
        return {
            "scale": self.value.item(),
            "growth_factor": o.growth_factor,
            "backoff_factor": o.backoff_factor,
            "growth_interval": o.growth_interval,
            "_growth_tracker": int(self.growth_tracker.item()),
        }

    def refuse_unfit(self, state: Mapping[str, Any]) -> None:
        if self.enabled != bool(state):
            made, here = ("with", "without") if state else ("without", "with")
            raise CheckpointError(
                f"the checkpoint was saved {made} loss scaling, but this step runs {here} it",
                why="fp16 needs its scale, and other precisions have none",
                fix="resume with the precision the run was started with",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load our state or a torch GradScaler's: scale and tracker. The factors stay as configured."""
        self.refuse_unfit(state)
        if self.enabled:
            self.value.fill_(float(state["scale"]))
            self.growth_tracker.fill_(int(state["_growth_tracker"]))
