"""Observe every operation of a step, forward and backward, by the module it belongs to.

The observer sees operations below autocast and autograd, as they reach the kernels, so it sees what ran and not what
was requested. It changes no operand and no result.

- Global module hooks track the running module; the model itself is unchanged.
- A backward operation belongs to the module whose forward created its autograd node. Nodes are numbered as they are
  created, so the number that was current when a forward operation ran leads back to its module.
- Recomputed forward passes run inside a backward node; they belong to the module that the hooks report there.

Compiled code is not seen this way: under a dispatch mode torch.compile steps aside (compiled_code.py reads its graphs).
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from halfstep.backend_flags import read_effective_leaves
from halfstep.islands import is_on_island
from halfstep.precision.plan import ROOT

OUTSIDE = "(outside the model)"
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of matmul, convolution, attention or custom operation in one module and direction."""

    module: str
    direction: Direction
    operation: str
    format: str
    is_island: bool = False
    is_custom: bool = False
    function: str = ""
    """The custom autograd Function whose backward ran the operation."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A change of format in one module and direction."""

    module: str
    direction: Direction
    source: str
    target: str


@dataclass(slots=True)
class Seen:
    """What was observed in one or several steps."""

    flops: Counter[Product] = field(default_factory=Counter)
    calls: Counter[Product] = field(default_factory=Counter)
    """Number of calls of the same products; those of unknown cost appear only here."""
    casts: Counter[Cast] = field(default_factory=Counter)
    cast_bytes: Counter[Cast] = field(default_factory=Counter)
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes kept for backward by module and format; weights do not count."""

    def add_product(
        self, module: str, direction: Direction, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        result: Any, *, is_island: bool, function: str,
    ) -> None:  # fmt: skip
        """Add the format and FLOPs of a matmul, convolution, attention or custom operation."""
        if not (name := find_compute_format(func, args, kwargs)):
            return
        operation = f"{func.namespace}::{func._opname}" if is_custom(func) else func._opname
        found = Product(module, direction, operation, name, is_island and name == "fp32", is_custom(func), function)
        self.calls[found] += 1
        if flops := count_flops(func, args, kwargs, result):
            self.flops[found] += flops

    def add_cast(self, module: str, direction: Direction, source: Tensor, result: Tensor) -> None:
        """Add a change of format between floating-point tensors."""
        if source.dtype != result.dtype and source.is_floating_point() and result.is_floating_point():
            found = Cast(module, direction, name_format(source.dtype), name_format(result.dtype))
            self.casts[found] += 1
            self.cast_bytes[found] += result.nbytes


class _Location(NamedTuple):
    module: str
    is_island: bool


class _Entered(NamedTuple):
    module: str
    node: int | None
    """The node of backward that was running: then it is a recomputed forward pass."""


class Observer:
    """Observe what runs inside `watching()`, which may be entered for several steps."""

    def __init__(self, model: nn.Module, frozen: Mapping[str, nn.Module] | None = None) -> None:
        self.names = {module: name or ROOT for name, module in model.named_modules()}
        for part, module in (frozen or {}).items():
            self.names |= {inner: f"{part}.{name}".rstrip(".") for name, inner in module.named_modules()}
        self.weights = {
            p.untyped_storage().data_ptr() for m in self.names for p in nn.Module.parameters(m, recurse=False)
        }
        self.seen = Seen()
        self._stack: list[_Entered] = []
        self._thread = 0
        self._numbers: list[int] = []
        self._places: list[_Location] = []
        self._kept: set[int] = set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Observe the operations that run inside."""
        self._thread = threading.get_ident()
        self._kept.clear()  # of the previous micro-batch, whose memory now holds other tensors
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept),
            _Operations(self),
        ):
            yield
        self._stack.clear()

    # --- where ---

    def _enter(self, module: nn.Module, args: Any) -> None:
        # Modules that are not in the model, such as those made inside a forward, count as the enclosing one. The number
        # of the running backward node, if there is one, marks a recomputed forward pass.
        enclosing = self._stack[-1].module if self._stack else OUTSIDE
        self._stack.append(_Entered(self.names.get(module, enclosing), _get_number(torch._C._current_autograd_node())))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def locate(self) -> tuple[_Location, Direction, str]:
        """Return module, direction, and the custom autograd Function that runs."""
        node: Any = torch._C._current_autograd_node()
        here = self._stack[-1] if self._stack else _Entered(OUTSIDE, None)
        # Forward: no node of backward runs, or the module was entered while this same node ran, as when checkpointing
        # recomputes a block.
        if here.node == _get_number(node) or node is None:
            place = _Location(here.module, is_on_island())
            self._remember(place)
            return place, "forward", ""
        function = type(node).__name__.removesuffix("Backward") if isinstance(node, BackwardCFunction) else ""
        # That of the first operation that ran after the node was created: several nodes made by one call share the
        # location noted after the last of them.
        found = bisect.bisect_left(self._numbers, node._sequence_nr())
        place = self._places[found] if found < len(self._places) else _Location(OUTSIDE, False)
        return place, "backward", function

    def _remember(self, place: _Location) -> None:
        if threading.get_ident() != self._thread:
            return  # recomputed in a thread of backward, which has its own counter
        # The counter holds the number of the next node, so the newest node has one less. Below autograd, that is the
        # node of the operation which runs now, if it has one.
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        # Numbers are kept ascending for the bisection. Operations that create no node leave the counter as it
        # is and are not noted.
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._places.append(place)

    # --- what ---

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if tensor.is_floating_point() and address not in self.weights and address not in self._kept:
            self._kept.add(address)
            place, _, _ = self.locate()
            self.seen.kept[place.module, name_format(tensor.dtype)] += storage.nbytes()
        # Detached: a node that saves its own output forms a reference cycle that the garbage collector cannot see.
        # Without a backward pass the graph would stay alive, its gradients tied to this stream, and no later step could
        # be captured.
        return tensor.detach()


