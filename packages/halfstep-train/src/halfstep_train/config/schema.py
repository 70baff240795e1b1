"""The config tree every workload shares: frozen, unknown keys refused, each field described.

A workload subclasses `RunConfig` and its `DataConfig` and `ModelConfig` where it adds settings or changes defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from halfstep.errors import ConfigError, suggest_nearest
from halfstep.precision.names import normalise_precision
from halfstep_train.config.foreign import Translator
from halfstep_train.config.section import (
    FilePath,
    Fraction,
    NamedPath,
    OffCount,
    OffNumber,
    Positive,
    PositiveCount,
    Section,
    Workers,
    setting,
)

OptimizerName = Literal[
    "sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop", "adafactor",
    "muon",
]  # fmt: skip
ScheduleName = Literal["constant", "cosine", "linear", "polynomial", "exponential", "step", "onecycle", "plateau"]
Beta = Annotated[float, Field(ge=0, lt=1)]

ADAM_LIKE = frozenset({"adam", "adamw", "nadam", "radam", "adamax"})
OPTIMIZER_OPTIONS: dict[str, frozenset[str]] = {
    "momentum": frozenset({"sgd", "rmsprop", "muon"}),
    "betas": ADAM_LIKE,
    "eps": ADAM_LIKE | {"adagrad", "rmsprop", "adadelta", "muon"},
    "nesterov": frozenset({"sgd", "muon"}),
}
"""The optimizers that read each option; a value given for another optimizer is reported, never silently dropped."""

SCHEDULE_OPTIONS: dict[str, frozenset[str]] = {
    "decay_from_start": frozenset({"cosine", "linear", "polynomial", "exponential", "step"}),
    "min_factor": frozenset({"cosine", "linear", "polynomial", "exponential", "plateau"}),
    "power": frozenset({"polynomial"}),
    "half_life_steps": frozenset({"exponential"}),
    "milestones": frozenset({"step"}),
    "patience": frozenset({"plateau"}),
    "factor": frozenset({"step", "plateau"}),
}
"""The same for schedules."""


def normalise_optimizer(value: object) -> object:
    return re.sub(r"[-_]", "", value.lower()) if isinstance(value, str) else value


class OptimizerConfig(Section):
    """The optimizer. An option that is not set takes the optimizer's own default."""

    name: Annotated[OptimizerName, BeforeValidator(normalise_optimizer)] = setting("adamw", "Optimizer")
    lr: Positive = setting(1e-3, "Peak learning rate of the schedule")
    lr_per: OffCount = setting(
        0, "Samples per step for which lr is given; lr scales linearly with the actual number; 0: no scaling"
    )
    weight_decay: float = setting(1e-2, "Weight decay; decoupled in adamw, added to the gradient in sgd", ge=0)
    decay_norms_and_biases: bool = setting(False, "Decay normalisation parameters and biases too")
    momentum: Beta | None = setting(None, "Momentum; default: 0.9 in sgd, 0 in rmsprop, 0.95 in muon")
    betas: tuple[Beta, Beta] | None = setting(None, "Decay of the two moments in the Adam family; default 0.9, 0.999")
    eps: Positive | None = setting(None, "Added to the denominator; default: the optimizer's default")
    nesterov: bool | None = setting(None, "Nesterov momentum; default: off in sgd, on in muon")
    moment_bits: Literal[32, 8] = setting(32, "Bits of adamw's two moments; 8: 8-bit AdamW, one scale per 256 values")

    def compute_peak_lr(self, samples_per_step: int) -> float:
        """Return the learning rate at the top of the schedule, scaled linearly (Goyal et al. 2017) if lr_per is set."""
        return self.lr * samples_per_step / self.lr_per if self.lr_per else self.lr

    def collect_options(self) -> dict[str, Any]:
        """Return keyword arguments for the chosen optimizer: the options that were set, and momentum 0.9 for sgd."""
        given = {option: getattr(self, option) for option, readers in OPTIMIZER_OPTIONS.items() if self.name in readers}
        defaults = {"momentum": 0.9} if self.name == "sgd" else {}
        return {**defaults, **{option: value for option, value in given.items() if value is not None}}


