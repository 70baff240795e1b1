"""What scores say to somebody who has seen many runs."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.workloads import KINDS


def hint_about(workload: str, scores: Mapping[str, float]) -> str:
    """A sentence about a validation's scores, empty where there is nothing to say."""
    kind = KINDS.of(workload)
    return str(kind.part("hint")(scores)) if kind.hint is not None else ""
