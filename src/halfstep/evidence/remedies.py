"""The smallest change that helps: each is proposed for a cause, tried on the very step, and named with its line.

Changes of code (an eps, a clamp, an island, a cast left out) are tried by the modes of patches.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep.errors import HalfstepError
from halfstep.evidence import causes
from halfstep.evidence.attempts import Attempt, Subject, attempt
from halfstep.evidence.causes import Diagnosis
from halfstep.evidence.patches import (
    EQUIVALENT,
    HALF,
    PATCHES,
    AtLines,
    IslandAt,
    Patch,
    WithoutCasts,
    finite_arguments,
)
from halfstep.evidence.ranges import LOSS, ROOT
from halfstep.evidence.samples import without

MOST_LINES = 3
"""Of one change; what needs more is not a small one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change, and what became of the step with it."""

    change: str
    """In words."""
    line: str = ""
    """For the config file; empty where code or data has to change."""
    outcome: Attempt | None = None
    """None where it could not be tried on one step."""

    @property
    def works(self) -> bool:
        return self.outcome is not None and self.outcome.is_good


def remedies(subject: Subject, found: Diagnosis, *, rate: float, is_run: bool) -> list[Remedy]:
    """What was tried, in order of size, up to the first that works."""
    tried: list[Remedy] = []
    if found.cause == causes.REFUSED:
        # It raised before any gradient: one that overflows at the loss scale of that moment is routine.
        subject = replace(subject, scale=1.0)
    for remedy in _proposed(subject, found, rate, is_run=is_run):
        tried.append(remedy)
        if remedy.works:
            break
    return tried


def _proposed(subject: Subject, found: Diagnosis, rate: float, *, is_run: bool) -> Iterator[Remedy]:
    if found.rows and found.cause in (causes.BAD_INPUT, causes.SPIKE, causes.CODE):
        yield _without_samples(subject, found)
    elif found.cause == causes.BAD_STATE:
        yield from _with_state(subject, found)
    elif found.loss_is_unbounded:
        yield Remedy(change="a loss that has a lower bound: this one falls as the weights grow; its sign may be wrong")
    elif found.cause == causes.DIVERGED or found.cause == causes.SPIKE:
        yield Remedy(change=f"a tenth of the learning rate, from before the weights grew: {rate / 10:.3g}",
                     line=f"optimizer.lr: {rate / 10:.3g}" if is_run else "")  # fmt: skip
    elif found.cause == causes.KERNEL:
        yield from _other_code(subject, found)
        if found.fp32_is_good:
            yield from _wider(subject, found, is_run=is_run)
    elif found.cause in (causes.OVERFLOW, causes.UNDERFLOW, causes.REFUSED):
        yield from (
            _wider(subject, found, is_run=is_run) if found.fp32_is_good else _recoded(subject, found, is_run=is_run)
        )


# --- precision ---


def _wider(subject: Subject, found: Diagnosis, *, is_run: bool, without_casts: bool = False) -> Iterator[Remedy]:
    """fp32 for the module, for those around it; an island for a line of the loss; another precision for all."""
    module = found.origin.module if found.origin is not None else ""
    for name in _and_around(module):
        yield _precision(subject, "", {name: "fp32"}, is_run=is_run, without_casts=without_casts)
    if found.origin is not None and found.origin.line:
        yield _island(subject, found.origin.line, torch.float32, without_casts=without_casts)
    for precision in ("bf16", "fp32"):
        if precision != subject.plan.granted:
            yield _precision(subject, precision, {}, is_run=is_run, without_casts=without_casts)


def _island(subject: Subject, line: str, dtype: torch.dtype, *, without_casts: bool = False) -> Remedy:
    at = IslandAt(line, dtype)

    @contextlib.contextmanager
    def island() -> Iterator[None]:
        with at, WithoutCasts(HALF) if without_casts else contextlib.nullcontext():
            yield

    outcome = attempt(subject, "island", around=island())
    if dtype != torch.float32:
        return Remedy(change=f"fp64 (.double()) at {line}", outcome=outcome)
    taken = ", .float() on what it takes" if at.has_widened else ""
    return Remedy(change=f"an fp32 island (hs.fp32_island()) around {line}{taken}", outcome=outcome)


def _and_around(module: str) -> Iterator[str]:
    while module and module not in (ROOT, LOSS):
        yield module
        module = module.rpartition(".")[0]


def _precision(
    subject: Subject, precision: str, modules: dict[str, str], *, is_run: bool, without_casts: bool
) -> Remedy:
    name = next(iter(modules), "")
    change = f"{name} in fp32" if name else f"everything in {precision}"
    in_config = f'precision.modules: {{"{name}": fp32}}' if name else f"precision.default: {precision}"
    in_code = f'hs.Step(..., modules={{"{name}": "fp32"}})' if name else f'hs.Step(..., "{precision}")'
    try:
        around = WithoutCasts(HALF) if without_casts else None
        outcome = attempt(subject, change, subject.plan_for(precision, modules), around=around)
    except HalfstepError as error:  # such as a part under tf32, which cannot have a precision of its own
        outcome = Attempt(name=change, error=error.what)
    return Remedy(change=change, line=in_config if is_run else in_code, outcome=outcome)


# --- code, at the lines in question ---


def _recoded(subject: Subject, found: Diagnosis, *, is_run: bool) -> Iterator[Remedy]:
    yield from _without_casts(subject, found, is_run=is_run)
    if found.origin is not None and found.origin.line:
        yield from _same_numbers(subject, found)
        for words, patch in PATCHES:
            yield from _patched(subject, found.origin.line, words, patch)
        if found.cause == causes.OVERFLOW and found.origin.output.dtype == "float32":
            yield _island(subject, found.origin.line, torch.float64)
        yield from _other_start(subject, found.origin.module)
    if found.rows:
        yield _without_samples(subject, found)


def _without_casts(subject: Subject, found: Diagnosis, *, is_run: bool) -> Iterator[Remedy]:
    """Casts to half that the code has itself stay in an fp32 step, too."""
    in_fp32, every = subject.plan_for("fp32", {}), WithoutCasts(HALF)
    if not attempt(subject, "fp32", in_fp32, around=every).is_good or not every.lines:
        return
    alone = (line for line in every.lines if attempt(subject, "", in_fp32, around=WithoutCasts(HALF, line)).is_good)
    lines = next(([line] for line in alone), list(every.lines))
    change = f"no cast to half at {' and '.join(lines)}"
    yield Remedy(change=change, outcome=attempt(subject, change, around=WithoutCasts(HALF)))
    for wider in _wider(subject, found, is_run=is_run, without_casts=True):
        yield replace(wider, change=f"{change}, and {wider.change}")


def _same_numbers(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    """Other code for the same result: fp64's is the witness."""
    exact = next(run.loss for run in found.attempts if run.name == "fp64")
    for words, patch in EQUIVALENT:
        tried = _patched(subject, found.origin.line if found.origin else "", words, patch)
        yield from (r for r in tried if r.outcome is not None and math.isclose(r.outcome.loss, exact, rel_tol=1e-3))


