"""A step as it was traced: its operations in order, and every piece of memory from its making to its end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.models.recompute import TURN
from halfstep.run.memory.convolutions import Shape, workspace_bytes

Owner = Literal["", "half copies", "gradients"]
"""What a piece of memory is known to be; activations and working memory are told apart by their lives."""

BLOCK_BYTES = 512
"""CUDA's allocator hands out multiples of it."""
HALF = (torch.bfloat16, torch.float16)
DISABLED = torch.compiler.disable(lambda: None).__code__
"""The code of every function that `torch.compiler.disable` wraps: all of them are one closure."""
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@dataclass(slots=True)
class Value:
    """One storage: tensors that are views of each other share it."""

    num_bytes: int
    made_by: int
    """Number of the operation; -1: it was there before the step."""
    ended_at: int = -1
    """The last operation during which it was there; -1: it outlives the step."""
    owner: Owner = ""
    is_written_twice: bool = False


@dataclass(slots=True)
class Op:
    """One operation, with the values it read and made by number."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    is_view: bool
    in_backward: bool
    workspace_bytes: int = 0
    as_written: bool = False
    """Whether it lies behind `torch.compiler.disable`, so that compiled steps run it eagerly too."""


@dataclass(slots=True)
class Trace:
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    is_chain: bool = False
    """Whether the model ran as a chain of our own kernels, which the compiler leaves as they are."""
    compiles: bool = True
    """False for a phase that runs eagerly in every mode."""


class Recorder(TorchDispatchMode):
    """Writes down what runs inside; `known` was there before, and is nobody's activation."""

    def __init__(self, known: Iterable[Tensor], parameters: Iterable[Tensor], *, is_strict: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_strict = is_strict
        """Whether fp32 is computed as fp32, not as TF32."""
        self.trace, self.in_backward = Trace(), False
        self._numbers: dict[int, int] = {}
        self._weights: set[int] = set()
        self._as_written: set[int] = set()
        self._held = [tensor.untyped_storage() for tensor in known]
        for storage in self._held:
            self._note(storage, made_by=-1)
        for parameter in parameters:
            self._weights.add(self._numbers[parameter.untyped_storage()._cdata])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor, such as where it is
            return func(*args, **kwargs)
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        reads = tuple(dict.fromkeys(n for t in read if (n := self._number(t)) is not None))
        number = len(self.trace.ops)
        made = func(*args, **kwargs)
        makes = [self._note(t.untyped_storage(), number) for t in tree_leaves(made) if isinstance(t, Tensor)]
        for old in set(makes) & set(reads) if func._schema.is_mutable else ():
            self.trace.values[old].is_written_twice = True
        new = tuple(n for n in dict.fromkeys(makes) if n not in reads)
        name = func._opname
        self._name_half_copies(name, reads, new, made)
        is_view = not new and not func._schema.is_mutable
        if not makes:
            return made
        workspace = _workspace_bytes(name, args, made, is_strict=self.is_strict)
        as_written = self._is_as_written()
        self.trace.ops.append(Op(name, reads, new, is_view, self.in_backward, workspace, as_written))
        return made

    def settle(self, gradients: Iterable[Tensor]) -> Trace:
        """The trace, once gradients are known."""
        for gradient in gradients:
            if (number := self._number(gradient)) is not None:
                self.trace.values[number].owner = "gradients"
        return self.trace

    def _is_as_written(self) -> bool:
        """What a function is to compute eagerly stands on the stack below it; its gradients come from nodes that were
        numbered meanwhile."""
        if _inside_disabled():
            if not self.in_backward:
                self._as_written.add(_get_sequence_nr() - 1)
            return True
        node = _current_autograd_node() if self.in_backward else None
        return node is not None and node._sequence_nr() in self._as_written

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _note(self, storage: torch.UntypedStorage, made_by: int) -> int:
        address = storage._cdata
        if address in self._numbers:
            return self._numbers[address]
        number = self._numbers[address] = len(self.trace.values)
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.trace.values.append(Value(size, made_by))
        weakref.finalize(storage, self._forget, address, number)
        return number

    def _forget(self, address: int, number: int) -> None:
        self._numbers.pop(address, None)
        self.trace.values[number].ended_at = len(self.trace.ops) - 1

    def _name_half_copies(self, name: str, reads: tuple[int, ...], new: tuple[int, ...], made: Any) -> None:
        if name == "_to_copy" and len(new) == 1 and made.dtype in HALF and self._weights.issuperset(reads):
            self.trace.values[new[0]].owner = "half copies"


def _inside_disabled() -> bool:
    """Whether a function that the compiler was told to leave alone is running, and none that it compiles within it.
    Torch's own are not meant, nor what hears of every operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not TURN:
        if frame.f_code is DISABLED:
            wrapped = frame.f_locals["fn"]
            is_of_torch = str(getattr(wrapped, "__module__", "")).startswith("torch.")
            if not is_of_torch and getattr(wrapped, "__name__", "") != "__torch_dispatch__":
                return True
        frame = frame.f_back
    return False


def _workspace_bytes(name: str, args: Any, made: Any, *, is_strict: bool) -> int:
    """What a kernel takes for itself while it runs, where that is known and large."""
    if name == ATTENTION_BACKWARD:
        return int(args[1].numel()) * 4  # FlashAttention sums the queries' gradients in fp32
    if is_strict and name == "convolution":
        return _convolution_bytes(args[0], args[1], args[3:9], ("forward",))
    if is_strict and name == "convolution_backward":
        wanted = zip(("input gradient", "weight gradient"), args[10], strict=False)
        return _convolution_bytes(args[1], args[2], args[4:10], [which for which, is_asked in wanted if is_asked])
    return 0


def _convolution_bytes(image: Tensor, weight: Tensor, how: Any, passes: Iterable[Any]) -> int:
    stride, _, dilation, is_transposed, _, groups = how
    is_plain = not is_transposed and groups == 1 and {*stride, *dilation} == {1} and image.dtype == torch.float32
    if image.ndim != 4 or weight.shape[2] != weight.shape[3] or not is_plain:
        return 0
    (n, c, height, width), (k, _, taps, _) = image.shape, weight.shape
    shape = Shape(n, c, k, height, width, taps)
    return max((workspace_bytes(shape, which) for which in passes), default=0)
