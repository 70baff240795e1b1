"""Equivalence test of two settings: paired seeds, and a margin fixed in advance.

Two one-sided tests (TOST): the verdict is "same" if the confidence interval of the mean difference is inside +-margin.
Several rows are judged by Holm's rule. `judge_rows` makes every decision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from halfstep.errors import ConfigError

LEVEL = 0.05
"""Probability of calling a difference as large as the margin "same", over all rows."""
SEEDS = 8
FEWEST_SEEDS = 5
"""With fewer, the interval is wider than any useful margin."""
MOST_SEEDS = 400
"""More seeds than this are not worth suggesting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowVerdict:
    """The result for one row compared with the baseline, from the seeds so far."""

    word: Literal["same", "lower", "higher", "not shown"]
    mean: float
    """Mean difference, row minus baseline."""
    low: float
    high: float
    """The interval that was judged."""
    margin: float
    seeds_needed: int | None = None
    """Seeds that would show "same" if mean and deviation stay; None if no number would, or none is needed."""
    why: str = ""

    def __str__(self) -> str:
        aside = f" ({'lower' if self.mean < 0 else 'higher'} by {abs(self.mean):.3g})"
        return self.word + (aside if self.word == "same" and not self.low <= 0 <= self.high else "")


def refuse_bad_rows(names: Sequence[str], margin: float | None) -> None:
    """Refuse rows or a margin that cannot give a verdict."""
    if len(names) < 2:
        raise ConfigError(
            f"a comparison needs two rows, but there is {f'only {names[0]!r}' if names else 'none'}",
            fix="give several with --precisions fp32,bf16, or add a row with --rows",
        )
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise ConfigError(f"two rows are called {twice!r}", fix="give each row a different name")
    if margin is not None and not 0 < margin < math.inf:
        raise ConfigError(f"--margin {margin:g} is not valid", fix="give a positive number in the metric's unit")


# --- the margin ---

POINTS = 0.005
"""Half a point of a metric between 0 and 1."""
RELATIVE = 0.01
WIDE_POINTS, WIDE_RELATIVE = 0.02, 0.05


def choose_margin(baseline: Sequence[float], *, in_points: bool) -> float:
    """Return half a point, or for a loss 1 % of the baseline's mean."""
    return POINTS if in_points or not baseline else RELATIVE * abs(statistics.mean(baseline))


def is_wide(margin: float, baseline: Sequence[float], *, in_points: bool) -> bool:
    """True if the margin is so wide that "same" means little."""
    return margin > (WIDE_POINTS if in_points else WIDE_RELATIVE * abs(statistics.mean(baseline)))


# --- the verdicts ---


def judge_rows(baseline: Sequence[float], rows: Mapping[str, Sequence[float]], margin: float) -> dict[str, RowVerdict]:
    """Compare each row with the baseline, seed by seed."""
    # A metric that is constant over all runs shows nothing, so it never counts as the same.
    stuck = {name for name, values in rows.items() if len({*baseline, *values}) == 1}
    differences = {
        name: np.asarray(values, np.float64) - np.asarray(baseline, np.float64) for name, values in rows.items()
    }
    order = sorted(rows, key=lambda name: (name in stuck, -_measure_clarity(differences[name], margin)))
    found: dict[str, RowVerdict] = {}
    still_same = True
    for place, name in enumerate(order):
        # Holm: the clearest row is judged most strictly; after one that fails no later one is called the same.
        verdict = _judge_row(differences[name], margin, LEVEL / (len(rows) - place))
        if name in stuck and verdict.word == "same":
            why = f"the metric is {baseline[0]:g} in every run, so it cannot show a difference"
            verdict = replace(verdict, word="not shown", why=why)
        still_same = still_same and verdict.word == "same"
        if verdict.word == "same" and not still_same:
            why = "a row with a smaller p-value was not shown to be the same (Holm's rule)"
            verdict = replace(verdict, word="not shown", why=why)
        found[name] = verdict
    return {name: found[name] for name in rows}


def _judge_row(differences: NDArray[np.float64], margin: float, level: float) -> RowVerdict:
    """Judge one row by the confidence interval of its paired differences."""
    count = len(differences)
    nothing = RowVerdict(word="not shown", mean=math.nan, low=math.nan, high=math.nan, margin=margin)
    if count < FEWEST_SEEDS:
        return replace(nothing, why=f"{count} paired seeds; at least {FEWEST_SEEDS} are needed")
    if not np.isfinite(differences).all():
        return replace(nothing, why="a run ended with a metric that is not finite")
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    reach = compute_student_quantile(1 - level, count - 1) * deviation / math.sqrt(count)
    found = replace(nothing, mean=mean, low=mean - reach, high=mean + reach)
    # Equivalence first: a difference that is significant but inside the margin still counts as the same.
    if -margin < found.low and found.high < margin:
        return replace(found, word="same")
    if found.high < 0 or found.low > 0:
        return replace(found, word="lower" if found.high < 0 else "higher")
    needed = count_seeds_needed(mean, deviation, margin, level)
    why = "the interval exceeds the margin" if needed else "the difference itself is about as large as the margin"
    return replace(found, seeds_needed=needed, why=why)


def count_seeds_needed(mean: float, deviation: float, margin: float, level: float) -> int | None:
    """Return the smallest number of seeds whose interval would fit into the margin; None if none would."""
    room = margin - abs(mean)
    if room <= 0:
        return None
    for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
        if compute_student_quantile(1 - level, count - 1) * deviation / math.sqrt(count) < room:
            return count
    return None


def _measure_clarity(differences: NDArray[np.float64], margin: float) -> float:
    """Return how many standard errors the mean difference is inside the margin; p-values have the opposite order."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return -math.inf
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    room = margin - abs(float(differences.mean()))
    return room / error if error else math.copysign(math.inf, room)


# --- Student's t with a whole number of degrees of freedom, where its distribution is a finite sum ---


def compute_student_cdf(t: float, freedom: int) -> float:
    """Compute the cumulative distribution of Student's t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term, total = (cosine if is_odd else 1.0), 0.0
    for k in range(1, freedom // 2 + 1):
        total += term
        term *= cosine**2 * ((2 * k) / (2 * k + 1) if is_odd else (2 * k - 1) / (2 * k))
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return (1 + inside) / 2


@cache
def compute_student_quantile(share: float, freedom: int) -> float:
    """Invert the cumulative distribution by bisection."""
    low, high = -1e3, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2
