"""Kind: the entry point through which the rest of the system uses a family of workloads.

A family names its functions and classes by import path, so that `--help` and config files work without importing
torch. It is listed in `KINDS`. A custom workload is a Kind at an import path (`my_pkg.my_mod:KIND`), or only a `build`
function. Only `builder` is required; each further field adds a command or a feature. Using one that is missing raises
a clear error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError, DataError
from halfstep_train.config.foreign import Foreign
from halfstep_train.config.schema import RunConfig, is_import_path, make_unknown_workload
from halfstep_train.workloads.base.import_path import check_call_form, import_callable

if TYPE_CHECKING:
    from halfstep_train.workloads.base.using import Guiding
    from halfstep_train.workloads.base.workload import Batch, Workload

Part = str | Callable[..., Any]
"""A function or class, or the import path of one."""
Export = Callable[[Mapping[str, Any], Path, Any], None]
"""(weights, folder, device): writes the weights of a run for other programs."""
Store = Mapping[str, Any]
"""Facts about the data that the model depends on: classes, channels, vocabulary. Stored with the run."""

BUILD = "build(config, store) -> halfstep_train.workloads.base.workload.Workload"
METRICS = ("update", "compute", "state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of throughput for one config, such as tokens, 1024 of them per sample."""

    name: str = "sample"
    per_sample: int = 1
    flops_per_sample: float = 0.0
    """Operations of forward and backward by the model's formula; 0: unknown."""

    def format_rate(self, samples_per_s: float) -> str:
        """Format the throughput, as in `12.3 images/s`."""
        return f"{samples_per_s * self.per_sample:,.1f} {self.name}s/s"

    def compute_rates(self, samples_per_s: float) -> dict[str, float]:
        """Return `{"tokens_per_s": 1234.5}` for records that hold `samples_per_s` too; empty if samples are the
        unit."""
        return {} if self.name == "sample" else {f"{self.name}s_per_s": round(samples_per_s * self.per_sample, 2)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleUnit:
    """What throughput counts, and how large a sample is."""

    name: str = "sample"
    """For example image, token or frame."""
    per_sample: Part | None = None
    """(config, store) -> units per sample; None: one."""
    flops: Part | None = None
    """(config, store) -> operations of forward and backward per sample, for the share of the device's peak (MFU)."""
    size: Part | None = None
    """(config) -> size of a sample as text: `512 pixels`, `1024 tokens`."""


def describe_pixels(config: RunConfig) -> str:
    return f"{config.data.image_size} pixels"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticData:
    """Random data, so that the benchmark and the memory planner need no data folder."""

    store: Part
    """(config) -> Store."""
    batch: Part
    """(config, store) -> Batch on the host, as the loader returns it."""
    over: Part
    """(config, store, samples) -> Workload on such samples, without augmentation."""
    peer_prepare: Part | None = None
    """(device) -> (batch) -> batch: preparation as users of another framework write it, for benchmarks against them."""

    def make_store(self, config: RunConfig) -> Store:
        return load_part(self.store)(config)

    def make_batch(self, config: RunConfig, store: Store) -> Batch:
        return load_part(self.batch)(config, store)

    def build(self, config: RunConfig, store: Store, samples: Any) -> Workload:
        return load_part(self.over)(config, store, samples)


@dataclass(frozen=True, slots=True)
class EvaluateCommand:
    """`halfstep evaluate` for a family that reports more than the metrics of validation."""

    evaluation: Part
    """(workload) -> PlainEvaluation (using.py), which scores each class and draws pictures."""
    options: tuple[Option, ...] = ()
    """Options in addition to the general ones; with any, the evaluation overrides `score_with_options`."""


@dataclass(frozen=True, slots=True)
class PredictCommand:
    """`halfstep predict`."""

    predictor: Part
    """(config, store) -> Predictor (using.py)."""
    options: tuple[Option, ...] = ()
    """Options in addition to the general ones; the predictor gets them as `request.options`."""
    needs_input: bool = True
    """Whether `halfstep predict RUN` must be given files; a predictor that generates samples needs none."""
    writes_files: bool = False
    """Whether the predictor writes files: `request.out` is then always a new folder, else only if --out is given."""


@dataclass(frozen=True, slots=True)
class ExportCommand:
    """`halfstep export`."""

    input: str
    """The tensor of a batch that the model takes."""
    describe: Part
    """(config, store, folder) -> facts by which other programs prepare an input and read an output. It may write files
    into the folder."""
    longest: Part | None = None
    """(config) -> the longest sequence that the model takes, if the second dimension of the input is one."""
    read: Part | None = None
    """(model, folder): reads back what the family's `export` wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuideEntry:
    """`halfstep guide`."""

    guide: Part = ".build:Guide"
    """() -> Guiding (using.py), which opens a data folder and suggests settings."""
    about: str
    """One line: what the family does and which data it needs."""
    models: Mapping[str, str]
    """A description of each workload; the guide asks the user to choose if there are several."""
    usual_on_cpu: str = ""
    """The workload most people want on a CPU; on a GPU it is `Kind.usual`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A family of workloads: its builder, config schema, and the commands it supports."""

    builder: Part
    """(config, store) -> Workload; the `store` of an earlier run fixes the facts found in its data."""
    config: type[RunConfig] | Mapping[str, type[RunConfig]] = RunConfig
    """The schema of its config files, or one per workload name."""
    task: str = ""
    """One or two words for the guide's first question and the title of the family's options."""
    usual: str = ""
    """The workload most people want; also the one that a Kind at an import path stands for."""
    kept: tuple[str, ...] = ()
    """Settings, or sections (`model.first_stage.`), that only a new run reads; its store keeps the result."""
    takes_channels_last: bool = False
    """Whether its model accepts the channels_last layout: `x.view(len(x), -1)` after a convolution would raise."""
    demo: Part | None = None
    """(folder, *, seed): writes demo data in the layout of real data."""
    hint: Part | None = None
    """(scores) -> advice if the scores point to a known mistake, else an empty string."""
    export: Part | None = None
    """(weights, config, store, folder, device): writes the best weights for other programs when training ends.

    `weights` maps the model's names to tensors, each read from the checkpoint when it is looked up. tensor_files.py
    converts and writes them one at a time, so that a model larger than the host's memory can be exported."""
    foreign: Part | None = None
    """(document, name) -> Foreign, or None: reads another project's config files (no torch)."""
    sample: SampleUnit = SampleUnit()
    synthetic: SyntheticData | None = None
    evaluate: EvaluateCommand | None = None
    predict: PredictCommand | None = None
    export_command: ExportCommand | None = None
    guide: GuideEntry | None = None

    @classmethod
    def from_package(cls, folder: str, **fields: Any) -> Kind:
        """Return the Kind of a package whose modules have the usual names. Import paths that start with a dot, such as
        `.evaluate:ClassificationEvaluation`, are relative to the package."""
        usual = {"builder": ".build:build", "demo": ".demo:write_demo", "synthetic": SYNTHETIC}
        named = {name: _resolve_paths(folder, value) for name, value in {**usual, **fields}.items()}
        return cls(takes_channels_last=True, **named)

    def get_schema(self, workload: str) -> type[RunConfig]:
        return self.config if isinstance(self.config, type) else self.config[self.get_model_name(workload)]

    def get_model_name(self, workload: str) -> str:
        """Return the name of the family's model; for a Kind at an import path, the `usual` one."""
        return self.usual if is_import_path(workload) and self.usual else workload

    def build(self, config: RunConfig, store: Store | None = None) -> Workload:
        """Build the workload of a config; refuse a custom builder that returns something else."""
        from halfstep_train.workloads.base.workload import Workload

        builder = load_part(self.builder, form=BUILD)
        check_call_form(builder, config.workload, config, store, form=BUILD)
        built = builder(config, store)
        if not isinstance(built, Workload):
            raise ConfigError(
                f"{config.workload} returns a {type(built).__name__}, not a Workload", fix=f"write {BUILD}"
            )
        # Fail here with a clear message, not in a worker or at the end of the first epoch.
        for name in ("train_samples", "val_samples"):
            check_samples(getattr(built, name), f"{name} of {config.workload}")
        check_metrics(built.metrics(), config.workload)
        return built

    def write_demo(self, workload: str, folder: Path, *, seed: int) -> None:
        if self.demo is None:
            raise DataError(f"no data folder, and {workload} has no demo data", fix="--data-dir DIR")
        load_part(self.demo, form="write_demo(folder, seed=0)")(folder, seed=seed)

    def make_guide(self) -> Guiding:
        assert self.guide is not None, "the guide covers only families that have an entry"
        return load_part(self.guide.guide)()

    def make_unit(self, config: RunConfig, store: Store) -> Unit:
        """Return the unit in which the throughput of a config is reported."""
        own = self.sample
        per_sample = load_part(own.per_sample)(config, store) if own.per_sample else 1
        return Unit(own.name, per_sample, load_part(own.flops)(config, store) if own.flops else 0)

    def make_export(self, config: RunConfig, store: Store) -> Export | None:
        """Return the function that exports the weights of a config's model; None if the family has none."""
        if self.export is None:
            return None
        export = self.export  # imported only when a run ends
        return lambda weights, folder, device: load_part(export)(weights, config, dict(store), folder, device)

    def describe_sample_size(self, config: RunConfig) -> str:
        return str(load_part(self.sample.size)(config)) if self.sample.size else ""

    def translate_config(self, document: Mapping[str, Any]) -> Foreign | None:
        """Translate another project's config if the family knows that project, else return None."""
        return load_part(self.foreign)(document) if self.foreign else None


SYNTHETIC = SyntheticData(
    store=".build:make_random_store", batch=".build:make_random_batch", over=".build:build_on_samples"
)
"""The usual function names in a family's `build.py`."""


def _resolve_paths(package: str, value: Any) -> Any:
    """Make relative import paths absolute, also those inside nested dataclasses."""
    if isinstance(value, str) and value.startswith("."):
        return package + value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{own.name: _resolve_paths(package, getattr(value, own.name)) for own in fields(value)})
    return value


