"""The contexts of `plan.forward()`, `plan.backend()` and `hs.simulate`. Cheap enough for every step; all is restored.

`plan.forward()` sets backend flags, attention kernels, simulation and autocast; `plan.backend()` does the same without
autocast, for backward. Both may be entered around a compiled model. Inside a compiled region flags cannot be set (they
are read at compile time), so there the flags in force are compared with the plan, and only autocast is entered.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.backend_flags import Fp32Context, Fp32Mode, read_effective_leaves, set_fp32_mode
from halfstep.errors import PrecisionError
from halfstep.precision.op_lists import use_cuda_op_lists
from halfstep.precision.simulate import simulate_kernels

if TYPE_CHECKING:
    from halfstep.precision.plan import Plan  # whose methods call this file


AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Autocast's dtype by precision; under fp8 everything but the swapped Linear layers runs in bf16."""
BACKWARD_AS_EAGER: dict[str, Any] = {"backward_pass_autocast": "off"}
"""Settings of torch._functorch.config while code is compiled: backward runs outside of autocast, as in eager code.
By default it would compute the gradients of fp32 modules and islands in half precision."""


def get_autocast_dtype(precision: str) -> torch.dtype | None:
    """Return autocast's dtype for a precision, or None if autocast is off."""
    return AUTOCAST_DTYPES.get(precision.removesuffix("-true"))


