"""Class maps of image files at their own size, as prediction writes them and as evaluation can score them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from halfstep.report.progress import Bar
from halfstep.workloads.segmentation.tiles import Array, margin_of, predict_file
from halfstep.workloads.using import Trained

TILE = 1024
"""Pixels a side, where the model allows it: a few GB at full width."""


class WholeImages:
    """A trained U-Net at work on files; tiles are halved where the device runs out of memory."""

    def __init__(
        self,
        trained: Trained,
        *,
        store: Mapping[str, Any],
        depth: int,
        tile: int | None = None,
    ) -> None:
        self.trained, self.store, self.depth = trained, store, depth
        self.tile = tile or smallest_good_tile(depth)

    def classes(self, path: Path, bar: Bar) -> Array:
        """One file's class map; while it takes several tiles, the bar counts them."""

        def tell(done: int, total: int) -> None:
            bar.show({"tile": f"{done + 1}/{total}"} if total > 1 else {})

        while True:
            try:
                with any_size():
                    return predict_file(
                        path,
                        self.trained,
                        store=self.store,
                        depth=self.depth,
                        device=self.trained.device,
                        tile=self.tile,
                        tell=tell,
                    )
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None  # its frames hold the activations that did not fit
                torch.cuda.empty_cache()
                self.tile //= 2
                self.trained.warn(f"out of memory: going on with tiles of {self.tile} pixels")


def smallest_good_tile(depth: int) -> int:
    """`TILE`, or for a very deep model what leaves eight pooled cells between the margins."""
    return max(TILE, 2 * margin_of(depth) + 8 * (1 << depth))


@contextmanager
def any_size() -> Iterator[None]:
    """Pillow refuses pictures beyond 179 million pixels as an attack; here the user named the file."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
