"""fp8 matmuls: Linear layers whose three products (output, grad of input, grad of weight) take fp8 operands.

Recipe: per-tensor dynamic scaling. Each operand is scaled so that its largest magnitude meets the format's largest,
then cast: e4m3 for activations and weights, e5m2, whose range is wider, for gradients. Products are summed in fp32 and
rounded to bf16. No state is kept between steps, so weights stay plain fp32 parameters under their own names and a
checkpoint loads in any precision. On hardware with fp8 the layer runs torchao (`InTorchaoFp8`); simulation multiplies
the same fp8 values in fp32 (`InFp8`).

Not every layer gains: a layer runs in fp8 if its forward and backward are measured MIN_GAIN times as fast as in bf16,
and the whole step is timed once more. The first and the last layer stay bf16 regardless: their errors reach everything,
and they are a small part of the time. `precision.force` runs every layer that can take fp8 in it, measured or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from halfstep.formats import FP8_E4M3, FP8_E5M2, Format
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, convert_to_float8, measure_gains_once
from halfstep.islands import fp32_island
from halfstep.precision.ladder import PlanRow, explain_lack, make_strict_refusal
from halfstep.precision.swapped import SwappedModule, find_original_class

if TYPE_CHECKING:
    from halfstep.precision.plan import Plan  # which is applied by rows that this file judges


FP8_DTYPES = {FP8_E4M3.name: torch.float8_e4m3fn, FP8_E5M2.name: torch.float8_e5m2}

MULTIPLE = 16
"""The fp8 matmul of the matrix units (cuBLASLt, torch._scaled_mm) takes inner dimensions in steps of 16: both sides of
the weight, and the number of tokens, which is the inner dimension of the weight's gradient."""

SMALLEST_AMAX = 1e-12  # below this an operand counts as all zeros: its scale stays finite (torchao uses the same bound)


class InFp8(SwappedModule):
    """A Linear layer with the numerics of fp8; bias and result are bf16."""

    in_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _apply_to_tokens(self._multiply, input, self.in_features)

    def _multiply(self, tokens: torch.Tensor) -> torch.Tensor:
        # bf16 first: that is what autocast hands to a Linear layer
        output: torch.Tensor = Fp8Product.apply(tokens.to(torch.bfloat16), self.weight)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class InTorchaoFp8(SwappedModule):
    """A Linear layer that runs torchao's fp8 forward; it has the attributes which that forward reads."""

    layer_class: ClassVar[Any]
    config: ClassVar[Any]
    linear_mm_config: ClassVar[Any]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return multiply_by_torchao(self, input)


