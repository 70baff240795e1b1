"""Where fp8 is worth it: measured layer by layer before the plan is made, and once more for the whole step.

A layer runs in fp8 when its forward and backward are measured MIN_GAIN times as fast as in bf16. The first and the last
layer of a model stay bf16 whatever they gain: their errors reach everything, and they are a small part of the time.
`precision.force` runs every layer that can take fp8 in it, measured or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.errors import HardwareError
from halfstep.hardware.facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, gains_once
from halfstep.precision.ladder import lacks
from halfstep.precision.parts import original_class
from halfstep.precision.row import Row

if TYPE_CHECKING:
    from halfstep.precision.plan import Plan  # which is applied by rows that this file judges

MULTIPLE = 16  # the fp8 matmul of the matrix units takes rows of 16 bytes only (cuBLASLt, torch._scaled_mm)

MIN_GAIN = 1.05
"""Below this a layer stays bf16: the rest of the step, which fuses with a bf16 layer, takes back more than that."""

FEWEST_LAYERS = 3  # a model of one or two layers has nothing between its first and its last


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Layers:
    gains: Mapping[str, Fp8Gain] = field(default_factory=dict)
    """Measured gain by module name; a layer that is not listed was not measured."""
    force: bool = False

    def compute_and_reason(self, name: str, module: nn.Module, *, is_edge: bool, reason: str) -> tuple[str, str]:
        """What a module computes in where fp8 was granted, and why."""
        if not takes_fp8(module):
            return "bf16", f"fp8 takes plain Linear layers with sides divisible by {MULTIPLE}"
        gain = self.gains.get(name)
        if self.force:
            return "fp8", f"forced; {gain}" if gain else "forced, not measured"
        if is_edge:
            return "bf16", "the first and the last layer stay bf16: their errors reach everything"
        if gain is None:
            return "fp8", reason
        return ("fp8" if gain.ratio >= MIN_GAIN else "bf16"), f"measured {gain}"


def takes_fp8(module: nn.Module) -> bool:
    """Linear layers whose sides the fp8 matmul can take; a subclass may compute otherwise, so it is left alone."""
    if not isinstance(module, nn.Linear) or original_class(module) is not nn.Linear:
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def edge_layers(model: nn.Module) -> set[str]:
    """Names of the first and the last module with a matrix or a kernel of its own."""
    layers = [
        name
        for name, module in model.named_modules()
        if any(weight.ndim > 1 for weight in nn.Module.parameters(module, recurse=False))
    ]
    return {layers[0], layers[-1]} if len(layers) >= FEWEST_LAYERS else set()


def measured_gains(
    model: nn.Module,
    forward: Callable[[], object],
    hardware: Hardware,
    directory: Path,
    *,
    measure: Callable[..., dict[LayerShape, Fp8Gain]] = gains_once,
) -> dict[str, Fp8Gain]:
    """Gain of every layer that can take fp8, by name; empty where the device has no fp8.

    `forward` calls the model on one micro-batch that it makes itself; it runs on fake tensors, to learn the shapes.
    """
    if lacks("fp8", hardware):
        return {}
    shapes = layer_shapes(model, forward)
    gains = measure(shapes.values(), hardware, directory) if shapes else {}
    return {name: gains[shape] for name, shape in shapes.items()}


def layer_shapes(model: nn.Module, forward: Callable[[], object]) -> dict[str, LayerShape]:
    """Shape of every layer that can take fp8 and is called in a forward pass; nothing is computed or changed."""
    shapes: dict[str, LayerShape] = {}

    def watch(name: str, layer: nn.Linear) -> Callable[..., None]:
        def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            tokens = inputs[0].numel() // layer.in_features
            shapes[name] = LayerShape(layer.in_features, layer.out_features, tokens + -tokens % MULTIPLE)

        return note

    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and takes_fp8(m)}
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


def after_whole_steps(plan: Plan, *, fp8_ms: float, bf16_ms: float, strict: bool = False) -> Plan:
    """An fp8 plan after whole steps were timed both ways: one that is slower as a whole goes back to bf16.

    Layers can gain while the step loses: a bf16 layer fuses with its neighbours.
    """
    times = f"a step takes {fp8_ms:.1f} ms in fp8 and {bf16_ms:.1f} ms in bf16"
    if fp8_ms < bf16_ms:
        return dataclasses.replace(plan, reason=f"{plan.reason}; {times}")
    return without_fp8(plan, times, strict=strict)


def without_fp8(plan: Plan, why: str, *, strict: bool = False, forcible: bool = True) -> Plan:
    """The same plan in bf16, with a warning; under `strict` an error. `forcible`: whether any layer could run fp8."""
    if strict:
        raise HardwareError(
            f"fp8 asked for, but {why}",
            why="strict is on, so halfstep does not go down to bf16",
            fix="ask for bf16, or leave strict off"
            + (", or precision.force=true (hs.Step: force=True) to run fp8 all the same" if forcible else ""),
        )
    warning = f"fp8 asked for, running bf16: {why}"
    warning += " (precision.force=true, in hs.Step force=True, runs fp8 all the same)" if forcible else ""
    granted, reason = ("bf16", why) if plan.granted == "fp8" else (plan.granted, plan.reason)
    rows = tuple(_in_bf16(row, why) for row in plan.rows)
    warnings = tuple(dict.fromkeys((*plan.warnings, warning)))
    return dataclasses.replace(plan, granted=granted, reason=reason, rows=rows, warnings=warnings)


def _in_bf16(row: Row, why: str) -> Row:
    if row.compute != "fp8":
        return row
    precision = "bf16" if row.precision else ""
    return dataclasses.replace(row, compute="bf16", precision=precision, reason=f"{row.reason}; {why}")
