"""Draw radio maps: buildings and antenna, the predicted map, the truth, the error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import default_collate

from halfstep.islands import fp32_island
from halfstep_train.workloads.base.sheets import Array, draw_table
from halfstep_train.workloads.base.workload import Forward, Prepare, Sample
from halfstep_train.workloads.radio.maps import RadioMaps

BUILDING, STREET, ANTENNA, CAR = (40, 40, 40), (225, 225, 225), (213, 94, 0), (0, 114, 178)
TOO_HIGH, TOO_LOW = (213, 94, 0), (0, 114, 178)
LARGEST_ERROR = 0.25
"""Errors of this size and larger are drawn in full colour."""
SHOWN = 4
"""Validation maps in a sheet of samples."""


Row = tuple[str, dict[str, Array]]
"""Name and pictures of a sample, the pictures by their headings."""


def draw_map_sheet(rows: Sequence[Row]) -> Image.Image:
    """Draw one row per sample under headings; all rows have the same ones."""
    return draw_table(list(rows[0][1]), [(name, list(cells.values())) for name, cells in rows])


def draw_cells(predicted: Array, truth: Array | None, condition: Array | None) -> dict[str, Array]:
    """Draw what is known of a sample: maps (H, W) in 0..1, and the condition (3, H, W) as bytes."""
    cells = {} if condition is None else {"buildings, antenna": draw_condition(condition)}
    cells["map"] = draw_gain(predicted)
    return cells if truth is None else cells | {"truth": draw_gain(truth), "error": draw_error(predicted, truth)}


def draw_condition(condition: Array) -> Array:
    """Draw streets, buildings and cars, and the antenna as a cross: a single pixel would not be visible."""
    buildings, antenna, last = condition
    picture = np.empty((*buildings.shape, 3), dtype=np.uint8)
    picture[:] = STREET
    picture[buildings > 127] = BUILDING
    if not np.array_equal(last, buildings):
        picture[last > 127] = CAR
    reach = max(1, buildings.shape[0] // 32)
    for row, column in np.argwhere(antenna > 0):
        picture[max(0, row - reach) : row + reach + 1, column] = ANTENNA
        picture[row, max(0, column - reach) : column + reach + 1] = ANTENNA
    return picture


def draw_gain(gain: Array) -> Array:
    """Draw a gain in 0..1 from black over violet and orange to white, with brightness increasing monotonically."""
    from matplotlib import colormaps

    return np.asarray(colormaps["magma"](gain, bytes=True)[..., :3])


def draw_error(predicted: Array, truth: Array) -> Array:
    """Draw the error: white where both agree, orange where the map is too bright, blue where it is too dark."""
    error = np.clip((predicted - truth) / LARGEST_ERROR, -1, 1)[..., None]
    colour = np.where(error > 0, np.array(TOO_HIGH), np.array(TOO_LOW))
    return np.asarray((255 + (colour - 255) * np.abs(error)).round().astype(np.uint8))


def make_sampler(maps: RadioMaps, prepare: Prepare, forward: Forward) -> Sample:
    """Return a function that runs the model on the first validation maps and draws them as a sheet."""

    def draw(model: nn.Module, key: tuple[int, ...]) -> dict[str, Array]:
        indices = range(min(SHOWN, len(maps)))
        batch = default_collate([maps.sample(index, key=(0, 0, index)) for index in indices])
        device = next(model.parameters()).device
        with torch.no_grad(), fp32_island():
            prepared = prepare({name: value.to(device) for name, value in batch.items()}, key=key, training=False)
        found = forward(model, prepared)["map"]
        rows = [
            (maps.name_of(index), draw_cells(one[0].float().cpu().numpy(), gain[0].numpy() / 255, condition.numpy()))
            for index, one, gain, condition in zip(indices, found, batch["gain"], batch["condition"], strict=True)
        ]
        return {"maps": np.asarray(draw_map_sheet(rows))}

    return draw
