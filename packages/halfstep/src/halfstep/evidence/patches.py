"""Try changes of code without editing it.

Function modes change calls of torch functions from certain lines. They act above autograd, so that backward also
follows the changed code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.evidence.ranges import FOREIGN, has_fractions
from halfstep.islands import fp32_island
from halfstep.our_code import OURS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Patch = Callable[[str, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Returns new arguments for the named function; None if the patch does not apply."""
HALF = (torch.float16, torch.bfloat16)
CASTS = ("to", "type", "type_as", "half", "bfloat16", "float")


class AtLines(TorchFunctionMode):
    """Change the arguments of torch functions that are called from these lines."""

    def __init__(self, lines: Collection[str], patch: Patch) -> None:
        super().__init__()
        self.lines, self.patch = lines, patch
        self.has_changed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = self.patch(_get_name(func), args, kwargs) if _find_own_line(sys._getframe(1)) in self.lines else None
        self.has_changed |= changed is not None
        args, kwargs = changed or (args, kwargs)
        return func(*args, **kwargs)


class StableLogs(TorchFunctionMode):
    """Compute log(softmax(z)) and log(sigmoid(z)) as one function: softmax and sigmoid round to 0 where their
    logarithms are ordinary numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[str, None] = {}
        """What to write at which lines."""
        self._made: dict[int, tuple[Tensor, str, Callable[[], Tensor]]] = {}
        """By the id of a result, which is kept alive: what its logarithm is, and how to compute that."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, _get_name(func)
        if name == "log" and id(args[0]) in self._made:
            _, words, compute = self._made[id(args[0])]
            self.changes[f"{words} at {_find_own_line(sys._getframe(1))}"] = None
            return compute()
        result = func(*args, **kwargs)
        if name == "softmax":
            self._made[id(result)] = result, "F.log_softmax(z, dim)", lambda: F.log_softmax(*args, **kwargs)
        elif name == "sigmoid":
            self._made[id(result)] = result, "F.logsigmoid(z)", lambda: F.logsigmoid(args[0])
        return result


class IslandAt(TorchFunctionMode):
    """Run torch functions called from one line in fp32, or in a wider format."""

    def __init__(self, line: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.line, self.dtype = line, dtype
        self.has_widened = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _find_own_line(sys._getframe(1)) != self.line:
            return func(*args, **kwargs)
        with fp32_island():
            return func(*self._widen(args), **self._widen(kwargs))

    def _widen(self, tree: Any) -> Any:
        def wide(x: Any) -> Any:
            is_narrow = isinstance(x, Tensor) and x.is_floating_point() and x.itemsize < self.dtype.itemsize
            self.has_widened |= is_narrow
            return x.to(self.dtype) if is_narrow else x

        return tree_map(wide, tree)


class WithoutCasts(TorchFunctionMode):
    """Skip casts to these narrower formats in the user's code, and record their lines. Casts to half in halfstep's code
    are skipped only with `ours`."""

    def __init__(self, dtypes: Collection[torch.dtype], only: str = "", *, ours: bool = False) -> None:
        super().__init__()
        self.dtypes, self.only, self.kept = dtypes, only, FOREIGN if ours else (*FOREIGN, *OURS)
        self.lines: dict[str, None] = {}
        """Lines of skipped casts, in the order in which they ran."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _get_name(func) not in CASTS or not isinstance(result, Tensor) or result.dtype not in self.dtypes:
            return result
        caller, given = sys._getframe(1), args[0]
        line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        is_own = not line.startswith(self.kept) and self.only in ("", line)
        if not is_own or not given.is_floating_point() or given.itemsize <= result.itemsize:
            return result
        self.lines[line] = None
        # The device may change in the same call; only the cast is skipped.
        return given.to(result.device)


def _find_own_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code or the model's."""
    while frame is not None and frame.f_code.co_filename.startswith(FOREIGN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _get_name(func: Any) -> str:
    return str(getattr(func, "__name__", "")).strip("_").removeprefix("linalg_")


def _patch_argument(names: Collection[str], change: Callable[[Tensor], Tensor]) -> Patch:
    """Change the first argument of these functions."""

    def patch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        fits = name in names and args and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return ((change(args[0]), *args[1:]), kwargs) if fits else None

    return patch


def make_arguments_finite(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Replace non-finite numbers in all arguments by 0."""
    floating = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and has_fractions(x)]
    if all(bool(x.isfinite().all()) for x in floating):
        return None
    known = {id(x) for x in floating}
    filled: Arguments = tree_map(lambda x: x.nan_to_num(0.0, 0.0, 0.0) if id(x) in known else x, (args, kwargs))
    return filled


def _patch_denominator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Move a denominator away from 0; a count of 0 becomes 1."""
    position = 0 if name in ("rdiv", "reciprocal") else 1  # 1 / x calls __rdiv__, whose first argument is x
    if name not in DIVISIONS or len(args) <= position:
        return None
    value = args[position]
    changed: Any
    if not isinstance(value, Tensor):
        changed = 1e-4 if value == 0 else value
    elif not has_fractions(value):
        changed = value.clamp(min=1)
    elif value.is_complex():
        changed = torch.where(value.abs() >= 1e-4, value, 1e-4)
    else:
        changed = torch.where(value >= 0, value.clamp(min=1e-4), value.clamp(max=-1e-4))
    if not torch.as_tensor(changed != value).any():
        return None
    return (*args[:position], changed, *args[position + 1 :]), kwargs


DIVISIONS = ("truediv", "div", "divide", "true_divide", "rdiv", "reciprocal")
ROOTS = ("pow", "sqrt", "rsqrt", "log", "log2", "log10")
EXPONENTIALS = ("exp", "expm1", "exp2")
SOFTMAXES = ("softmax", "log_softmax", "logsumexp")
PATCHES: tuple[tuple[str, Patch], ...] = (
    ("a denominator of at least 1e-4 (an eps, or a clamp)", _patch_denominator),
    ("clamp(min=1e-4) under the root or logarithm", _patch_argument(ROOTS, lambda x: x.clamp(min=1e-4))),
    ("clamp(max=10) on the argument of exp", _patch_argument(EXPONENTIALS, lambda x: x.clamp(max=10.0))),
    (
        "a large finite number in place of -inf",
        _patch_argument(SOFTMAXES, lambda x: x.clamp(min=torch.finfo(x.dtype).min / 2)),
    ),
)
"""Patches in order of size; each affects only its own functions."""
