"""Operations whose format a plan decides: matmuls, convolutions, attention, and custom operations. What each computed
in, and how many FLOPs it has (torch.utils.flop_counter's formulas: one multiply-add counts as two)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from halfstep.backend_flags import read_effective_leaves

aten = torch.ops.aten

FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
HALF = ("bf16", "fp16")
TORCHS_OWN = {"aten", "prim", "prims", "profiler", "inductor", "rngprims", "debugprims", "_c10d_functional", "c10d"}
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution", "cudnn_convolution", "convolution_overrideable"}


def _flops_of_vectors(left: Tensor, right: Tensor, *, out_val: Any) -> int:
    return 2 * left.numel()


WITHOUT_FORMULA: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten._scaled_dot_product_fused_attention_overrideable: flop_registry[aten._scaled_dot_product_flash_attention],
    aten.mv: _flops_of_vectors,
    aten.dot: _flops_of_vectors,
}
"""Products that torch has no entry for."""
RECURRENT = {"_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_scaled_mm_v2"}
"""Products of unknown cost."""


@functools.cache
def is_custom(func: Any) -> bool:
    """An operation of somebody's own library: autocast does not know it unless it was told."""
    return func.namespace not in TORCHS_OWN


@functools.cache
def is_product(func: Any) -> bool:
    packet = func._overloadpacket
    return packet in flop_registry or packet in WITHOUT_FORMULA or packet.__name__ in RECURRENT or is_custom(func)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """None where nobody has said how many."""
    packet = func._overloadpacket
    formula = flop_registry.get(packet) or WITHOUT_FORMULA.get(packet)
    if formula is None:
        return None
    shaped = (value for value in args if not isinstance(value, torch.dtype))  # of a result wider than its operands
    return int(formula(*shaped, **kwargs, out_val=result))


def format_of(dtype: torch.dtype) -> str:
    return FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def computed_in(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The format its operands were multiplied in; empty where none is a floating number."""
    found = [format_of(tensor.dtype) for tensor in floating((args, dict(kwargs)))]
    if not found:
        return ""
    lowest = next((name for name in ("fp8", "fp16", "bf16") if name in found), found[0]) if not is_custom(func) else ""
    name = lowest or found[0]
    return "tf32" if name == "fp32" and _uses_tf32(func, args) else name


def _uses_tf32(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the switch for fp32 operands allows TF32 at this moment: what the library asks before it multiplies."""
    if is_custom(func):
        return False
    device = next((tensor.device.type for tensor in floating(args)), "cpu")
    backend = "cuda" if device == "cuda" else "mkldnn"
    kind = "conv" if func._overloadpacket.__name__ in CONVOLUTIONS else "matmul"
    return read_effective_leaves()[backend, kind] == "tf32"


def floating(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
