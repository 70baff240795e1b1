"""Check a user's `loss_fn`: its result at every call, its autograd graph at the first one.

The first look finds leftovers of a torch AMP loop, such as a scaled loss. It walks autograd's graph once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.errors import ConfigError
from halfstep.precision.contexts import get_autocast_dtype
from halfstep.step.batches import Batch, Weight
from halfstep.step.forward_writes import ForwardWrites
from halfstep.step.loss_result import split_result
from halfstep.step.step import GuardedStep, LossFn
from halfstep.step.user_warnings import warn_user


class LossChecker:
    """Wrap `loss_fn` with checks, and take the gradients that a gradient penalty needs."""

    def __init__(self, step: GuardedStep) -> None:
        self.step = step
        # Loss functions that were checked, by code object: a lambda written in the loop is a new object in every step.
        self.known: set[object] = set()
        self.last: LossFn | None = None
        self.halves: set[torch.dtype] = set()  # half-precision dtypes in the loss that was checked last
        self.weighs = False  # whether a batch of this window has a weight other than 0

    def wrap(self, loss_fn: LossFn, *, is_alone: bool) -> LossFn:
        if not torch.is_grad_enabled():
            raise ConfigError(
                "the step was called inside torch.no_grad() or inference_mode()",
                why="no gradients are computed there",
                fix="call it outside; for evaluation, call the model directly",
            )
        self.last, self.weighs, kind = inspect.unwrap(loss_fn), False, _identify(loss_fn)
        if not self.known and torch.is_autocast_enabled(self.step.device.type):
            warn_user("the step was called inside torch.autocast, which it enters itself: remove your autocast")

        def loss_of(batch: Batch) -> tuple[Tensor, Weight]:
            loss, weight = split_result(loss_fn(batch), batch, is_alone=is_alone)
            self.weighs = self.weighs or isinstance(weight, Tensor) or weight != 0
            if kind not in self.known:
                self._look_closely(loss, weight)
                self.known.add(kind)
            return loss, weight

        return loss_of

    def refuse_unreached(self) -> None:
        """Refuse a loss whose first window gave no trained parameter a gradient: training would have no effect."""
        if self.weighs and all(p.grad is None for p in self.step.find_trained_parameters()):
            self.step.abandon()
            raise ConfigError(
                "no gradient reached a parameter that this step trains",
                why="the loss was computed with another network, a copy, or a tensor wrapped in a new Parameter",
                fix="compute it with the parameters that the optimizer trains",
            )

    def hint_at_forward_outside(self, *, ran: bool) -> None:
        """Warn if no layer of the model ran in the first window: then the forward pass ran outside of the step."""
        if ran:
            return
        named = self.step.model.named_modules()
        norms = [name for name, m in named if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
        if norms:
            warn_user(f"loss_fn ran no layer of the model, so what BatchNorm {norms[0]!r} wrote cannot be restored "
                      "after a bad step: run the forward pass inside loss_fn")  # fmt: skip
        elif not self.halves and get_autocast_dtype(self.step.plan.compute) is not None:
            warn_user(f"loss_fn ran no layer of the model, and nothing was computed in {self.step.plan.granted}: run "
                      "the forward pass inside loss_fn, or in `with step.plan.forward():`")  # fmt: skip

    def is_new(self, loss_fn: LossFn) -> bool:
        return _identify(loss_fn) not in self.known

    def grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, create_graph: bool, allow_unused: bool
    ) -> Any:
        scaler, wanted = self.step.scaler, [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if not outputs.requires_grad or not all(one.requires_grad for one in wanted):
            raise ConfigError(
                "step.grad needs outputs and inputs that are tracked by autograd",
                fix="x = x.clone().requires_grad_(), then step.grad(model(x), x)",
            )
        with torch.autocast(self.step.device.type, enabled=False):
            scaled = scaler.scale(outputs.float().sum())
            gradients = torch.autograd.grad(scaled, wanted, create_graph=create_graph, allow_unused=allow_unused)
            unscale = scaler.value.clone().reciprocal()
            found = [g.float() * unscale if scaler.enabled and g is not None else g for g in gradients]
        are_finite = [g.detach().isfinite().all() for g in found if g is not None]
        if are_finite:  # otherwise NaN everywhere: the loss becomes NaN, whatever it makes of a single infinite number
            is_finite = torch.stack(are_finite).all()
            found = [g if g is None else torch.where(is_finite, g, math.nan) for g in found]
        return found[0] if isinstance(inputs, Tensor) else tuple(found)

    def _look_closely(self, loss: Tensor, weight: Weight) -> None:
        groups = (group for optimizer in self.step.optimizers for group in optimizer.param_groups)
        if any(p.grad is not None for group in groups for p in group["params"]):
            raise ConfigError(
                "loss_fn called backward() itself",
                why="the step computes the gradient of the returned loss itself, so the gradient would count twice",
                fix="return the loss; leave backward(), zero_grad() and optimizer.step() out",
            )
        operation, numbers = find_last_operation(loss)
        # A large power of two.
        if operation == "MulBackward0" and any(n >= 1024 and math.frexp(n)[0] == 0.5 for n in numbers):
            warn_user("the loss is multiplied by a large power of two, as GradScaler.scale does: return the plain loss")
        if operation == "DivBackward0" and self.step.accumulate > 1 and self.step.accumulate in numbers:
            warn_user(f"the loss is divided by {self.step.accumulate}: if this is for accumulation, return the plain "
                       "loss, because the step already averages over its window")  # fmt: skip
        if isinstance(weight, Tensor) and weight.is_floating_point() and not float(weight) >= 1:
            what = f"loss_fn returned (loss, {float(weight):g}), which weights the batch in its window"
            warn_user(f"{what}: if it is an accuracy, return the loss alone")
        self.halves = find_half_dtypes(loss)
        if strange := self.halves - self._list_half_dtypes():
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in strange))
            warn_user(f"loss_fn computes in {names}, but the plan uses {self.step.plan.granted}: your own "
                       "autocast or a cast is active; use hs.Precision(..., modules=...) instead")  # fmt: skip

    def _list_half_dtypes(self) -> set[torch.dtype | None]:
        plan = self.step.plan
        computed = {plan.compute, *(row.compute for row in plan.rows), *(row.precision for row in plan.rows)}
        stored = {p.dtype for p in self.step.model.parameters()}
        if any(isinstance(module, torch.nn.RNNBase) for module in self.step.model.modules()):
            stored.add(torch.float16)  # autocast's choice for recurrent layers; the plan has warned
        return {get_autocast_dtype(name) for name in computed} | stored


def find_half_dtypes(loss: Tensor, most: int = 20_000) -> set[torch.dtype]:
    """Return the half-precision dtypes in the last `most` operations of a loss's autograd graph."""
    found: set[torch.dtype] = set()
    seen: set[Any] = set()
    open_nodes = [loss.grad_fn]
    while open_nodes and len(seen) < most:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        dtypes = {entry.dtype for entry in getattr(node, "_input_metadata", ()) if entry is not None}
        found |= dtypes & {torch.float16, torch.bfloat16}
        open_nodes += [following for following, _ in node.next_functions]
    return found