class ScheduleConfig(Section):
    """The learning rate as a factor of optimizer.lr over the committed steps."""

    name: ScheduleName = setting("cosine", "Shape after the warmup; plateau follows the validation metric")
    warmup_steps: OffCount | None = setting(None, "Steps of linear warmup; when given it replaces warmup_epochs")
    warmup_epochs: float = setting(0.0, "Linear warmup in epochs, fractions allowed", ge=0)
    decay_from_start: bool = setting(False, "Decay from the first step on, also during the warmup, instead of after it")
    min_factor: Fraction = setting(0.0, "Lower bound of the schedule's factor")
    power: Positive = setting(1.0, "Exponent of the polynomial schedule")
    half_life_steps: PositiveCount = setting(10_000, "Steps in which the exponential schedule halves")
    milestones: PositiveCount | tuple[PositiveCount, ...] = setting(
        (), "Steps at which the step schedule cuts; one number: steps between two cuts; default: 10,000"
    )
    patience: PositiveCount = setting(5, "Validations without improvement that the plateau schedule allows")
    factor: float = setting(0.1, "Factor at each cut of the step and plateau schedules", gt=0, lt=1)


def split_names(value: object) -> object:
    """Read `wandb,mlflow` as a list, and `none` or null as an empty one."""
    if value is None or value is False or isinstance(value, str) and value.lower() in ("none", "null", ""):
        return ()
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


WITHOUT_END = 1_000_000
"""Epochs of a run that only max_steps ends."""


class TrainConfig(Section):
    """The loop: how long, how large, how fast."""

    epochs: PositiveCount = setting(100, "Passes over the training set")
    max_steps: OffCount = setting(
        0, "Stop after this many attempted steps, and ignore the default of train.epochs; 0: off"
    )
    batch_size: PositiveCount = setting(8, "Samples per micro-batch, over all ranks")
    val_batch_size: OffCount = setting(0, "Samples per validation batch; 0: as in training")
    accumulate: PositiveCount = setting(1, "Micro-batches per optimizer step")
    clip_norm: OffNumber = setting(1.0, "Clip gradients to this value; 0: off")
    clip_type: Literal["l2", "inf", "value"] = setting(
        "l2", "What is clipped: the L2 norm, the largest magnitude, or each value"
    )
    early_stopping_patience: OffCount = setting(
        20, "Early stopping: validations without improvement before the run ends; 0: off"
    )
    validate_every: PositiveCount = setting(1, "Epochs between two validations")
    validate_every_steps: OffCount = setting(
        0, "Attempted steps between two validations, instead of epochs; 0: by epochs"
    )
    sample_every: OffCount = setting(0, "Attempted steps between two sets of model outputs in report/samples; 0: off")
    checkpoint_every: OffCount = setting(0, "Attempted steps between two checkpoints; 0: at the end of each epoch")
    checkpoints_total_limit: OffCount = setting(3, "Newest checkpoints kept in addition to the best one; 0: all")
    report_every: Literal["auto"] | PositiveCount = setting(
        "auto",
        "Attempted steps between two lines of metrics; before the first one also steps 1, 2, 4, ...; "
        "auto: 10, fewer in runs below 100 steps",
    )
    fast: Literal["auto", "off", "compile", "graph"] = setting(
        "auto",
        "off: eager; compile: torch.compile over model and loss; graph: also captured as a CUDA graph; "
        "auto: the fastest in timed trials on CUDA where the run is long enough, else eager",
    )
    tune_kernels: Literal["auto"] | bool = setting(
        "auto", "Let the compiler search each kernel's block sizes: starts minutes later; auto: for long runs"
    )
    memory: Literal["normal", "low"] = setting(
        "normal",
        "low: save the most memory by recomputation, 8-bit moments and compiler budget, for up to 10 % more time",
    )
    channels_last: Literal["auto"] | bool = setting(
        "auto", "Channels-last (NHWC) layout for images and convolutions; auto: if it is faster"
    )
    activation_checkpointing: bool = setting(
        False, "Recompute activations in backward: less memory, one more forward pass per step"
    )
    auto_batch: bool = setting(False, "When memory runs out, halve the micro-batch, double accumulate, and continue")
    reduce: Literal["fp32", "bf16"] = setting("fp32", "Several ranks: format in which gradients are all-reduced")
    shard: Literal["auto"] | bool = setting(
        False,
        "Several ranks: divide parameters, gradients and optimizer state among them (FSDP2); auto: only "
        "if the memory plan says that a whole copy per rank does not fit",
    )
    shard_gather: Literal["fp32", "bf16"] = setting(
        "fp32",
        "With shard: format in which blocks are gathered; bf16 halves the traffic; norms and modules "
        "that compute in fp32 stay in fp32",
    )
    sync_batch_norm: bool = setting(
        False, "Several ranks: BatchNorm computes its statistics over all of them (GPUs only)"
    )
    cumulative_norms: bool = setting(
        True, "BatchNorm's running statistics move faster in the first steps: by max(momentum, 8/(n + 7))"
    )
    find_unused: bool = setting(False, "Several ranks: some trained parameters are not used in every step")
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "Several ranks: communication backend; auto: nccl on CUDA, gloo elsewhere"
    )
    rank_timeout_s: Positive = setting(600.0, "Several ranks: seconds to wait for a rank that does not answer")
    callbacks: tuple[str, ...] = setting(
        (), "Functions pkg.module:fn that are called with each record of metrics.jsonl"
    )
    seed: int = setting(0, "Seed of weights, shuffling and augmentation", ge=0, lt=2**63)
    deterministic: bool = setting(False, "Bitwise reproducible on CUDA too, but slower")

    @field_validator("callbacks", mode="before")
    @classmethod
    def read_callbacks(cls, value: object) -> object:
        names = split_names(value)
        for name in names if isinstance(names, list | tuple) else ():
            if not isinstance(name, str) or not is_import_path(name):
                meant = ":".join(str(name).rsplit(".", 1))
                likely = f"; did you mean {meant}?" if is_import_path(meant) else ""
                raise ValueError(f"{name!r} is not an import path such as my_pkg.my_mod:fn{likely}")
        return names

    @model_validator(mode="after")
    def ignore_default_epochs(self) -> Self:
        """Ignore the default of `epochs` if only `max_steps` is set, as Lightning and transformers do."""
        if self.max_steps and "max_steps" in self.model_fields_set and "epochs" not in self.model_fields_set:
            object.__setattr__(self, "epochs", WITHOUT_END)  # the model is frozen: a plain assignment would raise
        return self


