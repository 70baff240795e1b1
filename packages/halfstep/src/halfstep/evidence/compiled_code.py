"""Find the formats of compiled code: read the graphs that the compiler makes of a region.

The region is compiled once more, on the side, by a backend that keeps the graphs of torch's own front end (the same
tracing, autocast and partitioning that inductor gets) and runs them as they are. Nodes carry the module whose forward
made them. Islands and autograd Functions leave no mark in a graph: the eager step shows which modules have them.
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

from halfstep.evidence.observer import (
    OUTSIDE,
    Cast,
    Direction,
    Product,
    Seen,
    count_flops,
    find_compute_format,
    is_custom,
    is_product,
    name_format,
)
from halfstep.precision.contexts import BACKWARD_AS_EAGER
from halfstep.precision.plan import ROOT

CASTS = ("_to_copy", "convert_element_type")
Graph = tuple[Direction, fx.GraphModule]


@dataclass(slots=True)
class GraphRecorder:
    """A torch.compile backend that records the graphs it is given and runs them unchanged."""

    graphs: list[Graph] = field(default_factory=list)

    def make_backend(self) -> Callable[..., Any]:
        """Return the backend: the front end of torch, with inductor's partitioner and compilers that only record."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        compile_graph = aot_autograd(
            fw_compiler=self._make_keeper("forward"),
            bw_compiler=self._make_keeper("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        return torch._functorch.config.patch(BACKWARD_AS_EAGER)(compile_graph)

    def _make_keeper(self, direction: Direction) -> Callable[[fx.GraphModule, Any], Any]:
        def keep(graph: fx.GraphModule, inputs: Any) -> Any:
            from torch._functorch._aot_autograd.utils import make_boxed_func

            self.graphs.append((direction, graph))
            return make_boxed_func(graph.forward)

        return keep

    def compile(self, region: Callable[..., Any]) -> Callable[..., Any]:
        """Return the region compiled by a backend that records its graphs."""
        return torch.compile(copy_region(region), backend=self.make_backend(), dynamic=False)


def copy_region(region: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a region's function with its own code object.

    Compiling the copy leaves the run's compiled code valid.
    """
    assert isinstance(region, types.FunctionType)
    # Dynamo caches by code object, so the copy is compiled separately and evicts nothing.
    code = region.__code__.replace(co_name=f"{region.__code__.co_name}_seen")
    return types.FunctionType(code, region.__globals__, region.__name__, region.__defaults__, region.__closure__)


def read_graphs(graphs: list[Graph], model: nn.Module, frozen: Mapping[str, nn.Module], twin: Seen) -> Seen:
    """Return the record of a compiled step, in the form of an eager one."""
    names = {name for name, _ in model.named_modules()}
    names |= {f"{part}.{name}".rstrip(".") for part, m in frozen.items() for name, _ in m.named_modules()}
    reader = _Reader(names, twin)
    for direction, graph in graphs:
        reader.read(direction, graph)
    return reader.seen


class _Reader:
    def __init__(self, names: set[str], twin: Seen) -> None:
        self.names, self.seen = names, Seen()
        self.islands = {product.module for product in twin.calls if product.is_island}
        self.functions = {product.module: product.function for product in twin.calls if product.function}
        self._forward_modules: dict[str, str] = {}

    def read(self, direction: Direction, graph: fx.GraphModule) -> None:
        """Add the products, casts and kept tensors of one graph."""
        if direction == "backward":
            self._add_kept(graph)
        else:
            # Names of nodes are unique within one graph only: a new forward graph replaces those of the last one.
            self._forward_modules.clear()
        for node in graph.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            module = find_module(node, self.names)
            if direction == "forward":
                self._forward_modules[node.name] = module
            if is_product(node.target):
                self._add_product(node, module, direction)
            elif node.target._opname in CASTS:
                self._add_cast(node, module, direction)

    def _add_product(self, node: fx.Node, module: str, direction: Direction) -> None:
        func, (args, kwargs) = node.target, tree_map(_get_value, (node.args, dict(node.kwargs)))
        name = find_compute_format(func, args, kwargs)
        if not name:
            return
        operation = f"{func.namespace}::{func._opname}" if is_custom(func) else func._opname  # type: ignore[union-attr]
        function = self.functions.get(module, "") if direction == "backward" else ""
        # A graph does not show islands: fp32 in a module that has one in the eager step is attributed to it.
        is_island = module in self.islands and name == "fp32"
        found = Product(module, direction, operation, name, is_island, is_custom(func), function)
        self.seen.calls[found] += 1
        if flops := count_flops(func, args, kwargs, _get_value(node)):
            self.seen.flops[found] += flops

    def _add_cast(self, node: fx.Node, module: str, direction: Direction) -> None:
        source, result = _get_value(node.args[0]), _get_value(node)
        floats = [t for t in (source, result) if isinstance(t, Tensor) and t.is_floating_point()]
        if len(floats) == 2 and floats[0].dtype != floats[1].dtype:
            found = Cast(module, direction, name_format(source.dtype), name_format(result.dtype))
            self.seen.casts[found] += 1
            self.seen.cast_bytes[found] += result.nbytes

    def _add_kept(self, graph: fx.GraphModule) -> None:
        """Count the bytes of forward that backward reads; weights and inputs (primals) and incoming gradients do not
        count."""
        for node in graph.graph.find_nodes(op="placeholder"):
            value = _get_value(node)
            if isinstance(value, Tensor) and value.is_floating_point() and node.name in self._forward_modules:
                self.seen.kept[self._forward_modules[node.name], name_format(value.dtype)] += value.nbytes


def find_module(node: fx.Node, names: set[str]) -> str:
    """Return the innermost module whose forward created the node, or the node that it is the gradient of."""
    # A forward node has its own stack of modules; a backward node carries that of the forward node it derives.
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        if (name := parse_module_path(str(path), names)) is not None:
            return name or ROOT
    return OUTSIDE


def parse_module_path(path: str, names: set[str]) -> str | None:
    """Convert `L['model'].blocks[0].inner` to `blocks.0.inner`: the longest suffix that the model has; "" is the
    model."""
    parts = [part for part in re.findall(r"\w+", path) if part not in ("_modules", "L", "G")]
    ends = (".".join(parts[k:]) for k in range(len(parts)))
    found = next((end for end in ends if end in names), None)
    return "" if found is None and len(parts) == 1 else found


def _get_value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def count_graphs(graphs: list[Graph]) -> Counter[str]:
    return Counter(direction for direction, _ in graphs)