def _patched(subject: Subject, line: str, words: str, patch: Patch) -> Iterator[Remedy]:
    """At this line, and at the next one that fails with it: a bad number is often used twice."""
    lines = [line]
    while True:
        there = AtLines(lines, patch)
        outcome = attempt(subject, words, around=there, traced=True)
        if not there.num_changed:
            return
        following = outcome.origin.line if outcome.origin is not None else ""
        if outcome.is_good or following in (*lines, "") or len(lines) == MOST_LINES:
            break
        lines.append(following)
    yield Remedy(change=f"{words} at {' and '.join(lines)}", outcome=outcome)


# --- data, state, code path ---


def _without_samples(subject: Subject, found: Diagnosis) -> Remedy:
    left = without(subject.window, found.rows)
    outcome = attempt(subject, "without those samples", window=left) if left else None
    return Remedy(change=f"drop or mend: sample {', '.join(found.samples)}", outcome=outcome)


@contextlib.contextmanager
def mended(subject: Subject, found: Diagnosis) -> Iterator[None]:
    """The step without the samples and with the state of this fault: what another one behind it is looked for in."""
    window, whole, filling = subject.window, subject.whole_state(), _fillings(found)[0]
    subject.window = without(window, found.rows)
    try:
        with subject.with_state({name: whole[name].masked_fill(bad, filling) for name, bad in found.tensors.items()}):
            yield
    finally:
        subject.window = window


def _fillings(found: Diagnosis) -> tuple[float, ...]:
    """0, then 1, which variances and scales begin with; where an operation is not defined with what is there, 1."""
    return (1.0,) if found.origin is not None else (0.0, 1.0)


def _with_state(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    if found.tensors:
        yield from (_initialised(subject, found.tensors, filling) for filling in _fillings(found))
    elif found.averages:
        yield Remedy(change=f"start the average again: {', '.join(found.averages)}", line="ema.enabled: false")
    if found.origin is not None and found.origin.outside is not None:
        words = f"finite numbers in the tensor of shape {found.origin.outside} that is used"
        tried = list(_patched(subject, found.origin.line, words, finite_arguments))
        yield from tried or [Remedy(change=f"{words} at {found.origin.line}")]


def _initialised(subject: Subject, tensors: Mapping[str, Tensor], filling: float) -> Remedy:
    whole = subject.whole_state()
    with subject.with_state({name: whole[name].masked_fill(is_bad, filling) for name, is_bad in tensors.items()}):
        outcome = attempt(subject, f"filled with {filling:g}")
    return Remedy(change=f"initialise {', '.join(tensors)}, here with {filling:g}", outcome=outcome)


def _other_start(subject: Subject, module: str) -> Iterator[Remedy]:
    """Zeros beside the operation, such as a layer that starts at zero under a norm of its weights."""
    tried = (_initialised(subject, {name: value == 0}, 1.0) for name, value in subject.near(module).items()
             if not value.all())  # fmt: skip
    yield from itertools.islice((remedy for remedy in tried if remedy.works), 1)


def _other_code(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    """What halfstep compiled it can leave eager; what the user's code compiles, torch can."""
    ours = {"kernels off": "train.fast: compile", "eager": "train.fast: off"}
    is_ours = "kernels off" in subject.variants
    for name, line in (ours if is_ours else {"eager": 'torch.compiler.set_stance("force_eager")'}).items():
        outcome = next((run for run in found.attempts if run.name == name), None)
        if outcome is not None:
            yield Remedy(change=f"steps run {name}", line=line, outcome=outcome)
    if found.origin is not None and not found.origin.is_torch:
        shape = f"{found.origin.name} ({found.origin.line})"
        yield Remedy(change=f"mend {shape}: hold it against torch's own operations at the shapes of this step")
