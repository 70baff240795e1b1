"""A trained model in use: what a family's evaluation and prediction get, and what they give."""

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
    """A model with its weights, on its device, in the precision asked for."""

    model: nn.Module
    device: torch.device
    inside: Callable[[], AbstractContextManager[None]]
    """Evaluation mode, no gradients and that precision."""
    warn: Callable[[str], None]

    def __call__(self, *inputs: Any) -> Any:
        with self.inside():
            return self.model(*inputs)


# --- evaluation ---

ShowProgress: TypeAlias = Callable[[str, int], AbstractContextManager[Bar]]
LookAt: TypeAlias = Callable[[int], tuple[Batch, Any]]
"""One validation sample as the model saw it, in a batch of one, and what the model says."""


class Evaluation(Protocol):
    """One workload under evaluation."""

    def __init__(self, workload: Workload) -> None: ...

    @property
    def ranking(self) -> str:
        """The column of `classes` that says how good a class is."""
        ...

    @property
    def scored_at(self) -> str:
        """The size, or the sampling steps, at which outputs were compared, where that is a question."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Those of validation, which may note more on the way."""
        ...

    @staticmethod
    def to_validate(config: RunConfig) -> RunConfig:
        """Settings without what only training reads: the same validation samples."""
        ...

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        """Settings for data that the run was not trained on."""
        ...

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        """The workload built with them, with everything to be evaluated as its validation samples."""
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
        """Scores that the options ask for in place of validation's; None where they ask for none.

        `with phase("Drawing", total) as bar` shows a bar; `batch_size` is None where the user named none.
        """
        ...


class PlainEvaluation:
    """Of a workload that says no more than its metrics."""

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
    """One file, and its name below the folder it was found in."""

    path: Path
    name: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user may ask for beside the files."""

    out: Path | None = None
    """A new folder for what is written; None where nothing is (`PredictCommand.writes_files`) and none was named."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `PredictCommand.options` by name, with the default where the user gave none."""


class Predictor(Protocol):
    """One workload in use on files. Its `frozen` and `values`, as of a Workload, are placed with the model."""

    @property
    def model(self) -> nn.Module:
        """As built; its weights come later."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """Files of a folder that count; empty where there are no inputs."""
        ...

    def answers(self, inputs: list[Input], trained: Trained, wishes: Wishes, bar: Bar) -> Iterator[Answer | Failure]:
        """One for each input, in order; the bar counts inputs, and may show how far one of them is. Without inputs
        (`PredictCommand.needs_input`) as many as the options ask for; set `bar.total` first."""
        ...


def get_frozen_parts(predictor: Predictor) -> dict[str, FrozenPart]:
    return wrap_frozen_parts(getattr(predictor, "frozen", {}))


def describe_failure(item: Input, error: DataError) -> Failure:
    """What is wrong with a file, in words that stand behind its name; reasons about training mean nothing here."""
    about_the_file = error.what.removeprefix(f"{item.path} ")
    is_said = about_the_file != error.what or not error.why
    return Failure(file=str(item.path), why=about_the_file if is_said else error.why)


def answer_each(inputs: Iterable[Input], answer: Callable[[Input], Answer]) -> Iterator[Answer | Failure]:
    """An answer, or what is wrong with the file, for each."""
    for item in inputs:
        try:
            yield answer(item)
        except DataError as error:
            yield describe_failure(item, error)


class FilePredictor:
    """A predictor that looks at one file at a time: it has `model`, `endings`, and `answer` or `answer_file`."""

    endings: tuple[str, ...] = ()

    def answer(self, path: Path, trained: Trained) -> Mapping[str, Any]:
        """What was found, by name; DataError, ValueError and OSError are about the file."""
        raise NotImplementedError(f"{type(self).__name__} has no answer(path, trained)")

    def answer_file(self, item: Input, trained: Trained, wishes: Wishes) -> Answer:
        """The same for a predictor that writes files or has options; DataError is about the file."""
        try:
            return Answer(file=str(item.path), found=self.answer(item.path, trained))
        except (ValueError, OSError) as error:
            raise DataError(f"{item.path} {error}") from error

    def answers(self, inputs: list[Input], trained: Trained, wishes: Wishes, bar: Bar) -> Iterator[Answer | Failure]:
        return answer_each(inputs, lambda item: self.answer_file(item, trained, wishes))


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Where it lies now: files of one name from several folders get numbers."""
    numbered = (path.with_stem(f"{path.stem}_{k}") for k in itertools.count(2))
    free = next(one for one in itertools.chain([path], numbered) if not one.exists())
    try:
        free.parent.mkdir(parents=True, exist_ok=True)
        picture.save(free)
    except OSError as error:
        raise CheckpointError(f"cannot write {free}: {error}", fix="make room, or --out DIR") from error
    return free
