"""Against an earlier bench: which rows got slower or larger by more than their windows vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.bench.record import read, rows_of
from halfstep.bench.row import Row
from halfstep.errors import ConfigError
from halfstep.measure.memory import format_bytes

SAME = ("torch", "cuda", "driver")
"""Versions that must be equal. halfstep's own is what a comparison is about, and a peer's counts for its rows only."""
TIME_BOUND = 0.02
"""Runs of the same program part by a percent or so, however steady their windows are."""
MEMORY_BOUND = 0.01
"""The allocator repeats itself."""


def earlier_rows(path: Path, now: Mapping[str, Any]) -> dict[str, Row]:
    """The file's rows that can be compared; refuses one of another device, other versions or another problem."""
    earlier = read(path)
    if differences := _differences(earlier, now):
        raise ConfigError(
            f"{path} cannot be compared with this bench",
            why="; ".join(differences),
            fix="save a new baseline here: --save FILE",
        )
    found = {row.label: row for row in rows_of(earlier, path) if row.is_measured and not row.simulated}
    if not found:
        raise ConfigError(
            f"{path} has no row to compare with",
            why="each was simulated, whose time means nothing, or could not be measured",
            fix="save one with a format that this device has: --precisions fp32 --save FILE",
        )
    return found


def regressions(before: Mapping[str, Row], rows: Sequence[Row]) -> list[str]:
    """What got worse, in words; rows that are simulated now are left out, as those of then are."""
    rows = [row for row in rows if not row.simulated]
    if not any(row.label in before for row in rows):
        raise ConfigError(
            f"the baseline has none of these rows: {', '.join(row.label for row in rows) or 'all are simulated'}",
            fix=f"it has {', '.join(before)}",
        )
    return [line for row in rows if row.label in before for line in _worse(before[row.label], row)]


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    pairs = [("device", earlier.get("device"), now["device"])]
    pairs += [(name, earlier.get("versions", {}).get(name), now["versions"][name]) for name in SAME]
    pairs += [(name, earlier.get("problem", {}).get(name), value) for name, value in now["problem"].items()]
    return [f"{name} was {before}, is {after}" for name, before, after in pairs if before != after]


def _worse(before: Row, now: Row) -> list[str]:
    if not now.is_measured:
        return [f"{now.label} was measured then, and now: {now.reason}"]
    found = []
    # Windows that do not overlap, rather than medians that part by more than the spreads: one window in which the
    # machine was busy makes a spread as large as the step, and would hide a slowdown of any size.
    fastest_now, slowest_then = min(now.window_ms), max(before.window_ms)
    if fastest_now > slowest_then and now.ms > (1 + TIME_BOUND) * before.ms:
        found.append(
            f"{now.label} is slower: {now.ms:.4g} ms a step against {before.ms:.4g} ({now.ms / before.ms - 1:+.1%}, "
            f"fastest window {fastest_now:.4g} ms, slowest then {slowest_then:.4g})"
        )
    if now.peak_bytes and before.peak_bytes and now.peak_bytes > (1 + MEMORY_BOUND) * before.peak_bytes:
        found.append(f"{now.label} is larger: {format_bytes(now.peak_bytes)} against {format_bytes(before.peak_bytes)}")
    return found
