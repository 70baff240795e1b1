"""The smallest change that helps: each is proposed for a cause, tried on the very step, and named with its line.

Changes of code (an eps, a clamp, an island) are tried by a function mode that acts at the one line in question, above
autograd, so that backward is the changed code's too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep.errors import HalfstepError
from halfstep.evidence import causes
from halfstep.evidence.attempts import Attempt, Subject, attempt
from halfstep.evidence.causes import Diagnosis
from halfstep.evidence.ranges import FOREIGN, LOSS, ROOT
from halfstep.evidence.samples import without
from halfstep.islands import fp32_island, to_fp32

Patch = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


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
    for remedy in _proposed(subject, found, rate, is_run=is_run):
        tried.append(remedy)
        if remedy.works:
            break
    return tried


def _proposed(subject: Subject, found: Diagnosis, rate: float, *, is_run: bool) -> Iterator[Remedy]:
    if found.cause == causes.BAD_INPUT or found.cause == causes.SPIKE and found.rows:
        yield _without_samples(subject, found)
    elif found.cause == causes.BAD_STATE:
        yield from _with_state(subject, found)
    elif found.cause == causes.DIVERGED or found.cause == causes.SPIKE:
        yield Remedy(change=f"a tenth of the learning rate, from before the weights grew: {rate / 10:.3g}",
                     line=f"optimizer.lr: {rate / 10:.3g}")  # fmt: skip
    elif found.cause == causes.KERNEL:
        yield from _other_code(subject, found)
    elif found.cause in (causes.OVERFLOW, causes.UNDERFLOW, causes.REFUSED):
        yield from _wider(subject, found, is_run=is_run) if found.fp32_is_good else _patched(subject, found)


# --- precision ---


def _wider(subject: Subject, found: Diagnosis, *, is_run: bool) -> Iterator[Remedy]:
    """fp32 for the module, for those around it; an island for a line of the loss; another precision for all."""
    module = found.origin.module if found.origin is not None else ""
    for name in _and_around(module):
        yield _precision(subject, "", {name: "fp32"}, is_run=is_run)
    if found.origin is not None and found.origin.line:
        island = attempt(subject, "island", around=AtLine(found.origin.line, island=True))
        yield Remedy(change=f"an fp32 island (hs.fp32_island()) around {found.origin.line}", outcome=island)
    for precision in ("bf16", "fp32"):
        if precision != subject.plan.granted:
            yield _precision(subject, precision, {}, is_run=is_run)


def _and_around(module: str) -> Iterator[str]:
    while module and module not in (ROOT, LOSS):
        yield module
        module = module.rpartition(".")[0]


def _precision(subject: Subject, precision: str, modules: dict[str, str], *, is_run: bool) -> Remedy:
    name = next(iter(modules), "")
    change = f"{name} in fp32" if name else f"everything in {precision}"
    in_config = f'precision.modules: {{"{name}": fp32}}' if name else f"precision.default: {precision}"
    in_code = f'hs.Step(..., modules={{"{name}": "fp32"}})' if name else f'hs.Step(..., "{precision}")'
    try:
        outcome = attempt(subject, change, subject.plan_for(precision, modules))
    except HalfstepError as error:  # such as a part under tf32, which cannot have a precision of its own
        outcome = Attempt(name=change, error=error.what)
    return Remedy(change=change, line=in_config if is_run else in_code, outcome=outcome)


# --- code, at one line ---


def _patched(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    origin = found.origin
    if origin is None or not origin.line:
        return
    for words, patch in PATCHES:
        outcome = attempt(subject, words, around=AtLine(origin.line, patch))
        yield Remedy(change=f"{words} at {origin.line}", outcome=outcome)


class AtLine(TorchFunctionMode):
    """Changes the arguments of torch's functions that are called from one line."""

    def __init__(self, line: str, patch: Patch | None = None, *, island: bool = False) -> None:
        super().__init__()
        self.line, self.patch, self.island = line, patch, island

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._caller() != self.line:
            return func(*args, **kwargs)
        if self.island:
            with fp32_island():
                return func(*to_fp32(args), **to_fp32(kwargs))
        assert self.patch is not None
        return func(*(changed := self.patch(func, args, kwargs))[0], **changed[1])

    def _caller(self) -> str:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(FOREIGN):
            frame = frame.f_back  # type: ignore[assignment]
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", "")).strip("_")