def multiply_by_torchao(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """Run torchao's fp8 forward with the weight and the settings of a layer."""

    def multiply(tokens: torch.Tensor) -> torch.Tensor:
        # Autocast is off inside because torchao would ask for its dtype by a deprecated name; the cast is done here.
        with fp32_island():
            output: torch.Tensor = layer.layer_class.forward(layer, tokens.to(torch.bfloat16))
        return output

    return _apply_to_tokens(multiply, input, layer.weight.shape[1])


def read_torchao_settings(recipe: str = "tensorwise", *, emulate: bool = False) -> dict[str, Any]:
    """Read the class attributes of `InTorchaoFp8` from a layer that torchao converted."""
    layer = convert_to_float8(nn.Linear(16, 16, device="meta"), recipe, emulate=emulate)
    return {"layer_class": type(layer), "config": layer.config, "linear_mm_config": layer.linear_mm_config}


class Fp8Product(torch.autograd.Function):
    """tokens @ weight.T and its two gradients, each a product of fp8 operands.

    With Y = X Wᵀ the gradients are dX = dY W and dW = dYᵀ X. `multiply_fp8` computes left @ right.T, so backward passes
    Wᵀ and Xᵀ as right operands. The unscaled tokens and weight are saved; backward casts them again.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return multiply_fp8(cast_to_fp8(tokens, FP8_E4M3), cast_to_fp8(weight, FP8_E4M3))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens, weight = ctx.saved_tensors
        grad_output, scale = cast_to_fp8(grads[0], FP8_E5M2)
        grad_tokens = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_t = _transpose(cast_to_fp8(weight, FP8_E4M3))
            grad_tokens = multiply_fp8((grad_output, scale), weight_t).to(tokens.dtype)
        if ctx.needs_input_grad[1]:
            tokens_t = _transpose(cast_to_fp8(tokens, FP8_E4M3))
            grad_weight = multiply_fp8((grad_output.t(), scale), tokens_t).to(weight.dtype)
        return grad_tokens, grad_weight


Scaled = tuple[torch.Tensor, torch.Tensor]  # fp8 values, and the fp32 factor that turns them back into real values


def cast_to_fp8(tensor: torch.Tensor, fmt: Format) -> Scaled:
    """Scale a tensor to the format's range and cast it, saturating."""
    # One scale per tensor, from its current maximum: amax * factor = fmt.largest. The product may round up past the
    # largest value, which e4m3 would turn into NaN (it has no infinity), so it is clamped before the cast.
    values = tensor.float()
    factor = fmt.largest / values.abs().amax().clamp(min=SMALLEST_AMAX)
    scaled = (values * factor).clamp(-fmt.largest, fmt.largest)
    return scaled.to(FP8_DTYPES[fmt.name]), factor.reciprocal()


def multiply_fp8(left: Scaled, right: Scaled) -> torch.Tensor:
    """Return left @ right.T in bf16: fp8 values multiplied and summed in fp32, then unscaled."""
    (a, scale_a), (b, scale_b) = left, right
    with fp32_island():
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(torch.bfloat16)


def _transpose(operand: Scaled) -> Scaled:
    return operand[0].t(), operand[1]


def _apply_to_tokens(product: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor, width: int) -> torch.Tensor:
    """Apply a product of rows to an input of any leading shape, padded to a multiple of 16 rows.

    Zero rows change none of the three products: they add zero to the weight's gradient, and their outputs are dropped.
    """
    tokens = input.reshape(-1, width)
    missing = -tokens.shape[0] % MULTIPLE
    padded = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
    return product(padded)[: tokens.shape[0]].reshape(*input.shape[:-1], -1)


# --- which layers run in fp8 ---

MIN_GAIN = 1.05
"""Below this a layer stays bf16: the rest of the step, which fuses with a bf16 layer, takes back more than that."""

FEWEST_LAYERS = 3  # a model of one or two layers has nothing between its first and its last


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Layers:
    """Which layers run in fp8: by measured gain, or all that can when forced."""

    gains: Mapping[str, Fp8Gain] = field(default_factory=dict)
    """Measured gain by module name; a layer that is not listed was not measured."""
    force: bool = False

    def choose_compute(self, name: str, module: nn.Module, *, is_edge: bool, reason: str) -> tuple[str, str]:
        """Return a module's compute format under granted fp8, and the reason."""
        gain = self.gains.get(name)
        if gain is None and not can_take_fp8(module):
            return "bf16", f"fp8 supports plain Linear layers with sizes divisible by {MULTIPLE}"
        if self.force:
            return "fp8", f"forced; {gain}" if gain else "forced, not measured"
        if is_edge:
            return "bf16", "the first and the last layer stay bf16: their errors affect all others"
        if gain is None:
            return ("bf16", "not called as a linear layer in the measured step") if self.gains else ("fp8", reason)
        return ("fp8" if gain.ratio >= MIN_GAIN else "bf16"), f"measured {gain}"


def can_take_fp8(module: nn.Module) -> bool:
    """True for a Linear layer with sides divisible by 16; a subclass may compute differently, so it is left alone."""
    if not isinstance(module, nn.Linear) or find_original_class(module) is not nn.Linear:
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def find_edge_layers(model: nn.Module) -> set[str]:
    """Return the names of the first and the last module with a weight matrix or a convolution kernel."""
    layers = [
        name
        for name, module in model.named_modules()
        if any(weight.ndim > 1 for weight in nn.Module.parameters(module, recurse=False))
    ]
    return {layers[0], layers[-1]} if len(layers) >= FEWEST_LAYERS else set()


def measure_layer_gains(
    model: nn.Module,
    forward: Callable[[], object],
    hardware: Hardware,
    directory: Path,
    recipe: str = "tensorwise",
    *,
    measure: Callable[..., dict[LayerShape, Fp8Gain]] = measure_gains_once,
) -> dict[str, Fp8Gain]:
    """Measure the gain of every layer that can take fp8, by name; empty if the device has no fp8.

    `forward` calls the model on one micro-batch that it creates itself; it runs on fake tensors, to find the shapes.
    """
    if explain_lack("fp8", hardware):
        return {}
    shapes = find_layer_shapes(model, forward)
    gains = measure(shapes.values(), hardware, directory, recipe) if shapes else {}
    return {name: gains[shape] for name, shape in shapes.items()}


def find_layer_shapes(model: nn.Module, forward: Callable[[], object]) -> dict[str, LayerShape]:
    """Return the shape of every layer that can take fp8 and is called in forward; nothing is computed or changed."""
    shapes: dict[str, LayerShape] = {}

    def watch(name: str, layer: nn.Linear) -> Callable[..., None]:
        def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            tokens = inputs[0].numel() // layer.in_features
            shapes[name] = LayerShape(layer.in_features, layer.out_features, tokens + -tokens % MULTIPLE)

        return note

    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and can_take_fp8(m)}
    hooks = [layer.register_forward_pre_hook(watch(name, layer)) for name, layer in layers.items()]
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()  # BatchNorm must not write its statistics
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            forward()
    finally:
        for hook in hooks:
            hook.remove()
        for module, was_training in training.items():
            module.training = was_training
    return shapes


