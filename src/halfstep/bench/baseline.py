"""Against an earlier bench: which rows got slower or larger by more than their windows vary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.bench.ours import Ours
from halfstep.bench.record import read, rows_of
from halfstep.bench.row import Row
from halfstep.bench.runner import Runner
from halfstep.errors import ConfigError
from halfstep.measure.memory import format_bytes

SAME = ("torch", "cuda", "driver")
"""Versions that must be equal. halfstep's own is what a comparison is about, and a peer's counts for its rows only."""
TIME_BOUND = 0.02
"""Runs of the same program part by a percent or so, however steady their windows are."""
MEMORY_BOUND = 0.01
"""The allocator repeats itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What an earlier bench has to compare with."""

    rows: Mapping[str, Row]
    """By their labels."""
    warning: str = ""
    """What the file does not tell, so that nobody knows whether it was the same."""


def earlier_rows(path: Path, now: Mapping[str, Any]) -> Earlier:
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
    return Earlier(rows=found, warning=_untold(path, earlier, now))


def refuse_without_common_rows(before: Mapping[str, Row], asked: Iterable[Runner | Row]) -> None:
    """Before anything is measured: at least one of those who will run must have run then."""
    real = [row for row in asked if not (isinstance(row, Ours) and row.simulated)]
    labels = [f"{row.name} {row.variant} {row.precision}" for row in real]
    if not any(label in before for label in labels):
        raise ConfigError(
            f"the baseline has none of these rows: {', '.join(labels) or 'all are simulated'}",
            fix=f"it has {', '.join(before)}",
        )


def regressions(before: Mapping[str, Row], rows: Sequence[Row]) -> list[str]:
    """What got worse, in words; rows that are simulated now are left out, as those of then are."""
    compared = [row for row in rows if row.label in before and not row.simulated]
    return [line for row in compared for line in _worse(before[row.label], row)]


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    pairs = [("device", earlier.get("device"), now["device"])]
    pairs += [(name, earlier.get("versions", {}).get(name), now["versions"][name]) for name in SAME]
    problem, settings = earlier.get("problem", {}), _settings(earlier)
    pairs += [(name, problem.get(name), value) for name, value in now["problem"].items() if name != "settings"]
    pairs += [(name, settings[name], value) for name, value in _settings(now).items() if name in settings]
    return [f"{name} was {before}, is {after}" for name, before, after in pairs if before != after]


def _untold(path: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Files of older versions know fewer settings; those they do not know are held for equal, and that is said."""
    if not _settings(earlier):
        return f"{path} does not tell its settings beyond the problem's size: whether they were the same is not known"
    unknown = sorted(_settings(now).keys() ^ _settings(earlier).keys())
    return f"{path} and this bench do not both tell {', '.join(unknown)}: not compared" if unknown else ""


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(record.get("problem", {}).get("settings", {}))


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