def find_last_operation(loss: Tensor) -> tuple[str, list[float]]:
    """Return the node of the operation that gave the loss, and its constants; none if it combines two losses."""
    if loss.grad_fn is None or len(inputs := loss.grad_fn.next_functions) > 1 and all(node for node, _ in inputs):
        return "", []
    given = (getattr(loss.grad_fn, f"_saved_{side}", None) for side in ("self", "other"))
    # Leave simulation's dispatch mode: inside it torch returns a Python number instead of the saved tensor.
    with _disable_current_modes():
        numbers = [float(n) for n in given if isinstance(n, Tensor) and n.numel() == 1 and not n.requires_grad]
    return loss.grad_fn.name(), numbers


def _identify(loss_fn: LossFn) -> object:
    if hasattr(loss_fn, "__wrapped__"):
        loss_fn = inspect.unwrap(loss_fn)
    return getattr(loss_fn, "__code__", type(loss_fn))


# --- networks that a loss function writes into although they belong neither to the model nor to also= ---
# A bad step cannot restore their buffers: BatchNorm statistics that became NaN would stay NaN, silently. So in the
# first window of each loss function a global forward hook notes every module that runs, and the floating buffers of
# other networks in training mode are compared before and after. The hook is removed when the window ends, and not
# installed where torch.compile would trace it.

MOST_ENTRIES = 100  # of a list or dict that is looked through for networks: it may hold the data