def make_forward_context(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Set backend flags, simulated kernels, op lists and autocast as planned (autocast off for fp32 and tf32)."""
    # torch.compile traces a generator-based context manager but not the Reusable class.
    return _enter_forward(plan) if torch.compiler.is_compiling() else Reusable(lambda: _enter_forward(plan))


@contextlib.contextmanager
def _enter_forward(plan: Plan) -> Iterator[None]:
    # torch.compile traces torch.autocast, but not the functions that read and clear its state.
    autocast = _make_autocast if torch.compiler.is_compiling() else FreshAutocast
    with enter_backend(plan), autocast(get_device_type(plan), get_autocast_dtype(plan.granted)):
        yield


def make_backend_context(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Set backend flags and simulated kernels: the context of backward and the optimizer."""
    return enter_backend(plan) if torch.compiler.is_compiling() else Reusable(lambda: enter_backend(plan))


def enter_autocast(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Enter autocast as planned: what a forward pass needs in addition to `enter_backend`."""
    return FreshAutocast(get_device_type(plan), get_autocast_dtype(plan.granted))


def enter_backend(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Enter the context of `plan.backend()` once, in less time."""
    mode: Fp32Mode = "tf32" if plan.compute == "tf32" and not plan.simulated else "ieee"
    if torch.compiler.is_compiling():
        _check_compiled_region(mode, simulated=plan.simulated)
        return contextlib.nullcontext()
    if plan.simulated:
        return _enter_simulated_backend(plan)
    return SoundBackend(mode) if has_cudnn_fault(plan.device) else Fp32Context(mode)


def get_device_type(plan: Plan) -> str:
    """Return the plan's device type as autocast names it: `cuda`, `cpu`, ..."""
    if not plan.device:
        raise PrecisionError(
            f"this plan is for {plan.device_name}, which is not on this machine",
            fix="make the plan for a device on this machine",
        )
    return plan.device.partition(":")[0]


# Before torch 2.11, autocast's cache also keeps casts made under no_grad, without gradients, and uses them in the next
# pass of the same weight, which then gets no gradient (pytorch/pytorch#158232).
CACHE_ENABLED = None if torch.__version__ >= "2.11" else False


def _make_autocast(device_type: str, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=CACHE_ENABLED)


class FreshAutocast:
    """Autocast with an empty cache of cast weights, which leaves nothing of it behind. It is entered once.

    torch counts the open autocast contexts of a thread and clears the cache when the count returns to 0. An interrupt
    inside `torch.autocast.__enter__` or `__exit__` leaves the count too high: the cache would then never be cleared,
    and all later steps would use stale copies of the weights. The state is set directly here: torch.autocast asks the
    device in every call whether it has the dtype, which the plan knows.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self.device_type, self.dtype = device_type, dtype

    def __enter__(self) -> None:
        device_type, dtype = self.device_type, self.dtype
        self.before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        self.kept_casts = torch.is_autocast_cache_enabled()
        self.num_open = torch.autocast_increment_nesting()
        try:
            torch.clear_autocast_cache()  # the copies of a context that was left open before
            torch.set_autocast_enabled(device_type, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(device_type, dtype)
            torch.set_autocast_cache_enabled(self.kept_casts and CACHE_ENABLED is None)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._restore()
        except BaseException:  # an interrupt in between
            self._restore()
            raise

    def _restore(self) -> None:
        """Close this context and those that were left open inside. Calling it twice is harmless."""
        num_open = torch.autocast_increment_nesting()
        while num_open >= self.num_open:
            num_open = torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.device_type, self.before[0])
        torch.set_autocast_dtype(self.device_type, self.before[1])
        torch.set_autocast_cache_enabled(self.kept_casts)


class SoundBackend(Fp32Context):
    """Backend flags, and attention without cuDNN's faulty shapes (below). In backward too: activation checkpointing
    runs forward again there."""

    def __enter__(self) -> None:
        super().__enter__()
        try:
            _count_entry(1)
        except BaseException:
            super().__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            _count_entry(-1)
        finally:
            super().__exit__()


@contextlib.contextmanager
def _enter_simulated_backend(plan: Plan) -> Iterator[None]:
    # The lists are needed in backward too: activation checkpointing runs forward again there, under its own autocast.
    with set_fp32_mode("ieee"), simulate_kernels(tf32=plan.compute == "tf32"), use_cuda_op_lists(get_device_type(plan)):
        yield


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_compiled_region(mode: Fp32Mode, simulated: bool) -> None:
    if simulated:
        raise PrecisionError("a simulated plan cannot run inside torch.compile", why="simulation is eager only")
    # torch reports "none" for a leaf that was never set: true fp32, or the library's own default.
    wrong = {leaf: value for leaf, value in read_effective_leaves().items() if value.replace("none", "ieee") != mode}
    if wrong:
        raise PrecisionError(
            f"plan.forward() is used inside torch.compile with different backend flags: {wrong}",
            why="a compiled region uses the flags that are set where it is called",
            fix="enter plan.forward() or plan.backend() around the compiled call as well",
        )


SIMULATED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": None}


def simulate(format: str, device_type: str = "cpu") -> Reusable:
    """Run the code inside, forward and backward, with the numerics of bf16, fp16 or tf32. ::

        with hs.simulate("fp16"):
            loss = loss_fn(model(x), y)
            loss.backward()

    fp8 swaps Linear modules, so it needs a plan: `hs.decide("fp8", hardware, model, simulate=True).apply(model)`.
    """
    if format not in SIMULATED_DTYPES:
        raise PrecisionError(
            f"simulate({format!r}) is not supported",
            fix=f"use one of {', '.join(SIMULATED_DTYPES)}; for fp8, use a plan",
        )
    dtype = SIMULATED_DTYPES[format]

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with simulate_kernels(tf32=dtype is None), use_cuda_op_lists(device_type), FreshAutocast(device_type, dtype):
            yield

    return Reusable(enter)


class Reusable(contextlib.ContextDecorator):
    """A context that can be entered repeatedly, nested, and from several threads: each entry creates a new one."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, threading.local()

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        vars(self._entered).setdefault("stack", []).append(context)

    def __exit__(self, *error: Any) -> bool | None:
        left: bool | None = self._entered.stack.pop().__exit__(*error)
        return left


# --- attention without the shapes at which cuDNN's backward gives NaN ---
# On Hopper GPUs cuDNN, torch's first choice since 2.11, reads keys in tiles of 128. If the last tile is half full and
# all scores of a query are below -88, exp overflows in the empty half and the query's gradient is NaN: in bf16 and
# fp16, with and without a mask (pytorch/pytorch#196678; a survey on an H200 found no other lengths). Causal attention
# without a mask is right. A single query of a single head fails in the same way with 128 keys and more
# (NVIDIA/cudnn-frontend#1072). For those shapes another of torch's kernels runs; all others stay with cuDNN, which is
# faster. The survey is in benchmarks/results/cudnn_attention.json; up to 256 samples fail at no other length. The
# workaround applies to every cuDNN version: 9.26 was announced as fixed, and a 9.30 was seen to fail
# (NVIDIA/cudnn-frontend#628).

TILE = 128
OTHER_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

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
    return [kernel for kernel, is_on in zip(OTHER_KERNELS, enabled, strict=True) if is_on]


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


def use_sound_attention(device: str) -> contextlib.AbstractContextManager[None]:
    """Replace `F.scaled_dot_product_attention` by `run_attention` inside, if the device has the fault.

    Code that imported the function from torch earlier keeps torch's; its NaN is then a bad step, which the guard drops.
    """
    return _SoundAttention() if has_cudnn_fault(device) else contextlib.nullcontext()


class _SoundAttention:
    """A context of `use_sound_attention`. A class: every replay enters one, and a generator takes twice the time."""

    def __enter__(self) -> None:
        _count_entry(1)

    def __exit__(self, *error: object) -> None:
        _count_entry(-1)


def _count_entry(num: int) -> None:
    """Replace or restore attention at the first entry or last exit of any thread; keep a function the user has set."""
    global _num_inside
    with _switching:
        _num_inside += num
        now, wanted = (torch_attention, run_attention) if _num_inside else (run_attention, torch_attention)
        if F.scaled_dot_product_attention is now:
            F.scaled_dot_product_attention = wanted
