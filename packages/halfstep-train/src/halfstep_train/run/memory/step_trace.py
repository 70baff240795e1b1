"""The trace of a step: its operations in order, and each allocation from the op that creates it to its last use.

Three parts: the recorder, the timeline that sums allocations up over the operations, and the workspaces that cuDNN's
convolutions take in strict fp32.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.recompute import ITERATION_CODE

Owner = Literal["", "half copies", "gradients"]
"""The known kind of an allocation; activations and workspaces are distinguished by their lifetimes."""

BLOCK_BYTES = 512
"""CUDA's allocator rounds sizes up to multiples of this."""
HALF = (torch.bfloat16, torch.float16)
DISABLED = torch.compiler.disable(lambda: None).__code__
"""The code object of every function that `torch.compiler.disable` wraps: all wrappers are one closure."""
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@dataclass(slots=True)
class TracedValue:
    """One storage; tensors that are views of each other share it."""

    num_bytes: int
    made_by: int
    """Number of the operation; -1: it existed before the step."""
    ended_at: int = -1
    """The last operation during which it existed; -1: it outlives the step."""
    owner: Owner = ""


@dataclass(slots=True)
class Op:
    """One operation, with the numbers of the values it read and made."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    is_view: bool
    in_backward: bool
    workspace_bytes: int = 0
    as_written: bool = False
    """Whether it is inside a `torch.compiler.disable`d function, so that compiled steps run it eagerly too."""


@dataclass(slots=True)
class StepTrace:
    values: list[TracedValue] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    is_chain: bool = False
    """Whether the model ran as a chain of our own kernels, which the compiler does not change."""
    compiles: bool = True
    """False for a phase that runs eagerly in every mode."""
    names: dict[int, str] = field(default_factory=dict)
    """The parameter that a value is, or whose half copy or gradient it is."""


class AllocationRecorder(TorchDispatchMode):
    """Record the operations that run inside; tensors in `known` existed before and are not activations."""

    def __init__(
        self,
        known: Iterable[Tensor],
        parameters: Iterable[Tensor],
        *,
        named: Mapping[str, Tensor] | None = None,
        is_strict: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_strict = is_strict
        """Whether fp32 products are computed in fp32, not in TF32."""
        self.trace, self.in_backward = StepTrace(), False
        self._numbers: dict[int, int] = {}
        self._as_written: set[int] = set()
        self._held = [tensor.untyped_storage() for tensor in known]
        for storage in self._held:
            self._note(storage, made_by=-1)
        self._weights = {self._numbers[p.untyped_storage()._cdata] for p in parameters}
        self.trace.names = {self._numbers[p.untyped_storage()._cdata]: name for name, p in (named or {}).items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record what it read, made and needed."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query about a tensor, such as its device
            return func(*args, **kwargs)
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        # Tensors are identified by their storage, so that views count once.
        reads = tuple(dict.fromkeys(n for t in read if (n := self._number(t)) is not None))
        number = len(self.trace.ops)
        made = func(*args, **kwargs)
        makes = [self._note(t.untyped_storage(), number) for t in tree_leaves(made) if isinstance(t, Tensor)]
        new = tuple(n for n in dict.fromkeys(makes) if n not in reads)
        name = func._opname
        self._name_half_copies(name, reads, new, made)
        is_view = not new and not func._schema.is_mutable
        if not makes:
            return made
        workspace = _count_kernel_workspace(name, args, made, is_strict=self.is_strict)
        as_written = self._is_as_written()
        self.trace.ops.append(Op(name, reads, new, is_view, self.in_backward, workspace, as_written))
        return made

    def settle(self, parameters: Iterable[Tensor]) -> StepTrace:
        """Mark the gradients of these parameters and return the trace."""
        for parameter in parameters:
            if parameter.grad is None or (number := self._number(parameter.grad)) is None:
                continue
            self.trace.values[number].owner = "gradients"
            if (name := self.trace.names.get(self._numbers[parameter.untyped_storage()._cdata])) is not None:
                self.trace.names[number] = name
        return self.trace

    def _is_as_written(self) -> bool:
        """True for an op of a function wrapped by `torch.compiler.disable`.

        In forward that function is on the stack; in backward the autograd node has a sequence number from inside it.
        """
        if _is_inside_disabled():
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
        self.trace.values.append(TracedValue(size, made_by))
        # Called when the storage is freed, between two operations: that ends the value's life.
        weakref.finalize(storage, self._forget, address, number)
        return number

    def _forget(self, address: int, number: int) -> None:
        self._numbers.pop(address, None)
        self.trace.values[number].ended_at = len(self.trace.ops) - 1

    def _name_half_copies(self, name: str, reads: tuple[int, ...], new: tuple[int, ...], made: Any) -> None:
        if name == "_to_copy" and len(new) == 1 and made.dtype in HALF and self._weights.issuperset(reads):
            self.trace.values[new[0]].owner = "half copies"
            for read in self.trace.names.keys() & set(reads):
                self.trace.names[new[0]] = self.trace.names[read]


def _is_inside_disabled() -> bool:
    """True if a disabled function is running, and no compiled one within it.

    torch's own disabled functions do not count, nor does `__torch_dispatch__`, through which every operation passes.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ITERATION_CODE:
        if frame.f_code is DISABLED:
            wrapped = frame.f_locals["fn"]
            is_of_torch = str(getattr(wrapped, "__module__", "")).startswith("torch.")
            if not is_of_torch and getattr(wrapped, "__name__", "") != "__torch_dispatch__":
                return True
        frame = frame.f_back
    return False


