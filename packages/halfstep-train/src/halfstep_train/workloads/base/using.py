"""Evaluation and prediction with a trained model: the interfaces that families implement, and shared helpers.

Another data folder is evaluated as a whole, not only a held-out split. If that folder has its own validation split,
only the split is evaluated: the rest may have been trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import CheckpointError, DataError
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import TRAIN_NAMES, VALIDATION_NAMES
from halfstep_train.data.image_folder import KAGGLE_TRAIN
from halfstep_train.data.images import open_image_file
from halfstep_train.report.run_report import Answer, Bar, Cell, Failure
from halfstep_train.workloads.base.workload import Batch, Metrics, OpenedData, Workload
from halfstep_train.workloads.classification.data import has_stored_images


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model with its weights, on its device, in the requested precision."""

    model: nn.Module
    device: torch.device
    inference: Callable[[], AbstractContextManager[None]]
    """Return a context with evaluation mode, no gradients and that precision."""
    warn: Callable[[str], None]

    def __call__(self, *inputs: Any) -> Any:
        with self.inference():
            return self.model(*inputs)


# --- evaluation ---

ShowProgress: TypeAlias = Callable[[str, int], AbstractContextManager[Bar]]
LookAt: TypeAlias = Callable[[int], tuple[Batch, Any]]
"""(index) -> a validation sample as the model gets it, in a batch of one, and the model's outputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest:
    """A `halfstep evaluate` call with a trained model."""

    config: Any
    trained: TrainedModel
    options: Mapping[str, Any]
    """Values of `EvaluateCommand.options` by name, defaults included."""
    phase: ShowProgress
    """`with phase("Drawing", total) as bar` shows a progress bar."""
    batch_size: int | None
    """None if the user gave none."""


class PlainEvaluation:
    """`halfstep evaluate` of one workload: reports the metrics of validation; a family overrides the rest."""

    ranking = ""
    """Column of `score_classes` by which classes are sorted."""
    scored_at = ""
    """Image size or sampling steps that the scores refer to, if not obvious."""
    num_scored = 0
    """Number of scored samples, if not all."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.metrics: Metrics = workload.metrics()
        """Metrics of validation, which may record more details."""

    @staticmethod
    def drop_training_settings(config: RunConfig) -> RunConfig:
        """Return the settings without those that only training reads; validation samples stay the same."""
        return config

    @staticmethod
    def change_data_folder(config: Any, folder: Path) -> Any:
        """Return the settings for another data folder, which the run was not trained on."""
        return use_folder(config, folder)

    @staticmethod
    def use_all_samples(workload: Workload) -> Workload:
        """Return the workload with all samples of that folder as validation samples."""
        return workload

    def score_with_options(self, request: EvaluateRequest) -> dict[str, float] | None:
        """Return the scores that `EvaluateCommand.options` request, or None to run validation instead."""
        return None

    def score_classes(self) -> tuple[dict[str, Cell], ...]:
        """Return one row of scores per class."""
        return ()

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Write pictures of samples to a folder; return their paths."""
        return []


# --- prediction ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """An input file, and its name relative to the folder it was found in."""

    path: Path
    name: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest:
    """Options of a `halfstep predict` call, in addition to the input files."""

    out: Path | None = None
    """A new folder for output files; None if the predictor writes none (`PredictCommand.writes_files`) and --out was
    not given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `PredictCommand.options` by name, defaults included."""


class Predictor(Protocol):
    """Interface of `halfstep predict` for one workload. Optional attributes `frozen` and `values` are as in Workload
    and are moved to the device with the model."""

    model: nn.Module
    """As built; weights are loaded later."""
    endings: tuple[str, ...]
    """Extensions of the files to read from an input folder; empty if it takes no inputs."""

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield one answer per input, in order. The progress bar counts inputs. A predictor without inputs
        (`PredictCommand.needs_input`) yields as many answers as the options request, and sets `bar.total` first."""
        ...


def describe_failure(item: Input, error: DataError) -> Failure:
    """Return the failure of a file: the error's reason without the file's name, and without its advice for training."""
    # Messages about a file start with its path, which the answer already has.
    about_the_file = error.what.removeprefix(f"{item.path} ")
    is_specific = about_the_file != error.what or not error.why
    return Failure(file=str(item.path), why=about_the_file if is_specific else error.why)


