"""Is the accuracy the same? Two one-sided tests (TOST) on paired seeds.

The word is "same" only if the 90 % confidence interval of the mean difference lies inside +-margin, where the margin
is the larger of half a point and twice the baseline's own deviation between seeds. Otherwise it is "not shown":
few seeds give a wide interval, and a wide interval shows nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

FEWEST_SEEDS = 5
STUDENT_95 = (
    (2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
    + (1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729)
    + (1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699)
)
"""95th percentile of Student's t from 4 to 29 degrees of freedom (any statistics table)."""

HALF_A_POINT = 0.005


def equivalence(baseline: Sequence[float], other: Sequence[float], *, margin: float | None = None) -> dict[str, Any]:
    """Compare metrics of runs with the same seeds; without a margin of their own, such as lie in 0..1."""
    differences = [b - a for a, b in zip(baseline, other, strict=True)]
    count, mean = len(differences), statistics.mean(differences)
    most = FEWEST_SEEDS + len(STUDENT_95) - 1
    if not FEWEST_SEEDS <= count <= most:
        why = f"{count} paired seeds, {FEWEST_SEEDS} to {most} are needed"
        return {"mean_difference": mean, "verdict": "not shown", "why": why}
    deviation = statistics.stdev(differences)
    reach = STUDENT_95[count - FEWEST_SEEDS] * deviation / math.sqrt(count)
    margin = margin or max(HALF_A_POINT, 2 * statistics.stdev(baseline))
    low, high = mean - reach, mean + reach
    return {
        "mean_difference": mean,
        "interval_90": [low, high],
        "margin": margin,
        "verdict": "same" if -margin < low and high < margin else "not shown",
    }
