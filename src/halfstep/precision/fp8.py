"""fp8 matmuls: Linear layers whose three products (output, grad of input, grad of weight) take fp8 operands.

Recipe: per-tensor dynamic scaling. Each operand is scaled so that its largest magnitude meets the format's largest,
then cast: e4m3 for activations and weights, e5m2, whose range is wider, for gradients. Products are summed in fp32 and
leave in bf16. Nothing is remembered between steps, so weights stay plain fp32 parameters under their own names and a
checkpoint loads in any precision. On hardware that has fp8 the layer computes by torchao (`InTorchaoFp8`); simulation
multiplies the same fp8 values in fp32 (`InFp8`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from halfstep.formats import FP8_E4M3, FP8_E5M2, Format
from halfstep.hardware.fp8_layers import in_float8
from halfstep.islands import fp32_island
from halfstep.precision.parts import Part

FP8_DTYPES = {FP8_E4M3.name: torch.float8_e4m3fn, FP8_E5M2.name: torch.float8_e5m2}

ROWS_MULTIPLE = 16
"""The matrix units take inner dimensions in steps of 16; tokens are the inner dimension of the weight's gradient."""

SMALLEST_AMAX = 1e-12  # below this an operand counts as all zeros: its scale stays finite (torchao uses the same bound)


class InFp8(Part):
    """A Linear layer with the numerics of fp8; bias and result are bf16."""

    in_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _by_tokens(self._product, input, self.in_features)

    def _product(self, tokens: torch.Tensor) -> torch.Tensor:
        # bf16 first: that is what autocast hands to a Linear layer
        output: torch.Tensor = Fp8Product.apply(tokens.to(torch.bfloat16), self.weight)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class InTorchaoFp8(Part):
    """A Linear layer that computes as torchao's fp8 layer does; it has what that class's forward asks for."""

    in_features: int
    layer_class: ClassVar[Any]
    config: ClassVar[Any]
    linear_mm_config: ClassVar[Any]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _by_tokens(self._product, input, self.in_features)

    def _product(self, tokens: torch.Tensor) -> torch.Tensor:
        # Autocast is off inside because torchao would ask for its dtype by a deprecated name; the cast is done here.
        with fp32_island():
            output: torch.Tensor = self.layer_class.forward(self, tokens.to(torch.bfloat16))
        return output


def torchao_settings(*, emulate: bool = False) -> dict[str, Any]:
    """What `InTorchaoFp8` needs to know, from a layer that torchao made."""
    layer = in_float8(nn.Linear(16, 16, device="meta"), emulate=emulate)
    return {"layer_class": type(layer), "config": layer.config, "linear_mm_config": layer.linear_mm_config}


class Fp8Product(torch.autograd.Function):
    """tokens @ weight.T, with its two gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return fp8_matmul(cast(tokens, FP8_E4M3), cast(weight, FP8_E4M3))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens, weight = ctx.saved_tensors
        grad_output, scale = cast(grads[0], FP8_E5M2)
        grad_tokens = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_t = _transposed(cast(weight, FP8_E4M3))
            grad_tokens = fp8_matmul((grad_output, scale), weight_t).to(tokens.dtype)
        if ctx.needs_input_grad[1]:
            tokens_t = _transposed(cast(tokens, FP8_E4M3))
            grad_weight = fp8_matmul((grad_output.t(), scale), tokens_t).to(weight.dtype)
        return grad_tokens, grad_weight


Scaled = tuple[torch.Tensor, torch.Tensor]  # fp8 values, and the fp32 factor that gives the real ones back


def cast(tensor: torch.Tensor, fmt: Format) -> Scaled:
    """Scale to the format's range and cast, saturating: rounding of the scaled maximum must not overflow."""
    values = tensor.float()
    factor = fmt.largest / values.abs().amax().clamp(min=SMALLEST_AMAX)
    scaled = (values * factor).clamp(-fmt.largest, fmt.largest)
    return scaled.to(FP8_DTYPES[fmt.name]), factor.reciprocal()


def fp8_matmul(left: Scaled, right: Scaled) -> torch.Tensor:
    """left @ right.T of fp8 values, multiplied and summed in fp32, in bf16."""
    (a, scale_a), (b, scale_b) = left, right
    with fp32_island():
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(torch.bfloat16)


def _transposed(operand: Scaled) -> Scaled:
    return operand[0].t(), operand[1]


def _by_tokens(product: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor, width: int) -> torch.Tensor:
    """A product of rows for any leading shape, in a multiple of rows: zero rows add nothing to any of the three."""
    tokens = input.reshape(-1, width)
    missing = -tokens.shape[0] % ROWS_MULTIPLE
    padded = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
    return product(padded)[: tokens.shape[0]].reshape(*input.shape[:-1], -1)