def answer_each(inputs: Iterable[Input], answer: Callable[[Input], Answer]) -> Iterator[Answer | Failure]:
    """Yield an answer or a failure for each input."""
    for item in inputs:
        try:
            yield answer(item)
        except DataError as error:
            yield describe_failure(item, error)


class FilePredictor:
    """Base of predictors that read one file at a time: define `model`, `endings`, and `answer` or `answer_file`."""

    endings: tuple[str, ...] = ()

    def answer(self, path: Path, trained: TrainedModel) -> Mapping[str, Any]:
        """Return results by name; raise DataError, ValueError or OSError if the file cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} has no answer(path, trained)")

    def answer_file(self, item: Input, trained: TrainedModel, request: PredictRequest) -> Answer:
        """Return the answer for one file. Override this instead of `answer` to write files or to read options; raise
        DataError if the file cannot be used."""
        try:
            return Answer(file=str(item.path), found=self.answer(item.path, trained))
        except (ValueError, OSError) as error:
            raise DataError(f"{item.path} {error}") from error

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        return answer_each(inputs, lambda item: self.answer_file(item, trained, request))


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Save a picture and return its path; append a number to the name if the file exists."""
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


# --- evaluation of another data folder ---


Config = TypeVar("Config", bound=RunConfig)


def use_folder(config: Config, folder: Path, **values: Any) -> Config:
    """Return the settings with another data folder, and other `values` of the data section."""
    return config.replace(data={"dir": str(folder), **values})


def use_all_pictures(config: Config, folder: Path) -> Config:
    """Return settings that read all images of the folder, without a cache, which would be written into the folder."""
    fields = type(config.data).model_fields
    values: dict[str, Any] = {name: fields[name].default for name in ("cache", "cache_file") if name in fields}
    values |= {"dir": str(folder), "folders": ()}
    has_own_split = has_stored_images(folder) or any(folder.glob(KAGGLE_TRAIN))
    train, val = (
        next((name for name in names if (folder / name).is_dir()), "") for names in (TRAIN_NAMES, VALIDATION_NAMES)
    )
    if not has_own_split and not (train and val):
        # Use the folder for both splits: nothing is trained, but a workload cannot be built without training samples.
        whole = train or val or "."
        values["folders"] = (whole, whole)
    return config.replace(data=values)


# --- halfstep guide ---


SIZED_FILES = 32
"""Number of images whose size is read; each one means opening a file."""
SIDE_STEP, LEAST_SIDE = 16, 32
"""Image sides are multiples of the first, which fits the levels and patches of our models."""


class Guiding:
    """What `halfstep guide` needs from a family; subclasses define `open`."""

    small_on_cpu: ClassVar[Mapping[str, Any]]
    """Settings of a smaller model, by path: a full-size model takes days on a CPU."""

    def open(self, config: Any) -> OpenedData:
        """Open the data folder of a config. The guide shows `about` if it is not empty, else the classes."""
        raise NotImplementedError

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw a sample; return a caption and the picture."""
        return f"sample {index}", Image.fromarray(sample["image"].numpy())

    def suggest_for_side(self, config: Any, side: int) -> dict[str, Any]:
        """Return settings, by path, that suit images with `side` pixels per side."""
        return {}


def measure_median_size(total: int, size_of: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Return the median width and height of a few of `total` images; `size_of(index)` gives (width, height)."""
    width, height = np.median([size_of(index) for index in spread_indices(total, SIZED_FILES)], axis=0)
    return int(width), int(height)


def choose_side(sides: tuple[int, int]) -> int:
    """Return the side in pixels at which images of this width and height are seen whole, without scaling them up."""
    return max(LEAST_SIDE, -(-max(sides) // SIDE_STEP) * SIDE_STEP)


def read_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image file, in pixels."""
    with open_image_file(path) as picture:
        return picture.size


def spread_indices(total: int, wanted: int) -> list[int]:
    """Return indices spread over the whole set: files are sorted by class, so the first ones would all share one
    class."""
    num = min(total, wanted)
    return [index * total // num for index in range(num)]
