"""Draw radio maps: buildings and antenna, the predicted map, the truth, the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import nn
from torch.utils.data import default_collate

from halfstep_train.workloads.base.sheets import Array, draw_table
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.radio.maps import RadioMaps

COLUMNS = ("buildings, antenna", "map", "truth", "error")
BUILDING, STREET, ANTENNA, CAR = (40, 40, 40), (225, 225, 225), (213, 94, 0), (0, 114, 178)
TOO_HIGH, TOO_LOW = (213, 94, 0), (0, 114, 178)
LARGEST_ERROR = 0.25
"""Errors of this size and larger are drawn in full colour."""
SHOWN = 4
"""Validation maps in a sheet of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapRow:
    """One row of a sheet; arrays (H, W) in 0..1."""

    name: str
    condition: Array | None
    """(3, H, W) bytes: buildings, antenna, cars (or buildings again); None for reconstructions by the first stage."""
    predicted: Array
    truth: Array | None = None


def draw_map_sheet(rows: Sequence[MapRow]) -> Image.Image:
    """Draw one row per sample under headings; leave out columns that no row has."""
    known = (any(row.condition is not None for row in rows), True, *[any(row.truth is not None for row in rows)] * 2)
    columns = [name for name, is_known in zip(COLUMNS, known, strict=True) if is_known]
    return draw_table(columns, [(row.name, _draw_cells(row)) for row in rows])


def _draw_cells(row: MapRow) -> list[Array]:
    # Only the cells for which there is data.
    city = [] if row.condition is None else [draw_condition(row.condition)]
    cells = [*city, draw_gain(row.predicted)]
    return cells if row.truth is None else [*cells, draw_gain(row.truth), draw_error(row.predicted, row.truth)]


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
    stops = np.array([(0, 0, 4), (81, 18, 124), (183, 55, 121), (252, 137, 97), (252, 253, 191)], dtype=np.float64)
    # Interpolate linearly between the colours of neighbouring stops.
    position = np.clip(gain, 0, 1) * (len(stops) - 1)
    low = np.minimum(position.astype(int), len(stops) - 2)
    part = (position - low)[..., None]
    return np.asarray((stops[low] * (1 - part) + stops[low + 1] * part).round().astype(np.uint8))


def draw_error(predicted: Array, truth: Array) -> Array:
    """Draw the error: white where both agree, orange where the map is too bright, blue where it is too dark."""
    error = np.clip((predicted - truth) / LARGEST_ERROR, -1, 1)[..., None]
    colour = np.where(error > 0, np.array(TOO_HIGH), np.array(TOO_LOW))
    return np.asarray((255 + (colour - 255) * np.abs(error)).round().astype(np.uint8))


def draw_samples(maps: RadioMaps, model: nn.Module, workload: Workload, key: tuple[int, ...]) -> dict[str, Array]:
    """Run the model on the first validation maps and draw them as a sheet."""
    indices = range(min(SHOWN, len(maps)))
    batch = default_collate([maps.sample(index, key=(0, 0, index)) for index in indices])
    device = next(model.parameters()).device
    placed = {name: value.to(device) for name, value in batch.items()}
    found = workload.forward(model, workload.prepare_batch(placed, key=key, training=False))["map"]
    rows = [
        MapRow(
            name=maps.name_of(index),
            condition=batch["condition"][index].numpy(),
            predicted=found[index, 0].float().cpu().numpy(),
            truth=batch["gain"][index, 0].numpy() / 255,
        )
        for index in indices
    ]
    return {"maps": np.asarray(draw_map_sheet(rows))}
