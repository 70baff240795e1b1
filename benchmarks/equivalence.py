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

STUDENT_95 = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""95th percentile of Student's t by degrees of freedom (any statistics table)."""

HALF_A_POINT = 0.005


def equivalence(baseline: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Compare metrics in 0..1 of runs with the same seeds."""
    differences = [b - a for a, b in zip(baseline, other, strict=True)]
    count, mean = len(differences), statistics.mean(differences)
    if count - 1 not in STUDENT_95:
        return {"mean_difference": mean, "verdict": "not shown", "why": f"{count} paired seeds, 5 to 10 are needed"}
    deviation = statistics.stdev(differences)
    reach = STUDENT_95[count - 1] * deviation / math.sqrt(count)
    margin = max(HALF_A_POINT, 2 * statistics.stdev(baseline))
    low, high = mean - reach, mean + reach
    return {
        "mean_difference": mean,
        "interval_90": [low, high],
        "margin": margin,
        "verdict": "same" if -margin < low and high < margin else "not shown",
    }
