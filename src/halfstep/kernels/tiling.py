"""How maps, as rows × channels, are cut into tiles for the programs of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class Tiling:
    """What is to be measured on a GPU: the sizes of a kernel's tiles and of its grid."""

    values: int  # of a tile: 8 per thread are a 16-byte access of a half format
    most_channels: int
    num_warps: int
    num_programs: int  # over a whole map, to be counted in multiprocessors, of which an H200 has 132


@dataclass(frozen=True, slots=True)
class Tiles:
    """How rows × channels are cut: `grid` programs, each of which walks over tiles of `rows` × `channels`."""

    grid: tuple[int, int]
    rows: int
    channels: int
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        """What every kernel is launched with."""
        return {"BR": self.rows, "BC": self.channels, "num_warps": self.num_warps}


def tiles_of(num_rows: int, num_channels: int, tiling: Tiling) -> Tiles:
    """The cut for a map of this size."""
    channels = min(triton.next_power_of_2(num_channels), tiling.most_channels)
    rows, across = tiling.values // channels, triton.cdiv(num_channels, channels)
    down = min(triton.cdiv(num_rows, rows), max(1, tiling.num_programs // across))
    return Tiles((across, down), rows, channels, tiling.num_warps)
