"""Prediction of masks: each with the values and the size of its original, beside an overlay to look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from halfstep.data.files import READABLE
from halfstep.data.images import read_image
from halfstep.errors import CheckpointError, DataError
from halfstep.report.prediction_view import Answer, Failure
from halfstep.report.progress import Bar
from halfstep.workloads.kind import Store
from halfstep.workloads.segmentation.build import background_class, model_from_store, table_of_store
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.pictures import overlay
from halfstep.workloads.segmentation.tiles import Array, WholeImages, any_size
from halfstep.workloads.using import Input, Trained, Wishes, failure_of


class MaskPredictor:
    endings = READABLE

    def __init__(self, config: UNetConfig, store: Store) -> None:
        self.config, self.store, self.table = config, store, table_of_store(store)
        self.model = model_from_store(config, store)

    def answers(self, inputs: list[Input], trained: Trained, wishes: Wishes, bar: Bar) -> Iterator[Answer | Failure]:
        assert wishes.out is not None
        images = WholeImages(trained, store=self.store, depth=self.config.model.depth, tile=wishes.options["tile"])
        for item in inputs:
            try:
                yield self._written(item, images.classes(item.path, bar), wishes.out)
            except DataError as error:
                yield failure_of(item, error)

    def _written(self, item: Input, classes: Array, out: Path) -> Answer:
        name = item.name.with_suffix("")
        mask = _unused(out / "masks" / f"{name}{self.config.data.mask_suffix}.png")
        picture = _unused(out / "overlays" / f"{name}_overlay.png")
        _save(Image.fromarray(self.table.paint(classes)), mask)
        with any_size():
            image = read_image(item.path, channels=self.store["channels"], raw_scale=self.store["raw_scale"])
        shown = image if image.shape[-1] != 2 else image[..., :1]
        _save(overlay(shown, classes, background=background_class(self.config, self.table)), picture)
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
