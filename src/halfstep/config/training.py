"""How a run optimizes, and what keeps it from damaging its weights."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from halfstep.config.section import Fraction, OffCount, OffNumber, Positive, PositiveCount, Section

OptimizerName = Literal[
    "sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop", "adafactor",
    "muon",
]  # fmt: skip
ScheduleName = Literal["constant", "cosine", "linear", "polynomial", "exponential", "step", "onecycle", "plateau"]
Beta = Annotated[float, Field(ge=0, lt=1)]

UNJUDGEABLE = ("lbfgs",)
ADAM_LIKE = frozenset({"adam", "adamw", "nadam", "radam", "adamax"})
OPTIMIZER_OPTIONS: dict[str, frozenset[str]] = {
    "momentum": frozenset({"sgd", "rmsprop", "muon"}),
    "betas": ADAM_LIKE,
    "eps": ADAM_LIKE | {"adagrad", "rmsprop", "adadelta", "muon"},
    "nesterov": frozenset({"sgd", "muon"}),
    "alpha": frozenset({"rmsprop"}),
    "rho": frozenset({"adadelta"}),
}
"""Which optimizers read an option; a value given to another one is reported, never dropped in silence."""

SCHEDULE_OPTIONS: dict[str, frozenset[str]] = {
    "decay_from_start": frozenset({"cosine", "linear", "polynomial", "exponential", "step"}),
    "min_factor": frozenset({"cosine", "linear", "polynomial", "exponential", "plateau"}),
    "power": frozenset({"polynomial"}),
    "half_life_steps": frozenset({"exponential"}),
    "step_size": frozenset({"step"}),
    "milestones": frozenset({"step"}),
    "gamma": frozenset({"step"}),
    "patience": frozenset({"plateau"}),
    "factor": frozenset({"plateau"}),
    "peak_share": frozenset({"onecycle"}),
}
"""The same for schedules."""


class OptimizerConfig(Section):
    """The optimizer. An option left out takes the optimizer's own default."""

    name: OptimizerName = Field(default="adamw", description="Which optimizer")
    lr: Positive = Field(default=1e-3, description="Learning rate at the top of the schedule")
    lr_per: OffCount = Field(
        default=0, description="lr is meant for this many samples per step and grows with them; 0: lr is used as it is"
    )
    weight_decay: float = Field(
        default=1e-2, ge=0, description="Weight decay; decoupled in adamw, added to the gradient in sgd"
    )
    decay_norms_and_biases: bool = Field(default=False, description="Decay normalisation parameters and biases too")
    momentum: Beta | None = Field(default=None, description="Momentum; default: 0.9 in sgd, 0 in rmsprop, 0.95 in muon")
    betas: tuple[Beta, Beta] | None = Field(
        default=None, description="Decay of the two moments in the Adam family; default 0.9, 0.999"
    )
    eps: Positive | None = Field(default=None, description="Added to the denominator; default: the optimizer's own")
    nesterov: bool | None = Field(default=None, description="Nesterov momentum; default: off in sgd, on in muon")
    alpha: Beta | None = Field(default=None, description="Smoothing of rmsprop; default 0.99")
    rho: Beta | None = Field(default=None, description="Smoothing of adadelta; default 0.9")
    moment_bits: Literal[32, 8] = Field(
        default=32, description="Bits of adamw's two moments; 8: codes with a scale for each 256 (8-bit AdamW)"
    )

    @field_validator("name", mode="before")
    @classmethod
    def known_optimizer(cls, value: object) -> object:
        name = re.sub(r"[-_]", "", value.lower()) if isinstance(value, str) else value
        if name in UNJUDGEABLE:
            raise ValueError(f"refused: {name} changes weights before a step can be judged; adamw is a good default")
        return name

    def peak_lr(self, samples_per_step: int) -> float:
        """The learning rate at the top of the schedule, scaled linearly (Goyal et al. 2017) where lr_per is set."""
        return self.lr * samples_per_step / self.lr_per if self.lr_per else self.lr

    def options(self) -> dict[str, Any]:
        """Keyword arguments for the chosen optimizer: what was set, and 0.9 where sgd needs a momentum."""
        given = {option: getattr(self, option) for option, readers in OPTIMIZER_OPTIONS.items() if self.name in readers}
        defaults = {"momentum": 0.9} if self.name == "sgd" else {}
        return {**defaults, **{option: value for option, value in given.items() if value is not None}}


