"""Against an earlier bench: which rows got slower or larger by more than their windows vary and their machine drifts.

The medians are compared. They must part by more than half of each row's spread, both together, and by the drift on top.
A spread leaves the slowest window out: where the machine was busy in one, that alone would hide a slowdown of any size.
How often the rule misses a slowdown, or sees one where none is: docs/log.md.

How far a machine drifted while a bench ran tells its first row, which is measured again at the end. Where in between
another row stood is not known, so each may have come out as much too slow, or in the earlier bench too fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.bench.bench import drift
from halfstep.bench.ours import Ours
from halfstep.bench.problem import Runner
from halfstep.bench.record import Stored, StoredProblem, read
from halfstep.bench.row import Row
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
    drift: float = 1.0
    """How many times as long its first row took at the slower end of that bench."""
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
    rows = [stored.row() for stored in earlier.rows]
    found = {row.label: row for row in rows if row.is_measured and not row.simulated}
    if not found:
        raise ConfigError(
            f"{path} has no row to compare with",
            why="each was simulated, whose time means nothing, or could not be measured",
            fix="save one with a format that this device has: --precisions fp32 --save FILE",
        )
    repeated = earlier.repeated.row() if earlier.repeated else None
    return Earlier(rows=found, drift=drift(rows, repeated), warning=_untold(path, earlier.problem, now))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What became of the rows since an earlier bench."""

    compared: tuple[str, ...] = ()
    """Labels of the rows that both have."""
    simulated: tuple[str, ...] = ()
    """Of those now, left out: their time means nothing."""
    regressions: tuple[str, ...] = ()
    within_drift: tuple[str, ...] = ()
    """Slower, but by no more than the machine drifted while one of the two benches ran."""
    drift: float = 1.0
    """Of both benches together: as many times as long may a step take without having got slower."""


def refuse_without_common_rows(before: Mapping[str, Row], asked: Iterable[Runner | Row]) -> None:
    """Before anything is measured: at least one of those who will run must have run then."""
    real = [row for row in asked if not (isinstance(row, Ours) and row.simulated)]
    labels = [f"{row.name} {row.variant} {row.precision}" for row in real]
    if not any(label in before for label in labels):
        raise ConfigError(
            f"the baseline has none of these rows: {', '.join(labels) or 'all are simulated'}",
            fix=f"it has {', '.join(before)}",
        )


def compare(before: Earlier, rows: Sequence[Row], repeated: Row | None) -> Comparison:
    """What got worse, in words; rows that are simulated now are left out, as those of then are."""
    drifted = before.drift * drift(rows, repeated)
    pairs = [(before.rows[row.label], row) for row in rows if row.label in before.rows and not row.simulated]
    slower = [(then, now) for then, now in pairs if now.is_measured and _is_slower(then, now)]
    certain = [(then, now) for then, now in slower if _is_slower(then, now, drift=drifted)]
    return Comparison(
        compared=tuple(now.label for _, now in pairs),
        simulated=tuple(row.label for row in rows if row.simulated),
        regressions=tuple(_lost_and_larger(pairs)) + tuple(_in_words(then, now, drifted) for then, now in certain),
        within_drift=tuple(_in_words(then, now, drifted) for then, now in slower if (then, now) not in certain),
        drift=drifted,
    )


def _differences(earlier: Stored, now: Mapping[str, Any]) -> list[str]:
    pairs: list[tuple[str, object, object]] = [("device", earlier.device, now["device"])]
    pairs += [(name, earlier.versions.get(name), now["versions"][name]) for name in SAME]
    problem, settings = earlier.problem.__pydantic_extra__, earlier.problem.settings
    pairs += [(name, problem.get(name), value) for name, value in now["problem"].items() if name != "settings"]
    pairs += [(name, settings[name], value) for name, value in _settings(now).items() if name in settings]
    return [f"{name} was {before}, is {after}" for name, before, after in pairs if before != after]


def _untold(path: Path, earlier: StoredProblem, now: Mapping[str, Any]) -> str:
    """Files of older versions know fewer settings; those they do not know are held for equal, and that is said."""
    if not earlier.settings:
        return f"{path} does not tell its settings beyond the problem's size: whether they were the same is not known"
    unknown = sorted(_settings(now).keys() ^ earlier.settings.keys())
    return f"{path} and this bench do not both tell {', '.join(unknown)}: not compared" if unknown else ""


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(record["problem"].get("settings", {}))


def _is_slower(before: Row, now: Row, *, drift: float = 1.0) -> bool:
    return now.ms > _allowed(before, now, drift) * before.ms


def _allowed(before: Row, now: Row, drift: float) -> float:
    """As many times as long may a step take without having got slower."""
    return drift * (1 + max(TIME_BOUND, _half_spread(before) + _half_spread(now)))


def _half_spread(row: Row) -> float:
    """Relative to the median, the slowest window left out."""
    fastest, *others = sorted(row.window_ms)
    return (max(others[:-1], default=fastest) - fastest) / 2 / row.ms


def _in_words(before: Row, now: Row, drift: float) -> str:
    return (
        f"{now.label} is slower: {now.ms:.4g} ms a step against {before.ms:.4g} ({now.ms / before.ms - 1:+.1%}; "
        f"spread and drift explain up to {_allowed(before, now, drift) - 1:+.1%})"
    )


def _lost_and_larger(pairs: Iterable[tuple[Row, Row]]) -> Iterator[str]:
    for before, now in pairs:
        if not now.is_measured:
            yield f"{now.label} was measured then, and now: {now.reason}"
        elif now.peak_bytes and before.peak_bytes and now.peak_bytes > (1 + MEMORY_BOUND) * before.peak_bytes:
            yield f"{now.label} is larger: {format_bytes(now.peak_bytes)} against {format_bytes(before.peak_bytes)}"
