"""Kind: what a family of workloads gives the rest of the system.

A family gives its functions and classes as import paths, so that `--help` and config files are read without torch, and
is one entry in `KINDS`. A custom workload is a Kind at an import path (`my_pkg.my_mod:KIND`), or `build` alone. Only
`builder` is required; each further field adds a command or a feature, and what is missing is refused with a clear
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.config.foreign import Foreign
from halfstep.config.schema import RunConfig, is_import_path, make_unknown_workload
from halfstep.errors import ConfigError, DataError
from halfstep.workloads.base.import_path import check_call_form, import_callable

if TYPE_CHECKING:
    from halfstep.workloads.base.guiding import Guiding
    from halfstep.workloads.base.workload import Batch, Workload

Part = str | Callable[..., Any]
"""A function or class, or the import path of one."""
Store = Mapping[str, Any]
"""Facts about the data that the model depends on: classes, channels, vocabulary. Stored with the run."""

BUILD = "build(config, store) -> halfstep.workloads.base.workload.Workload"
METRICS = ("update", "compute", "state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True)
class Unit:
    name: str = "sample"
    per_sample: int = 1
    flops_per_sample: float = 0.0
    """Operations of forward and backward by the model's formula; 0: unknown."""

    def rate(self, samples_per_s: float, digits: int = 1) -> str:
        """Format the throughput, as in `12.3 images/s`."""
        return f"{samples_per_s * self.per_sample:,.{digits}f} {self.name}s/s"

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Return `{"tokens_per_s": 1234.5}`, for records next to `samples_per_s`; empty if samples are the unit."""
        return {} if self.name == "sample" else {f"{self.name}s_per_s": round(samples_per_s * self.per_sample, 2)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleUnit:
    """What throughput counts, and how large a sample is."""

    name: str = "sample"
    """image, token, frame."""
    per_sample: Part | None = None
    """(config, store) -> int; without it a sample is one unit."""
    flops: Part | None = None
    """(config, store) -> operations of forward and backward per sample, for the share of the device's peak (MFU)."""
    size: Part | None = None
    """(config) -> how large a sample is, as text: `512 pixels`, `1024 tokens`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticData:
    """Random data, with which bench and planner need no data folder."""

    store: Part
    """(config) -> Store."""
    batch: Part
    """(config, store) -> Batch on the host, as a loader delivers it."""
    over: Part
    """(config, store, samples) -> Workload on such samples, without augmentation."""
    peer_prepare: Part | None = None
    """(device) -> (batch) -> batch: preparation as a user of another framework writes it, for a bench with peers."""

    def make_store(self, config: RunConfig) -> Store:
        return load_part(self.store)(config)

    def make_batch(self, config: RunConfig, store: Store) -> Batch:
        return load_part(self.batch)(config, store)

    def build(self, config: RunConfig, store: Store, samples: Any) -> Workload:
        return load_part(self.over)(config, store, samples)


@dataclass(frozen=True, slots=True)
class EvaluateCommand:
    """`halfstep evaluate`, where it reports more than the metrics of validation."""

    evaluation: Part
    """(workload) -> what evaluates it class by class and draws pictures (using.py)."""
    options: tuple[Option, ...] = ()
    """In addition to the general ones; with some, the evaluation has `scored`."""


@dataclass(frozen=True, slots=True)
class PredictCommand:
    """`halfstep predict`."""

    predictor: Part
    """(config, store) -> what answers for files, or without any (using.py)."""
    options: tuple[Option, ...] = ()
    """In addition to the general ones; they reach the predictor as `wishes.options`."""
    needs_input: bool = True
    """Whether `halfstep predict RUN` must name files; a predictor that draws samples needs none."""
    writes_files: bool = False
    """Whether the predictor writes files: `wishes.out` is then always a new folder, else only where --out names one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuideEntry:
    """`halfstep guide`."""

    guide: Part = ".guide:Guide"
    """() -> what looks into a data folder and suggests settings (guiding.py)."""
    about: str
    """What the family does, in a line, with the data it needs."""
    models: Mapping[str, str]
    """A text for each workload; the guide asks where there are several."""
    usual_on_cpu: str = ""
    """The workload most people want on a CPU; on a GPU it is the Kind's `usual`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    builder: Part
    """(config, store) -> Workload; `store` of an earlier run fixes what was found in the data."""
    config: type[RunConfig] | Mapping[str, type[RunConfig]] = RunConfig
    """The schema of its config files; one for each workload name where they differ."""
    task: str = ""
    """What the family does, in a word or two: the guide's first question, and the title of its options."""
    usual: str = ""
    """The workload most people want; a copy of the Kind at an import path is this one."""
    kept: tuple[str, ...] = ()
    """Settings, or sections (`model.first_stage.`), that a run reads once: its store holds what came of them."""
    takes_channels_last: bool = False
    """Whether its model runs on images in that layout: `x.view(len(x), -1)` behind a convolution raises there."""
    reads_packs: bool = False
    """Whether `data.cache_file` may be what `halfstep pack` made of an image folder."""
    pack: Part | None = None
    """(config) -> what `halfstep pack CONFIG.yaml` made ahead of training: `file`, `bytes`, `text` and more."""
    demo: Part | None = None
    """(folder, *, seed): writes data in the layout of real ones."""
    hint: Part | None = None
    """(scores) -> advice on scores that point at a known mistake, or an empty text."""
    export: Part | None = None
    """(model, config, store, folder): writes the best weights for other programs; called when training ends."""
    foreign: Part | None = None
    """(document, name) -> Foreign, or None: reads another project's config files (no torch)."""
    sample: SampleUnit = SampleUnit()
    synthetic: SyntheticData | None = None
    evaluate: EvaluateCommand | None = None
    predict: PredictCommand | None = None
    guide: GuideEntry | None = None

    @classmethod
    def in_folder(cls, folder: str, **fields: Any) -> Kind:
        """Return the Kind of a package whose files have the usual names; `.evaluate:Shown` is a path in that
        package."""
        usual = {"builder": ".build:build", "demo": ".demo:write_demo", "synthetic": SYNTHETIC}
        named = {name: _resolve_paths(folder, value) for name, value in {**usual, **fields}.items()}
        return cls(takes_channels_last=True, **named)

    def schema(self, workload: str) -> type[RunConfig]:
        return self.config if isinstance(self.config, type) else self.config[self.model_of(workload)]

    def model_of(self, workload: str) -> str:
        """Return the name of the family's model; a Kind at an import path is its `usual` one."""
        return self.usual if is_import_path(workload) and self.usual else workload

    def build(self, config: RunConfig, store: Store | None = None) -> Workload:
        """Build the workload of a config; refuse a custom builder that returns something else."""
        from halfstep.workloads.base.workload import Workload

        builder = load_part(self.builder, form=BUILD)
        check_call_form(builder, config.workload, config, store, form=BUILD)
        built = builder(config, store)
        if not isinstance(built, Workload):
            raise ConfigError(
                f"{config.workload} returns a {type(built).__name__}, not a Workload", fix=f"write {BUILD}"
            )
        for name in ("train_samples", "val_samples"):
            check_samples(getattr(built, name), f"{name} of {config.workload}")
        check_metrics(built.metrics(), config.workload)
        return built

    def write_demo(self, workload: str, folder: Path, *, seed: int) -> None:
        if self.demo is None:
            raise DataError(f"no data folder, and {workload} has no demo data", fix="--data-dir DIR")
        load_part(self.demo, form="write_demo(folder, seed=0)")(folder, seed=seed)

    def make_guide(self) -> Guiding:
        assert self.guide is not None, "the guide asks families that have an entry"
        return load_part(self.guide.guide)()

    def unit_of(self, config: RunConfig, store: Store) -> Unit:
        own = self.sample
        per_sample = load_part(own.per_sample)(config, store) if own.per_sample else 1
        return Unit(own.name, per_sample, load_part(own.flops)(config, store) if own.flops else 0)

    def size_of_sample(self, config: RunConfig) -> str:
        return str(load_part(self.sample.size)(config)) if self.sample.size else ""

    def claim(self, document: Mapping[str, Any], name: str) -> Foreign | None:
        """Translate another project's config if the family knows that project, else return None."""
        return load_part(self.foreign)(document, name) if self.foreign else None


