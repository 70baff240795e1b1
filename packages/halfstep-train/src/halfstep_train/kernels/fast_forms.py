"""Decide, in one place, where a fast form runs instead of torch's own layer.

A fast form gives the layer's result up to the order of sums. It is written in plain torch operations that the compiler
fuses with their neighbours, so it pays inside `torch.compile` on a GPU and costs time everywhere else: eager code and
the CPU run torch's layers, bit-exactly. `force` overrides that, for tests and for measuring a form alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Form = Literal["patches", "class_token", "chain", "group_norm"]
FORMS: tuple[Form, ...] = get_args(Form)

LEAST_SHARED_MEMORY = 160 * 1024  # bytes per block

_forced: dict[Form, bool] = {}  # read while tracing: the compiler guards on it, so a change traces again
_pretended = False
_has_triton = importlib.util.find_spec("triton") is not None  # at import: torch 2.11's compiler cannot trace it


def is_wanted(form: Form, x: Tensor) -> bool:
    """True if the layer with input `x` should compute in this form."""
    return is_forced_on(form, otherwise=torch.compiler.is_compiling() and x.is_cuda)


def is_forced_on(form: Form, *, otherwise: bool) -> bool:
    """Return what `force` sets for this form, or `otherwise` if it sets nothing."""
    return _forced.get(form, otherwise)


def can_chain(x: Tensor, *, is_training: bool) -> bool:
    """True if a model with input `x` should, and can, run as a chain of our kernels between convolutions.

    A chain runs eagerly, so it is called through `torch.compiler.disable`. It computes in fp32 at most, and pays where
    maps are half as wide: under autocast. A one-channel image counts as channels_last whatever its strides.
    """
    is_rows = x.is_contiguous(memory_format=torch.channels_last)
    is_possible = is_training and torch.is_grad_enabled() and is_rows and x.dtype != torch.float64
    return is_possible and is_wanted("chain", x) and (has_half_autocast(x) or "chain" in _forced) and has_triton()


def allow_chains(*, on: bool) -> contextlib.AbstractContextManager[None]:
    """Let models run as chains inside, for captured steps. In uncaptured steps their launches can cost the host more
    time than the kernels save on the device (benchmarks/NOTES.md)."""
    return contextlib.nullcontext() if on else force(False, "chain")


@functools.cache
def has_room_for_tiles(device: torch.device) -> bool:
    """True if the GPU gives a block the shared memory that our kernels' tiles need.

    Tiles take up to 147 KiB where 163 are available (A100), up to 201 where 227 are (H100, H200, B200). T4, A10, L4 and
    GeForce have 64 to 100. The CPU, where kernels are interpreted, has no such limit.
    """
    if device.type != "cuda":
        return True
    offered = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # not in ROCm's
    return int(offered) >= LEAST_SHARED_MEMORY


def has_half_autocast(x: Tensor) -> bool:
    """True if layers on the device of `x` currently compute in a half format under autocast."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) in (torch.bfloat16, torch.float16)


def has_triton() -> bool:
    """True if Triton is installed, as it is with every CUDA build of torch on Linux."""
    return _has_triton


@contextlib.contextmanager
def force(on: bool, *forms: Form) -> Iterator[None]:
    """Switch these forms, or all, on or off on any device; enter it outside of compiled code."""
    before = dict(_forced)
    _forced.update(dict.fromkeys(forms or FORMS, on))
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def is_pretending() -> bool:
    """True if tensors have no content and only represent those of a GPU: our kernels are then not launched."""
    return _pretended


@contextlib.contextmanager
def pretend_launches() -> Iterator[list[str]]:
    """Trace memory with tensors without content: launchers allocate their outputs, and nothing runs.

    Yields the list of kernel names that would have been launched.
    """
    global _pretended
    before, _pretended = _pretended, True
    try:
        with _skip_launches() as names:
            yield names
    finally:
        _pretended = before


@contextlib.contextmanager
def _skip_launches() -> Iterator[list[str]]:
    names: list[str] = []
    if not has_triton():
        yield names
        return
    from triton.runtime.jit import KernelInterface

    def noted(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: names.append(getattr(kernel, "__name__", ""))

    launching = KernelInterface.__getitem__
    # `kernel[grid]` returns what launches: replaced here for all kernels at once.
    KernelInterface.__getitem__ = noted
    try:
        yield names
    finally:
        KernelInterface.__getitem__ = launching
