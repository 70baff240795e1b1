"""fp8 matmuls: Linear layers whose three products (output, grad of input, grad of weight) take fp8 operands.

Recipe: per-tensor dynamic scaling. Each operand is scaled so that its largest magnitude meets the format's largest,
then cast: e4m3 for activations and weights, e5m2, whose range is wider, for gradients. Products are summed in fp32 and
leave in bf16. Simulation multiplies the same fp8 values in fp32; on hardware that has fp8, `torch._scaled_mm` does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from halfstep.formats import FP8_E4M3, FP8_E5M2, Format
from halfstep.islands import fp32_island
from halfstep.precision.parts import Part

FP8_DTYPES = {FP8_E4M3.name: torch.float8_e4m3fn, FP8_E5M2.name: torch.float8_e5m2}

ROWS_MULTIPLE = 16
"""The matrix units take inner dimensions in steps of 16; tokens are the inner dimension of the weight's gradient."""

SMALLEST_AMAX = 1e-12
"""Below this an operand counts as all zeros: its scale stays finite (torchao uses the same bound)."""


class InFp8(Part):
    """A Linear layer that multiplies in fp8; bias and result are bf16."""

    simulated: ClassVar[bool]
    in_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tokens = input.reshape(-1, self.in_features)
        count = tokens.shape[0]
        product = Fp8Product.apply(_pad_rows(tokens), self.weight, self.simulated)[:count]  # type: ignore[no-untyped-call]
        output: torch.Tensor = product.reshape(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class Fp8Product(torch.autograd.Function):
    """tokens @ weight.T, with its two gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, simulated: bool) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.simulated = simulated
        return fp8_matmul(cast(tokens, FP8_E4M3), cast(weight, FP8_E4M3), simulated=simulated)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        tokens, weight = ctx.saved_tensors
        grad_output, scale = cast(grads[0], FP8_E5M2)
        grad_tokens = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_t = _transposed(cast(weight, FP8_E4M3))
            grad_tokens = fp8_matmul((grad_output, scale), weight_t, simulated=ctx.simulated).to(tokens.dtype)
        if ctx.needs_input_grad[1]:
            tokens_t = _transposed(cast(tokens, FP8_E4M3))
            grad_weight = fp8_matmul((grad_output.t(), scale), tokens_t, simulated=ctx.simulated).to(weight.dtype)
        return grad_tokens, grad_weight, None


Scaled = tuple[torch.Tensor, torch.Tensor]
"""fp8 values, and the fp32 factor that gives the real ones back."""


def cast(tensor: torch.Tensor, fmt: Format) -> Scaled:
    """Scale to the format's range and cast, saturating: rounding of the scaled maximum must not overflow."""
    values = tensor.float()
    factor = fmt.largest / values.abs().amax().clamp(min=SMALLEST_AMAX)
    scaled = (values * factor).clamp(-fmt.largest, fmt.largest)
    return scaled.to(FP8_DTYPES[fmt.name]), factor.reciprocal()


def fp8_matmul(left: Scaled, right: Scaled, *, simulated: bool) -> torch.Tensor:
    """left @ right.T, summed in fp32, in bf16."""
    (a, scale_a), (b, scale_b) = left, right
    if simulated:
        with fp32_island():
            return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(torch.bfloat16)
    product: torch.Tensor = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16
    )
    return product


def _transposed(operand: Scaled) -> Scaled:
    return operand[0].t(), operand[1]


def _pad_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Zero rows up to the multiple: they add nothing to any of the three products."""
    missing = -tokens.shape[0] % ROWS_MULTIPLE
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
