"""Kind: all that other packages may ask of a family of workloads.

A family gives its parts as import paths, so that `--help` and config files are read without torch, and is one entry in
`KINDS`. A workload of the user's own is a Kind at an import path (`my_pkg.my_mod:KIND`), or `build` alone; it gets what
it provides, and what it does not is refused in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.config.foreign import Foreign
from halfstep.config.schema import RunConfig, is_import_path, unknown_workload
from halfstep.errors import ConfigError, DataError
from halfstep.workloads.base.import_path import imported, refuse_other_form
from halfstep.workloads.base.options import Option

if TYPE_CHECKING:
    from halfstep.workloads.base.workload import Batch, Workload

Part = str | Callable[..., Any]
"""A function or class, or the import path of one."""
Store = Mapping[str, Any]
"""What a model must know of the data: classes, channels, vocabulary. Stored with the run."""

USUAL = {
    "builder": ".build:build",
    "demo": ".demo:write_demo",
    "random_store": ".build:random_store",
    "random_batch": ".build:random_batch",
    "over": ".build:over",
    "guide": ".guide:Guide",
}
"""Parts of a family that has a file for each."""

BUILD = "build(config, store) -> halfstep.workloads.base.workload.Workload"
METRICS = ("update", "compute", "state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True)
class Unit:
    name: str = "sample"
    per_sample: int = 1
    flops_per_sample: float = 0.0
    """Of forward and backward, as the model's own formula counts them; 0: not known."""

    def rate(self, samples_per_s: float, digits: int = 1) -> str:
        """`12.3 images/s`."""
        return f"{samples_per_s * self.per_sample:,.{digits}f} {self.name}s/s"

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """`{"tokens_per_s": 1234.5}`, for records beside `samples_per_s`; empty where samples are the unit."""
        return {} if self.name == "sample" else {f"{self.name}s_per_s": round(samples_per_s * self.per_sample, 2)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    builder: Part
    """(config, store) -> Workload; `store` of an earlier run fixes what was found in the data."""
    config: type[RunConfig] = RunConfig
    """The schema of its config files."""
    schemas: Mapping[str, type[RunConfig]] = field(default_factory=dict)
    """Other ones, by workload name."""
    kept: tuple[str, ...] = ()
    """Settings, or sections (`model.first_stage.`), that a run reads once: its store holds what came of them."""
    takes_channels_last: bool = False
    """Whether its model runs on images in that layout: `x.view(len(x), -1)` behind a convolution raises there."""
    reads_packs: bool = False
    """Whether `data.cache_file` may be what `halfstep pack` made of an image folder."""
    pack: Part | None = None
    """(config) -> what `halfstep pack CONFIG.yaml` made ahead of training: `file`, `bytes`, `text` and more."""
    demo: Part | None = None
    """(folder, *, seed): data in the layout of real ones."""
    random_store: Part | None = None
    """(config) -> Store of made-up data. With the next two, bench and planner need no data; else they read its own."""
    random_batch: Part | None = None
    """(config, store) -> Batch on the host, as a loader delivers it."""
    over: Part | None = None
    """(config, store, samples) -> Workload on such samples, without augmentation."""
    peer_prepare: Part | None = None
    """(device) -> (batch) -> batch: preparation as a user of another framework writes it."""
    evaluation: Part | None = None
    """(workload) -> what evaluates it class by class and draws pictures."""
    evaluate_options: tuple[Option, ...] = ()
    """Options of `halfstep evaluate` beside the general ones; with some, the evaluation has `scored` (using.py)."""
    predictor: Part | None = None
    """(config, store) -> what answers for files, or without any (`needs_input`)."""
    predict_options: tuple[Option, ...] = ()
    """Options of `halfstep predict` beside the general ones; they reach the predictor as `wishes.options`."""
    needs_input: bool = True
    """Whether `halfstep predict RUN` must name files; one that draws samples needs none."""
    writes_files: bool = False
    """Whether the predictor writes files: `wishes.out` is then a new folder always, else only where --out names one."""
    export: Part | None = None
    """(model, config, store, folder): the best weights in a form that others read; called when training ends."""
    foreign: Part | None = None
    """(document, name) -> Foreign, or None for a file that is not its own: another project's config (no torch)."""
    unit: str = "sample"
    """What throughput counts: image, token, frame."""
    units_per_sample: Part | None = None
    """(config, store) -> int; without it a sample is one unit."""
    flops_per_sample: Part | None = None
    """(config, store) -> operations of forward and backward, for the share of the device's peak (MFU)."""
    sample_size: Part | None = None
    """(config) -> how large a sample is, in words: `512 pixels`, `1024 tokens`."""
    hint: Part | None = None
    """(scores) -> a sentence to somebody who has seen many runs, or nothing."""
    guide: Part | None = None
    """() -> what `halfstep guide` looks at (guiding.py)."""
    task: str = ""
    """What the family does, in a word: the guide's first question."""
    about: str = ""
    """The same in a line, with the data it needs."""
    models: Mapping[str, str] = field(default_factory=dict)
    """What the guide says of each workload; asked for where there are several."""
    usual: str = ""
    """The workload most people want on a GPU."""
    usual_on_cpu: str = ""

    @classmethod
    def in_folder(cls, folder: str, **parts: Any) -> Kind:
        """The family of a package whose files have the usual names; `.evaluate:Shown` is a part in one of them."""
        named: dict[str, Any] = {}
        for name, part in {**USUAL, **parts}.items():
            named[name] = folder + part if isinstance(part, str) and part.startswith(".") else part
        return cls(takes_channels_last=True, **named)

    def schema(self, workload: str) -> type[RunConfig]:
        return self.schemas.get(self.model_of(workload), self.config)

    def model_of(self, workload: str) -> str:
        """Which of the family's models a workload is, by its name; one at an import path is the usual one."""
        return self.usual if is_import_path(workload) and self.usual else workload

    def build(self, config: RunConfig, store: Store | None = None) -> Workload:
        """The workload of a config; one of the user's own that gives something else is refused."""
        from halfstep.workloads.base.workload import Workload

        builder = loaded(self.builder, form=BUILD)
        refuse_other_form(builder, config.workload, config, store, form=BUILD)
        built = builder(config, store)
        if not isinstance(built, Workload):
            raise ConfigError(f"{config.workload} gives a {type(built).__name__}, not a Workload", fix=f"write {BUILD}")
        for name in ("train_samples", "val_samples"):
            refuse_other_samples(getattr(built, name), f"{name} of {config.workload}")
        refuse_other_metrics(built.metrics(), config.workload)
        return built

    def write_demo(self, workload: str, folder: Path, *, seed: int) -> None:
        if self.demo is None:
            raise DataError(f"no data folder, and {workload} has no demo data", fix="--data-dir DIR")
        loaded(self.demo, form="write_demo(folder, seed=0)")(folder, seed=seed)

    @property
    def makes_data(self) -> bool:
        """Whether it can be timed and planned without data; else batches of its own are read."""
        return None not in (self.random_store, self.random_batch, self.over)

    def part(self, name: str) -> Callable[..., Any]:
        """A part by its field's name; whoever asks has seen that it is there."""
        given = getattr(self, name)
        assert given is not None, f"the family has no {name}"
        return loaded(given, form=name)

    def unit_of(self, config: RunConfig, store: Store) -> Unit:
        per_sample = self.part("units_per_sample")(config, store) if self.units_per_sample else 1
        return Unit(self.unit, per_sample, self.part("flops_per_sample")(config, store) if self.flops_per_sample else 0)

    def size_of_sample(self, config: RunConfig) -> str:
        return str(self.part("sample_size")(config)) if self.sample_size else ""

    def claim(self, document: Mapping[str, Any], name: str) -> Foreign | None:
        """Another project's config in our settings, where the family knows that project."""
        return self.part("foreign")(document, name) if self.foreign else None

    def make_batch(self, config: RunConfig, store: Store) -> Batch:
        return self.part("random_batch")(config, store)


def loaded(part: Part, *, form: str) -> Callable[..., Any]:
    return imported(part, what="workload", form=form) if isinstance(part, str) else part


def refuse_other_metrics(metrics: object, workload: str) -> None:
    """Some methods are called only when an epoch ends, or a run goes on."""
    if missing := [name for name in METRICS if not hasattr(metrics, name)]:
        raise ConfigError(
            f"metrics of {workload}: a {type(metrics).__name__} without {', '.join(missing)}",
            why="counts are stored with a checkpoint, so that a run that goes on has the same scores",
            fix=f"give it {', '.join(METRICS)}, or use halfstep.workloads.base.sums.Means, "
            "as examples/own_workload.py does",
        )


def refuse_other_samples(samples: object, whose: str) -> None:
    """A data set of torch's own form is the likeliest mistake of all, and would fail in a worker."""
    forms = (getattr(samples, name, None) for name in ("sample", "filled", "batch"))
    if not (hasattr(samples, "__len__") and any(map(callable, forms))):
        raise ConfigError(
            f"{whose}: a {type(samples).__name__} without __len__ or sample(index, *, key)",
            why="a sample depends on its index and (seed, epoch, index) alone, whatever the workers and batches",
            fix="give it `def sample(self, index, *, key): return {name: tensor}`; a Dataset returns self[index] there",
        )


class Kinds(Mapping[str, Kind]):
    """Kinds by workload name, imported when asked for; import paths are looked up too."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, workload: str) -> Kind:
        if workload in self.paths:
            return _kind_at(self.paths[workload])
        if is_import_path(workload):
            return _kind_at(workload)
        raise KeyError(workload)

    def of(self, workload: str, where: str = "") -> Kind:
        """The kind of a workload; a name that nobody knows is refused, with the nearest ones."""
        try:
            return self[workload]
        except KeyError:
            raise unknown_workload(workload, self.paths, where) from None

    def translators(self) -> Iterator[Kind]:
        """Each family once."""
        return map(_kind_at, dict.fromkeys(self.paths.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def _kind_at(path: str) -> Kind:
    found: Any = imported(path, what="workload", form=BUILD)
    return found if isinstance(found, Kind) else Kind(builder=found)
