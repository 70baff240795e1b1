"""The one place that decides where a fast form runs instead of torch's own layer.

A fast form gives the layer's result up to the order of sums. It is written in plain torch operations that the compiler
fuses with their neighbours, so it pays inside `torch.compile` on a GPU and costs time everywhere else: eager code and
the CPU run torch's layers, to the bit. `force` overrules that, for tests and for measuring a form alone.
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
_has_triton = importlib.util.find_spec("triton") is not None  # here, as torch 2.11's compiler cannot trace the search


def is_wanted(form: Form, x: Tensor) -> bool:
    """Whether the layer that got `x` should compute in this form."""
    return is_forced_on(form, otherwise=torch.compiler.is_compiling() and x.is_cuda)


def is_forced_on(form: Form, *, otherwise: bool) -> bool:
    """What `force` says of this form, or `otherwise` where it says nothing."""
    return _forced.get(form, otherwise)


def can_chain(x: Tensor, *, is_training: bool) -> bool:
    """Whether a model that got `x` should, and can, run as a chain of our own kernels between convolutions.

    A chain runs eagerly, so it is called through `torch.compiler.disable`. It computes in fp32 at most, and pays where
    maps are half as wide: under autocast. An image of one channel is channels_last too, however it was made.
    """
    is_rows = x.is_contiguous(memory_format=torch.channels_last)
    is_possible = is_training and torch.is_grad_enabled() and is_rows and x.dtype != torch.float64
    return is_possible and is_wanted("chain", x) and (has_half_autocast(x) or "chain" in _forced) and has_triton()


def allow_chains(*, on: bool) -> contextlib.AbstractContextManager[None]:
    """Whether models may run as chains within: where steps are captured. One by one, their launches can cost the host
    more time than the kernels save the device (benchmarks/NOTES.md)."""
    return contextlib.nullcontext() if on else force(False, "chain")


@functools.cache
def has_room_for_tiles(device: torch.device) -> bool:
    """Whether a GPU lets a block have the shared memory that our kernels' tiles take: up to 147 KiB where it offers 163
    (A100), up to 201 where it offers 227 (H100, H200, B200). T4, A10, L4 and GeForce offer 64 to 100; the CPU, where
    kernels are interpreted, has no such limit."""
    if device.type != "cuda":
        return True
    offered = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # not in ROCm's
    return int(offered) >= LEAST_SHARED_MEMORY


def has_half_autocast(x: Tensor) -> bool:
    """Whether layers on the device of `x` compute in a half format now."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) in (torch.bfloat16, torch.float16)


def has_triton() -> bool:
    """Whether the kernels' language is installed, as it is with every build of torch for CUDA on Linux."""
    return _has_triton


@contextlib.contextmanager
def force(on: bool, *forms: Form) -> Iterator[None]:
    """Switch these forms, or all, on or off whatever the device; to be entered outside of compiled code."""
    before = dict(_forced)
    _forced.update(dict.fromkeys(forms or FORMS, on))
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def is_pretending() -> bool:
    """Whether tensors have no content and only stand for a GPU's: kernels of our own are then not launched."""
    return _pretended


@contextlib.contextmanager
def pretend_launches() -> Iterator[list[str]]:
    """Count memory within, of tensors without content: whoever launches kernels takes their memory, and nothing runs.
    The names of kernels that would have been launched come back."""
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
    KernelInterface.__getitem__ = noted
    try:
        yield names
    finally:
        KernelInterface.__getitem__ = launching
