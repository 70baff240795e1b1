"""Evaluation and prediction with a trained model: the interfaces that families implement, and shared helpers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from PIL import Image
from torch import nn

from halfstep.config.schema import RunConfig
from halfstep.errors import CheckpointError, DataError
from halfstep.report.progress import Bar
from halfstep.report.results import Answer, Cell, Failure
from halfstep.workloads.base.other_data import use_folder
from halfstep.workloads.base.workload import Batch, FrozenPart, Metrics, Workload, wrap_frozen_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A model with its weights, on its device, in the requested precision."""

    model: nn.Module
    device: torch.device
    inside: Callable[[], AbstractContextManager[None]]
    """Enters evaluation mode, without gradients, in that precision."""
    warn: Callable[[str], None]

    def __call__(self, *inputs: Any) -> Any:
        with self.inside():
            return self.model(*inputs)


# --- evaluation ---

ShowProgress: TypeAlias = Callable[[str, int], AbstractContextManager[Bar]]
LookAt: TypeAlias = Callable[[int], tuple[Batch, Any]]
"""(index) -> a validation sample as the model saw it, in a batch of one, and the model's outputs."""


class Evaluation(Protocol):
    """One workload under evaluation."""

    def __init__(self, workload: Workload) -> None: ...

    @property
    def ranking(self) -> str:
        """Return the column of `classes` that ranks classes."""
        ...

    @property
    def scored_at(self) -> str:
        """Return the image size or sampling steps of the scores, if that is not obvious."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Return the metrics of validation, which may record more."""
        ...

    @staticmethod
    def to_validate(config: RunConfig) -> RunConfig:
        """Return settings without what only training reads; validation samples stay the same."""
        ...

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        """Return settings for data that the run was not trained on."""
        ...

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        """Return the workload built with these settings, with everything to evaluate as validation samples."""
        ...

    def classes(self) -> tuple[dict[str, Cell], ...]: ...
    def draw(self, folder: Path, look: LookAt) -> list[Path]: ...


class OptionalScores(Protocol):
    """An evaluation whose `EvaluateCommand` has options; `num_scored` says how many samples where not all were."""

    def scored(
        self,
        config: RunConfig,
        trained: Trained,
        options: Mapping[str, Any],
        phase: ShowProgress,
        batch_size: int | None,
    ) -> dict[str, float] | None:
        """Return scores that the options request instead of validation's, or None to run validation.

        `with phase("Drawing", total) as bar` shows a bar; `batch_size` is None if the user gave none.
        """
        ...


class PlainEvaluation:
    """Evaluation that reports the metrics of validation and nothing else."""

    ranking = ""
    scored_at = ""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.metrics: Metrics = workload.metrics()

    @staticmethod
    def to_validate(config: RunConfig) -> RunConfig:
        return config

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        return use_folder(config, folder)

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        return workload

    def classes(self) -> tuple[dict[str, Cell], ...]:
        return ()

    def draw(self, folder: Path, look: LookAt) -> list[Path]:
        return []


# --- prediction ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """An input file, and its name relative to the folder it was found in."""

    path: Path
    name: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user requested in addition to the input files."""

    out: Path | None = None
    """A new folder for written files; None if nothing is written (`PredictCommand.writes_files`) and none was named."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `PredictCommand.options` by name, with the default where the user gave none."""


class Predictor(Protocol):
    """Prediction with one workload. Its `frozen` and `values`, as in a Workload, are moved with the model."""

    @property
    def model(self) -> nn.Module:
        """Return the model as built; weights are loaded later."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """Return the extensions of the files to read from an input folder; empty if there are no inputs."""
        ...

    def answers(self, inputs: list[Input], trained: Trained, wishes: Wishes, bar: Bar) -> Iterator[Answer | Failure]:
        """Yield one answer per input, in order; the bar counts inputs. Without inputs (`PredictCommand.needs_input`)
        yield as many as the options request, and set `bar.total` first."""
        ...


def get_frozen_parts(predictor: Predictor) -> dict[str, FrozenPart]:
    return wrap_frozen_parts(getattr(predictor, "frozen", {}))


def describe_failure(item: Input, error: DataError) -> Failure:
    """Return the failure of a file, with the error's text without the file's name; advice on training is left out."""
    about_the_file = error.what.removeprefix(f"{item.path} ")
    is_said = about_the_file != error.what or not error.why
    return Failure(file=str(item.path), why=about_the_file if is_said else error.why)


def answer_each(inputs: Iterable[Input], answer: Callable[[Input], Answer]) -> Iterator[Answer | Failure]:
    """Yield an answer or a failure for each input."""
    for item in inputs:
        try:
            yield answer(item)
        except DataError as error:
            yield describe_failure(item, error)


class FilePredictor:
    """A predictor that looks at one file at a time: it has `model`, `endings`, and `answer` or `answer_file`."""

    endings: tuple[str, ...] = ()

    def answer(self, path: Path, trained: Trained) -> Mapping[str, Any]:
        """Return results by name; DataError, ValueError and OSError mean that the file cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} has no answer(path, trained)")

    def answer_file(self, item: Input, trained: Trained, wishes: Wishes) -> Answer:
        """Override this instead to write files or to read options; DataError means that the file cannot be used."""
        try:
            return Answer(file=str(item.path), found=self.answer(item.path, trained))
        except (ValueError, OSError) as error:
            raise DataError(f"{item.path} {error}") from error

    def answers(self, inputs: list[Input], trained: Trained, wishes: Wishes, bar: Bar) -> Iterator[Answer | Failure]:
        return answer_each(inputs, lambda item: self.answer_file(item, trained, wishes))


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Save a picture and return its path; a number is added to a name that is already taken."""
    numbered = (path.with_stem(f"{path.stem}_{k}") for k in itertools.count(2))
    free = next(one for one in itertools.chain([path], numbered) if not one.exists())
    try:
        free.parent.mkdir(parents=True, exist_ok=True)
        picture.save(free)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {free}: {error}", fix="free disk space, or choose another folder: --out DIR"
        ) from error
    return free
