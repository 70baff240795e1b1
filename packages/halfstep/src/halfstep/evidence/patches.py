"""Try changes of code without editing it.

Function modes change calls of torch functions from certain lines. They act above autograd, so that backward also
follows the changed code.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.evidence.ranges import FOREIGN, has_fractions
from halfstep.islands import fp32_island
from halfstep.our_code import OURS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Patch = Callable[[str, tuple[Any, ...], dict[str, Any]], Arguments | Tensor | None]
"""Returns new arguments for the named function, or its result; None if the patch does not apply."""
HALF = (torch.float16, torch.bfloat16)
CASTS = ("to", "type", "type_as", "half", "bfloat16", "float")


class AtLines(TorchFunctionMode):
    """Change the arguments of torch functions that are called from these lines; with `passes_gradient`, as if that had
    the gradient of the identity."""

    def __init__(self, lines: Collection[str], patch: Patch, *, passes_gradient: bool = False) -> None:
        super().__init__()
        self.lines, self.patch, self.passes_gradient = set(lines), patch, passes_gradient
        self.num_changed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = self.patch(_get_name(func), args, kwargs) if _find_own_line(sys._getframe(1)) in self.lines else None
        if changed is None:
            return func(*args, **kwargs)
        self.num_changed += 1
        if isinstance(changed, Tensor):
            return changed
        new = list(changed[0])
        for k, before in enumerate(args if self.passes_gradient else ()):
            if new[k] is not before and isinstance(before, Tensor):
                x = before.nan_to_num(0.0, 0.0, 0.0)
                new[k] = new[k].detach() + (x - x.detach())
        return func(*new, **changed[1])


@contextlib.contextmanager
def enter_in_backward(function: type[Function] | None, mode: TorchFunctionMode) -> Iterator[None]:
    """Enter a mode around the step, and again in the backward of a custom Function, where torch disables such modes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if function is not None:
            # autograd runs a custom backward with function modes disabled, so it enters the mode itself.
            backward = function.backward

            def patched(*args: Any) -> Any:
                with mode:
                    return backward(*args)

            stack.enter_context(_replace_attribute(function, "backward", staticmethod(patched)))
        yield


