"""What keeps a run from damaging its weights: guard, loss scaling, the averaged copy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from halfstep.config.section import OffCount, Positive, PositiveCount, Section


class GuardConfig(Section):
    """What happens when steps go bad."""

    on_fault: Literal["stop", "rollback"] = Field(
        default="stop", description="After max_consecutive faults: end the run, or go back"
    )
    max_consecutive: PositiveCount = Field(
        default=5, description="Faults in a row (not routine fp16 overflows) before the guard acts"
    )
    margin: OffCount = Field(
        default=50, description="A rollback goes at least this many committed steps before the first fault"
    )
    max_rollbacks: OffCount = Field(default=3, description="Rollbacks before the run stops")
    lr_cut: float = Field(
        default=0.5, gt=0, le=1, description="The learning rate is multiplied by this at each rollback"
    )
    snapshot_every: PositiveCount = Field(default=100, description="Attempted steps between two snapshots for rollback")
    floor_patience: PositiveCount = Field(
        default=10, description="fp16 overflows in a row at the smallest scale before the run stops"
    )
    capsules: OffCount = Field(
        default=4, description="Faults whose step is kept in RUN/capsules for `halfstep replay`; 0 keeps none"
    )
    capture_spikes: bool = Field(default=False, description="Keep the step of a loss spike, too")
    hold: bool = Field(default=False, description="Commit nothing after a fault until it is kept: exact capsules")
    skip_spikes: bool = Field(default=False, description="Skip steps whose loss is a spike, not only non-finite ones")
    spike_threshold: Positive = Field(
        default=10.0, description="A spike is a loss this many deviations (MAD) above the median"
    )
    spike_window: int = Field(default=64, ge=8, description="Losses the median and the deviation are taken over")


class ScalerConfig(Section):
    """Loss scaling under fp16; torch's GradScaler has the same defaults."""

    init_scale: Positive = Field(default=65536.0, description="Scale of the first step; divided by train.accumulate")
    growth_factor: float = Field(
        default=2.0, gt=1, description="The scale grows by this after growth_interval clean steps"
    )
    backoff_factor: float = Field(default=0.5, gt=0, lt=1, description="The scale shrinks by this after an overflow")
    growth_interval: PositiveCount = Field(default=2000, description="Clean steps in a row before the scale grows")
    min_scale: Positive = Field(default=1.0, description="The scale never falls below this")

    @model_validator(mode="after")
    def starts_above_its_floor(self) -> Self:
        if self.init_scale < self.min_scale:
            raise ValueError(f"init_scale {self.init_scale:g} is below min_scale {self.min_scale:g}")
        return self


class EmaConfig(Section):
    """An fp32 moving average of the weights and buffers, moved by committed steps only."""

    enabled: bool = Field(default=False, description="Keep the average, and validate and save it")
    decay: float = Field(default=0.9999, gt=0, lt=1, description="Decay after the warmup")
    warmup_power: Positive = Field(
        default=2 / 3, description="Warmup: decay = min(decay, 1 - (1 + step / inv_gamma) ** -warmup_power)"
    )
    inv_gamma: Positive = Field(default=1.0, description="Steps scale of that warmup")
