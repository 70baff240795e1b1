"""Notices networks that a loss function writes into although they belong neither to the model nor to `also=`.

A bad step cannot put their buffers back: BatchNorm statistics that became NaN stay so, and nothing else would tell. So
in the first window of each loss function every module that runs is noted, and the floating buffers of strangers in
training mode are compared before and after. A global hook sees them; it is taken away when the window ends, and never
put where torch.compile would trace it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from halfstep.run.user_line import warn_user
from halfstep.step.forward_writes import ForwardWrites

Buffers = dict[str, Tensor]
MOST_ENTRIES = 100
"""Of a list or dict that is looked through for networks: it may hold the data."""


class Strangers:
    """Warns once of each network that a step runs, writes into and does not guard."""

    def __init__(self, writes: ForwardWrites) -> None:
        self.writes = writes
        self.warned: set[nn.Module] = set()

    @contextlib.contextmanager
    def noticed(self, loss_fn: Callable[..., Any]) -> Iterator[None]:
        """Around a window that runs `loss_fn`."""
        named = _named_by(loss_fn)
        self.writes.places.refresh()
        own = set(self.writes.places.modules)
        if any(map(_is_compiled, [*named.values(), *self.writes.places.roots])):
            yield
            return
        ran: dict[nn.Module, Buffers] = {}
        thread = threading.get_ident()

        def note(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != thread:
                return
            if module not in own and module not in ran:
                ran[module] = self._copies(module) if module.training else {}

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        self._warn_of(ran, named)

    def _copies(self, module: nn.Module) -> Buffers:
        given = {id(tensor) for tensor in self.writes.loose._buffers.values()}
        held = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
        return {n: b.detach().clone() for n, b in held if b.is_floating_point() and id(b) not in given}

    def _warn_of(self, ran: dict[nn.Module, Buffers], named: dict[str, Any]) -> None:
        for module, before in ran.items():
            if not any(_differs(module._buffers.get(name), then) for name, then in before.items()):
                continue
            # Networks run before their parts, so the first that holds it is the outermost.
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


def _differs(now: Tensor | None, then: Tensor) -> bool:
    return now is None or now.shape != then.shape or not torch.equal(now, then)


def _named_by(loss_fn: Callable[..., Any]) -> dict[str, Any]:
    """What a function can name: its closure, its globals, of a method its object; and their parts."""
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
    return found | {f"{name}{key}": part for name, value in holders.items() for key, part in _parts(value).items()}


def _parts(value: object) -> dict[str, Any]:
    """Entries and attributes, as they follow its name. A `__getattr__` is not asked: it may do anything."""
    if isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"[{key!r}]": part for key, part in itertools.islice(entries, MOST_ENTRIES)}
    held = {**getattr(value, "__dict__", {}), **(value._modules if isinstance(value, nn.Module) else {})}
    return {f".{key}": part for key, part in held.items()}


def _is_compiled(thing: object) -> bool:
    """By torch.compile(thing), or by module.compile()."""
    if isinstance(thing, nn.Module):
        modules = thing.modules()
        return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    return "_torchdynamo_orig_callable" in getattr(thing, "__dict__", {})