@contextlib.contextmanager
def use_autograd_derivative(function: type[Function]) -> Iterator[None]:
    """Use autograd's derivative of a custom Function's forward instead of its backward."""

    class Ignored:
        """A ctx that saves nothing."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    def apply(*args: Any) -> Any:
        # Two styles of Functions: forward(ctx, ...), or forward(...) with a separate setup_context.
        has_context = function.setup_context is Function.setup_context
        return function.forward(Ignored(), *args) if has_context else function.forward(*args)

    with _replace_attribute(function, "apply", staticmethod(apply)):
        yield


@contextlib.contextmanager
def _replace_attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside; an inherited one is inherited again afterwards."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        # Deleting first makes an inherited attribute visible again.
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)


@dataclass(frozen=True, slots=True)
class KnownLog:
    """A tensor that is a function of z (`LOGS`), so that its logarithm can be computed without it."""

    tensor: Tensor
    kind: str
    z: Tensor
    root: str
    """The function that the user gives z to."""
    words: str = ""
    """How to write the logarithm, if not as in LOGS."""

    @property
    def log(self) -> Tensor:
        return LOGS[self.kind][0](self.z)


LOGS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "exp": (lambda z: z, "z"),
    "1 + exp": (F.softplus, "F.softplus(z)"),
    "1 - exp": (lambda z: torch.log(-torch.expm1(z)), "torch.log(-torch.expm1(z))"),
    "sigmoid": (F.logsigmoid, "F.logsigmoid(z)"),
    "1 - sigmoid": (lambda z: F.logsigmoid(-z), "F.logsigmoid(-z)"),
    "1 - tanh²": (lambda z: 2 * (math.log(2) - z - F.softplus(-2 * z)), "2 * (math.log(2) - z - F.softplus(-2 * z))"),
    "1 + z": (torch.log1p, "torch.log1p(z)"),
    "1 - z": (lambda z: torch.log1p(-z), "torch.log1p(-z)"),
}
"""By function of z: its logarithm, in a form that is finite wherever the logarithm is, and the words for it."""
DERIVED = {
    ("1 +", "exp"): "1 + exp", ("1 -", "exp"): "1 - exp", ("1 /", "1 + exp"): "1 - sigmoid",
    ("1 -", "sigmoid"): "1 - sigmoid", ("1 -", "1 - sigmoid"): "sigmoid",
    ("square", "tanh"): "tanh²", ("1 -", "tanh²"): "1 - tanh²",
}  # fmt: skip
"""By operation and function of z: the function of z that the result is."""
ONE = {"add": "1 +", "radd": "1 +", "rsub": "1 -", "rdiv": "1 /"}
RESHAPING = ("getitem", "gather", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "select", "clone")


class InLogs(TorchFunctionMode):
    """Take logarithms of exp, sigmoid, softmax and 1 - tanh², and quotients of exp, without computing these.

    The results are the same in exact arithmetic. In floating point exp overflows, and sigmoid and softmax round to 0 or
    1, where their logarithms are ordinary numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: list[tuple[int, str, str, str]] = []
        """For each change 2 for a logarithm that was not finite, 1 for such a quotient, or 0; the line, what to write
        there, and the function that z is given to."""
        self._known: dict[int, KnownLog] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), _get_name(func)
        if not isinstance(result, Tensor) or not result.is_floating_point() or not args:
            return result
        is_bad, is_quotient = not bool(result.isfinite().all()), name in _DIVISIONS
        known = self._derive(name, func, args, kwargs)
        used = known if is_quotient and is_bad else self._known.get(id(args[0])) if name == "log" else None
        if name == "log1p" and id(args[0]) in self._known:  # of exp(z): as log(1 + exp(z))
            used = self._derive("add", func, (args[0], 1), {})
        if used is not None and used.kind in LOGS:
            result, words = used.log, used.words or LOGS[used.kind][1]
            if is_quotient:
                result, words = result.exp(), words.replace("F.log_softmax", "torch.softmax")
            rank = is_bad * (1 if is_quotient else 2)
            self.changed.append((rank, _find_own_line(sys._getframe(1)), words, used.root))
        if known is not None:
            self._known[id(result)] = replace(known, tensor=result)
        return result

    def _derive(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KnownLog | None:
        """Return what the result of this function is in terms of another tensor, if its logarithm has a better form."""
        x, other = args[0], args[1] if len(args) > 1 else None
        of, by = self._known.get(id(x)), self._known.get(id(other))
        if name in ("exp", "sigmoid", "tanh"):
            return KnownLog(x, name, x, name)
        if name == "softmax":
            return KnownLog(x, "exp", F.log_softmax(*args, **kwargs), name, "F.log_softmax(z, dim)")
        operation = ONE.get(name, "") if not isinstance(other, Tensor) and other == 1 else ""
        if name == "square" or name == "pow" and other == 2 or name == "mul" and other is x:
            operation = "square"
        if of is None:
            return KnownLog(x, f"{operation} z", x, "log") if f"{operation} z" in LOGS else None
        if kind := DERIVED.get((operation, of.kind)):
            return replace(of, kind=kind, words="")
        if name in RESHAPING:
            return replace(of, z=func(of.z, *args[1:], **kwargs))
        if name == "add" and isinstance(other, float) and 0 < other < 1e-3:  # an eps, which may be left out then
            return of
        if name == "sum" and of.kind == "exp":
            dim = kwargs.pop("dim", other if other is not None else tuple(range(x.ndim)))
            z = torch.logsumexp(of.z, dim, *args[2:], **kwargs)
            return replace(of, z=z, words="torch.logsumexp(z, dim)")
        if by is not None and {of.kind, by.kind} <= LOGS.keys() and name in ("mul", *_DIVISIONS):
            words = "F.log_softmax(z, dim)" if by.words.startswith("torch.logsumexp") else of.words
            return replace(of, kind="exp", z=of.log + by.log if name == "mul" else of.log - by.log, words=words)
        return None

    def describe(self) -> str:
        """Return what to write at which lines: those that matter most."""
        most = max(self.changed)[0]
        chosen = zip(*(one for one in self.changed if one[0] == most), strict=True)
        _, lines, words, roots = map(dict.fromkeys, chosen)
        if {"F.logsigmoid(z)", "F.logsigmoid(-z)"} <= {word for _, _, word, _ in self.changed}:
            words = {"F.binary_cross_entropy_with_logits(z, target)": None}
        here, z = f"{' and '.join(words)} at {' and '.join(lines)}", " or ".join(roots)
        return f"rewrite as {here}, where z is the argument of {z}"


class IslandAt(TorchFunctionMode):
    """Run torch functions called from one line in fp32, or in a wider format."""

    def __init__(self, line: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.line, self.dtype = line, dtype
        self.has_widened = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def combine_patches(patches: Collection[Patch]) -> Patch:
    """Apply several patches at once; each affects its own functions."""

    def patch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | Tensor | None:
        return next((changed for one in patches if (changed := one(name, args, kwargs)) is not None), None)

    return patch


def _patch_argument(names: tuple[str, ...], change: Callable[[Tensor], Tensor], position: int = 0) -> Patch:
    def patch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        fits = name in names and len(args) > position and isinstance(args[position], Tensor)
        if not fits or not args[position].is_floating_point():
            return None
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs

    return patch


def _clamp(names: tuple[str, ...], low: float | None = None, high: float | None = None) -> Patch:
    return _patch_argument(names, lambda x: x.clamp(low, high))


def make_arguments_finite(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Replace non-finite numbers in all arguments by 0."""
    floating = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and has_fractions(x)]
    if all(bool(x.isfinite().all()) for x in floating):
        return None
    known = {id(x) for x in floating}
    filled: Arguments = tree_map(lambda x: x.nan_to_num(0.0, 0.0, 0.0) if id(x) in known else x, (args, kwargs))
    return filled


def _patch_keywords(names: tuple[str, ...], **more: Any) -> Patch:
    return lambda name, args, kwargs: (args, kwargs | more) if name in names else None


def _find_denominator(name: str) -> int:
    """Return which argument is the denominator. `1 / x` calls __rdiv__, whose first argument is x."""
    return 0 if name in ("rdiv", "reciprocal") else 1


def _patch_denominator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Move a denominator away from 0: real and complex tensors, and a Python float that is 0."""
    position = _find_denominator(name)
    value = args[position] if name in _DIVISIONS and len(args) > position else None
    if isinstance(value, Tensor) and has_fractions(value):
        return (*args[:position], _move_away_from_zero(value), *args[position + 1 :]), kwargs
    is_zero = isinstance(value, float) and value == 0
    return ((*args[:position], 1e-4, *args[position + 1 :]), kwargs) if is_zero else None


def _patch_count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Raise an integer denominator of 0 to 1, in a tensor or in Python."""
    position = _find_denominator(name)
    value = args[position] if name in _DIVISIONS and len(args) > position else None
    is_integer = isinstance(value, int) or isinstance(value, Tensor) and not has_fractions(value)
    if not is_integer or not bool(torch.as_tensor(value == 0).any()):
        return None
    count = value.clamp(min=1) if isinstance(value, Tensor) else 1
    return (*args[:position], count, *args[position + 1 :]), kwargs


_DIVISIONS = ("truediv", "div", "divide", "true_divide", "rdiv", "reciprocal")


def _move_away_from_zero(x: Tensor, eps: float = 1e-4) -> Tensor:
    if x.is_complex():
        return torch.where(x.abs() >= eps, x, eps)
    return torch.where(x >= 0, x.clamp(min=eps), x.clamp(max=-eps))


def _clamp_infinity(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).min / 2)


def _add_diagonal(x: Tensor) -> Tensor:
    """Add distinct numbers to the diagonal, so that no two eigenvalues stay equal."""
    small = torch.linspace(1e-3, 2e-3, x.shape[-1], dtype=x.dtype, device=x.device)
    return x + small * torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)


def _patch_determinant(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return torch.linalg.slogdet(args[0])[1] if name == "logdet" else None


def _patch_mean(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    is_empty = name == "mean" and len(args) == 1 and not kwargs and not args[0].numel()
    return args[0].sum() if is_empty else None


def _patch_eps(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    eps = kwargs.get("eps")
    is_small = name.endswith("_norm") and isinstance(eps, float | int) and eps < 1e-8
    return (args, kwargs | {"eps": 1e-5}) if is_small else None


def _patch_exponent(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | Tensor | None:
    """Limit the argument of an exponential, or the exponent of a power; `2 ** x` calls __rpow__, whose first argument
    is x."""
    position = 1 if name == "pow" else 0
    return _patch_argument((*EXPONENTIALS, "pow", "rpow"), lambda x: x.clamp(max=10.0), position)(name, args, kwargs)


def _patch_base(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Take the absolute value of negative numbers under a power with a fraction, and of mostly negative ones under a
    root or logarithm: a clamp would leave them without gradient."""
    if name not in ROOTS or not isinstance(args[0], Tensor) or not args[0].requires_grad:
        return None
    share = float((args[0] < 0).float().mean())
    fits = share > (0 if name == "pow" else 0.5) and not _is_whole(_get_exponent(name, args, kwargs))
    return ((args[0].abs(), *args[1:]), kwargs) if fits else None


def _patch_root(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | Tensor | None:
    """Keep what is under a root, a logarithm or a negative power away from 0; squares are finite there."""
    exponent = _get_exponent(name, args, kwargs)
    if _is_whole(exponent) and exponent > 0:
        return None
    return _clamp((*ROOTS, "lgamma", "digamma"), low=1e-4)(name, args, kwargs)


def _get_exponent(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name != "pow":
        return None
    return kwargs["exponent"] if "exponent" in kwargs else args[-1]


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, int) or isinstance(exponent, float) and exponent.is_integer()


ROOTS = ("pow", "sqrt", "rsqrt", "log", "log2", "log10")
MATRIX_FUNCTIONS = ("logdet", "slogdet", "det", "cholesky", "inv", "inverse", "solve", "eigh", "svd", "pinv")
SOFTMAXES = ("softmax", "log_softmax", "logsumexp")
BETWEEN_ONES = ("acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "erfinv")
EXPONENTIALS = ("exp", "expm1", "exp2")
PATCHES: tuple[tuple[str, Patch], ...] = (
    ("a count of at least 1 in the denominator (clamp(min=1))", _patch_count),
    ("a denominator of at least 1e-4 (an eps, or a clamp)", _patch_denominator),
    ("rewrite as x.abs() ** p or x.sign() * x.abs() ** p, or with x.abs() under the root or logarithm,", _patch_base),
    ("clamp(min=1e-4) under the root or logarithm", _patch_root),
    ("clamp(min=-0.9999) on the argument of log1p", _clamp(("log1p",), low=-0.9999)),
    ("eps=1e-4 in logit", _clamp(("logit",), 1e-4, 1 - 1e-4)),
    ("an eps of 1e-4 before the norm", _patch_argument(("norm", "vector_norm"), lambda x: x + 1e-4)),
    ("eps=1e-5 in the normalisation", _patch_eps),
    ("clamp(max=10) on the argument of exp", _patch_exponent),
    ("rewrite as F.softplus in place of exp", lambda name, args, _: F.softplus(args[0]) if name == "exp" else None),
    ("clamp(-10, 10) on the argument of cosh or sinh", _clamp(("cosh", "sinh"), -10.0, 10.0)),
    ("factors of at most 1 (clamp(-1, 1)) in the product", _clamp(("cumprod", "prod"), -1.0, 1.0)),
    (
        "different small numbers added to the diagonal (torch.diag(torch.linspace(1e-3, 2e-3, n)))",
        _patch_argument(MATRIX_FUNCTIONS, _add_diagonal),
    ),
    ("torch.linalg.slogdet(...)[1] in place of logdet", _patch_determinant),
    ("a large finite number in place of -inf", _patch_argument(SOFTMAXES, _clamp_infinity)),
    ("clamp(-0.9999, 0.9999) on what is between -1 and 1", _clamp(BETWEEN_ONES, -0.9999, 0.9999)),
    ("clamp(min=1.0001) on the argument of acosh", _clamp(("acosh", "arccosh"), low=1.0001)),
    ("correction=0, since one number has no unbiased deviation,", _patch_keywords(("std", "var"), correction=0)),
    (
        'reduction="sum" and a division by the number of targets that count, at least 1,',
        _patch_keywords(("cross_entropy", "nll_loss"), reduction="sum"),
    ),
    ("sum() in place of mean() where nothing is selected", _patch_mean),
    ("zero_infinity=True, for targets longer than their input,", _patch_keywords(("ctc_loss",), zero_infinity=True)),
)
"""Patches in order of size; each affects only its own functions."""