def load_part(part: Part, *, form: str = "the family declares it") -> Callable[..., Any]:
    """Import a part that is given as a path; `form` is the expected signature, for error messages."""
    return import_callable(part, what="workload", form=form) if isinstance(part, str) else part


def check_metrics(metrics: object, workload: str) -> None:
    """Refuse metrics that lack a method. Some are first called when an epoch ends or a run resumes: too late to
    fail."""
    if missing := [name for name in METRICS if not hasattr(metrics, name)]:
        raise ConfigError(
            f"metrics of {workload}: {type(metrics).__name__} has no {', '.join(missing)}",
            why="checkpoints store the sums, so that a resumed run has the same scores",
            fix=f"give it {', '.join(METRICS)}, or use halfstep_train.workloads.base.sums.Means, "
            "as examples/own_workload.py does",
        )


def check_samples(samples: object, whose: str) -> None:
    """Refuse samples without a `sample` method, such as a torch Dataset, which would fail only later, in a worker."""
    if not (hasattr(samples, "__len__") and callable(getattr(samples, "sample", None))):
        raise ConfigError(
            f"{whose}: {type(samples).__name__} has no __len__ or sample(index, *, key)",
            why="a sample may depend only on its index and key, so that results do not depend on workers and batches",
            fix="give it `def sample(self, index, *, key): return {name: tensor}`; in a Dataset, return self[index]",
        )