class GuardConfig(Section):
    """What happens when a step has a non-finite loss or gradient, or a spike."""

    on_fault: Literal["stop", "rollback"] = setting("stop", "After max_consecutive faults: stop the run, or roll back")
    max_consecutive: PositiveCount = setting(5, "Faults in a row (not routine fp16 overflows) before the guard acts")
    margin: OffCount = setting(50, "A rollback returns to at least this many committed steps before the first fault")
    max_rollbacks: OffCount = setting(3, "Rollbacks before the run stops")
    lr_cut: float = setting(0.5, "The learning rate is multiplied by this at each rollback", gt=0, le=1)
    snapshot_every: PositiveCount = setting(100, "Attempted steps between two snapshots for rollback")
    floor_patience: PositiveCount = setting(10, "fp16 overflows in a row at the smallest scale before the run stops")
    capsules: OffCount = setting(4, "Faults whose step is saved in RUN/capsules for `halfstep replay`; 0: none")
    capture_spikes: bool = setting(False, "Save the step of a loss spike as well")
    hold: bool = setting(False, "Commit nothing after a fault until its step is saved: exact capsules")
    skip_spikes: bool = setting(False, "Skip steps whose loss is a spike, not only non-finite ones")
    spike_threshold: Positive = setting(10.0, "A loss this many deviations (MAD) above the median is a spike")
    spike_window: int = setting(64, "Number of losses for the median and the deviation", ge=8)


class ScalerConfig(Section):
    """Loss scaling under fp16; torch's GradScaler has the same defaults."""

    init_scale: Positive = setting(65536.0, "Scale of the first step; divided by train.accumulate")
    growth_factor: float = setting(2.0, "The scale is multiplied by this after growth_interval clean steps", gt=1)
    backoff_factor: float = setting(0.5, "The scale is multiplied by this after an overflow", gt=0, lt=1)
    growth_interval: PositiveCount = setting(2000, "Clean steps in a row before the scale grows")
    min_scale: Positive = setting(1.0, "The scale never falls below this")

    @model_validator(mode="after")
    def refuse_scale_below_minimum(self) -> Self:
        if self.init_scale < self.min_scale:
            raise ValueError(f"init_scale {self.init_scale:g} is below min_scale {self.min_scale:g}")
        return self


