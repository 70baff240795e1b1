"""`simulate`: a format's numerics on hardware that lacks it. For numerics, never for speed; eager only.

Real autocast runs, so every tensor has its real dtype. What a CPU without half-precision units does 30 to 200 times
slower, matmul and convolution, is replaced below autograd, forward and backward, by the fp32 kernel plus a cast: half
operands are exact in fp32 and both sum in fp32, so only the last rounding is ours, and it is the same rounding. fp16
overflows to inf and underflows to zero in that cast as it does on a GPU.

Refused: rounding hooks on modules (they miss functional calls and gradients), and replacing CPU kernels process-wide
(other threads would compute through us).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import PrecisionError
from halfstep.islands import LOW_PRECISION, to_fp32
from halfstep.precision.op_lists import cuda_op_lists
from halfstep.precision.rounding import round_to

aten = torch.ops.aten

OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.dot.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.addbmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
    # inference_mode hands these over whole instead of taking them apart first
    aten.linear.default: (0, 1),
    aten.matmul.default: (0, 1),
    aten.conv1d.default: (0, 1),
    aten.conv2d.default: (0, 1),
    aten.conv3d.default: (0, 1),
    aten.conv_transpose1d.default: (0, 1),
    aten.conv_transpose2d.input: (0, 1),
    aten.conv_transpose3d.input: (0, 1),
}
"""Replaced kernels, and which of their arguments are multiplied with each other."""

ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.scaled_dot_product_attention.default,
}

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": None}


@contextlib.contextmanager
def simulate(format: str, device_type: str = "cpu") -> Iterator[None]:
    """Run what is inside, forward and backward, with the numerics of bf16, fp16 or tf32.

    with hs.simulate("fp16"):
        loss = loss_fn(model(x), y)
        loss.backward()

    fp8 swaps Linear modules, so it needs a plan: decide("fp8", hardware, model, simulate=True).apply(model).
    """
    if format not in FORMATS:
        raise PrecisionError(f"simulate({format!r}) is not offered", fix=f"one of {', '.join(FORMATS)}; fp8 by a plan")
    dtype = FORMATS[format]
    autocast = torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
    with simulated_kernels(tf32=dtype is None), cuda_op_lists(device_type), autocast:
        yield


def simulated_kernels(*, tf32: bool = False) -> TorchDispatchMode:
    """Matmul, convolution and attention on half tensors by the fp32 kernel plus a cast; fp32 ones in tf32 if asked."""
    return _SimulatedKernels(tf32=tf32)


class _SimulatedKernels(TorchDispatchMode):
    def __init__(self, *, tf32: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tf32 = tf32

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ATTENTION:
            return _attention_in_fp32(func, args, kwargs)
        if func not in OPERANDS:
            return func(*args, **kwargs)
        dtype = args[OPERANDS[func][0]].dtype
        if dtype in LOW_PRECISION:
            return _cast(func(*to_fp32(args), **kwargs), dtype)
        if self.tf32 and dtype == torch.float32:
            return func(*_operands_in_tf32(args, OPERANDS[func]), **kwargs)
        return func(*args, **kwargs)


def _attention_in_fp32(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = args[0].dtype
    if dtype not in LOW_PRECISION:
        return func(*args, **kwargs)
    result = func(*to_fp32(args), **to_fp32(kwargs))
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return result[0].to(dtype), result[1]  # the log-sum-exp stays fp32, as the half kernel has it
    return _cast(result, dtype)


def _cast(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(dtype)
    return type(result)(_cast(item, dtype) if item is not None else None for item in result)


def _operands_in_tf32(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[Any]:
    return [round_to(arg, "tf32") if position in positions else arg for position, arg in enumerate(args)]
