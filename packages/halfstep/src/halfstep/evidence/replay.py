"""Replay a capsule's step: find its cause, then propose and try the smallest change.

If no change helps although samples or state are at fault, these are repaired for the time being, and the step is
replayed again to find the fault behind the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.evidence.attempts import Attempt, Subject
from halfstep.evidence.capsule import Capsule, to_strict_json
from halfstep.evidence.causes import Diagnosis, diagnose
from halfstep.evidence.ranges import ROOT, Range, group_by_module
from halfstep.evidence.remedies import Remedy, find_remedies, repair_temporarily


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The result of a replay."""

    capsule: Capsule
    diagnosis: Diagnosis
    tried: list[Remedy]
    format: str
    """The format that the step computed in."""
    behind: Replayed | None = None
    """Another fault, which appears once this one is fixed."""

    @property
    def cause(self) -> str:
        return self.diagnosis.cause

    @property
    def remedy(self) -> Remedy | None:
        """Return the change that lasts; else one that makes the step good; else a proposed one that could not be
        tried."""
        ranks = ([r for r in self.tried if r.lasts], [r for r in self.tried if r.works],
                 [r for r in self.tried if r.outcome is None])  # fmt: skip
        return next((rank[0] for rank in ranks if rank), None)

    @property
    def as_was(self) -> Attempt:
        return self.diagnosis.attempts[0]

    @property
    def module(self) -> str:
        """Return the module at fault; empty if no operation is."""
        return self.diagnosis.origin.module if self.diagnosis.origin is not None else ""

    def group_ranges(self) -> dict[str, list[tuple[str, Range]]]:
        """Return each module's range in execution order, by direction, for the figure."""
        traced = next((run.trace for run in self.diagnosis.attempts if run.trace is not None), None)
        if traced is None:
            return {}
        return {
            word: list(group_by_module(traced, is_backward=word == "backward").items())
            for word in ("forward", "backward")
        }

    def __str__(self) -> str:
        return "\n".join(self.format_lines())

    def format_lines(self) -> list[str]:
        """Return the answer as lines of text."""
        about = self.capsule.about
        place = f" of {about['phase']}" if about.get("phase") else ""
        inexact = [self.capsule.inexact] if self.capsule.inexact else []
        before = describe_growth(about.get("watch"), self.module)
        return [f"step {self.capsule.step}{place}: {about['reason']}", *inexact, *before, "", *self._format_answer()]

    def _format_answer(self) -> list[str]:
        lines = [f"cause: {self.cause}", *(f"  {line}" for line in self.diagnosis.shown)]
        if (origin := self.diagnosis.origin) is not None:
            where = f" at {origin.line}" if origin.line else ""
            what = "raised" if origin.has_raised else "first operation out of range"
            lines.append(f"{what}: {origin.place}{where}")
        lines += ["", "the step, run again", *(f"  {run}" for run in self.diagnosis.attempts), ""]
        if self.behind is None:
            return lines + self._format_advice()
        change = f"change: {self.tried[0].change} (tried: another fault is behind it)"
        return [*lines, change, "", "behind it", *self.behind._format_answer()]

    def _format_advice(self) -> list[str]:
        failed = [f"  tried, does not help: {r.change}" for r in self.tried if r.outcome is not None and not r.works]
        if self.remedy is None:
            return ["change: none of those tried helps", *failed] if self.tried else ["change: nothing to propose"]
        lines = [f"change: {self.remedy.change} ({self.remedy.shown})", *failed]
        return [*lines, "", self.remedy.line] if self.remedy.line else lines

    def to_json(self) -> dict[str, Any]:
        origin = self.diagnosis.origin
        document = {
            "step": self.capsule.step,
            "reason": self.capsule.about["reason"],
            "inexact": self.capsule.inexact,
            "before": describe_growth(self.capsule.about.get("watch"), self.module),
            "cause": self.cause,
            "shown": self.diagnosis.shown,
            "operation": origin
            and {
                **{name: getattr(origin, name) for name in ("name", "module", "line")},
                "backward": origin.is_backward,
                "inputs": [str(r) for r in origin.inputs],
                "output": str(origin.output),
            },
            "samples": list(self.diagnosis.rows.values()),
            "places": [str(place) for place in self.diagnosis.places],
            "attempts": [
                {**{key: getattr(run, key) for key in ("name", "loss", "grad_norm", "error")}, "good": run.is_good}
                for run in self.diagnosis.attempts
            ],
            "tried": [
                {"change": r.change, "line": r.line, "works": r.outcome and r.works, "lasts": r.outcome and r.lasts}
                for r in self.tried
            ],
            "change": self.remedy.change if self.remedy else "",
            "line": self.remedy.line if self.remedy else "",
            "behind": self.behind.to_json() if self.behind else None,
        }
        return dict(to_strict_json(document))


def replay(subject: Subject, capsule: Capsule) -> Replayed:
    """Run the step again in every variant, and report why it went bad."""
    found = diagnose(subject, capsule)
    rate = capsule.about.get("base_lr") or capsule.about["lr"]
    tried = find_remedies(subject, found, rate=rate if isinstance(rate, float) else 0.0, is_run=capsule.is_from_run)
    behind = None
    if (found.rows or found.tensors) and tried and all(r.outcome is not None and not r.works for r in tried):
        # No change helps although samples or state are at fault: repair those and look for a second fault.
        with repair_temporarily(subject, found):
            behind = replay(subject, capsule)
    return Replayed(capsule=capsule, diagnosis=found, tried=tried, format=subject.plan.compute, behind=behind)


LEAST_GROWTH = 2.0
"""Bits by which a row has to grow to be worth mentioning."""
BACK = 0.25
"""Bits by which it may shrink in between."""


def describe_growth(watch: Mapping[str, Any] | None, module: str) -> list[str]:
    """Return what a watch saw grow before the step: of the module at fault, or else of all, the two that grew most."""
    if watch is None:
        return []
    found = []
    for row in watch["rows"]:
        seen = [(s, v) for s, v in zip(watch["steps"], row["high"], strict=True) if isinstance(v, int | float)]
        if row["kind"] == "update" or len(seen) < 3:
            continue
        first = len(seen) - 1
        while first and seen[first - 1][1] <= seen[first][1] + BACK:
            first -= 1
        (begin, low), (end, high) = seen[first], seen[-1]
        if high - low >= LEAST_GROWTH:
            is_at_fault = row["module"] == module.replace(ROOT, "") and bool(module)
            text = f"{row['module'] or 'the model'}, {row['kind']}: grew for {end - begin:,} steps before, from "
            # Gradients that grow are a consequence of activations and weights that do.
            order = not is_at_fault, "gradient" in row["kind"], low - high
            found.append((order, f"{text}{2**low:.3g} to {2**high:.3g}"))
    return [text for _, text in sorted(found)[:2]]