class _Operations(TorchDispatchMode):
    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, seen = func(*args, **kwargs), self.observer.seen
        (module, is_island), direction, function = self.observer.locate()  # notes the nodes of all operations
        if is_product(func):
            seen.add_product(module, direction, func, args, kwargs, result, is_island=is_island, function=function)
        elif func is torch.ops.aten._to_copy.default:
            seen.add_cast(module, direction, args[0], result)
        return result


def _get_number(node: Any) -> int | None:
    return None if node is None else int(node._sequence_nr())


# --- operations whose format the plan decides: matmuls, convolutions, attention and custom operations ---
# FLOPs follow torch.utils.flop_counter: one multiply-add counts as two.


aten = torch.ops.aten

FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
HALF = ("bf16", "fp16")
TORCHS_OWN = {"aten", "prim", "prims", "profiler", "inductor", "rngprims", "debugprims", "_c10d_functional", "c10d"}
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution", "cudnn_convolution", "convolution_overrideable"}


def _count_vector_flops(left: Tensor, right: Tensor, *, out_val: Any) -> int:
    return 2 * left.numel()


WITHOUT_FORMULA: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten._scaled_dot_product_fused_attention_overrideable: flop_registry[aten._scaled_dot_product_flash_attention],
    aten.mv: _count_vector_flops,
    aten.dot: _count_vector_flops,
}
"""FLOP formulas of products that the registry of torch lacks."""
RECURRENT = {"_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_scaled_mm_v2"}
"""Products of unknown cost."""


@functools.cache
def is_custom(func: Any) -> bool:
    """True for an operation of a custom library: autocast does not know it unless it is registered."""
    return func.namespace not in TORCHS_OWN


@functools.cache
def is_product(func: Any) -> bool:
    """True for an operation whose format the plan decides."""
    packet = func._overloadpacket
    return packet in flop_registry or packet in WITHOUT_FORMULA or packet.__name__ in RECURRENT or is_custom(func)


def count_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """Return the FLOPs of an operation; None if there is no formula for it."""
    packet = func._overloadpacket
    formula = flop_registry.get(packet) or WITHOUT_FORMULA.get(packet)
    if formula is None:
        return None
    shaped = (value for value in args if not isinstance(value, torch.dtype))  # drop `out_dtype`
    return int(formula(*shaped, **kwargs, out_val=result))


def name_format(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as `bf16`; `fp8` for both of its formats."""
    return FORMATS.get(dtype, str(dtype)).removeprefix("torch.").partition("_e")[0]


def find_compute_format(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the format in which operands were multiplied; empty if none is floating-point."""
    found = [name_format(tensor.dtype) for tensor in iterate_floating((args, dict(kwargs)))]
    if not found:
        return ""
    # Operands can differ, such as an fp32 bias or accumulator: the narrowest is what is multiplied. A custom operation
    # may take them in any roles, so its first operand counts.
    lowest = next((name for name in ("fp8", "fp16", "bf16") if name in found), found[0]) if not is_custom(func) else ""
    name = lowest or found[0]
    return "tf32" if name == "fp32" and _uses_tf32(func, args) else name


def _uses_tf32(func: Any, args: tuple[Any, ...]) -> bool:
    """True if the current switch for fp32 operands allows TF32, which the library checks before it multiplies."""
    if is_custom(func):
        return False
    device = next((tensor.device.type for tensor in iterate_floating(args)), "cpu")
    backend = "cuda" if device == "cuda" else "mkldnn"
    kind = "conv" if func._overloadpacket.__name__ in CONVOLUTIONS else "matmul"
    return read_effective_leaves()[backend, kind] == "tf32"


def iterate_floating(value: Any) -> Iterator[Tensor]:
    """Return the floating-point tensors of nested arguments."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
