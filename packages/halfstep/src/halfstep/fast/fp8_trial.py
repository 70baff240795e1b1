"""fp8 in hs.Step: used if the captured, compiled step is measured to be faster with it.

Until that is known, steps are made in bf16. Once compiled code runs, Dynamo's graph of the step shows the layers and
their shapes: it has one node for each product with a weight. Each shape is timed alone in both formats, once per device
(hardware/fp8_layers.py). The layers that gain get torchao's products in a copy of the graph. It is compiled and
captured like bf16's, compared with the same products uncompiled, and its replays are timed against those in bf16.

The model itself stays as it is: checkpoints, eager steps and validation are those of bf16. Swapping the classes of
layers, as `halfstep train` and hs.Precision(force=True) do, was rejected: outside of compiled code the casts take
longer than fp8 saves, and code of new classes would have to be trained with before it can be timed.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from halfstep.disk import find_cache_directory
from halfstep.errors import HardwareError
from halfstep.fast import compiled_trial
from halfstep.fast.windows import Call, Compiler, Graph, NotTraced
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import LayerShape, measure_gains_once
from halfstep.precision.decide import Precision, decide, needs_fp8_trial
from halfstep.precision.fp8 import (
    MULTIPLE,
    fall_back_to_bf16,
    judge_whole_steps,
    multiply_by_torchao,
    read_torchao_settings,
)
from halfstep.precision.names import normalise_precision
from halfstep.precision.plan import ROOT, Plan

if TYPE_CHECKING:
    from halfstep.fast.fast_path import Attempt, FastPath

IN_FP8: dict[Compiler, Compiler] = {"aten": "aten fp8", "inductor": "inductor fp8"}
"""The compiler that makes the same code with fp8 products."""


@dataclass(eq=False)
class Fp8Trial:
    """What fp8 was asked for, and which layers run in it."""

    asked: Precision
    hardware: Hardware
    model: nn.Module
    settings: dict[str, Any]  # of torchao's layer
    layers: frozenset[str] = frozenset()
    """Modules whose products run in fp8 in the code of an fp8 compiler."""
    is_pending: bool = True

    def choose_layers(self, calls: Sequence[Call]) -> Plan:
        """Measure the layers that traced code calls, and return the plan with fp8 in those that gain."""
        owners, shapes = self._find_owners(), dict[str, LayerShape]()

        def note(product: Product) -> None:
            for name in owners.get(id(product.weight), ()):
                shapes[name] = product.shape

        for call in calls:
            visit_products(call.entry.reference, call.inputs, note)

        def divides(shape: LayerShape) -> bool:
            return shape.in_features % MULTIPLE == 0 and shape.out_features % MULTIPLE == 0

        shapes = {name: shape for name, shape in shapes.items() if divides(shape)}
        recipe = self.asked.fp8_recipe
        measured = measure_gains_once(shapes.values(), self.hardware, find_cache_directory(), recipe)
        gains = {name: measured[shape] for name, shape in shapes.items()}
        if not gains:
            raise NotTraced(f"loss_fn calls no linear layer with sizes divisible by {MULTIPLE}")
        plan = decide(self.asked, self.hardware, self.model, fp8_gains=gains)
        names = {row.module.replace(ROOT, "") for row in plan.rows if row.compute == "fp8"}
        self.layers = frozenset(names & gains.keys())  # a row may also stand for the layers inside
        return plan if self.layers or not names else self.fall_back(plan, "no layer gets faster in fp8")

    def convert(self, module: GraphModule, last_inputs: Sequence[Any]) -> GraphModule:
        """Return a copy of Dynamo's graph whose chosen layers multiply in fp8."""
        inputs = [one() if isinstance(one, weakref.ref) else one for one in last_inputs]
        owners = self._find_owners()

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if not torch.is_autocast_enabled(input.device.type):  # in an fp32 island
                return F.linear(input, weight, bias)
            return multiply_by_torchao(SimpleNamespace(weight=weight, bias=bias, **self.settings), input)

        def addmm(bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
            return linear(input, weight.t(), bias)

        def swap(product: Product) -> None:
            # A weight that is tied to a layer in bf16 stays bf16.
            names = owners.get(id(product.weight))
            if names and self.layers.issuperset(names):
                product.node.target = addmm if product.node.target is torch.addmm else linear

        return visit_products(module, inputs, swap)

    def _find_owners(self) -> dict[int, list[str]]:
        """Return the names of the modules that hold a weight, by its identity."""
        owners: dict[int, list[str]] = {}
        for name, module in self.model.named_modules():
            for weight in module.parameters(recurse=False):
                owners.setdefault(id(weight), []).append(name)
        return owners

    def fall_back(self, plan: Plan, why: str) -> Plan:
        return fall_back_to_bf16(plan, why, strict=self.asked.strict)


def plan_fp8_trial(asked: Precision, hardware: Hardware, model: nn.Module) -> tuple[Plan, Fp8Trial | None]:
    """Return the plan of a step. If fp8 has to be measured first, that of bf16 and the trial."""
    if not needs_fp8_trial(asked, hardware):
        return decide(asked, hardware, model), None

    def replace(precision: str) -> str:
        return "bf16" if normalise_precision(precision) == "fp8" else precision

    modules = {pattern: replace(precision) for pattern, precision in asked.modules.items()}
    in_bf16 = dataclasses.replace(asked, default=replace(asked.default), modules=modules)
    settings = read_torchao_settings(asked.fp8_recipe)
    plan = decide(in_bf16, hardware, model)
    if in_bf16.default != asked.default:
        plan = dataclasses.replace(plan, asked="fp8", reason="fp8 is tried once the step is compiled")
    return plan, Fp8Trial(asked, hardware, model, settings)


def try_fp8(path: FastPath, trial: Fp8Trial, graph: Graph, attempt: Attempt) -> str:
    """Compile and capture the window in fp8, and keep the faster of the two graphs. Return the line that tells the
    user, or nothing if this window shows nothing. Nothing is trained by it; under `strict` staying in bf16 raises."""
    step, level = path.step, path.make_level(IN_FP8[compiled_trial.COMPILED])
    problem, captured = "", None
    try:
        with path.aside(attempt):
            plan = trial.choose_layers(attempt.calls)
        captured = path.capture(level, attempt) if trial.layers else None
        if captured is not None:
            with path.aside(attempt):
                step.committed.zero_()  # the replays would run past the end of a table of learning rates
                bf16_s, fp8_s = (compiled_trial.time_replays(one.replay, step.device) for one in (graph, captured))
            plan = judge_whole_steps(plan, fp8_ms=1e3 * fp8_s, bf16_ms=1e3 * bf16_s, strict=trial.asked.strict)
        elif trial.layers:
            return ""  # the step would be dropped: try the next one
    except Exception as error:
        if trial.asked.strict and isinstance(error, HardwareError):  # it refuses bf16
            raise
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    # Outside of the except block, whose error holds frames and so activations.
    step.plan = trial.fall_back(step.plan, problem) if problem else plan
    path.has_lost_graphs = step.device.type == "cuda"  # those of the slower step
    if captured is None or not any(row.compute == "fp8" for row in step.plan.rows):
        path.fp8 = None
        return step.plan.warnings[-1]
    trial.is_pending, path.compiled = False, level
    level.graphs[attempt.key], level.began_s = captured, path.in_steps_s
    attempt.level = level
    return (
        f"fp8 in {len(trial.layers)} layers ({describe_layers(trial.layers)}): {1e3 * fp8_s:.3g} ms per step, "
        f"{1e3 * bf16_s:.3g} ms in bf16 ({bf16_s / fp8_s:.2f}x); {level.certificate}"
    )


def describe_layers(names: Iterable[str]) -> str:
    """Return module names in short, with * for the numbers of blocks."""
    return ", ".join(sorted({re.sub(r"\d+", "*", name) for name in names}))


# --- products with a weight in Dynamo's graph ---


@dataclass(frozen=True)
class Product:
    """A call of F.linear, or of addmm with a weight stored as (in, out), as transformers' Conv1D has it."""

    node: Node
    weight: object
    shape: LayerShape


def visit_products(module: GraphModule, inputs: Sequence[object], visit: Callable[[Product], None]) -> GraphModule:
    """Copy a graph, call `visit` with each product with a weight, also in checkpointed blocks, and return the copy."""
    module = GraphModule(module, copy.deepcopy(module.graph))
    values = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if "checkpoint" in str(node.target):
            block, *operands = node.args
            setattr(module, block.target, visit_products(
                getattr(module, block.target), [values.get(one) for one in operands], visit
            ))  # fmt: skip
        elif node.target in (F.linear, torch.addmm) and not node.kwargs:
            is_linear = node.target is F.linear
            x, weight = node.args[:2] if is_linear else node.args[1:3]
            value = values.get(weight)
            if isinstance(value, nn.Parameter) and value.ndim == 2:
                width, out = reversed(value.shape) if is_linear else value.shape
                tokens = x.meta["example_value"].numel() // width
                visit(Product(node, value, LayerShape(width, out, tokens + -tokens % MULTIPLE)))
    module.recompile()
    return module
