"""Replay a capsule's step: find its cause, then find the smallest change that helps.

Changes are proposed for a cause, in order of size, and each is tried on the recorded step. Those of code (an eps, a
clamp, an island, a cast left out) are tried by the modes of patches.py. One that makes the step good is tried further:
the weights are updated as in training, and ten more steps follow on the same window. If training then fails again,
changes are combined with clipping and with a smaller learning rate.

If no change helps although samples or state are at fault, these are repaired for the time being, and the step is
replayed again to find the fault behind the first one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import HalfstepError
from halfstep.evidence import causes
from halfstep.evidence.attempts import Attempt, Subject, attempt
from halfstep.evidence.capsule import Capsule, to_strict_json
from halfstep.evidence.causes import Diagnosis, diagnose
from halfstep.evidence.patches import (
    HALF,
    PATCHES,
    AtLines,
    InLogs,
    IslandAt,
    Patch,
    WithoutCasts,
    combine_patches,
    enter_in_backward,
    make_arguments_finite,
    use_autograd_derivative,
)
from halfstep.evidence.ranges import LOSS, ROOT, Operation
from halfstep.evidence.samples import draw_samples, drop_samples, take_rows
from halfstep.evidence.updates import Update
from halfstep.step.batches import count_samples


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


# --- changes that may help ---

MOST_LINES = 3
"""The most lines of one change: what needs more is not a small change."""
NUM_MORE = 10
"""Steps after the recorded one that a change has to last."""
NUM_AT_RATE = 30
"""Steps that a learning rate is tried for, in addition to twice those that momentum averages over."""
LOWEST = 1e-8
"""The smallest factor on the recorded learning rate: below it the rate is not the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change, and the outcome of the step with it."""

    change: str
    """The change, described for the user."""
    line: str = ""
    """The line for the config file; empty if code or data has to change."""
    outcome: Attempt | None = None
    """The step with this change; None if it could not be tried on one step."""
    margin: int = 0
    """Where it was tried in a training from random weights and not on the recorded step: a multiple of the rate that
    trains as well."""

    @property
    def works(self) -> bool:
        """True if the step is good with this remedy."""
        return self.outcome is not None and self.outcome.first_is_good

    @property
    def lasts(self) -> bool:
        """True if later steps are good as well, and do not raise the loss."""
        return self.outcome is not None and self.outcome.is_good and self.outcome.change_of_loss <= 0

    @property
    def shown(self) -> str:
        """Return how the change was tried, and with which result."""
        if self.outcome is None:
            return "not tried: one step cannot show it"
        num = len(self.outcome.losses)
        if not self.outcome.is_good:
            return f"tried: the step is good with it, but step {num} after it is not"
        if not self.lasts:
            return f"tried: the step is good with it, but the loss rises in {num} more steps on its batches"
        if self.margin:
            start = f"{num} steps on samples drawn from its batches, from random weights of the initial size,"
            return f"tried: {start} stay finite and lower the loss, also at {self.margin} times the rate"
        falls = "the loss falls" if self.outcome.change_of_loss < 0 else "the loss hardly changes"
        return "tried: the step is good with it" + (f", as are {num} more steps on its batches; {falls}" if num else "")


def find_remedies(subject: Subject, found: Diagnosis, *, rate: float, is_run: bool) -> list[Remedy]:
    """Return what was tried, in order of size, up to the first remedy that lasts."""
    tried: list[Remedy] = []
    if found.cause == causes.REFUSED:
        # It raised before any gradient: one that overflows at the loss scale of that moment is routine.
        subject = replace(subject, scale=1.0)
    for words, update in _calm_update(subject.update):
        for remedy in _propose(replace(subject, update=update), found, rate, is_run=is_run):
            if not words or remedy.lasts:
                tried.append(replace(remedy, change=remedy.change + words))
            if remedy.lasts:
                return tried
        if not any(remedy.works for remedy in tried):
            break
    return tried


def _calm_update(update: Update | None) -> Iterator[tuple[str, Update | None]]:
    """Yield the update as it was, then smaller ones: a change may leave gradients finite but large."""
    yield "", update
    if update is None:
        return
    if not 0 < update.clip.limit <= 1:
        yield ", and clip_norm=1", update.replace_clip(1.0)
    yield ", and a tenth of the learning rate", update.change_setting("lr", lambda lr: lr / 10)


def _propose(subject: Subject, found: Diagnosis, rate: float, *, is_run: bool) -> Iterator[Remedy]:
    if found.rows and found.cause in (causes.BAD_INPUT, causes.SPIKE, causes.CODE):
        yield _try_without_samples(subject, found)
    elif found.cause == causes.BAD_STATE:
        yield from _try_state(subject, found)
    elif found.cause == causes.UPDATE:
        yield from _try_other_update(subject, found, rate, is_run=is_run)
    elif found.loss_is_unbounded:
        yield Remedy(change="a loss that has a lower bound: this one falls as the weights grow; its sign may be wrong")
    elif found.cause == causes.DIVERGED and found.start and subject.update is not None:
        yield from _try_slower(subject, found, rate, is_run=is_run)
        yield from _try_code_changes(subject, found, rate, is_run=is_run)
    elif found.cause in (causes.DIVERGED, causes.SPIKE):
        yield Remedy(change=f"a tenth of the learning rate, from before the weights grew: {rate / 10:.3g}",
                     line=f"optimizer.lr: {rate / 10:.3g}" if is_run else "")  # fmt: skip
    elif found.cause == causes.KERNEL:
        yield from _try_other_code(subject, found)
        if found.fp32_is_good:
            yield from _try_wider(subject, found, is_run=is_run)
    elif found.cause in (causes.OVERFLOW, causes.UNDERFLOW, causes.REFUSED) and found.fp32_is_good:
        yield from _try_wider(subject, found, is_run=is_run)
    elif found.cause in (causes.OVERFLOW, causes.UNDERFLOW, causes.REFUSED, causes.CODE):
        yield from _try_code_changes(subject, found, rate, is_run=is_run)


# --- the update ---


def _try_slower(subject: Subject, found: Diagnosis, rate: float, *, is_run: bool) -> Iterator[Remedy]:
    """Try clipping, then lower rates, from weights of their initial size, since the recorded ones have grown already.

    Each must also train at a larger rate: one that barely trains on these repeated batches may fail on others.
    """
    assert subject.update is not None
    if not subject.update.clip.limit:
        line = "train.clip_norm: 1" if is_run else "hs.Step(..., clip_norm=1)"
        clipped = subject.update.replace_clip(1.0)
        outcome = _train(subject, found, clipped)
        outcome = outcome if not outcome.is_good else _train(subject, found, clipped.replace_rate(3 * rate))
        yield Remedy(change="gradients clipped to a norm of 1", line=line, outcome=outcome, margin=3)
    # Divide the rate by 3 until two in a row are good, and propose the lower one: its margin is then 3.
    failed, num_good, lower = None, 0, rate / 3
    while lower >= LOWEST * rate > 0:
        outcome = _train(subject, found, subject.update.replace_rate(lower))
        num_good = num_good + 1 if outcome.is_good else 0
        if num_good == 2:
            line = f"optimizer.lr: {lower:.3g}" if is_run else f"lr={lower:.3g}"
            change = f"a learning rate of {lower:.3g}, not {rate:.3g}"
            yield from [failed] if failed is not None else []
            yield Remedy(change=change, line=line, outcome=outcome, margin=3)
            return
        if not outcome.is_good:
            failed = Remedy(change=f"a learning rate of {lower:.3g} or more", outcome=outcome)
        if not outcome.losses:  # the first step fails, whatever the rate
            break
        lower /= 3
    yield from [failed] if failed is not None else []


def _train(subject: Subject, found: Diagnosis, update: Update) -> Attempt:
    """Run many steps with another update, on samples redrawn for each: a repeated window would be memorised.

    A loss that has not fallen is as bad as a non-finite one: the rate is still too large.
    """
    draw, num_more = partial(draw_samples, generator=torch.Generator().manual_seed(0)), NUM_AT_RATE + 2 * update.memory
    subject = replace(subject, update=update)
    with subject.replace_state(found.start):
        outcome = attempt(subject, "other update", num_more=num_more, draw=draw)
        if outcome.error and not outcome.losses:  # rows that belong together, such as those sorted by length
            outcome = attempt(subject, "other update", num_more=num_more)
    if not outcome.is_good:
        return replace(outcome, error=outcome.error or "not finite")
    return outcome if outcome.change_of_loss < 0 else replace(outcome, error=f"the loss went up to {outcome.loss:.3g}")


def _try_other_update(subject: Subject, found: Diagnosis, rate: float, *, is_run: bool) -> Iterator[Remedy]:
    assert subject.update is not None
    with _fill_state(subject, found.tensors, 0.0):
        if any(eps < 1e-30 for eps in subject.update.list_settings("eps") if isinstance(eps, float | int)):
            update = subject.update.change_setting("eps", lambda eps: max(eps, 1e-8))
            outcome = attempt(replace(subject, update=update), "eps", num_more=NUM_MORE)
            change = f"eps=1e-8 in {subject.update.names}: with 0, a weight without gradient is updated by 0/0"
            yield Remedy(change=change, line="optimizer.eps: 1e-8" if is_run else "eps=1e-8", outcome=outcome)
        yield from _try_slower(subject, found, rate, is_run=is_run)


# --- precision ---


def _try_wider(subject: Subject, found: Diagnosis, *, is_run: bool, without_casts: bool = False) -> Iterator[Remedy]:
    """Try fp32 for the module, then for enclosing ones; an island for a line of the loss; another precision for all."""
    module = found.origin.module if found.origin is not None else ""
    while module and module not in (ROOT, LOSS):
        yield _try_precision(subject, "", {module: "fp32"}, is_run=is_run, without_casts=without_casts)
        module = module.rpartition(".")[0]
    if found.origin is not None and found.origin.line:
        yield _try_island(subject, found.origin.line, torch.float32, without_casts=without_casts)
    for precision in ("bf16", "fp32"):
        if precision != subject.plan.granted:
            yield _try_precision(subject, precision, {}, is_run=is_run, without_casts=without_casts)


def _try_island(subject: Subject, line: str, dtype: torch.dtype, *, without_casts: bool = False) -> Remedy:
    at = IslandAt(line, dtype)
    with at, WithoutCasts(HALF) if without_casts else contextlib.nullcontext():
        outcome = attempt(subject, "island", num_more=NUM_MORE)
    if dtype != torch.float32:
        return Remedy(change=f"fp64 (.double()) at {line}", outcome=outcome)
    taken = ", with .float() on its inputs" if at.has_widened else ""
    return Remedy(change=f"an fp32 island (hs.fp32_island()) around {line}{taken}", outcome=outcome)


def _try_precision(
    subject: Subject, precision: str, modules: dict[str, str], *, is_run: bool, without_casts: bool
) -> Remedy:
    name = next(iter(modules), "")
    change = f"{name} in fp32" if name else f"everything in {precision}"
    in_config = f'precision.modules: {{"{name}": fp32}}' if name else f"precision.default: {precision}"
    in_code = f'hs.Step(..., "{precision}")'
    if name:
        in_code = f'hs.Step(..., hs.Precision("{subject.plan.granted}", modules={{"{name}": "fp32"}}))'
    try:
        around = WithoutCasts(HALF) if without_casts else None
        outcome = attempt(subject, change, subject.plan_for(precision, modules), around=around, num_more=NUM_MORE)
    except HalfstepError as error:  # such as a module under tf32, which cannot have another precision
        outcome = Attempt(name=change, error=error.what)
    return Remedy(change=change, line=in_config if is_run else in_code, outcome=outcome)


# --- code, at the lines in question ---


def _try_code_changes(subject: Subject, found: Diagnosis, rate: float, *, is_run: bool) -> Iterator[Remedy]:
    yield from _try_without_casts(subject, found, is_run=is_run)
    if found.origin is not None and found.origin.line:
        yield from _try_equivalent(subject, found)
        yield from _try_patches(subject, found.origin)
    if found.cause == causes.OVERFLOW:
        if found.start and subject.update is not None:
            yield from _try_slower(subject, found, rate, is_run=is_run)
        yield from _try_smaller_start(subject, found.origin.module if found.origin is not None else "")
    if found.origin is not None and found.origin.line:
        if found.cause == causes.OVERFLOW and found.origin.output.dtype == "float32":
            yield _try_island(subject, found.origin.line, torch.float64)
        yield from _try_other_start(subject, found.origin.module)
    if found.rows:
        yield _try_without_samples(subject, found)
    yield from _try_two_of_each(subject)


def _try_patches(subject: Subject, origin: Operation) -> Iterator[Remedy]:
    """Try each patch alone; if none is enough, all that change something there; for a custom backward, autograd's
    derivative."""
    changing, is_enough = [], False
    for words, patch in PATCHES:
        for remedy in _try_patch(subject, origin, words, patch):
            changing.append((words, patch))
            is_enough |= remedy.works
            yield remedy
    if len(changing) > 1 and not is_enough:
        words = ", and ".join(words for words, _ in changing)
        yield from _try_patch(subject, origin, words, combine_patches([patch for _, patch in changing]))
    if origin.function is not None:
        name = origin.function.__name__
        outcome = attempt(subject, "derived", around=use_autograd_derivative(origin.function), num_more=NUM_MORE)
        if outcome.grad_norm > 0:  # else forward is not made of what autograd can derive
            change = f"autograd's derivative of {name}.forward in place of {name}.backward (fix or remove backward)"
            yield Remedy(change=change, outcome=outcome)


def _try_without_casts(subject: Subject, found: Diagnosis, *, is_run: bool) -> Iterator[Remedy]:
    """Try the step without the code's own casts to half, which remain in an fp32 step."""
    in_fp32, every = subject.plan_for("fp32", {}), WithoutCasts(HALF)
    if not attempt(subject, "fp32", in_fp32, around=every).is_good or not every.lines:
        return
    alone = (line for line in every.lines if attempt(subject, "", in_fp32, around=WithoutCasts(HALF, line)).is_good)
    lines = next(([line] for line in alone), list(every.lines))
    change = f"no cast to half at {' and '.join(lines)}"
    yield Remedy(change=change, outcome=attempt(subject, change, around=WithoutCasts(HALF)))
    for wider in _try_wider(subject, found, is_run=is_run, without_casts=True):
        yield replace(wider, change=f"{change}, and {wider.change}")


