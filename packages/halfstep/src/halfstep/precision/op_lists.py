"""CUDA's autocast lists, applied on any device during simulation.

The CPU's own lists differ: they leave softmax, log, exp, sum and the norms in half, and upcast FFTs that CUDA does not.
During a simulation the autocast kernels that differ are overridden in torch's dispatcher, so that a laptop shows what
the GPU will do. The overrides are above autograd, as autocast is, so casts have gradients. They are registered at the
outermost entry (about 3 ms) and removed at its exit, which restores the device's own lists.
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

# --- CUDA's lists: ATen/autocast_mode.h and the op reference of torch.amp's documentation ---
# Names are ATen overloads. Left out: `_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell` and
# `_scaled_dot_product_flash_attention`, kernels that exist on CUDA only and are reached through listed ones.

LOWER = (
    *("_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "convolution"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm"),
    *("baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention"),
)
"""Run in the autocast format."""

RECURRENT = tuple(f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))
"""Run as one cuDNN kernel, in fp16 whatever autocast's format is; a bf16 plan warns of it (decide.py)."""

FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"),
    *("layer_norm", "native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm"),
    *(("rms_norm",) if torch.__version__ >= "2.12" else ()),  # on the list since torch 2.12
    *("nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity", "poisson_nll_loss"),
    *("cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
    *("dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""Inputs upcast, run in fp32."""

FP32_BY_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
"""Run in fp32 unless the caller names a dtype."""

PROMOTE = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"),
    *("tensordot", "scatter_add"),
)
"""Run in the widest format among the inputs."""

BANNED = ("binary_cross_entropy",)  # refused: its gradient overflows fp16. `binary_cross_entropy_with_logits` is safe.

KEPT = (
    *("conv1d.padding", "conv2d.padding", "conv3d.padding", "_addmm_activation", "mkldnn_rnn_layer"),
    *("_native_multi_head_attention", "cat", "stack", "index_copy"),
)
"""Only on the CPU's list but with the same effect: other entry points to listed ops, and plain type promotion."""


Kernel = Callable[..., Any]

KEYS = {"cpu": "AutocastCPU", "mps": "AutocastMPS", "xpu": "AutocastXPU"}
"""Dispatch keys of the devices whose lists are not CUDA's."""

_entries: dict[str, int] = {}
_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def use_cuda_op_lists(device_type: str) -> Iterator[None]:
    """Make autocast on this device follow CUDA's lists inside the context."""
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
    for name, kernel in _make_kernels(device_type).items():
        library.impl(name, kernel, KEYS[device_type])
    if device_type == "cpu":
        for name in RECURRENT:
            library.impl(name, make_decomposed(_find_overload(name)), "AutogradCPU")
    return library


@functools.cache
def _make_kernels(device_type: str) -> dict[str, Kernel]:
    """Return the overrides by op: entries of CUDA's lists that the device lacks or treats differently.

    Ops that only the device lists get a fallthrough kernel, which switches its autocast off for them.
    """
    key = KEYS[device_type]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own = {name.removeprefix("aten::") for name in names if has_kernel(name, key)}
    casts = [
        (name, _make_casting(lambda _, device: torch.get_autocast_dtype(device)))
        for name in (*LOWER, *RECURRENT)
        if name not in own
    ]
    casts += [(name, _make_casting(lambda *_: torch.float32)) for name in FP32 if name not in own]
    casts += [(name, _make_casting(_choose_widest)) for name in PROMOTE]
    casts += [(name, _make_fp32_by_dtype) for name in FP32_BY_DTYPE] + [(name, _make_refusing) for name in BANNED]
    kernels = {name: make(_find_overload(name), device_type) for name, make in casts}
    unlisted = own - set(kernels) - {*LOWER, *FP32, *KEPT}
    return kernels | dict.fromkeys(unlisted, torch.library.fallthrough_kernel)


def _find_overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_eligible(value: Any, device_type: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == device_type
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _choose_widest(arguments: list[Any], device_type: str) -> torch.dtype:
    is_wide = any(value.dtype == torch.float32 for value in arguments if _is_eligible(value, device_type))
    return torch.float32 if is_wide else torch.get_autocast_dtype(device_type)


def _make_casting(choose: Callable[[list[Any], str], torch.dtype]) -> Callable[[Any, str], Kernel]:
    """Make kernels that cast floating inputs to the format that `choose` returns, then run without autocast."""

    def make(op: Any, device_type: str) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = choose(tree_leaves((args, kwargs)), device_type)
            with _exclude_autocast(device_type):
                args, kwargs = tree_map(
                    lambda value: value.to(dtype) if _is_eligible(value, device_type) else value, (args, kwargs)
                )
                return op(*args, **kwargs)

        return kernel

    return make


def _make_fp32_by_dtype(op: Any, device_type: str) -> Kernel:
    """Make a kernel for an op with a dtype argument: fp32 unless the caller passed one."""
    position = next(index for index, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = args[position] if len(args) > position else kwargs.get("dtype")
        with _exclude_autocast(device_type):
            if named is None and _is_eligible(args[0], device_type):
                return op(*args[:position], **{**kwargs, "dtype": torch.float32})
            return op(*args, **kwargs)

    return kernel


def _make_refusing(op: Any, device_type: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{op} is unsafe to autocast, and CUDA autocast refuses it.\n"
            "  fix: binary_cross_entropy_with_logits on the logits, or hs.fp32_island() with .float() on its inputs"
        )

    return kernel


def _exclude_autocast(device_type: str) -> Any:
    key = getattr(torch._C.DispatchKey, KEYS[device_type])
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


@functools.cache
def _use_up_override_notice() -> None:
    """Trigger torch's warning about the first override of a process once, silenced: our override is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        library = torch.library.Library("aten", "IMPL")
        library.impl("prod", lambda *args, **kwargs: None, KEYS["cpu"])
        library._destroy()


# --- recurrent layers ---
# On CUDA cuDNN runs nn.LSTM, nn.GRU and nn.RNN as one kernel in half. Here they are decomposed, matmul by matmul, so
# that every product is rounded as simulated; the CPU's fused kernel (oneDNN) lacks these formats on most CPUs. torch's
# decomposition also rounds between the operations inside a cell, where cuDNN keeps fp32 (docs/precision.md).


@contextlib.contextmanager
def disable_onednn() -> Iterator[None]:
    """Switch oneDNN off, so that torch decomposes recurrent layers instead of calling one fused kernel."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def make_decomposed(op: Any) -> Callable[..., Any]:
    """Make a kernel that runs the layer's decomposition, whose ops autograd and the simulated kernels see."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with disable_onednn():
            return op.decompose(*args, **kwargs)

    return kernel


def is_recurrent(op: Any) -> bool:
    return str(op).removeprefix("aten.") in RECURRENT