class ScheduleConfig(Section):
    """The learning rate as a factor of optimizer.lr over the committed steps."""

    name: ScheduleName = Field(
        default="cosine", description="Shape after the warmup; plateau follows the validation metric"
    )
    warmup_steps: OffCount | None = Field(
        default=None, description="Steps of linear warmup; when given it replaces warmup_epochs"
    )
    warmup_epochs: float = Field(default=0.0, ge=0, description="Linear warmup in epochs, fractions allowed")
    decay_from_start: bool = Field(
        default=False, description="Decay from the first step on, also during the warmup, instead of after it"
    )
    min_factor: Fraction = Field(default=0.0, description="The factor never falls below this")
    power: Positive = Field(default=1.0, description="Exponent of the polynomial schedule")
    half_life_steps: PositiveCount = Field(default=10_000, description="Steps in which the exponential schedule halves")
    step_size: PositiveCount = Field(default=10_000, description="Steps between two cuts of the step schedule")
    milestones: tuple[PositiveCount, ...] = Field(
        default=(), description="Steps at which the step schedule cuts; replaces step_size"
    )
    gamma: Fraction = Field(default=0.1, description="Factor of one cut of the step schedule")
    patience: PositiveCount = Field(default=5, description="Validations without a better metric before plateau cuts")
    factor: float = Field(default=0.1, gt=0, lt=1, description="Factor of one cut of plateau")
    peak_share: float = Field(default=0.3, gt=0, lt=1, description="Share of the steps before onecycle's peak")


WITHOUT_END = 1_000_000
"""Epochs of a run that steps alone end."""


class TrainConfig(Section):
    """The loop: how long, how large, how fast."""

    epochs: PositiveCount = Field(default=100, description="Passes over the training set")
    max_steps: OffCount = Field(
        default=0,
        description="Stop after this many attempted steps; epochs are no limit then, unless they are named; 0: epochs",
    )
    batch_size: PositiveCount = Field(default=8, description="Samples of one micro-batch, over all processes")
    val_batch_size: OffCount = Field(default=0, description="Samples of a batch in validation; 0: as in training")
    accumulate: PositiveCount = Field(default=1, description="Micro-batches of one optimizer step")
    clip_norm: OffNumber = Field(default=1.0, description="Gradients are clipped to this; 0: off")
    clip_type: Literal["l2", "inf", "value"] = Field(
        default="l2", description="What is clipped: the L2 norm, the largest entry's norm, each value"
    )
    early_stopping_patience: OffCount = Field(
        default=20, description="Validations without a better metric before the run ends; 0: off"
    )
    validate_every: PositiveCount = Field(default=1, description="Epochs between two validations")
    validate_every_steps: OffCount = Field(
        default=0, description="Attempted steps between two validations, in place of epochs; 0: by epochs"
    )
    sample_every: OffCount = Field(
        default=0, description="Attempted steps between two looks at what the model makes, in report/samples; 0: off"
    )
    checkpoint_every: OffCount = Field(
        default=0, description="Attempted steps between two checkpoints; 0: at each epoch's end"
    )
    checkpoints_total_limit: OffCount = Field(
        default=3, description="Newest checkpoints kept besides the best one; 0: all"
    )
    report_every: Literal["auto"] | PositiveCount = Field(
        default="auto",
        description="Attempted steps between two lines of metrics; auto: 10, fewer in runs below 100 steps",
    )
    fast: Literal["auto", "off", "compile", "graph"] = Field(
        default="auto",
        description="off: eager; compile: torch.compile over model and loss; graph: that, captured as one CUDA graph; "
        "auto: the fastest in timed trials on CUDA where the run is long enough, else eager",
    )
    tune_kernels: Literal["auto"] | bool = Field(
        default="auto",
        description="Let the compiler search each kernel's block sizes: minutes more to start; auto: for long runs",
    )
    memory: Literal["normal", "low"] = Field(
        default="normal",
        description="low: recompute, 8-bit moments, compiler's budget: the least that trials find within memory_time",
    )
    memory_time: float = Field(
        default=1.1, gt=1.01, description="How many times as long as normally a step with memory: low may take"
    )
    channels_last: Literal["auto"] | bool = Field(
        default="auto", description="NHWC memory layout of images and convolutions; auto: where it is faster"
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in backward: less memory, one more forward pass per step"
    )
    auto_batch: bool = Field(
        default=False, description="Out of memory: halve the micro-batch, double accumulate, and go on"
    )
    reduce: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Several processes: the number format in which gradients are summed over them"
    )
    sync_batch_norm: bool = Field(
        default=False, description="Several processes: BatchNorm takes its statistics over all of them (GPUs only)"
    )
    find_unused: bool = Field(
        default=False, description="Several processes: some trained parameters take no part in every step"
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        default="auto", description="Several processes: how they talk; auto: nccl on CUDA, gloo elsewhere"
    )
    rank_timeout_s: Positive = Field(
        default=600.0, description="Several processes: seconds that they wait for one that does not answer"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, shuffling and augmentation")
    deterministic: bool = Field(default=False, description="Bitwise repeatable on CUDA too, at the price of speed")

    @model_validator(mode="after")
    def steps_alone_say_how_long(self) -> Self:
        """As in Lightning and transformers: beside `max_steps`, epochs that nobody named are no limit."""
        if self.max_steps and "max_steps" in self.model_fields_set and "epochs" not in self.model_fields_set:
            object.__setattr__(self, "epochs", WITHOUT_END)  # frozen from here on
        return self


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