def _count_kernel_workspace(name: str, args: Any, made: Any, *, is_strict: bool) -> int:
    """Return the workspace of a kernel, for kernels whose workspace is known and large."""
    if name == ATTENTION_BACKWARD:
        return int(args[1].numel()) * 4  # FlashAttention sums the queries' gradients in fp32
    if is_strict and name == "convolution":
        return _count_convolution_workspace(args[0], args[1], args[3:9], ("forward",))
    if is_strict and name == "convolution_backward":
        wanted = zip(("input gradient", "weight gradient"), args[10], strict=False)
        return _count_convolution_workspace(
            args[1], args[2], args[4:10], [which for which, is_asked in wanted if is_asked]
        )
    return 0


def _count_convolution_workspace(image: Tensor, weight: Tensor, how: Any, passes: Iterable[Any]) -> int:
    stride, _, dilation, is_transposed, _, groups = how
    is_plain = not is_transposed and groups == 1 and {*stride, *dilation} == {1} and image.dtype == torch.float32
    if image.ndim != 4 or weight.shape[2] != weight.shape[3] or not is_plain:
        return 0
    (n, c, height, width), (k, _, taps, _) = image.shape, weight.shape
    shape = Convolution(n, c, k, height, width, taps)
    return max((find_workspace_bytes(shape, which) for which in passes), default=0)


# --- memory over the operations of a step, and its peak for any batch ---


KINDS = ("half copies", "gathered", "gradients", "reductions", "activations", "workspaces")


@dataclass(frozen=True, slots=True)
class Life:
    """An allocation with its first and last operation, both included."""

    num_bytes: int
    first: int
    last: int
    kind: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Allocations of one step at one batch, and the workspace of each operation's kernels."""

    lives: tuple[Life, ...]
    workspaces: tuple[int, ...]

    def is_like(self, other: Timeline) -> bool:
        """True if both are the same step at two batch sizes."""
        shapes = ([(life.first, life.last, life.kind) for life in t.lives] for t in (self, other))
        return len(self.workspaces) == len(other.workspaces) and next(shapes) == next(shapes)

    def scale(self, factor: float) -> Timeline:
        """Return the timeline with all allocations but gradients larger by `factor`."""
        lives = (
            replace(life, num_bytes=int(life.num_bytes * (1 if life.kind == "gradients" else factor)))
            for life in self.lives
        )
        return Timeline(tuple(lives), self.workspaces)

    @property
    def gradient_bytes(self) -> int:
        return sum(life.num_bytes for life in self.lives if life.kind == "gradients")

    def _sum_over_ops(self, kind: str) -> npt.NDArray[np.int64]:
        # Bytes that appear and disappear at each operation; their running sum is the memory.
        change = np.zeros(len(self.workspaces) + 1, dtype=np.int64)
        for life in self.lives:
            if life.kind == kind:
                change[life.first] += life.num_bytes
                change[life.last + 1] -= life.num_bytes
        return np.cumsum(change[:-1])

    def find_peak(self, *, accumulates: bool = False) -> Counter[str]:
        """Return the bytes by kind at the peak.

        While gradients accumulate over micro-batches, all of them exist in every forward pass but the first.
        """
        by_kind = {kind: self._sum_over_ops(kind) for kind in KINDS}
        by_kind["workspaces"] = by_kind["workspaces"] + np.array(self.workspaces, dtype=np.int64)
        if accumulates:
            by_kind["gradients"] = np.full(len(self.workspaces), self.gradient_bytes)
        at = int(np.argmax(sum(by_kind.values())))
        return Counter({kind: int(found[at]) for kind, found in by_kind.items()})


def interpolate_peak(
    batch: int, first: tuple[int, Timeline], second: tuple[int, Timeline], **how: bool
) -> Counter[str]:
    """Return the peak at another batch size: each allocation is linear in the number of samples.

    Where the two traces differ in structure (a loop over chunks, another cut), the peaks are interpolated instead.
    """
    (small, one), (large, other) = first, second

    def interpolate(a: int, b: int) -> int:
        return max(0, round(a + (b - a) * (batch - small) / (large - small)))

    if one.is_like(other):
        pairs = zip(one.lives, other.lives, strict=True)
        lives = tuple(replace(life, num_bytes=interpolate(life.num_bytes, far.num_bytes)) for life, far in pairs)
        workspaces = tuple(map(interpolate, one.workspaces, other.workspaces))
        return Timeline(lives, workspaces).find_peak(**how)
    near, far = one.find_peak(**how), other.find_peak(**how)
    return Counter({kind: interpolate(near[kind], far[kind]) for kind in KINDS})