class EmaConfig(Section):
    """An fp32 moving average of the weights and buffers, updated by committed steps only."""

    enabled: bool = setting(False, "Keep an average of the weights, and validate and save it")
    decay: float = setting(0.9999, "Decay after the warmup", gt=0, lt=1)
    warmup_power: Positive = setting(2 / 3, "Warmup: decay = min(decay, 1 - (1 + step) ** -warmup_power)")


def canonicalise_precision(value: object) -> str:
    try:
        return normalise_precision(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


PrecisionName = Annotated[str, BeforeValidator(canonicalise_precision)]


class PrecisionConfig(Section):
    """How weights are stored and what matmuls and convolutions compute in."""

    default: PrecisionName = setting(
        "auto", "auto, fp32 (strict, no TF32), tf32, bf16, fp16, fp8 or bf16-true; other tools' names work"
    )
    modules: dict[str, PrecisionName] = Field(
        default_factory=dict, description='Precision of modules by name pattern: {"vae.*": fp32}'
    )
    strict: bool = setting(False, "Refuse to run if the device lacks the requested precision, instead of falling back")
    simulate: bool = setting(False, "Simulate the numerics of a format the hardware lacks; slower, never faster")
    rounding: Literal["split", "stochastic", "nearest"] = setting(
        "split",
        "How bf16-true stores weights: split keeps the low 16 bits in a second tensor, stochastic rounds "
        "up or down at random, nearest loses small updates",
    )
    force: bool = setting(False, "Run fp8 in every layer that supports it, even where bf16 is measured to be faster")
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = setting(
        "tensorwise", "fp8's scales: one per tensor, per row, or per row with bf16 weight gradients"
    )


class DataConfig(Section):
    """Where the data is and how it is read."""

    dir: NamedPath = setting(None, "Folder of the dataset; without one halfstep trains on generated demo data")
    image_size: PositiveCount = setting(224, "Side of the square images the model sees, in pixels")
    num_workers: Workers = setting(
        "auto",  # validated as any other value, into a number
        "Worker processes that read and decode; 0: the main process reads; auto: one per core, at most 8",
    )
    val_fraction: float = setting(0.1, "Share of the samples kept for validation", ge=0, lt=1)
    on_bad_file: Literal["error", "skip"] = setting("error", "A file that cannot be read: stop, or skip and count it")


class FolderConfig(DataConfig):
    """A folder of images, whole or split into two folders."""

    folders: tuple[str, ...] = setting(
        (), "Training and validation folder below data.dir; empty: those with common names", max_length=2
    )


class LabelledFolderConfig(FolderConfig):
    """A folder of images with classes."""

    label_column: str = setting(
        "", "Column of metadata.jsonl or .csv with the classes; empty: label or another common name"
    )


class ModelConfig(Section):
    """Which model, and how large."""

    path: str | None = setting(None, "Import path of your model, pkg.module:callable; default: the workload's")
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Keyword arguments for your model or workload"
    )
    weights: FilePath = setting(None, "File with weights to start from")


class BuiltModelConfig(ModelConfig):
    """The model section of a workload that builds its own model."""

    @model_validator(mode="after")
    def refuse_custom_model(self) -> Self:
        if self.path or self.options:
            raise ValueError("this workload has a fixed model; to train your model: halfstep train my_pkg.my_mod:build")
        return self


class TransformerSize(Section):
    """Size of a transformer."""

    depth: OffCount = setting(0, "Number of blocks; 0: from the workload's name")
    heads: OffCount = setting(0, "Attention heads, must divide dim; 0: from the workload's name")
    dim: OffCount = setting(0, "Channels of a token; 0: from the workload's name")


def read_off(value: object) -> object:
    return "off" if value is None or value is False else value


LatentCaching = Annotated[Literal["off", "latents"], BeforeValidator(read_off)]
"""Whether the autoencoder's latents of the samples are cached on disk; `null` and `false` mean off."""


TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class LogConfig(Section):
    """What is written and shown in addition to metrics.jsonl."""

    track: Annotated[tuple[TrackerName, ...], BeforeValidator(split_names)] = setting(
        (), "Experiment trackers that get metrics, config, plan and report: tensorboard, wandb, mlflow"
    )
    quiet: bool = setting(False, "Show warnings, errors and the final summary only")
    verbose: bool = setting(False, "Print each epoch's metrics as a table, and keep finished bars")
    ledger: bool | PositiveCount = setting(
        False,
        "Record the dtypes that the first step of each mode computes in (report/ledger.json); a number N: "
        "and those of every N-th step",
    )
    watch: int = setting(
        0, "Measure the ranges of all modules every N steps, and warn before one leaves its format; 0: off", ge=0
    )

    @model_validator(mode="after")
    def refuse_quiet_and_verbose(self) -> Self:
        if self.quiet and self.verbose:
            raise ValueError("quiet and verbose contradict each other")
        return self


class RunConfig(Section):
    """The config of one run."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "fast": {"precision.default": "bf16"},
        "quality": {"precision.default": "bf16", "ema.enabled": True},
        "lowmem": {"precision.default": "bf16", "train.activation_checkpointing": True},
        "stable": {"precision.default": "fp32", "train.fast": "off", "guard.on_fault": "rollback"},
        "debug": {"precision.default": "fp32", "train.fast": "off", "train.epochs": 1, "data.num_workers": 0},
    }
    """Values by path for each preset; a workload may define its own."""
    demo: ClassVar[dict[str, Any]] = {}
    """Values by path for the workload's demo data; they apply only if no data folder is given."""
    demo_replaces: ClassVar[frozenset[str]] = frozenset()
    """Paths of settings that name files of a data folder: without one they are ignored."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults by path that differ from those of the class's sections; a subclass lists only its own."""

    workload: str = Field(description="What is trained: a workload's name, or an import path pkg.module:build")
    preset: str | None = setting(None, "Set of values for a purpose: fast, quality, lowmem, stable, debug")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps or xpu")
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    guard: GuardConfig = GuardConfig()
    scaler: ScalerConfig = ScalerConfig()
    ema: EmaConfig = EmaConfig()
    log: LogConfig = LogConfig()
    globals: dict[str, JsonValue] = Field(
        default_factory=dict, description="Custom values, which any setting can refer to as ${globals.NAME}"
    )

    @field_validator("device")
    @classmethod
    def check_device(cls, value: str) -> str:
        if not is_device(value):
            raise ValueError("there is no such kind of device")
        return value

    def replace(self, **sections: Mapping[str, Any]) -> Self:
        """Return a copy with other values in some of its sections; nothing is validated again."""
        parts = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=parts)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Make a subclass of each section with other defaults, as an attribute of the config class for pickle."""
        given = [(*path.split("."), value) for path, value in vars(cls).get("defaults", {}).items()]
        for section in dict.fromkeys(name for name, _, _ in given):
            field = cls.model_fields[section]
            # A subclass of the section, so that the defaults of other workloads stay unchanged.
            kind: Any = field.annotation
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}._{section}"}
            made: Any = type(kind)(kind.__name__, (kind,), {**names, "__doc__": kind.__doc__})
            for key, value in ((key, value) for name, key, value in given if name == section):
                # pydantic reads defaults from here when the model is rebuilt below.
                made.model_fields[key].default = value
            made.model_rebuild(force=True)
            # Worker processes unpickle the class by this name.
            setattr(cls, f"_{section}", made)
            field.annotation, field.default = made, made()
        cls.model_rebuild(force=True)


IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class HasSchema(Protocol):
    def get_schema(self, workload: str) -> type[RunConfig]: ...


class Schemas(Protocol):
    """Families by workload name; also finds a user's workload by its import path."""

    def of(self, workload: str, where: str = "") -> HasSchema: ...
    def __iter__(self) -> Iterator[str]: ...
    def list_translators(self) -> Iterable[Translator]: ...


DEVICE = re.compile(r"(auto|cpu|cuda|rocm|mps|xpu)(:\d+)?", re.IGNORECASE)


def is_device(name: str) -> bool:
    """True if a machine can have a device of this name."""
    return DEVICE.fullmatch(name) is not None


def is_import_path(name: str) -> bool:
    """True if this is the import path of a custom workload, `my_pkg.my_mod:build`."""
    return IMPORT_PATH.fullmatch(name) is not None


def make_unknown_workload(workload: str, known: Iterable[str], where: str = "") -> ConfigError:
    at = f" ({where})" if where and where != workload else ""
    fix = f"{suggest_nearest(workload, known)} (or a YAML file, or an import path such as my_pkg.my_mod:build)"
    return ConfigError(f"unknown workload {workload!r}{at}", fix=fix)
