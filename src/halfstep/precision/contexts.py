"""The two contexts a step runs in. Cheap enough for every step; everything is restored on exit.

`forward_context` sets backend flags, attention kernels, simulation and autocast; `backend_context` the same without
autocast, for backward. Both may be entered around a compiled model. Inside a compiled region flags cannot be set (they
are read at compile time), so there the flags in force are compared with the plan, and only autocast is entered.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.backend_flags import Fp32Mode, fp32_mode, read_effective_leaves
from halfstep.errors import PrecisionError
from halfstep.precision.op_lists import cuda_op_lists
from halfstep.precision.simulate import Reusable, simulated_kernels

if TYPE_CHECKING:
    from halfstep.precision.plan import Plan  # whose methods call this file


AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Autocast's dtype by precision; under fp8 everything but the swapped Linear layers runs in bf16."""


def get_autocast_dtype(precision: str) -> torch.dtype | None:
    """Return autocast's dtype for a precision, or None if autocast is off."""
    return AUTOCAST_DTYPES.get(precision.removesuffix("-true"))


def forward_context(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Set backend flags, simulated kernels, op lists and autocast as planned (autocast off for fp32 and tf32)."""
    # torch.compile traces a generator-based context manager but not the Reusable class.
    return _forward(plan) if torch.compiler.is_compiling() else Reusable(lambda: _forward(plan))


@contextlib.contextmanager
def _forward(plan: Plan) -> Iterator[None]:
    with _backend(plan), make_autocast(plan):
        yield


def backend_context(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Set backend flags and simulated kernels: the context of backward and the optimizer."""
    return _backend(plan) if torch.compiler.is_compiling() else Reusable(lambda: _backend(plan))


def _backend(plan: Plan) -> contextlib.AbstractContextManager[None]:
    mode: Fp32Mode = "tf32" if plan.compute == "tf32" and not plan.simulated else "ieee"
    if torch.compiler.is_compiling():
        _check_compiled_region(mode, simulated=plan.simulated)
        return contextlib.nullcontext()
    if plan.simulated:
        return _simulated_backend(plan)
    return _native_backend(plan, mode)


def get_device_type(plan: Plan) -> str:
    """Return the plan's device type as autocast names it: `cuda`, `cpu`, ..."""
    if not plan.device:
        raise PrecisionError(
            f"this plan is for {plan.device_name}, which is not on this machine",
            fix="make the plan for a device of this machine",
        )
    return plan.device.partition(":")[0]


def make_autocast(plan: Plan) -> torch.autocast:
    """Return autocast as planned: what `forward_context` adds to `backend_context`."""
    dtype = get_autocast_dtype(plan.granted)
    if dtype is None:
        return torch.autocast(get_device_type(plan), enabled=False)
    return torch.autocast(get_device_type(plan), dtype=dtype)


@contextlib.contextmanager
def _native_backend(plan: Plan, mode: Fp32Mode) -> Iterator[None]:
    # In backward too: activation checkpointing runs forward again there.
    with fp32_mode(mode), sound_attention(plan.device):
        yield


@contextlib.contextmanager
def _simulated_backend(plan: Plan) -> Iterator[None]:
    # The lists are needed in backward too: activation checkpointing runs forward again there, under its own autocast.
    with fp32_mode("ieee"), simulated_kernels(tf32=plan.compute == "tf32"), cuda_op_lists(get_device_type(plan)):
        yield


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_compiled_region(mode: Fp32Mode, simulated: bool) -> None:
    if simulated:
        raise PrecisionError("a simulated plan inside torch.compile", why="simulation is eager only")
    # torch reports "none" for a leaf that was never set: true fp32, or the library's own default.
    wrong = {leaf: value for leaf, value in read_effective_leaves().items() if value.replace("none", "ieee") != mode}
    if wrong:
        raise PrecisionError(
            f"plan.forward() inside torch.compile with different backend flags set: {wrong}",
            why="a compiled region uses the flags that are set where it is called",
            fix="enter plan.forward() or plan.backend() around the compiled call as well",
        )


# --- attention without the shapes at which cuDNN's backward gives NaN ---
# On Hopper GPUs cuDNN, torch's first choice since 2.11, reads keys in tiles of 128. If the last tile is half full and
# all scores of a query are below -88, exp overflows in the empty half and the query's gradient is NaN: in bf16 and
# fp16, with and without a mask (pytorch/pytorch#196678; a survey on an H200 found no other lengths). Causal attention
# without a mask is right. A single query of a single head fails in the same way with 128 keys and more
# (NVIDIA/cudnn-frontend#1072). For those shapes another of torch's kernels runs; all others stay with cuDNN, which is
# faster. benchmarks/cudnn_attention.py is the survey; batches of up to 256 samples fail at no other length. The
# workaround applies to every cuDNN version: 9.26 was announced as fixed, and a 9.30 was seen to fail
# (NVIDIA/cudnn-frontend#628).

TILE = 128
OTHERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

torch_attention = torch._C._nn.scaled_dot_product_attention  # other code may have replaced the one in F by now

_switching = threading.RLock()
"""Kernels are switched for the whole process: without the lock, a second thread would treat the first one's choice as
the user's setting and restore that on exit."""
_num_inside = 0


@functools.cache
def has_cudnn_fault(device: str) -> bool:
    """True if cuDNN on this device has the fault (Hopper: compute capability 9.x)."""
    if not torch.cuda.is_available() or torch.version.hip or not device.startswith("cuda"):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


# Called during tracing instead of being traced: torch 2.11's compiler evaluates is_exporting() to True everywhere,
# which would leave compiled code unprotected.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_traced_for_any_length() -> bool:
    """True while torch.export or torch.jit.trace records a program."""
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def has_bad_shape(query: Any, key: Any, *, is_causal: bool) -> bool:
    """True for shapes at which cuDNN fails; False while a length-independent program is recorded, or for bad inputs."""
    if is_traced_for_any_length() or not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        return False
    if query.is_nested or key.is_nested or query.dim() < 2 or key.dim() < 2:
        return False
    return query.shape[-2] == 1 or not is_causal and key.shape[-2] % TILE == TILE // 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def list_allowed_kernels() -> list[SDPBackend]:
    """Return the other kernels that may run: those which the user's own `sdpa_kernel` leaves enabled."""
    flags = torch.backends.cuda
    enabled = (flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled())
    return [kernel for kernel, is_on in zip(OTHERS, enabled, strict=True) if is_on]


def run_attention(*arguments: Any, **options: Any) -> Tensor:
    """Run torch's attention, avoiding cuDNN's kernel where it fails, unless the user allows no other kernel."""
    query = arguments[0] if arguments else options.get("query")
    key = arguments[1] if len(arguments) > 1 else options.get("key")
    is_causal = arguments[5] if len(arguments) > 5 else options.get("is_causal", False)
    kernels = list_allowed_kernels() if has_bad_shape(query, key, is_causal=is_causal) else []
    if not kernels:
        return torch_attention(*arguments, **options)
    # Compiled code chooses its kernel while it is traced and keeps it.
    alone = contextlib.nullcontext() if torch.compiler.is_compiling() else _switching
    with alone, sdpa_kernel(kernels):
        return torch_attention(*arguments, **options)


@contextlib.contextmanager
def sound_attention(device: str) -> Iterator[None]:
    """Replace `F.scaled_dot_product_attention` by `run_attention` inside, if the device has the fault.

    Code that imported the function from torch earlier keeps torch's; its NaN is then a bad step, which the guard drops.
    """
    if not has_cudnn_fault(device):
        yield
        return
    _count_entry(1)
    try:
        yield
    finally:
        _count_entry(-1)


def _count_entry(num: int) -> None:
    """Replace or restore attention at the first entry or last exit of any thread; keep a function the user has set."""
    global _num_inside
    with _switching:
        _num_inside += num
        now, wanted = (torch_attention, run_attention) if _num_inside else (run_attention, torch_attention)
        if F.scaled_dot_product_attention is now:
            F.scaled_dot_product_attention = wanted