class Kinds(Mapping[str, Kind]):
    """Mapping from workload name or import path to Kind; each Kind is imported on first use."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, workload: str) -> Kind:
        if workload in self.paths:
            return _load_kind(self.paths[workload])
        if is_import_path(workload):
            return _load_kind(workload)
        raise KeyError(workload)

    def of(self, workload: str, where: str = "") -> Kind:
        """Return the Kind of a workload; refuse an unknown name and suggest the nearest known one."""
        try:
            return self[workload]
        except KeyError:
            raise make_unknown_workload(workload, self.paths, where) from None

    def list_translators(self) -> Iterator[Kind]:
        """Iterate over the Kinds without duplicates; each may translate configs of other projects."""
        return map(_load_kind, dict.fromkeys(self.paths.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def _load_kind(path: str) -> Kind:
    found: Any = import_callable(path, what="workload", form=BUILD)
    return found if isinstance(found, Kind) else Kind(builder=found)


# --- options of evaluate and predict ---


@dataclass(frozen=True, slots=True)
class Option:
    """`Option("num", int, 16, "How many to draw", least=1)` is `--num 16`; an option of type bool is a flag."""

    name: str
    """The Python name: `top_k` is `--top-k`."""
    type: type = str
    default: Any = None
    help: str = ""
    least: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def validate(self, value: Any) -> Any:
        """Return the value converted to the option's type, or raise ConfigError."""
        try:
            found = value if self.type is bool and isinstance(value, bool) else self.type(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.flag} {value}: expected {EXPECTED.get(self.type, self.type.__name__)}") from None
        if self.least is not None and found < self.least:
            raise ConfigError(f"{self.flag} {value}: it must be at least {self.least:g}")
        return found


EXPECTED: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a text"}


def resolve_options(options: Sequence[Option], given: Mapping[str, Any], workload: str) -> dict[str, Any]:
    """Return all options by name, with defaults; refuse an option that the workload does not take."""
    known = {option.name: option for option in options}
    for name, value in given.items():
        if name not in known:
            flag = Option(name).flag + ("" if value is True else f" {value}")
            takes = ", ".join(option.flag for option in options)
            fix = f"leave it out; {workload} takes {takes}" if takes else "leave it out"
            raise ConfigError(f"{workload} has no option {flag}", fix=fix)
    return {
        name: option.validate(given[name]) if given.get(name) is not None else option.default
        for name, option in known.items()
    }
