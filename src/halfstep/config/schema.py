"""The config tree every workload shares: frozen, unknown keys refused, each field described.

A workload subclasses `RunConfig` and its `DataConfig` and `ModelConfig` where it has settings or defaults of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from halfstep.config.foreign import Translator
from halfstep.config.precision_names import precision_name
from halfstep.config.section import FilePath, NamedPath, PositiveCount, Section, Workers
from halfstep.config.training import EmaConfig, GuardConfig, OptimizerConfig, ScalerConfig, ScheduleConfig, TrainConfig
from halfstep.errors import ConfigError, nearest

__all__ = [
    "BuiltModelConfig",
    "DataConfig",
    "EmaConfig",
    "GuardConfig",
    "LatentCaching",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScalerConfig",
    "ScheduleConfig",
    "TrainConfig",
]


class PrecisionConfig(Section):
    """How weights are stored and what matmuls and convolutions compute in."""

    default: str = Field(
        default="auto",
        description="auto, fp32 (strict, no TF32), tf32, bf16, fp16, fp8 or bf16-true; other tools' names work",
    )
    modules: dict[str, str] = Field(
        default_factory=dict, description='Precision of parts of the model by name pattern: {"vae.*": fp32}'
    )
    strict: bool = Field(
        default=False, description="Refuse to run when the asked precision is lacking, instead of falling back"
    )
    simulate: bool = Field(
        default=False, description="Run the numerics of a format the hardware lacks; never for speed"
    )
    rounding: Literal["split", "stochastic", "nearest"] = Field(
        default="split",
        description="How bf16-true stores weights: split keeps the other 16 bits beside them, stochastic rounds up or "
        "down at random, nearest loses small updates",
    )
    force: bool = Field(
        default=False, description="Run fp8 in every layer that can take it, also where bf16 is measured faster"
    )

    @field_validator("default", mode="before")
    @classmethod
    def canonical_default(cls, value: object) -> str:
        return canonical(value)

    @field_validator("modules", mode="before")
    @classmethod
    def canonical_modules(cls, value: object) -> object:
        return {name: canonical(wish) for name, wish in value.items()} if isinstance(value, dict) else value


def canonical(value: object) -> str:
    try:
        return precision_name(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class DataConfig(Section):
    """Where the data is and how it is read."""

    dir: NamedPath = Field(
        default=None, description="Folder of the data set; without one halfstep trains on generated demo data"
    )
    image_size: PositiveCount = Field(default=224, description="Side of the square images the model sees, in pixels")
    num_workers: Workers = Field(
        default="auto",  # type: ignore[assignment]  # validated as any other value, into a number
        description="Processes that read and decode; 0 reads in the main process; auto: one per core, at most 8",
    )
    val_fraction: float = Field(default=0.1, ge=0, lt=1, description="Share of the samples kept for validation")
    on_bad_file: Literal["error", "skip"] = Field(
        default="error", description="A file that cannot be read: stop, or skip and count"
    )


class ModelConfig(Section):
    """Which model, and how large."""

    path: str | None = Field(
        default=None, description="Import path of your own model, pkg.module:callable; default: the workload's"
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Keyword arguments for your own model or workload"
    )
    weights: FilePath = Field(default=None, description="File with weights to start from")


class BuiltModelConfig(ModelConfig):
    """Of a workload that builds its own model."""

    @model_validator(mode="after")
    def builds_its_own_model(self) -> Self:
        if self.path or self.options:
            raise ValueError(
                "this workload builds its own model; one of yours is a workload: halfstep train my_pkg.my_mod:build"
            )
        return self


def off_by_any_name(value: object) -> object:
    return "off" if value is None or value is False else value


LatentCaching = Annotated[Literal["off", "latents"], BeforeValidator(off_by_any_name)]
"""Whether what an autoencoder says of samples is kept on disk; `null` and `false` say off."""


class LogConfig(Section):
    """What is written and shown besides metrics.jsonl."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard events into the run's folder")
    quiet: bool = Field(default=False, description="Show warnings, errors and the final summary only")
    curves: bool = Field(default=True, description="Draw report/curves.png when the run ends, a second or two")
    ledger: bool = Field(default=False, description="Observe what steps really compute in: report/ledger.json")
    ledger_every: int = Field(
        default=0, ge=0, description="The same, and again every so many steps; 0: the first of each mode"
    )


PRESET_NAMES = ("fast", "quality", "lowmem", "stable", "debug")


class RunConfig(Section):
    """Everything one run is made of."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "fast": {"precision.default": "bf16"},
        "quality": {"precision.default": "bf16", "ema.enabled": True},
        "lowmem": {"precision.default": "bf16", "train.activation_checkpointing": True},
        "stable": {"precision.default": "fp32", "train.fast": "off", "guard.on_fault": "rollback"},
        "debug": {"precision.default": "fp32", "train.fast": "off", "train.epochs": 1, "data.num_workers": 0},
    }
    """Values by path for each preset; a workload has its own."""
    demo: ClassVar[dict[str, Any]] = {}
    """Values by path that suit the workload's demo data; they count only where no data folder is given."""
    demo_replaces: ClassVar[frozenset[str]] = frozenset()
    """Paths of settings that name files of a data folder: without one they do not count."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults by path that differ from those of the class's sections; a subclass names its own alone."""

    workload: str = Field(description="What is trained: a workload's name, or an import path pkg.module:build")
    preset: str | None = Field(default=None, description=f"Values for a purpose: {', '.join(PRESET_NAMES)}")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps or xpu")
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
        default_factory=dict, description="Values of your own: ${globals.NAME} works anywhere"
    )

    def changed(self, **sections: Mapping[str, Any]) -> Self:
        """The same run with other values in some of its sections; nothing is checked again."""
        parts = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=parts)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """A section with other defaults is a class of its own, held by the config's class so that pickle finds it."""
        given = [(*path.split("."), value) for path, value in vars(cls).get("defaults", {}).items()]
        for section in dict.fromkeys(name for name, _, _ in given):
            field = cls.model_fields[section]
            kind: Any = field.annotation
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}._{section}"}
            made: Any = type(kind)(kind.__name__, (kind,), {**names, "__doc__": kind.__doc__})
            for setting, value in ((setting, value) for name, setting, value in given if name == section):
                made.model_fields[setting].default = value
            made.model_rebuild(force=True)
            setattr(cls, f"_{section}", made)
            field.annotation, field.default = made, made()
        cls.model_rebuild(force=True)


IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class HasSchema(Protocol):
    def schema(self, workload: str) -> type[RunConfig]: ...


class Schemas(Protocol):
    """Families by workload name; import paths of the user's own are found in it, too."""

    def __getitem__(self, workload: str) -> HasSchema: ...
    def __iter__(self) -> Iterator[str]: ...
    def translators(self) -> Iterable[Translator]: ...


def is_import_path(name: str) -> bool:
    """Whether this names a workload of the user's own, `my_pkg.my_mod:build`."""
    return IMPORT_PATH.fullmatch(name) is not None


def schema_for(workload: str, kinds: Schemas, where: str = "") -> type[RunConfig]:
    """The schema of a workload."""
    try:
        return kinds[workload].schema(workload)
    except KeyError:
        raise unknown_workload(workload, kinds, where) from None


def unknown_workload(workload: str, known: Iterable[str], where: str = "") -> ConfigError:
    at = f" ({where})" if where and where != workload else ""
    fix = f"{nearest(workload, known)} (or a YAML file, or an import path such as my_pkg.my_mod:build)"
    return ConfigError(f"unknown workload {workload!r}{at}", fix=fix)
