"""Run one step again in another precision, with other batches or other code. Nothing is committed.

Each attempt starts from the recorded weights, buffers and generators, and restores them afterwards, so that attempts do
not influence each other. It costs a forward and a backward pass; with a trace, every operation waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.errors import CheckpointError, HalfstepError, suggest_nearest, summarise_error
from halfstep.evidence.capsule import Capsule, collect_state
from halfstep.evidence.ranges import Operation, RangeTrace, has_fractions
from halfstep.evidence.recorder import find_non_finite
from halfstep.evidence.updates import Update
from halfstep.precision.apply import apply, apply_frozen_
from halfstep.precision.plan import Plan
from halfstep.step.batches import count_samples
from halfstep.step.facts import read_rng_state, restore_rng
from halfstep.step.phases import freeze_others

LossFn = Callable[[Any], Any]
"""Returns the loss of a batch, or (loss, weight, ...)."""
ROUNDING = 1e-6
"""The relative change of a loss that may be rounding."""
PlanFor = Callable[[str, Mapping[str, str]], Plan]
"""Returns the plan of a precision ("": that of the step), with the given precisions for some modules."""


@dataclass(kw_only=True, slots=True)
class Subject:
    """A step that can be run again."""

    model: nn.Module
    loss: LossFn
    """Forward and loss, eager."""
    window: Sequence[Any]
    """Ready for the model, on its device."""
    state: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]
    plan: Plan
    plan_for: PlanFor
    scale: float = 1.0
    update: Update | None = None
    """How the training updated its weights; None if that cannot be repeated."""
    variants: Mapping[str, LossFn] = field(default_factory=dict)
    """Other ways to run forward and loss, by name, such as "as it was" and "kernels off"."""
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)
    trained: Sequence[Tensor] = ()
    """Parameters that the step trains; empty means all that require gradients."""
    held: Mapping[str, nn.Module] = field(default_factory=dict)
    """Other modules that the loss uses, such as a teacher in a user's loop; no plan casts them."""
    other_state: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Weights and buffers of frozen and held parts, before any plan cast them."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def restore_state(self) -> None:
        """Restore weights, buffers and generators as the step began."""
        own = collect_state(self.model)
        with torch.no_grad():
            for name, value in self.state.items():
                # Keep the current strides: the memory layout is part of how a step ran.
                own[name].data = torch.empty_like(own[name], dtype=value.dtype).copy_(value)
                own[name].grad = None
        if self.rng:
            restore_rng(dict(self.rng), self.device)

    def apply_plan(self, plan: Plan) -> None:
        """Apply a plan to the model, and to the frozen modules from their recorded state."""
        apply(plan, self.model)
        for name, part in self.list_other_modules().items():
            own = collect_state(part)
            for key, value in self.other_state[name].items():
                own[key].data = value.to(own[key].device, copy=True)
        apply_frozen_(plan, self.frozen)

    def list_other_modules(self) -> dict[str, nn.Module]:
        """Return the modules that the step uses in addition to the model."""
        return {**self.frozen, **self.held}

    def collect_whole_state(self) -> dict[str, Tensor]:
        """Return the state of the model and of the other modules, by name."""
        others = {f"{part}.{name}": value for part, state in self.other_state.items() for name, value in state.items()}
        return {**self.state, **others}

    def find_state_near(self, module: str) -> dict[str, Tensor]:
        """Return the floating-point state of a module, or of the nearest enclosing one that has any."""
        floating = {name: value for name, value in self.collect_whole_state().items() if value.is_floating_point()}
        while module:
            inside = {name: value for name, value in floating.items() if name.startswith(f"{module}.")}
            if inside:
                return inside
            module = module.rpartition(".")[0]
        return {name: value for name, value in floating.items() if "." not in name}

    def list_buffer_names(self) -> set[str]:
        """Return the names of all buffers, those of other modules with their prefix."""
        return {
            f"{part}.{name}".lstrip(".")
            for part, module in {"": self.model, **self.list_other_modules()}.items()
            for name, _ in module.named_buffers()
        }

    @contextlib.contextmanager
    def replace_state(self, changed: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace some of the state inside."""
        before = self.state, self.other_state
        self.state = {name: changed.get(name, value) for name, value in self.state.items()}
        self.other_state = {
            part: {name: changed.get(f"{part}.{name}", value) for name, value in state.items()}
            for part, state in self.other_state.items()
        }
        try:
            yield
        finally:
            self.state, self.other_state = before


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The outcome of running the step; if more steps followed, of the last one."""

    name: str
    loss: float = math.nan
    grad_norm: float = math.nan
    not_finite: tuple[str, ...] = ()
    """Buffers or weights that were finite before the step, and are not after forward or the update."""
    losses: tuple[float, ...] = ()
    """Losses of the good steps that updated the weights, if more steps followed; the step itself comes first."""
    gradients: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The norm of the gradient of each trained parameter in the step itself."""
    error: str = ""
    trace: RangeTrace | None = None
    origin: Operation | None = None

    @property
    def is_good(self) -> bool:
        return not self.error and not self.not_finite and math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def first_is_good(self) -> bool:
        """True if the step itself is good, even if one that followed is not."""
        return self.is_good or bool(self.losses) and not self.error

    @property
    def change_of_loss(self) -> float:
        """Return by how much the loss changed in the steps that followed; 0 if that is rounding."""
        if not self.losses:
            return 0.0
        losses = (*self.losses, self.loss)[-5:]  # their mean, since losses of noisy models go up and down
        change = sum(losses) / len(losses) - self.losses[0]
        return change if abs(change) > ROUNDING * abs(self.losses[0]) else 0.0

    def is_like(self, other: Attempt) -> bool:
        """True if both outcomes read the same: the error, or loss and gradient norm to six digits."""
        # As text, since NaN is not equal to NaN.
        return str(replace(self, name="")) == str(replace(other, name=""))

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        shown, more = self.not_finite[:2], len(self.not_finite) - 2
        bad = f", not finite: {', '.join(shown)}" + (f" and {more} more" if more > 0 else "") if shown else ""
        return f"{self.name}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}{bad}"


def attempt(
    subject: Subject,
    name: str,
    plan: Plan | None = None,
    *,
    loss: LossFn | None = None,
    window: Sequence[Any] | None = None,
    dtype: torch.dtype | None = None,
    traced: bool | type[RangeTrace] = False,
    around: AbstractContextManager[Any] | None = None,
    num_more: int = 0,
    draw: Callable[[Sequence[Any]], Sequence[Any]] = lambda window: window,
) -> Attempt:
    """Run the step and return its outcome, which may be an error that the model's code raised.

    With `num_more`, the weights are updated as in the training, and as many steps follow on the same window, or on
    what `draw` makes of it; the outcome is that of the last step, or of the first that is not good.
    """
    plan, window = plan or subject.plan, subject.window if window is None else window
    # The attempt sets generators to those of the step: the caller's are restored at the end.
    generators = read_rng_state(subject.device)
    trace = (RangeTrace if traced is True else traced)(subject.model, subject.list_other_modules()) if traced else None
    try:
        subject.restore_state()
        subject.apply_plan(plan)
        with _cast_temporarily(subject, dtype):
            batches = [_cast_batch(batch, dtype) for batch in window]
            with around or nullcontext():
                return _run_steps(subject, name, plan, loss or subject.loss, lambda: draw(batches), trace, num_more)
    except HalfstepError:
        raise
    except Exception as error:  # from the model or torch: an operation that rejects a format raises here
        origin = trace.find_raising(error) if trace is not None else None
        return Attempt(name=name, error=f"{type(error).__name__}: {summarise_error(error)}", trace=trace, origin=origin)
    finally:
        subject.restore_state()
        subject.apply_plan(subject.plan)
        restore_rng(generators, subject.device)


def _run_steps(
    subject: Subject,
    name: str,
    plan: Plan,
    loss: LossFn,
    draw: Callable[[], Sequence[Any]],
    trace: RangeTrace | None,
    num_more: int,
) -> Attempt:
    losses: tuple[float, ...] = ()
    gradients: Mapping[str, float] = {}
    update = subject.update
    optimizers = update.build(subject.model) if update is not None and num_more else []
    while True:
        subject.model.train()
        with freeze_others(subject.model, subject.trained or subject.model.parameters()):
            value = _run_window(subject, plan, loss, draw(), trace)
        found = _describe_attempt(subject, name, plan, value, trace)
        gradients = gradients if losses else found.gradients
        found = replace(found, losses=losses, gradients=gradients)
        if update is None or not found.is_good or len(losses) == num_more:
            return found
        update.step(optimizers, _get_scale(subject, plan))
        losses = (*losses, found.loss)
        ruined = find_non_finite(dict(subject.model.named_parameters()))
        if ruined := [key for key in ruined if key not in find_non_finite(subject.state)]:
            return replace(found, not_finite=tuple(ruined), losses=losses)
        nn.Module.zero_grad(subject.model)
        # An overflow at the loss scale of the recorded step would be routine in a later one.
        subject = replace(subject, scale=1.0)


def _run_window(subject: Subject, plan: Plan, loss: LossFn, window: Sequence[Any], trace: RangeTrace | None) -> Tensor:
    """Run forward and backward over the window, weighting its batches as the step does."""
    total = torch.zeros((), device=subject.device)
    weights, unit = 0.0, None
    for batch in window:
        with plan.forward(), trace or nullcontext():
            found = loss(batch)
            value, weight = (found[0], found[1]) if isinstance(found, tuple) else (found, count_samples(batch))
            weight = float(weight)
            if not weight:
                continue
            # Weights are relative to the first batch: with equal weights the loss is not multiplied at all.
            unit = unit or weight
            value = value.reshape(()) if weight == unit else value.reshape(()) * (weight / unit)
            value = value if value.dtype == torch.float64 else value.float()
        with plan.backend(), trace or nullcontext():
            (value * _get_scale(subject, plan)).backward()
        if trace is not None and not value.isfinite() and trace.find_origin(value) is not None:
            trace.of_loss = trace.of_loss or trace.find_origin(value)
        total, weights = total + value.detach(), weights + weight / unit
    return total / weights if weights else torch.full_like(total, math.nan)


def _describe_attempt(subject: Subject, name: str, plan: Plan, value: Tensor, trace: RangeTrace | None) -> Attempt:
    trained = list(subject.trained) or [p for p in subject.model.parameters() if p.requires_grad]
    gradients = [p.grad.detach() for p in trained if p.grad is not None]
    names = {id(p): name for name, p in subject.model.named_parameters()}
    norms = {names.get(id(p), "a parameter"): float(p.grad.norm()) for p in trained if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    buffers = dict(subject.model.named_buffers())
    ruined = [key for key, b in buffers.items() if has_fractions(b) and not b.isfinite().all()]
    # Only buffers that were finite before the step.
    ruined = [key for key in ruined if key not in subject.state or subject.state[key].isfinite().all()]
    origin = None
    if trace is not None:
        bad = [g for g in [*gradients, *(buffers[key] for key in ruined)] if not g.isfinite().all()]
        found = [trace.of_loss, *map(trace.find_origin, bad)]
        # Of several origins the earliest operation is the cause, the others may follow from it.
        origin = min((op for op in found if op is not None), key=lambda op: op.index, default=None)
    return Attempt(
        name=name,
        loss=float(value),
        grad_norm=float(norm) / _get_scale(subject, plan),
        not_finite=tuple(ruined),
        gradients=norms,
        trace=trace,
        origin=origin,
    )


def _get_scale(subject: Subject, plan: Plan) -> float:
    return subject.scale if plan.needs_loss_scaling else 1.0


@contextlib.contextmanager
def _cast_temporarily(subject: Subject, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the whole model, and the default dtype of new tensors, to `dtype` inside."""
    if dtype is None:
        yield
        return
    before = torch.get_default_dtype()
    for part in (subject.model, *subject.list_other_modules().values()):
        nn.Module._apply(part, lambda tensor: _widen(tensor, dtype))  # a `to` of the model may do more
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    def to(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wide = value if dtype is None else _widen(value, dtype)
        return value.clone() if wide is value else wide

    return tree_map(to, batch)


def _widen(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast real numbers to `dtype`, complex ones to the complex format of its width, and nothing else."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def refuse_another_model(capsule: Capsule, model: nn.Module) -> None:
    """Refuse a model whose parameters differ from the capsule's: it is not the step that failed."""
    then = {name: tuple(shape) for name, shape in capsule.about["layout"].items()}
    now = {name: tuple(value.shape) for name, value in collect_state(model).items()}
    if then == now:
        return
    name = next(name for name in (*then, *now) if then.get(name) != now.get(name))
    was, is_ = (f"{name} of shape {shapes[name]}" if name in shapes else f"no {name}" for shapes in (then, now))
    raise CheckpointError(
        f"the capsule {capsule.path} belongs to another model",
        why=f"it had {was}, but this one has {is_}" + (f"; {suggest_nearest(name, now)}" if name not in now else ""),
        fix="replay it with the code that trained the run",
    )