def _try_equivalent(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    """Try logarithms in a better form. It is equivalent if its loss is that of fp64, where that is finite."""
    exact, in_logs = next(run.loss for run in found.attempts if run.name == "fp64"), InLogs()
    outcome = attempt(subject, "in logarithms", around=in_logs, num_more=NUM_MORE)
    first = (*outcome.losses, outcome.loss)[0]
    is_exact = not math.isfinite(exact) or math.isclose(first, exact, rel_tol=1e-3)
    if in_logs.changed and outcome.first_is_good and is_exact:
        yield Remedy(change=in_logs.describe(), outcome=outcome)


def _try_patch(subject: Subject, origin: Operation, words: str, patch: Patch) -> Iterator[Remedy]:
    """Try a patch at this line, and at the next one that then fails: a bad number is often used twice."""
    lines = [origin.line]
    while True:
        there = AtLines(lines, patch)
        outcome = attempt(subject, words, around=enter_in_backward(origin.function, there), num_more=NUM_MORE)
        # The patch affects no call at these lines: nothing was tried.
        if not there.num_changed:
            return
        # The step itself decides here; whether later steps last is judged by the caller.
        if outcome.first_is_good or len(lines) == MOST_LINES:
            break
        next_ = attempt(
            subject, words, around=enter_in_backward(origin.function, AtLines(lines, patch)), traced=True
        ).origin
        if next_ is None or next_.line in (*lines, ""):
            break
        lines.append(next_.line)
    change = f"{words} at {' and '.join(lines)}"
    if outcome.first_is_good:
        # A clamp has no gradient beyond its limits. A parameter that has one with the change as the identity in
        # backward, and none otherwise, would never be trained.
        through = enter_in_backward(origin.function, AtLines(lines, patch, passes_gradient=True))
        gradients = attempt(subject, words, around=through).gradients
        if blocked := [name for name, norm in gradients.items() if norm and not outcome.gradients[name]]:
            why = f"no gradient reaches {', '.join(blocked[:2])}"
            change, outcome = f"{change} ({why})", replace(outcome, error=why)
    yield Remedy(change=change, outcome=outcome)


# --- data, state, code path ---


def _try_without_samples(subject: Subject, found: Diagnosis) -> Remedy:
    left = drop_samples(subject.window, found.rows)
    outcome = attempt(subject, "without those samples", window=left, num_more=NUM_MORE) if left else None
    return Remedy(change=f"drop or fix: sample {', '.join(found.rows.values())}", outcome=outcome)


def _try_two_of_each(subject: Subject) -> Iterator[Remedy]:
    """Try each sample twice: statistics over a batch of one sample are undefined."""
    sizes = [count_samples(batch) for batch in subject.window]
    if 1 not in sizes:
        return
    twice = [take_rows(b, [0, 0]) if size == 1 else b for b, size in zip(subject.window, sizes, strict=True)]
    outcome = attempt(subject, "two of each", window=twice, num_more=NUM_MORE)
    change = "batches of at least 2 samples (drop_last=True in the loader), tried with the one sample twice"
    yield Remedy(change=change, outcome=outcome)


@contextlib.contextmanager
def repair_temporarily(subject: Subject, found: Diagnosis) -> Iterator[None]:
    """Repair this fault inside, by dropping samples and changing state, to look for another fault behind it."""
    window = subject.window
    subject.window = drop_samples(window, found.rows)
    try:
        with _fill_state(subject, found.tensors, 0.0 if found.origin is None else 1.0):
            yield
    finally:
        subject.window = window


def _fill_state(subject: Subject, tensors: Mapping[str, Tensor], filling: float) -> AbstractContextManager[None]:
    """Replace the numbers that these masks mark, inside."""
    whole = subject.collect_whole_state()
    return subject.replace_state({name: whole[name].masked_fill(bad, filling) for name, bad in tensors.items()})


def _try_state(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    if found.tensors:
        # 0, then 1, as variances and scales begin; only 1 if existing numbers are undefined for an operation.
        fillings = (0.0, 1.0) if found.origin is None else (1.0,)
        yield from (_try_filling(subject, found.tensors, filling) for filling in fillings)
    elif found.averages:
        yield Remedy(change=f"start the average again: {', '.join(found.averages)}", line="ema.enabled: false")
    if found.origin is not None and found.origin.outside is not None:
        words = f"finite numbers in the tensor of shape {found.origin.outside} that is used"
        tried = list(_try_patch(subject, found.origin, words, make_arguments_finite))
        yield from tried or [Remedy(change=f"{words} at {found.origin.line}")]


def _try_filling(subject: Subject, tensors: Mapping[str, Tensor], filling: float) -> Remedy:
    with _fill_state(subject, tensors, filling):
        outcome = attempt(subject, f"filled with {filling:g}", num_more=NUM_MORE)
    return Remedy(change=f"initialise {', '.join(tensors)}, here with {filling:g}", outcome=outcome)


def _try_other_start(subject: Subject, module: str) -> Iterator[Remedy]:
    """Try 1 in place of zeros near the operation, such as those of a layer that starts at zero under weight
    normalisation."""
    tried = (_try_filling(subject, {name: value == 0}, 1.0) for name, value in subject.find_state_near(module).items()
             if not value.all())  # fmt: skip
    yield from itertools.islice((remedy for remedy in tried if remedy.works), 1)


def _try_smaller_start(subject: Subject, module: str) -> Iterator[Remedy]:
    """Try smaller matrices where repeated application amplifies (a recurrent or deep network): those near the
    operation, then the largest, then all."""
    trained = set(map(id, subject.trained or subject.model.parameters()))
    names = [name for name, p in subject.model.named_parameters() if p.requires_grad and id(p) in trained]
    matrices = {name: v for name, v in subject.state.items() if name in names and v.ndim > 1 and v.is_floating_point()}
    norms = {name: _estimate_spectral_norm(v.float().flatten(1)) for name, v in matrices.items()}
    large = {name: norm for name, norm in norms.items() if 1 < norm < math.inf}
    near = {name: norm for name, norm in large.items() if name in subject.find_state_near(module)}
    largest = max(large, key=large.__getitem__, default="")
    scopes = [near, {largest: large[largest]} if large else {}, large]
    for scope in (scope for number, scope in enumerate(scopes) if scope and scope not in scopes[:number]):
        with subject.replace_state({name: matrices[name] / norm for name, norm in scope.items()}):
            outcome = attempt(subject, "smaller start", num_more=NUM_MORE)
        shown = ", ".join(list(scope)[:3]) + (f" and {len(scope) - 3} more" if len(scope) > 3 else "")
        change = f"initialise {shown} with a spectral norm of 1 (nn.init.orthogonal_), not {max(scope.values()):.3g}"
        yield Remedy(change=change, outcome=outcome)


def _estimate_spectral_norm(matrix: Tensor, num_steps: int = 20) -> float:
    """Estimate the spectral norm by power iteration: decomposing every matrix of a large model would take minutes."""
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(num_steps):
        vector = torch.nn.functional.normalize(matrix.T @ (matrix @ vector), dim=0)
    return float((matrix @ vector).norm())


def _try_other_code(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    """Try eager code: halfstep's compilation can be switched off, and torch can disable the user's."""
    ours = {"kernels off": "train.fast: compile", "eager": "train.fast: off"}
    is_ours = "kernels off" in subject.variants
    for name, line in (ours if is_ours else {"eager": 'torch.compiler.set_stance("force_eager")'}).items():
        outcome = next((run for run in found.attempts if run.name == name), None)
        if outcome is not None:
            yield Remedy(change=f"steps run {name}", line=line, outcome=outcome)
    if found.origin is not None and not found.origin.is_torch:
        shape = f"{found.origin.name} ({found.origin.line})"
        yield Remedy(change=f"fix {shape}: compare it with torch's operations at the shapes of this step")
