"""Prediction of masks: each with the values and the size of its original, beside an overlay to look at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.data.files import READABLE
from halfstep.data.images import read_image
from halfstep.errors import CheckpointError, DataError
from halfstep.models.unet import receptive_radius
from halfstep.precision.plan import Plan
from halfstep.report.prediction_view import Answer, Failure
from halfstep.report.run_report import RunReport
from halfstep.run.validate import evaluating
from halfstep.tune.memory_limit import OutOfMemory
from halfstep.use.inputs import Input
from halfstep.use.open_run import OpenedRun
from halfstep.use.predictor import Wishes, failure_of
from halfstep.workloads.segmentation.build import model_from_store, table_of_store
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.pictures import overlay
from halfstep.workloads.segmentation.tiles import Array, predict_file

TILE = 1024
"""Pixels a side, where the model allows it: a few GB at full width."""


class MaskPredictor:
    """One mask and one overlay a file."""

    endings = READABLE
    takes = frozenset({"out", "tile"})

    def __init__(self, run: OpenedRun) -> None:
        assert isinstance(run.config, UNetConfig)
        self.config, self.store, self.table = run.config, run.store, table_of_store(run.store)
        self.model = model_from_store(run.config, run.store)

    def answers(
        self, inputs: list[Input], model: nn.Module, plan: Plan, wishes: Wishes, report: RunReport
    ) -> Iterator[Answer | Failure]:
        """Each file's mask, written as it is found; tiles are halved where the device runs out of memory."""
        out, tile = wishes.out, wishes.tile or smallest_good_tile(self.config.model.depth)
        assert out is not None

        def forward(images: Tensor) -> Tensor:
            with evaluating(model), plan.forward():
                logits: Tensor = model(images)
                return logits

        for item in inputs:
            try:
                with any_size():
                    classes, tile = self._classes(item.path, forward, plan, tile, report)
                    yield self._written(item, classes, out)
            except DataError as error:
                yield failure_of(item, error)

    def _classes(
        self, path: Path, forward: Callable[[Tensor], Tensor], plan: Plan, tile: int, report: RunReport
    ) -> tuple[Array, int]:
        device, depth = torch.device(plan.device), self.config.model.depth
        while True:
            try:
                return predict_file(path, forward, store=self.store, depth=depth, device=device, tile=tile), tile
            except OutOfMemory as error:
                error.__traceback__ = None  # its frames hold the activations that did not fit
                torch.cuda.empty_cache()
                tile //= 2
                report.notice(f"out of memory: going on with tiles of {tile} pixels", "warning")

    def _written(self, item: Input, classes: Array, out: Path) -> Answer:
        name = item.name.with_suffix("")
        mask = _unused(out / "masks" / f"{name}{self.config.data.mask_suffix}.png")
        picture = _unused(out / "overlays" / f"{name}_overlay.png")
        _save(Image.fromarray(self.table.paint(classes)), mask)
        image = read_image(item.path, channels=self.store["channels"], raw_scale=self.store["raw_scale"])
        _save(overlay(image if image.shape[-1] != 2 else image[..., :1], classes), picture)
        shares = {str(value): float((classes == k).mean()) for k, value in enumerate(self.table.values)}
        return Answer(
            file=str(item.path),
            found={"mask": str(mask), "overlay": str(picture), "shares": shares},
            cells={
                "mask": str(mask),
                "overlay": str(picture),
                **{f"share of {value}": share for value, share in shares.items()},
            },
            brief={
                "mask": str(mask),
                "share of each mask value": ", ".join(f"{value}: {share:.1%}" for value, share in shares.items()),
            },
        )


def smallest_good_tile(depth: int) -> int:
    """`TILE`, or for a very deep model what leaves eight pooled cells between the margins."""
    step = 1 << depth
    return max(TILE, 2 * (-(-receptive_radius(depth) // step) * step) + 8 * step)


@contextmanager
def any_size() -> Iterator[None]:
    """Pillow refuses pictures beyond 179 million pixels as an attack; here the user named the file."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _unused(path: Path) -> Path:
    """Files of one name from several folders get numbers."""
    numbered = (path.with_stem(f"{path.stem}_{k}") for k in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())


def _save(picture: Image.Image, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}", fix="make room, or --out DIR") from error
