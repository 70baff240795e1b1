"""Find which modules a kernel of compiled code belongs to: inductor names the source nodes above every call.

The generated code is read as text, call by call. Forward nodes have dynamo's names, backward nodes AOTAutograd's; both
are looked up in graphs that were traced on the side (`NodeRecorder`), where each node knows the module whose forward
created it.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

Modules = tuple[str, ...]
Nodes = Mapping[str, str]
"""The modules of a graph's nodes, by the names that inductor calls them."""

_SOURCE_NODES = re.compile(r"# .*Source Nodes: \[(.*)\], Original ATen")
_CALL = re.compile(r"(?:(triton_\w+)\.run|extern_kernels\.(\w+)|(?:torch\.ops\.\w+|\baten)\.(\w+)(?:\.\w+)?)\(")
_BUFFER = re.compile(r"\bbuf\d+\b")
RENAMED_CALLEES = {"bias_addmm": "addmm"}
"""Names that differ between inductor and the profiler."""


@dataclass(frozen=True, slots=True)
class Site:
    """A call in generated code that launches kernels."""

    callee: str
    nodes: tuple[str, ...]


def find_sites(source: str) -> list[Site]:
    """Return the calls of a generated module, in order. A call without nodes above it, such as `aten.index_put_`, gets
    the nodes that its first buffer was made from."""
    found: list[Site] = []
    nodes: tuple[str, ...] = ()
    made_from: dict[str, tuple[str, ...]] = {}
    # Definitions of kernels come before `call`; only the calls inside it are launches.
    for line in source.partition("def call(")[2].splitlines():
        if named := _SOURCE_NODES.search(line):
            nodes = tuple(name.strip() for name in named[1].split(",") if name.strip())
        elif called := _CALL.search(line):
            callee, buffers = next(name for name in called.groups() if name), _BUFFER.findall(line)
            # A comment applies to the next call only. Without one, the call continues work on a known buffer.
            nodes = nodes or made_from.get(next(iter(buffers), ""), ())
            made_from |= dict.fromkeys(buffers, nodes)
            found.append(Site(RENAMED_CALLEES.get(callee, callee), nodes))
            nodes = ()
    return found


class CompiledCode:
    """The calls of all compiled graphs, with their modules."""

    def __init__(self, sources: Sequence[str], graphs: Sequence[Nodes]) -> None:
        self.codes = [_add_modules(find_sites(source), graphs) for source in sources]

    def find_modules(self, calls: Sequence[str]) -> list[Modules]:
        """Return the modules of the observed calls of one compiled graph; empty for calls that its code does not
        contain."""
        # The profiler does not report which graph ran: take the code whose calls are most like the observed ones.
        code = max(self.codes, key=lambda code: _measure_likeness(calls, [callee for callee, _ in code]), default=[])
        left: dict[str, list[Modules]] = {}
        for callee, modules in code:
            left.setdefault(callee, []).append(modules)
        # The n-th observed call of a name is the n-th in the code.
        return [left[call].pop(0) if left.get(call) else () for call in calls]


def _measure_likeness(calls: Sequence[str], callees: Sequence[str]) -> float:
    shared = sum((Counter(calls) & Counter(callees)).values())
    return shared / max(len(calls), len(callees), 1)


def _add_modules(sites: Sequence[Site], graphs: Sequence[Nodes]) -> list[tuple[str, Modules]]:
    named = {name for site in sites for name in site.nodes}
    # Graphs are matched by names too: the one with most of the named nodes.
    nodes = max(graphs, key=lambda graph: len(named & graph.keys()), default={})
    return [(site.callee, _find_modules(site, nodes)) for site in sites]


def _find_modules(site: Site, nodes: Nodes) -> Modules:
    known = [nodes[name] for name in site.nodes if name in nodes]
    is_fused = site.callee.startswith("triton_")
    return tuple(dict.fromkeys(known if is_fused else known[-1:]))  # of a library's call the last node is its own


@dataclass(slots=True)
class NodeRecorder:
    """Trace a region as inductor's front end does, and record the modules of the nodes that inductor would get."""

    names: set[str]
    graphs: list[dict[str, str]] = field(default_factory=list)

    def trace(self, region: Callable[..., Any]) -> Callable[..., Any]:
        """Return the region compiled by a backend that records its nodes and runs its graphs unchanged."""
        return torch.compile(copy_region(region, "named"), backend=self._compile_graph, dynamic=False)

    def _compile_graph(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # A graph found in the cache would come compiled, and without a look at its nodes.
        with torch._functorch.config.patch(BACKWARD_AS_EAGER | {"enable_autograd_cache": False}):
            return compile_fx(graph, inputs, inner_compile=self._keep)

    def _keep(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        nodes = (node for node in graph.graph.nodes if node.op == "call_function")
        self.graphs.append({_get_node_name(node): find_module(node, self.names) for node in nodes})
        return make_boxed_func(graph.forward)


def _get_node_name(node: fx.Node) -> str:
    """Return the node's name as inductor's comments write it."""
    origins = node.meta.get("from_node")
    return str(origins[0].name) if origins else node.name


# --- the graphs of compiled code ---
# The region is compiled once more, on the side, by a backend that keeps the graphs of torch's own front end (the same
# tracing, autocast and partitioning that inductor gets) and runs them as they are. Nodes carry the module whose forward
# made them. Islands and autograd Functions leave no mark in a graph: the eager step shows which modules have them.


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
        return torch.compile(copy_region(region, "seen"), backend=self.make_backend(), dynamic=False)


def copy_region(region: Callable[..., Any], word: str) -> Callable[..., Any]:
    """Return a copy of a region's function with its own code object, whose name ends in `word`.

    Compiling the copy leaves the run's compiled code valid.
    """
    assert isinstance(region, types.FunctionType)
    # Dynamo caches by code object, so the copy is compiled separately and evicts nothing.
    code = region.__code__.replace(co_name=f"{region.__code__.co_name}_{word}")
    return types.FunctionType(code, region.__globals__, region.__name__, region.__defaults__, region.__closure__)


def read_graphs(graphs: list[Graph], model: nn.Module, frozen: Mapping[str, nn.Module], twin: Seen) -> Seen:
    """Return the record of a compiled step, in the form of an eager one."""
    reader = _Reader(list_module_names(model, frozen), twin)
    for direction, graph in graphs:
        reader.read(direction, graph)
    return reader.seen


def list_module_names(model: nn.Module, frozen: Mapping[str, nn.Module]) -> set[str]:
    """Return all module paths; those of frozen modules are prefixed with their name."""
    names = {name for name, _ in model.named_modules()}
    return names | {f"{part}.{name}".rstrip(".") for part, m in frozen.items() for name, _ in m.named_modules()}


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
