"""One rule of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep_check.findings import Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What `halfstep-check --explain RULE` says."""

    name: str
    severity: Severity
    title: str
    why: str
    bad: str
    good: str
    threads: tuple[str, ...] = ()
    """Public issue threads where this cost somebody a run, as owner/repository#number."""
