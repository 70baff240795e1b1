"""Record the output range of each operation of a step, forward and backward, and where numbers stop being finite.

A dispatch mode sees every kernel below autograd and autocast. Its module is found in the Python frames above it; in
backward by the sequence number that autograd gives each node in forward. No hooks are needed, and nothing is changed.

A non-finite tensor leads back to its origin, the operation that first left the finite range. Infinities written on
purpose (a mask of -inf) are not the origin; the operation that turns them into NaN is. An origin with a non-finite
input that no operation of the step made got it from outside.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import function as autograd_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.our_code import MACHINERY

ROOT, LOSS = "(root)", "(loss)"
FOREIGN = (str(Path(torch.__file__).parent), *MACHINERY, "<")
"""Files whose lines are not the user's, nor the model's. Kernels are among them: the model's line that calls one tells
more than a line inside it."""
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
CONSTANTS = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where",
             "copy_", "lift_fresh")  # fmt: skip
"""Operations that write constants given by the code."""


@dataclass(frozen=True, slots=True)
class Range:
    """Statistics of the magnitudes in a tensor."""

    low: float
    """The smallest that is not zero."""
    high: float
    """The largest finite one."""
    num_zero: int
    num_nan: int
    num_inf: int
    numel: int
    dtype: str

    @property
    def is_finite(self) -> bool:
        return not self.num_nan and not self.num_inf

    def __str__(self) -> str:
        counts = ((self.num_zero, "zero"), (self.num_inf, "inf"), (self.num_nan, "NaN"))
        odd = [f"{count} {word}" for count, word in counts if count]
        # Without a finite value other than zero, low and high are both 0, which is no range.
        span = f"{self.low:.3g} to {self.high:.3g}" if self.high else "without a finite nonzero value"
        return f"{self.dtype} {span}" + (f" ({', '.join(odd)})" if odd else "")


@dataclass(slots=True)
class Operation:
    """One kernel of the step."""

    index: int
    name: str
    module: str
    line: str
    is_backward: bool
    output: Range
    inputs: list[Range] = field(default_factory=list)
    is_torch: bool = True
    outside: tuple[int, ...] | None = None
    """Shape of an input that is not finite and was made before the step."""
    is_meant: bool = False
    """Whether the code intends the infinities, such as those of a mask."""
    has_raised: bool = False
    function: type | None = None
    """The autograd.Function in whose backward it ran."""

    @property
    def place(self) -> str:
        return f"{self.name}{' (backward)' if self.is_backward else ''} in {self.module}".lstrip()


class RangeTrace(TorchDispatchMode):
    """Record the operations that run inside, and follow non-finite numbers back to their origin."""

    def __init__(self, model: nn.Module, others: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parts = {**(others or {}), "": model}
        self.names = {
            id(module): name or ROOT
            for part, whole in parts.items()
            for name, module in whole.named_modules(prefix=part)
        }
        self.operations: list[Operation] = []
        self.of_loss: Operation | None = None
        """The origin of a non-finite loss, recorded while the loss is in memory."""
        self._origins: dict[int, Operation] = {}
        """Operation that produced each non-finite tensor, by its storage."""
        self._places: dict[int, tuple[str, str]] = {}
        """Module and line by autograd's sequence number."""
        self._running = ""
        """The operation that runs, or the one that raised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _list_floating((args, kwargs))
        # An in-place operation overwrites its inputs: measure them before it runs.
        before = [measure_range(value) for value in given] if func._schema.is_mutable else None
        name = self._running = func.overloadpacket.__name__
        outputs = func(*args, **kwargs)
        self._running = ""
        if name not in UNWRITTEN:
            self._record(func, name, given, before, _list_floating(outputs))
        else:
            self._forget(_list_floating(outputs))
        return outputs

    def find_origin(self, tensor: Tensor) -> Operation | None:
        """Return the operation that first left the finite range on the way to this tensor."""
        return self._origins.get(_get_key(tensor))

    def _record(
        self, func: Any, name: str, given: list[Tensor], before: list[Range] | None, found: list[Tensor]
    ) -> None:
        # -1 outside of backward.
        is_backward = torch._C._current_graph_task_id() != -1
        if not is_backward:
            place = self._locate()
            # The first operation that sees a number created the node. Later ones that create none, such as the +1 of a
            # counter, see the same number and are not noted.
            self._places.setdefault(torch._C._autograd._get_sequence_nr(), place)
        for output in found:
            range_ = measure_range(output)
            if func.is_view:  # has no new values
                continue
            module, line = self._locate_backward() if is_backward else place
            is_torch = func.namespace in ("aten", "prims", "prim", "_c10d_functional")
            seen = Operation(len(self.operations), name, module, line, is_backward, range_, is_torch=is_torch)
            seen.function = _find_function() if is_backward else None
            last = self.operations[-1] if self.operations else seen
            if name == "scalar_tensor" and range_.num_nan and last.line == line:
                # The last operation writes NaN itself where it is undefined, such as logdet of a negative determinant.
                seen.name = last.name
            self.operations.append(seen)
            # Inputs are measured only where a diagnosis needs them: each measurement waits for the device.
            if not range_.is_finite or not seen.is_torch:
                seen.inputs = before if before is not None else [measure_range(value) for value in given]
            if not range_.is_finite:
                self._origins[_get_key(output)] = self._trace_back(seen, given)
            elif output.numel() * output.element_size() >= output.untyped_storage().nbytes():
                self._forget([output])  # a view of a part may be finite where the rest is not

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._origins.pop(_get_key(tensor), None)

    def _trace_back(self, seen: Operation, given: list[Tensor]) -> Operation:
        """Return an operation's own origin, or that of the non-finite input it inherits from."""
        keys = [_get_key(value) for value, r in zip(given, seen.inputs, strict=True) if not r.is_finite]
        known = [self._origins[key] for key in keys if key in self._origins]
        # NaN made from infinities that the code wrote on purpose, such as 0 · inf or a row of only -inf: this operation
        # is the origin, not the mask.
        is_born_here = seen.output.num_nan and not any(r.num_nan for r in seen.inputs)
        if known and not (is_born_here and all(origin.is_meant for origin in known)):
            return min(known, key=lambda origin: origin.index)
        bad = [value for value, r in zip(given, seen.inputs, strict=True) if not r.is_finite]
        # Only -inf next to finite numbers: a mask, which an operation may pass on without fault.
        is_masked = bool(bad) and all(bool(((value == -torch.inf) | value.isfinite()).all()) for value in bad)
        seen.is_meant = seen.name in CONSTANTS or is_masked and not seen.output.num_nan
        # A non-finite input that no operation of the trace made existed before the step.
        if bad and not known and not is_masked and not seen.is_backward:
            seen.outside = tuple(bad[0].shape)
        return seen

    def find_raising(self, error: BaseException) -> Operation:
        """Return the operation that raised, by the frames of its error; one that torch rejects before it runs has no
        name."""
        frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        module, line = self._find_innermost(reversed(frames))
        nothing = measure_range(torch.empty(0))
        return Operation(len(self.operations), self._running, module, line, False, nothing, has_raised=True)

    def _locate(self) -> tuple[str, str]:
        # Three frames up: `_locate`, `_record` and `__torch_dispatch__` are skipped.
        return self._find_innermost(traceback.walk_stack(sys._getframe(3)))

    def _find_innermost(self, frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
        """Return the innermost module, and the innermost line of the user's code or the model's."""
        module = line = ""
        for frame, number in frames:
            # A module's forward is a method, so the module is the `self` of its frame.
            if not module and isinstance(own := frame.f_locals.get("self"), nn.Module):
                module = self.names.get(id(own), "")
            file = frame.f_code.co_filename
            if not line and not file.startswith(FOREIGN):
                line = f"{file}:{number}"
            if module and line:
                break
        return module or LOSS, line

    def _locate_backward(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return LOSS, ""
        number = node._sequence_nr() + 1  # requested after the node was created
        module, line = self._places.get(number) or self._locate()
        if _find_function() is not None:  # its backward is Python code: report the line inside it
            # Only frames inside the custom backward: those outside of it belong to the loop that called it.
            frames = traceback.walk_stack(sys._getframe(2))
            inside = itertools.takewhile(lambda at: at[0].f_code.co_filename != autograd_function.__file__, frames)
            line = self._find_innermost(inside)[1] or line
        return module, line


def _find_function() -> type | None:
    """Return the autograd.Function whose backward is running."""
    node = torch._C._current_autograd_node()
    return node._forward_cls if isinstance(node, autograd_function.BackwardCFunction) else None


def measure_range(tensor: Tensor) -> Range:
    """Measure the range of a tensor's values; waits for the device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel():
        return Range(0.0, 0.0, 0, 0, 0, 0, dtype)
    with torch.no_grad():
        wide = tensor.detach()
        if wide.device.type != "mps":  # which has no fp64
            # fp64 holds the values of all narrower formats exactly.
            wide = wide.to(torch.complex128 if wide.is_complex() else torch.float64)
        size = wide.abs()
        num_nan, num_inf = int(size.isnan().sum()), int(size.isinf().sum())
        size = torch.nan_to_num(size, 0.0, 0.0, 0.0) if num_nan or num_inf else size
        # nan_to_num made NaN and infinities zeros, which do not count.
        num_zero = int((size == 0).sum()) - num_nan - num_inf
        high = float(size.max())
        low = float(torch.where(size > 0, size, high).min())
    return Range(low, high, num_zero, num_nan, num_inf, tensor.numel(), dtype)


def find_twin(operation: Operation, other: RangeTrace, own: RangeTrace) -> Operation | None:
    """Return the same operation in another trace: the n-th of its name in its module, forward or backward."""
    kind = (operation.module, operation.name, operation.is_backward)
    same, theirs = (
        [op for op in trace.operations if (op.module, op.name, op.is_backward) == kind] for trace in (own, other)
    )
    place = next(k for k, op in enumerate(same) if op is operation)
    return theirs[place] if place < len(theirs) else None


def group_by_module(trace: RangeTrace, *, is_backward: bool) -> Mapping[str, Range]:
    """Return the widest output range of each module, in execution order."""
    found: dict[str, Range] = {}
    for op in trace.operations:
        if op.is_backward != is_backward or not op.output.high:
            continue
        r, o = found.get(op.module, op.output), op.output
        found[op.module] = Range(
            min(r.low, o.low), max(r.high, o.high), r.num_zero + o.num_zero, r.num_nan + o.num_nan,
            r.num_inf + o.num_inf, r.numel + o.numel, o.dtype,
        )  # fmt: skip
    return found


def _list_floating(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and has_fractions(leaf)]


def has_fractions(tensor: Tensor) -> bool:
    """True for real and complex numbers, which can be NaN or infinite; False for integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _get_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
