"""Compiled code: what its forward and backward graphs compute in, node by node.

The code is compiled once more, on the side, by a compiler that keeps the graphs torch's own front end made (the same
tracing, autocast and partition that inductor gets) and runs them as they are. Nodes know the module whose forward made
them. Islands and autograd Functions leave no trace in a graph: which module has one is known from the eager step.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from halfstep.evidence.observer import OUTSIDE, Cast, Direction, Product, Seen
from halfstep.evidence.operations import computed_in, flops_of, format_of, is_custom, is_product
from halfstep.precision.plan import ROOT

CASTS = ("_to_copy", "convert_element_type")
Graph = tuple[Direction, fx.GraphModule]


@dataclass(slots=True)
class GraphRecorder:
    """A backend of torch.compile that keeps the graphs it is given and runs them as they are."""

    graphs: list[Graph] = field(default_factory=list)

    def backend(self) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return aot_autograd(
            fw_compiler=self._kept("forward"),
            bw_compiler=self._kept("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _kept(self, direction: Direction) -> Callable[[fx.GraphModule, Any], Any]:
        def keep(graph: fx.GraphModule, inputs: Any) -> Any:
            from torch._functorch._aot_autograd.utils import make_boxed_func

            self.graphs.append((direction, graph))
            return make_boxed_func(graph.forward)

        return keep

    def compiled(self, region: Callable[..., Any]) -> Callable[..., Any]:
        """The region as the front end sees it."""
        return torch.compile(copied(region, "seen"), backend=self.backend(), dynamic=False)


def copied(region: Callable[..., Any], word: str) -> Callable[..., Any]:
    """A function of its own, whose code object the compiler has not met: the run's compiled code stays."""
    assert isinstance(region, types.FunctionType)
    code = region.__code__.replace(co_name=f"{region.__code__.co_name}_{word}")
    return types.FunctionType(code, region.__globals__, region.__name__, region.__defaults__, region.__closure__)


def seen_in(graphs: list[Graph], model: nn.Module, frozen: Mapping[str, nn.Module], twin: Seen) -> Seen:
    """The same record as of an eager step."""
    reader = _Reader(names_in(model, frozen), twin)
    for direction, graph in graphs:
        reader.read(direction, graph)
    return reader.seen


def names_in(model: nn.Module, frozen: Mapping[str, nn.Module]) -> set[str]:
    """All module paths, those of frozen parts behind the part's name."""
    names = {name for name, _ in model.named_modules()}
    return names | {f"{part}.{name}".rstrip(".") for part, m in frozen.items() for name, _ in m.named_modules()}


class _Reader:
    def __init__(self, names: set[str], twin: Seen) -> None:
        self.names, self.seen = names, Seen()
        self.islands = {product.module for product in twin.calls if product.is_island}
        self.functions = {product.module: product.function for product in twin.calls if product.function}
        self._forward_modules: dict[str, str] = {}

    def read(self, direction: Direction, graph: fx.GraphModule) -> None:
        if direction == "backward":
            self._kept(graph)
        else:
            self._forward_modules.clear()
        for node in graph.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            module = module_of(node, self.names)
            if direction == "forward":
                self._forward_modules[node.name] = module
            if is_product(node.target):
                self._product(node, module, direction)
            elif node.target._opname in CASTS:
                self._cast(node, module, direction)

    def _product(self, node: fx.Node, module: str, direction: Direction) -> None:
        func, (args, kwargs) = node.target, tree_map(_value, (node.args, dict(node.kwargs)))
        name = computed_in(func, args, kwargs)
        if not name:
            return
        operation = f"{func.namespace}::{func._opname}" if is_custom(func) else func._opname  # type: ignore[union-attr]
        function = self.functions.get(module, "") if direction == "backward" else ""
        is_island = module in self.islands and name == "fp32"
        found = Product(module, direction, operation, name, is_island, is_custom(func), function)
        self.seen.calls[found] += 1
        if flops := flops_of(func, args, kwargs, _value(node)):
            self.seen.flops[found] += flops

    def _cast(self, node: fx.Node, module: str, direction: Direction) -> None:
        source, result = _value(node.args[0]), _value(node)
        floats = [t for t in (source, result) if isinstance(t, Tensor) and t.is_floating_point()]
        if len(floats) == 2 and floats[0].dtype != floats[1].dtype:
            found = Cast(module, direction, format_of(source.dtype), format_of(result.dtype))
            self.seen.casts[found] += 1
            self.seen.cast_bytes[found] += result.nbytes

    def _kept(self, graph: fx.GraphModule) -> None:
        """What backward reads of forward; weights and inputs (primals) and the gradients it is given are not kept."""
        for node in graph.graph.find_nodes(op="placeholder"):
            value = _value(node)
            if isinstance(value, Tensor) and value.is_floating_point() and node.name in self._forward_modules:
                self.seen.kept[self._forward_modules[node.name], format_of(value.dtype)] += value.nbytes


def module_of(node: fx.Node, names: set[str]) -> str:
    """The innermost module whose forward made the node, or the node that it is the gradient of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        if (name := module_name(str(path), names)) is not None:
            return name or ROOT
    return OUTSIDE


def module_name(path: str, names: set[str]) -> str | None:
    """`L['model'].blocks[0].inner` is `blocks.0.inner`: the longest end that the model knows; "" is the model."""
    parts = [part for part in re.findall(r"\w+", path) if part not in ("_modules", "L", "G")]
    ends = (".".join(parts[k:]) for k in range(len(parts)))
    found = next((end for end in ends if end in names), None)
    return "" if found is None and len(parts) == 1 else found


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def num_of(graphs: list[Graph]) -> Counter[str]:
    return Counter(direction for direction, _ in graphs)
