"""Which modules a kernel of compiled code works for: inductor names above every call the nodes that it was made from.

Its generated code is read as text, call by call. Nodes of forward are named as dynamo named them, those of backward as
AOTAutograd did; both are found again in graphs that were traced on the side (`NodeRecorder`), where each knows the
module whose forward made it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from halfstep.evidence.graphs import copied, module_of

Modules = tuple[str, ...]
Nodes = Mapping[str, str]
"""The modules of a graph's nodes, by the names that inductor calls them."""

_SOURCE_NODES = re.compile(r"# .*Source Nodes: \[(.*)\], Original ATen")
_CALL = re.compile(r"(?:(triton_\w+)\.run|extern_kernels\.(\w+)|(?:torch\.ops\.\w+|\baten)\.(\w+)(?:\.\w+)?)\(")
_BUFFER = re.compile(r"\bbuf\d+\b")
SAME = {"bias_addmm": "addmm"}
"""What inductor calls otherwise than the profiler."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in generated code that launches kernels."""

    callee: str
    nodes: tuple[str, ...]


def sites_of(source: str) -> list[Site]:
    """The calls of a generated module, in order. One without nodes above it, such as `aten.index_put_`, is of those
    that its first buffer was made from."""
    found: list[Site] = []
    nodes: tuple[str, ...] = ()
    made_from: dict[str, tuple[str, ...]] = {}
    for line in source.partition("def call(")[2].splitlines():
        if named := _SOURCE_NODES.search(line):
            nodes = tuple(name.strip() for name in named[1].split(",") if name.strip())
        elif called := _CALL.search(line):
            callee, buffers = next(name for name in called.groups() if name), _BUFFER.findall(line)
            nodes = nodes or made_from.get(next(iter(buffers), ""), ())
            made_from |= dict.fromkeys(buffers, nodes)
            found.append(Site(SAME.get(callee, callee), nodes))
            nodes = ()
    return found


class CompiledCode:
    """The calls of all compiled graphs, with their modules."""

    def __init__(self, sources: Sequence[str], graphs: Sequence[Nodes]) -> None:
        self.codes = [_with_modules(sites_of(source), graphs) for source in sources]

    def modules(self, calls: Sequence[str]) -> list[Modules]:
        """Of the calls that one compiled graph was seen to make; empty for those that its code does not know."""
        code = max(self.codes, key=lambda code: _likeness(calls, [callee for callee, _ in code]), default=[])
        left: dict[str, list[Modules]] = {}
        for callee, modules in code:
            left.setdefault(callee, []).append(modules)
        return [left[call].pop(0) if left.get(call) else () for call in calls]


def _likeness(calls: Sequence[str], callees: Sequence[str]) -> float:
    shared = sum((Counter(calls) & Counter(callees)).values())
    return shared / max(len(calls), len(callees), 1)


def _with_modules(sites: Sequence[Site], graphs: Sequence[Nodes]) -> list[tuple[str, Modules]]:
    named = {name for site in sites for name in site.nodes}
    nodes = max(graphs, key=lambda graph: len(named & graph.keys()), default={})
    return [(site.callee, _modules(site, nodes)) for site in sites]


def _modules(site: Site, nodes: Nodes) -> Modules:
    known = [nodes[name] for name in site.nodes if name in nodes]
    is_fused = site.callee.startswith("triton_")
    return tuple(dict.fromkeys(known if is_fused else known[-1:]))  # of a library's call the last node is its own


@dataclass(slots=True)
class NodeRecorder:
    """Traces a region as inductor's front end does, and keeps the modules of the nodes that inductor would get."""

    names: set[str]
    graphs: list[dict[str, str]] = field(default_factory=list)

    def traced(self, region: Callable[..., Any]) -> Callable[..., Any]:
        """It runs its graphs as they are."""
        return torch.compile(copied(region, "named"), backend=self._backend, dynamic=False)

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # A graph found in the cache would come compiled, and without a look at its nodes.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=self._keep)

    def _keep(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        nodes = (node for node in graph.graph.nodes if node.op == "call_function")
        self.graphs.append({_name(node): module_of(node, self.names) for node in nodes})
        return make_boxed_func(graph.forward)


def _name(node: fx.Node) -> str:
    """As inductor's comments have it."""
    origins = node.meta.get("from_node")
    return str(origins[0].name) if origins else node.name
