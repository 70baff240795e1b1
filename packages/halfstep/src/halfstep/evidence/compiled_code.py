"""Find the formats of compiled code: read the graphs that the compiler makes of a region.

The region is compiled once more, on the side, by a backend that keeps the graphs of torch's own front end (the same
tracing, autocast and partitioning that inductor gets) and runs them as they are. Nodes carry the module whose forward
made them. Islands and autograd Functions leave no mark in a graph: the eager step shows which modules have them.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from halfstep.evidence.observer import OUTSIDE, Direction, Seen, is_product, name_format
from halfstep.precision.contexts import BACKWARD_AS_EAGER
from halfstep.precision.plan import ROOT

CASTS = ("_to_copy", "convert_element_type")
Graph = tuple[Direction, fx.GraphModule]


def record_graphs(region: Callable[..., Any]) -> tuple[Callable[..., Any], list[Graph]]:
    """Return the region, compiled with inductor's partitioner, and the list that gets the graphs as they are made."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[Graph] = []

    def keep(direction: Direction, graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append((direction, graph))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=partial(keep, "forward"),
        bw_compiler=partial(keep, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    backend = torch._functorch.config.patch(BACKWARD_AS_EAGER)(backend)
    # Dynamo caches by code object: a copy of the function with its own is compiled separately, and the run's compiled
    # code stays valid.
    assert isinstance(region, types.FunctionType)
    code = region.__code__.replace(co_name=f"{region.__code__.co_name}_seen")
    copy = types.FunctionType(code, region.__globals__, region.__name__, region.__defaults__, region.__closure__)
    return torch.compile(copy, backend=backend, dynamic=False), graphs


def read_graphs(graphs: list[Graph], model: nn.Module, frozen: Mapping[str, nn.Module], twin: Seen) -> Seen:
    """Return the record of a compiled step, in the form of an eager one; `twin` is that of its eager step."""
    names = {name for name, _ in model.named_modules()}
    names |= {f"{part}.{name}".rstrip(".") for part, m in frozen.items() for name, _ in m.named_modules()}
    # A graph does not show islands: fp32 in a module that has one in the eager step is attributed to it.
    islands = {product.module for product in twin.calls if product.is_island}
    functions = {product.module: product.function for product in twin.calls if product.function}
    seen = Seen()
    makers: dict[str, str] = {}  # of the last forward graph: the modules of its nodes, whose names are unique within it
    for direction, graph in graphs:
        if direction == "backward":
            _add_kept(seen, graph, makers)
        else:
            makers = {}
        for node in graph.graph.nodes:
            func = node.target
            if node.op != "call_function" or not isinstance(func, torch._ops.OpOverload):
                continue
            module = find_module(node, names)
            if direction == "forward":
                makers[node.name] = module
            args, kwargs, result = tree_map(_get_value, (node.args, dict(node.kwargs), node))
            if is_product(func):
                function = functions.get(module, "") if direction == "backward" else ""
                is_island = module in islands
                seen.add_product(module, direction, func, args, kwargs, result, is_island=is_island, function=function)
            elif func._opname in CASTS:
                seen.add_cast(module, direction, args[0], result)
    return seen


def _add_kept(seen: Seen, graph: fx.GraphModule, makers: Mapping[str, str]) -> None:
    """Count the bytes of forward that backward reads; weights and inputs (primals) and incoming gradients do not
    count."""
    for node in graph.graph.find_nodes(op="placeholder"):
        value = _get_value(node)
        if isinstance(value, Tensor) and value.is_floating_point() and node.name in makers:
            seen.kept[makers[node.name], name_format(value.dtype)] += value.nbytes


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