def _on_first(names: tuple[str, ...], change: Callable[[Tensor], Tensor], position: int = 0) -> Patch:
    def patch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        fits = _name(func) in names and len(args) > position and isinstance(args[position], Tensor)
        if not fits or not args[position].is_floating_point():
            return args, kwargs
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs

    return patch


def _away_from_zero(x: Tensor, eps: float = 1e-4) -> Tensor:
    return torch.where(x >= 0, x.clamp(min=eps), x.clamp(max=-eps))


def _no_infinity(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).min / 2)


PATCHES: tuple[tuple[str, Patch], ...] = (
    ("an eps of 1e-4 in the denominator", _on_first(("truediv", "div", "divide", "true_divide"), _away_from_zero, 1)),
    ("an eps of 1e-4 in the denominator", _on_first(("rtruediv", "reciprocal"), _away_from_zero)),
    ("an eps of 1e-4 under the root or logarithm",
     _on_first(("log", "log2", "log10", "sqrt", "rsqrt", "pow", "rpow"), lambda x: x.clamp(min=1e-4))),
    ("an eps of 1e-4 before the norm", _on_first(("norm", "vector_norm"), lambda x: x + 1e-4)),
    ("a clamp of the argument of exp to at most 10", _on_first(("exp", "expm1", "exp2"), lambda x: x.clamp(max=10.0))),
    ("a large finite number in place of -inf", _on_first(("softmax", "log_softmax"), _no_infinity)),
)  # fmt: skip
"""In order of size; each acts on its own functions alone."""


# --- data, state, code path ---


def _without_samples(subject: Subject, found: Diagnosis) -> Remedy:
    names = [place.name or f"row {place.row} of batch {place.batch}" for place in found.places]
    names = names or [line for line in found.shown if line.startswith("sample ")]
    left = without(subject.window, found.rows)
    outcome = attempt(subject, "without those samples", window=left) if left else None
    return Remedy(change=f"drop or mend: {', '.join(names)}", outcome=outcome)


def _with_state(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    """Numbers that are not finite replaced by 0, then by 1, which variances and scales begin with."""
    before = dict(subject.state)
    own = [name for name in found.tensors if name in before]
    for filling in (0.0, 1.0) if own else ():
        subject.state = before | {name: _filled(before[name], filling) for name in own}
        try:
            outcome = attempt(subject, f"filled with {filling:g}")
        finally:
            subject.state = before
        yield Remedy(change=f"initialise {', '.join(own)}: with {filling:g} the step", outcome=outcome)
    if not own:
        yield Remedy(change=f"start the average anew: {', '.join(found.tensors)}", line="ema.enabled: false")


def _filled(value: Tensor, filling: float) -> Tensor:
    is_good = value.isfinite() & (value.abs() < causes.GARBAGE)
    return torch.where(is_good, value, torch.full_like(value, filling))


def _other_code(subject: Subject, found: Diagnosis) -> Iterator[Remedy]:
    for name, line in (("kernels off", "train.fast: compile"), ("eager", "train.fast: off")):
        outcome = next((run for run in found.attempts if run.name == name), None)
        if outcome is not None:
            yield Remedy(change=f"steps run {name}", line=line, outcome=outcome)
    if found.origin is not None and not found.origin.is_torch:
        shape = f"{found.origin.name} ({found.origin.line})"
        yield Remedy(change=f"mend {shape}: hold it against torch's own operations at the shapes of this step")
