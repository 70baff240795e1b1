"""What scores say to somebody who has seen many runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halfstep.workloads import KINDS


def hint_about(workload: str, scores: Mapping[str, float]) -> str:
    """A sentence about a validation's scores, empty where there is nothing to say."""
    if not math.isfinite(scores.get("loss", 0.0)):
        return ""  # what such a model predicts says nothing about its classes
    kind = KINDS.of(workload)
    return str(kind.part("hint")(scores)) if kind.hint is not None else ""