def judge_whole_steps(plan: Plan, *, fp8_ms: float, bf16_ms: float, strict: bool = False) -> Plan:
    """Return the plan to use after whole steps were timed in fp8 and in bf16: the faster of the two.

    Layers can gain while the step loses: a bf16 layer fuses with its neighbours.
    """
    times = f"a step takes {fp8_ms:.1f} ms in fp8 and {bf16_ms:.1f} ms in bf16"
    if fp8_ms < bf16_ms:
        return dataclasses.replace(plan, reason=f"{plan.reason}; {times}")
    return fall_back_to_bf16(plan, times, strict=strict)


def fall_back_to_bf16(plan: Plan, why: str, *, strict: bool = False, forcible: bool = True) -> Plan:
    """Return the plan in bf16 with a warning; raise under `strict`. `forcible`: some layer could run fp8 if forced."""
    if strict:
        force = "or precision.force=true (hs.Precision(..., force=True)) to run fp8 anyway" if forcible else ""
        raise make_strict_refusal("fp8", "bf16", why, fix=force)
    warning = f"fp8 requested, running bf16: {why}"
    warning += " (precision.force=true, hs.Precision(..., force=True), runs fp8 anyway)" if forcible else ""
    granted, reason = ("bf16", why) if "fp8" in (plan.asked, plan.granted) else (plan.granted, plan.reason)
    rows = tuple(_move_to_bf16(row, why) for row in plan.rows)
    warnings = tuple(dict.fromkeys((*plan.warnings, warning)))
    return dataclasses.replace(plan, granted=granted, reason=reason, rows=rows, warnings=warnings)


def _move_to_bf16(row: PlanRow, why: str) -> PlanRow:
    if row.compute != "fp8":
        return row
    precision = "bf16" if row.precision else ""
    return dataclasses.replace(row, compute="bf16", precision=precision, reason=f"{row.reason}; {why}")
