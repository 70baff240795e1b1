"""CUDA's autocast lists, in force on any device while simulating.

The CPU's own lists differ: they leave softmax, log, exp, sum and the norms in half, and upcast FFTs that CUDA does not.
While a simulation runs, the autocast kernels that differ are overridden in torch's dispatcher, so that a laptop shows
what the GPU will do. The overrides sit above autograd, where autocast does, so casts have their gradients. They are
registered once per outermost entry (about 3 ms) and removed by its exit, which brings the device's own lists back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.precision.autocast_lists import BANNED, FP32, FP32_BY_DTYPE, KEPT, LOWER, PROMOTE, RECURRENT

Kernel = Callable[..., Any]

KEYS = {"cpu": "AutocastCPU", "mps": "AutocastMPS", "xpu": "AutocastXPU"}
"""Dispatch keys of the devices whose lists are not CUDA's."""

_entries: dict[str, int] = {}
_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def cuda_op_lists(device_type: str) -> Iterator[None]:
    """Autocast on this device follows CUDA's lists inside, and its own again outside."""
    if device_type not in KEYS:
        yield
        return
    with _lock:
        _entries[device_type] = _entries.get(device_type, 0) + 1
        if _entries[device_type] == 1:
            _libraries[device_type] = _override(device_type)
    try:
        yield
    finally:
        with _lock:
            _entries[device_type] -= 1
            if _entries[device_type] == 0:
                _libraries.pop(device_type)._destroy()


def _override(device_type: str) -> torch.library.Library:
    _use_up_override_notice()
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _kernels(device_type).items():
        library.impl(name, kernel, KEYS[device_type])
    if device_type == "cpu":
        for name in RECURRENT:
            library.impl(name, in_parts(_overload(name)), "AutogradCPU")
    return library


@functools.cache
def _kernels(device_type: str) -> dict[str, Kernel]:
    """What must be overridden: entries of CUDA's lists that the device has not, or has otherwise."""
    key = KEYS[device_type]
    own = {name for name in _aten_names() if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)}
    casts = [(name, _casting(_lower_format)) for name in (*LOWER, *RECURRENT) if name not in own]
    casts += [(name, _casting(_always_fp32)) for name in FP32 if name not in own]
    casts += [(name, _casting(_widest)) for name in PROMOTE]
    casts += [(name, _naming_fp32) for name in FP32_BY_DTYPE] + [(name, _refusing) for name in BANNED]
    kernels = {name: make(_overload(name), device_type) for name, make in casts}
    unlisted = own - set(kernels) - {*LOWER, *FP32, *KEPT}
    return kernels | dict.fromkeys(unlisted, torch.library.fallthrough_kernel)


def _aten_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix("aten::") for name in names if name.startswith("aten::")]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_eligible(value: Any, device_type: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == device_type
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _lower_format(arguments: list[Any], device_type: str) -> torch.dtype:
    return torch.get_autocast_dtype(device_type)


def _always_fp32(arguments: list[Any], device_type: str) -> torch.dtype:
    return torch.float32


def _widest(arguments: list[Any], device_type: str) -> torch.dtype:
    is_wide = any(value.dtype == torch.float32 for value in arguments if _is_eligible(value, device_type))
    return torch.float32 if is_wide else torch.get_autocast_dtype(device_type)


def _casting(choose: Callable[[list[Any], str], torch.dtype]) -> Callable[[Any, str], Kernel]:
    """Kernels that cast their floating inputs to the format chosen, then run without autocast."""

    def make(op: Any, device_type: str) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = choose(tree_leaves((args, kwargs)), device_type)
            with _without_autocast(device_type):
                args, kwargs = tree_map(
                    lambda value: value.to(dtype) if _is_eligible(value, device_type) else value, (args, kwargs)
                )
                return op(*args, **kwargs)

        return kernel

    return make


def _naming_fp32(op: Any, device_type: str) -> Kernel:
    """Kernels with a dtype argument: fp32 unless the caller named one."""
    position = next(index for index, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = args[position] if len(args) > position else kwargs.get("dtype")
        with _without_autocast(device_type):
            if named is None and _is_eligible(args[0], device_type):
                return op(*args[:position], **{**kwargs, "dtype": torch.float32})
            return op(*args, **kwargs)

    return kernel


def _refusing(op: Any, device_type: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{op} is unsafe to autocast, and CUDA autocast refuses it.\n"
            "  fix: binary_cross_entropy_with_logits on the logits, or an fp32_island()"
        )

    return kernel


def _without_autocast(device_type: str) -> Any:
    key = getattr(torch._C.DispatchKey, KEYS[device_type])
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


@functools.cache
def _use_up_override_notice() -> None:
    """torch warns of the first override of a process; ours is meant. Done once, not around every entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        library = torch.library.Library("aten", "IMPL")
        library.impl("prod", lambda *args, **kwargs: None, KEYS["cpu"])
        library._destroy()


# --- recurrent layers ---
# On CUDA cuDNN runs nn.LSTM, nn.GRU and nn.RNN whole in half. Here they run in parts, matmul by matmul, so that every
# product is rounded as simulated; the CPU's fused kernel (oneDNN) lacks these formats on most CPUs. torch's
# decomposition also rounds between the operations inside a cell, where cuDNN keeps fp32 (docs/precision.md).


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """torch's recurrent layers are one kernel of oneDNN, or parts where that is switched off."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def in_parts(op: Any) -> Callable[..., Any]:
    """The layer as its decomposition, each part of which autograd and the simulated kernels see."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_onednn():
            return op.decompose(*args, **kwargs)

    return kernel


def is_recurrent(op: Any) -> bool:
    return str(op).removeprefix("aten.") in RECURRENT
