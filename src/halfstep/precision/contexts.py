"""The two contexts a step runs in. Cheap enough for every step; everything is put back on exit.

`forward_context` is backend flags, attention kernels, simulation and autocast; `backend_context` the same without
autocast, for backward. Both may stand around a compiled model. Inside a compiled region flags cannot be set (they are
read at compile time), so there the flags in force are checked against the plan, and only autocast is entered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from halfstep.backend_flags import Fp32Mode, fp32_mode, read_effective_leaves
from halfstep.errors import PrecisionError
from halfstep.precision.attention_kernels import sound_attention
from halfstep.precision.op_lists import cuda_op_lists
from halfstep.precision.simulate import Reusable, simulated_kernels

if TYPE_CHECKING:
    from halfstep.precision.plan import Plan  # whose methods call this file

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What autocast is set to; under fp8 everything but the swapped Linear layers runs in bf16."""


def autocast_dtype(precision: str) -> torch.dtype | None:
    """None where autocast is off."""
    return AUTOCAST_DTYPES.get(precision.removesuffix("-true"))


def forward_context(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Backend flags, simulated kernels and op lists, and autocast as the plan says (switched off for fp32 and tf32)."""
    # The compiler follows a generator's context and not the class; there nobody keeps it.
    return _forward(plan) if torch.compiler.is_compiling() else Reusable(lambda: _forward(plan))


@contextlib.contextmanager
def _forward(plan: Plan) -> Iterator[None]:
    with _backend(plan), _autocast(plan):
        yield


def backend_context(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Backend flags and simulated kernels: what backward and the optimizer run in."""
    return _backend(plan) if torch.compiler.is_compiling() else Reusable(lambda: _backend(plan))


def _backend(plan: Plan) -> contextlib.AbstractContextManager[None]:
    mode: Fp32Mode = "tf32" if plan.compute == "tf32" and not plan.simulated else "ieee"
    if torch.compiler.is_compiling():
        _check_compiled_region(mode, simulated=plan.simulated)
        return contextlib.nullcontext()
    if plan.simulated:
        return _simulated_backend(plan)
    return _native_backend(plan, mode)


def device_type(plan: Plan) -> str:
    """`cuda`, `cpu`, ...: how autocast names the plan's device."""
    if not plan.device:
        raise PrecisionError(
            f"this plan is for {plan.device_name}, which is not on this machine",
            fix="decide with the Hardware of a device that is here",
        )
    return plan.device.partition(":")[0]


def _autocast(plan: Plan) -> torch.autocast:
    dtype = autocast_dtype(plan.granted)
    if dtype is None:
        return torch.autocast(device_type(plan), enabled=False)
    return torch.autocast(device_type(plan), dtype=dtype)


@contextlib.contextmanager
def _native_backend(plan: Plan, mode: Fp32Mode) -> Iterator[None]:
    # In backward too: activation checkpointing runs forward again there.
    with fp32_mode(mode), sound_attention(plan.device):
        yield


@contextlib.contextmanager
def _simulated_backend(plan: Plan) -> Iterator[None]:
    # The lists are needed in backward too: activation checkpointing runs forward again there, under its own autocast.
    with fp32_mode("ieee"), simulated_kernels(tf32=plan.compute == "tf32"), cuda_op_lists(device_type(plan)):
        yield


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_compiled_region(mode: Fp32Mode, simulated: bool) -> None:
    if simulated:
        raise PrecisionError("a simulated plan inside torch.compile", why="simulation is eager only")
    # "none" is what torch says of a leaf nobody set: true fp32, or what the library does by itself.
    wrong = {leaf: value for leaf, value in read_effective_leaves().items() if value.replace("none", "ieee") != mode}
    if wrong:
        raise PrecisionError(
            f"plan.forward() inside torch.compile with other backend flags in force: {wrong}",
            why="a compiled region takes the flags that hold where it is called",
            fix="enter plan.forward() or plan.backend() around the compiled call as well",
        )