def derive_eager_timeline(trace: StepTrace) -> Timeline:
    """Return the allocations as traced, which is what eager mode runs."""
    last = len(trace.ops) - 1
    turn = next((number for number, op in enumerate(trace.ops) if op.in_backward), last + 1)
    lives = []
    for value in trace.values:
        if value.made_by < 0 or not value.num_bytes:
            continue
        end = last if value.ended_at < 0 else max(value.ended_at, value.made_by)
        is_kept = value.made_by < turn <= end
        kind = value.owner or ("activations" if is_kept else "workspaces")
        lives.append(Life(value.num_bytes, value.made_by, end, kind))
    return Timeline(tuple(lives), tuple(op.workspace_bytes for op in trace.ops))


# --- cuDNN's workspaces for convolutions in strict fp32 ---
#
# Three of cuDNN's four kinds of algorithms write transformed copies to memory, whose sizes follow from the shapes: all
# 87 large workspaces of 202 shapes on an H200 match one of the formulas below within 3 %. cuDNN chooses the algorithm
# by internal tables, for which no rule was found. Its choices are stored for a grid of shapes (cudnn_choices.txt);
# other shapes use the choice of the nearest one: for 56 shapes off the grid, 151 of 168 passes are right within 30 MB
# or 10 %. Strides, groups and 1 x 1 kernels need little or no workspace.

SIDES = (7, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
COMPLEX_BYTES, FLOAT_BYTES = 8, 4
TILE_FREQUENCIES = 32 * 17
"""Frequencies of a tile of 32 x 32 real numbers."""
LARGEST_BYTES = 10**11
"""Above this size torch falls back to cuDNN's next algorithm: the allocation would fail."""


class Convolution(NamedTuple):
    """A convolution of n images from c to k channels with taps x taps kernels and stride 1."""

    n: int
    c: int
    k: int
    height: int
    width: int
    taps: int


def count_fft_bytes(shape: Convolution) -> int:
    """Return the bytes of images and kernels after an FFT.

    Both are padded to powers of two and stored twice: complex, and as separate real and imaginary parts.
    """
    rows, columns = (1 << math.ceil(math.log2(side + shape.taps - 1)) for side in (shape.height, shape.width))
    return 2 * COMPLEX_BYTES * rows * (columns // 2 + 1) * (shape.c * shape.k + shape.n * shape.c)


def count_tiled_fft_bytes(shape: Convolution) -> int:
    """Return the bytes of transformed kernels and of two tiles of each image."""
    return COMPLEX_BYTES * TILE_FREQUENCIES * (shape.c * shape.k + 2 * shape.n * (shape.c + shape.k))


def count_winograd_bytes(shape: Convolution) -> int:
    """Return the bytes of F(4 x 4, 3 x 3): 6 x 6 transformed tiles of inputs and outputs, and of the kernels."""
    tiles = shape.n * math.ceil(shape.height / 4) * math.ceil(shape.width / 4)
    return FLOAT_BYTES * 36 * (tiles * (shape.c + shape.k) + shape.c * shape.k)


Pass = Literal["forward", "input gradient", "weight gradient"]
ALGORITHMS: dict[Pass, Callable[[Convolution], int]] = {
    "forward": count_fft_bytes,
    "input gradient": count_tiled_fft_bytes,
    "weight gradient": count_winograd_bytes,
}
"""The algorithm of each pass that takes a large workspace."""


def find_workspace_bytes(shape: Convolution, which: Pass) -> int:
    """Return cuDNN's workspace for one pass of a convolution in strict fp32."""
    if shape.taps == 1 or which == "weight gradient" and shape.taps != 3:
        return 0
    size = ALGORITHMS[which](shape)
    # One bit per pass: set if cuDNN chooses the algorithm with the large workspace.
    bit = 1 << list(ALGORITHMS).index(which)
    return size if _find_choice(shape) & bit and size < LARGEST_BYTES else 0


@functools.cache
def _find_choice(shape: Convolution) -> int:
    shapes, choices = _load_grid()
    # Distance in logarithms, because sizes differ by factors.
    wanted: npt.NDArray[np.float64] = np.log2([shape.n, shape.c, shape.k, math.sqrt(shape.height * shape.width)])
    return int(choices[np.argmin(((shapes - wanted) ** 2).sum(axis=1))])


@functools.cache
def _load_grid() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the stored shapes, as logarithms of n, c, k and side, and cuDNN's choice for each (one bit per pass)."""
    lines = resources.files(__package__).joinpath("cudnn_choices.txt").read_text().splitlines()
    known = [
        ((int(n), int(c), int(k), side), int(digit))
        for n, c, k, digits in (line.split() for line in lines if not line.startswith("#"))
        for side, digit in zip(SIDES, digits, strict=True)
        if digit != "."
    ]
    return np.log2([shape for shape, _ in known]), np.array([choice for _, choice in known])
