"""Prediction of masks: each with the values and the size of its original, beside an overlay to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from halfstep.data.files import READABLE
from halfstep.data.images import read_image
from halfstep.errors import DataError
from halfstep.report.prediction_view import Answer, Failure
from halfstep.report.progress import Bar
from halfstep.workloads.kind import Store
from halfstep.workloads.segmentation.build import background_class, model_from_store, table_of_store
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.pictures import overlay
from halfstep.workloads.segmentation.tiles import Array, WholeImages, any_size
from halfstep.workloads.using import Input, Trained, Wishes, failure_of, saved_picture


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
        painted = Image.fromarray(self.table.paint(classes))
        mask = saved_picture(painted, out / "masks" / f"{name}{self.config.data.mask_suffix}.png")
        with any_size():
            image = read_image(item.path, channels=self.store["channels"], raw_scale=self.store["raw_scale"])
        shown = image if image.shape[-1] != 2 else image[..., :1]
        laid_over = overlay(shown, classes, background=background_class(self.config, self.table))
        picture = saved_picture(laid_over, out / "overlays" / f"{name}_overlay.png")
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