class UnguardedNetworks:
    """Warn once of each network whose buffers a step writes and does not guard."""

    def __init__(self, writes: ForwardWrites) -> None:
        self.writes = writes
        self.warned: set[nn.Module] = set()
        self.ran_own = True  # whether one of the step's modules ran in the last observed window

    @contextlib.contextmanager
    def watch(self, loss_fn: Callable[..., Any]) -> Iterator[None]:
        named = find_named(loss_fn)
        self.writes.slots.refresh()
        own = set(self.writes.slots.modules)
        self.ran_own = any(map(_is_compiled, [*named.values(), *self.writes.slots.roots]))
        if self.ran_own:  # it may have: no hook could tell
            yield
            return
        ran: dict[nn.Module, dict[str, Tensor]] = {}
        thread = threading.get_ident()
        given = {id(tensor) for tensor in self.writes.loose._buffers.values()}

        def note(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != thread:
                return
            if module in own:
                self.ran_own = True
            elif module not in ran:
                held = ((n, b) for n, b in module._buffers.items() if b is not None and id(b) not in given)
                ran[module] = {n: b.detach().clone() for n, b in held if module.training and b.is_floating_point()}

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        self._warn_of_writes(ran, named)

    def _warn_of_writes(self, ran: dict[nn.Module, dict[str, Tensor]], named: dict[str, Any]) -> None:
        for module, before in ran.items():
            buffers = module._buffers
            if all((now := buffers.get(n)) is not None and torch.equal(now, then) for n, then in before.items()):
                continue
            # A network's hook runs before those of its submodules, so the first match is the outermost.
            root, path = next((r, n) for r in ran for n, part in r.named_modules() if part is module)
            if root in self.warned:
                continue
            self.warned.add(root)
            name = next((name for name, value in named.items() if value is root), f"the {type(root).__name__}")
            part = f"{type(module).__name__} {path!r} of {type(root).__name__}" if path else type(root).__name__
            warn_user(
                f"loss_fn writes into the buffers of {part}, which is neither in the model nor in also=: a bad step "
                f"would leave them as they are, NaN included. Fix: hs.Step(..., also=[{name}])"
            )


def find_named(loss_fn: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function can refer to: closure, globals, a method's object, and their entries and attributes."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
    found = {"loss_fn": loss_fn, **({"self": loss_fn.__self__} if hasattr(loss_fn, "__self__") else {})}
    if inspect.isfunction(function):
        with contextlib.suppress(ValueError):  # a variable of its closure has no value yet
            variables = inspect.getclosurevars(function)
            found.update(variables.globals)
            found.update(variables.nonlocals)
    holders = {name: value for name, value in found.items() if not inspect.ismodule(value)}
    return found | {f"{name}{key}": part for name, value in holders.items() for key, part in _list_parts(value).items()}


def suggest_ways(loss_fn: Callable[..., Any] | None, *, has_capsules: bool) -> Iterator[str]:
    """Yield what a user can do after a stop, in addition to the guard's advice."""
    if not has_capsules:
        yield 'capsules="DIR" saves such a step, and hs.replay names its cause'
    if carried := find_non_finite(loss_fn):
        yield (
            f"{', '.join(carried[:3])} of loss_fn is not finite: if it is carried from batch to batch, as a hidden "
            "state is, keep it in a buffer of a module in also=, so that a bad step restores it"
        )


def find_non_finite(loss_fn: Callable[..., Any] | None) -> list[str]:
    """Return names of non-finite tensors that a loss function holds outside of modules: a hidden state carried from
    batch to batch would stay NaN. Waits for the device."""
    held = {} if loss_fn is None else find_named(loss_fn)
    held |= {
        f"{n}{k}": p for n, v in held.items() if isinstance(v, (dict, list, tuple)) for k, p in _list_parts(v).items()
    }
    return [
        name
        for name, value in held.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.detach().isfinite().all())
    ]


def _list_parts(value: object) -> dict[str, Any]:
    """Return entries and attributes by the suffix that follows the object's name. `__getattr__` is not called: it may
    have side effects."""
    if isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"[{key!r}]": part for key, part in itertools.islice(entries, MOST_ENTRIES)}
    held = {**getattr(value, "__dict__", {}), **(value._modules if isinstance(value, nn.Module) else {})}
    return {f".{key}": part for key, part in held.items()}


def _is_compiled(thing: object) -> bool:
    """True after torch.compile(thing) or module.compile()."""
    if isinstance(thing, nn.Module):
        modules = thing.modules()
        return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    return "_torchdynamo_orig_callable" in getattr(thing, "__dict__", {})