SYNTHETIC = SyntheticData(store=".build:make_random_store", batch=".build:make_random_batch", over=".build:build_over")
"""The usual names in a family's folder."""


def _resolve_paths(package: str, value: Any) -> Any:
    """Make relative import paths absolute, those inside a group of fields too."""
    if isinstance(value, str) and value.startswith("."):
        return package + value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{own.name: _resolve_paths(package, getattr(value, own.name)) for own in fields(value)})
    return value


def load_part(part: Part, *, form: str = "the family declares it") -> Callable[..., Any]:
    """Import a part that is given as a path; `form` tells in an error how it is called."""
    return import_callable(part, what="workload", form=form) if isinstance(part, str) else part


def check_metrics(metrics: object, workload: str) -> None:
    """Refuse metrics without a method that is called only when an epoch ends or a run resumes."""
    if missing := [name for name in METRICS if not hasattr(metrics, name)]:
        raise ConfigError(
            f"metrics of {workload}: a {type(metrics).__name__} without {', '.join(missing)}",
            why="checkpoints store the sums, so that a resumed run has the same scores",
            fix=f"give it {', '.join(METRICS)}, or use halfstep.workloads.base.sums.Means, "
            "as examples/own_workload.py does",
        )


def check_samples(samples: object, whose: str) -> None:
    """Refuse samples without `sample`: a torch Dataset is the likeliest mistake, and would fail in a worker."""
    forms = (getattr(samples, name, None) for name in ("sample", "filled", "batch"))
    if not (hasattr(samples, "__len__") and any(map(callable, forms))):
        raise ConfigError(
            f"{whose}: a {type(samples).__name__} without __len__ or sample(index, *, key)",
            why="a sample may depend only on its index and key, so that results do not depend on workers and batches",
            fix="give it `def sample(self, index, *, key): return {name: tensor}`; a Dataset returns self[index] there",
        )


class Kinds(Mapping[str, Kind]):
    """Kinds by workload name, imported when asked for; import paths are looked up too."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, workload: str) -> Kind:
        if workload in self.paths:
            return _load_kind(self.paths[workload])
        if is_import_path(workload):
            return _load_kind(workload)
        raise KeyError(workload)

    def of(self, workload: str, where: str = "") -> Kind:
        """Return the Kind of a workload; refuse an unknown name with the nearest known ones."""
        try:
            return self[workload]
        except KeyError:
            raise make_unknown_workload(workload, self.paths, where) from None

    def translators(self) -> Iterator[Kind]:
        """Return each Kind once."""
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
    """`Option("num", int, 16, "How many to draw", least=1)` is `--num 16`; of type bool it is a flag."""

    name: str
    """The Python name: `top_k` is `--top-k`."""
    type: type = str
    default: Any = None
    help: str = ""
    least: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """Return the value in the option's type, or raise ConfigError."""
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
        name: option.checked(given[name]) if given.get(name) is not None else option.default
        for name, option in known.items()
    }
