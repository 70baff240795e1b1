"""Captured steps: find which modules the kernels of a replayed CUDA graph belong to, and how long they take.

A replay shows only a sequence of kernels. So one uncaptured step of the same code is recorded too, in which each launch
is inside the operation that made it, and the kernels of both are matched by name and launch shape, in order. A kernel
that works for several modules belongs to all of them. A kernel without a counterpart stays unmapped and is shown as
such.

The graph also holds the step's work after backward: verdict and clipping, which the uncaptured step has as well, and
the commit, which it leaves out. So what a replay runs after its last matched kernel is the commit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from torch import Tensor, nn

from halfstep.evidence.compiled_code import CompiledCode
from halfstep.evidence.kernel_events import (
    Event,
    Kernel,
    LaunchedKernel,
    get_sequence_number,
    list_input_types,
    list_launches,
)
from halfstep.evidence.observer import OUTSIDE, Product, Seen
from halfstep.evidence.precision_ledger import Expected, KernelRow, Ledger, LedgerRow, collect_findings, format_percent
from halfstep.precision.plan import ROOT, Plan

Modules = tuple[str, ...]
Direction = Literal["forward", "backward", "step"]

COMPUTING = "halfstep: forward or backward"
"""The range around both in the uncaptured step."""
GUARDING, COMMITTING = "(verdict and clipping)", "(commit)"
BACKWARD = "autograd::engine::evaluate_function: "
COMPILED = "## Call CompiledFxGraph"
TYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}
PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::convolution",
    "aten::convolution_backward", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaunchPurpose:
    """What a kernel was launched for."""

    modules: Modules
    direction: Direction
    operation: str = ""
    format: str = ""
    """Format of the operands of a matmul, convolution or attention."""


@dataclass(frozen=True, slots=True)
class LocatedKernel:
    """A kernel and what it was launched for; None if unknown."""

    kernel: Kernel
    place: LaunchPurpose | None


def locate_kernels(events: Sequence[Event], owners: Mapping[int, Modules], code: CompiledCode) -> list[LocatedKernel]:
    """Return the kernels of an uncaptured step with their modules; `owners` are the modules of its autograd nodes."""
    found = list_launches(events)
    sites = _find_sites(found, code)
    return [LocatedKernel(one.kernel, _locate(one, owners, sites.get(number))) for number, one in enumerate(found)]


def _locate(one: LaunchedKernel, owners: Mapping[int, Modules], site: Modules | None) -> LaunchPurpose | None:
    # Backward runs in its own thread, where the range of the main thread is not on the stack.
    if not any(event["name"] == COMPUTING for event in one.within) and not _is_backward(one):
        return LaunchPurpose((GUARDING,), "step")
    direction: Direction = "backward" if _is_backward(one) else "forward"
    modules = _find_owners(one, owners) if site is None else site
    # The innermost one, where such operations are nested.
    product = next((event for event in reversed(one.within) if event["name"] in PRODUCTS), None)
    operation = str(product["name"]).removeprefix("aten::") if product is not None else ""
    return LaunchPurpose(modules, direction, operation, _get_format(product)) if modules else None


def _is_backward(one: LaunchedKernel) -> bool:
    return any(str(event["name"]).startswith(BACKWARD) for event in one.within)


def _find_owners(one: LaunchedKernel, owners: Mapping[int, Modules]) -> Modules:
    """Return the modules of the innermost operation that autograd knows.

    A kernel between two such operations belongs to the next, which reads it; in backward nothing runs outside of a
    node.
    """
    for event in reversed(one.within):
        if (number := get_sequence_number(event)) in owners:
            return owners[number]  # type: ignore[index]
    # Nothing around the launch has a number: in forward, use that of the operation which follows in this thread.
    number = get_sequence_number(one.before) if one.before is not None else None
    return owners.get(number, ()) if number is not None and not _is_backward(one) else ()


def _get_format(product: Event | None) -> str:
    if product is None:
        return ""
    known = [TYPES[kind] for kind in list_input_types(product) if kind in TYPES]
    return max(known[:2], key=list(TYPES.values()).index, default="")  # the wider of the two operands


def _find_sites(found: Sequence[LaunchedKernel], code: CompiledCode) -> dict[int, Modules]:
    """Return the modules of kernels launched inside compiled code, by index in the list."""
    runs: dict[int, list[tuple[int, str, object]]] = defaultdict(list)
    for number, one in enumerate(found):
        # Of nested calls of compiled graphs the innermost made the launch.
        inside = [k for k, event in enumerate(one.within) if str(event["name"]).startswith(COMPILED)]
        if inside:
            call = _identify_call(one, one.within[inside[-1] + 1 :])
            runs[id(one.within[inside[-1]])].append((number, *call))
    modules: dict[int, Modules] = {}
    for run in runs.values():
        # One entry per call, in order: kernels launched by one library call are one call of the generated code.
        calls = list(dict.fromkeys((callee, which) for _, callee, which in run))
        known = dict(zip(calls, code.find_modules([callee for callee, _ in calls]), strict=True))
        modules |= {number: known[callee, which] for number, callee, which in run}
    return modules


def _identify_call(one: LaunchedKernel, below: Sequence[Event]) -> tuple[str, object]:
    """Return what the generated code called, and which call it was: a library call may launch several kernels."""
    if one.kernel.name.startswith("triton_"):
        return one.kernel.name, one.kernel.correlation
    operation = next((event for event in below if "::" in str(event["name"])), None)
    return (one.kernel.name, one.kernel.correlation) if operation is None else (
        str(operation["name"]).rpartition("::")[2], id(operation)
    )  # fmt: skip


# --- the replay ---


def match_replay(replay: Sequence[Kernel], reference: Sequence[LocatedKernel]) -> list[LocatedKernel]:
    """Return each kernel of a replay with the location of its counterpart."""
    places: dict[int, LaunchPurpose | None] = {}
    mine, theirs = list(range(len(replay))), list(range(len(reference)))
    # From strict to loose: name and launch shape, name alone, then the kind of memory kernels. Each round pairs only
    # what the rounds before left over on both sides.
    for key in (lambda kernel: (kernel.name, kernel.shape), lambda kernel: kernel.name, _get_kind):
        pairs = _pair_in_order([key(replay[k]) for k in mine], [key(reference[k].kernel) for k in theirs])
        places |= {mine[a]: reference[theirs[b]].place for a, b in pairs}
        used = {theirs[b] for _, b in pairs}
        mine, theirs = [k for k in mine if k not in places], [k for k in theirs if k not in used]
    # The commit has no counterpart in the reference: it is what runs after the last matched kernel. Unmatched kernels
    # before that stay unmapped.
    last = max((replay[number].start_us for number in places), default=float("inf"))
    committing = LaunchPurpose((COMMITTING,), "step")
    behind = {number: committing for number in mine if replay[number].start_us > last}
    return [LocatedKernel(kernel, places.get(number) or behind.get(number)) for number, kernel in enumerate(replay)]


def _get_kind(kernel: Kernel) -> object:
    """Return the kind of a memory kernel, else its name: inside a graph the driver uses other names, such as
    `memset32`."""
    name = kernel.name.lower()
    return next((kind for kind in ("memset", "memcpy") if name.startswith(kind)), name)


def _pair_in_order(mine: Sequence[object], theirs: Sequence[object]) -> list[tuple[int, int]]:
    """Pair kernels of two lists: in order where a key occurs equally often in both, whatever ran at the same time on
    another stream; the rest by longest common blocks."""
    # A key that is equally frequent in both lists needs no alignment: the n-th launch matches the n-th. That holds even
    # if streams interleave differently in the graph.
    counts = Counter(mine)
    equal = {key for key, num in Counter(theirs).items() if counts[key] == num}
    places: dict[object, list[int]] = defaultdict(list)
    for number, key in enumerate(theirs):
        places[key].append(number)
    pairs = [(number, places[key].pop(0)) for number, key in enumerate(mine) if key in equal]
    # autojunk would ignore keys that are frequent, as kernels of repeated layers are.
    matcher = SequenceMatcher(None, mine, theirs, autojunk=False)
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            if mine[block.a + k] not in equal:
                pairs.append((block.a + k, block.b + k))
    return pairs


# --- the ledger of a captured step ---


def make_captured_ledger(
    plan: Plan,
    kernels: Sequence[LocatedKernel],
    code: Ledger,
    model: nn.Module,
    islands: set[str],
    frozen: Mapping[str, nn.Module] | None = None,
    mode: str = "captured",
) -> Ledger:
    """Return the ledger of a captured step; `code` is that of the captured code, `islands` the modules that have
    one."""
    expected = Expected(plan)
    seen = _collect_products(expected, kernels, islands)
    found = collect_findings(plan, seen, model, frozen or {})
    rows = _make_rows(code, kernels)
    listed = _list_kernels(kernels)
    return Ledger(
        mode=mode, rows=tuple(rows), findings=tuple(found), kernels=tuple(listed), step=code.step,
        summary=_summarise(kernels, sum(finding.level == "differs" for finding in found)),
    )  # fmt: skip


def _collect_products(expected: Expected, kernels: Sequence[LocatedKernel], islands: set[str]) -> Seen:
    """Collect matmuls, convolutions and attention by module.

    A kernel that covers several layers counts for the planned one: a convolution and the normalisation before it have
    different formats.
    """
    seen = Seen()
    for place in (one.place for one in kernels):
        if place is None or place.direction == "step" or not place.format:
            continue
        # If no module of the kernel is planned in its format, the last one is reported.
        module = next(
            (name for name in place.modules if expected.find_compute(name) == place.format), place.modules[-1]
        )
        is_island = place.format == "fp32" and module in islands
        seen.calls[Product(module, place.direction, place.operation, place.format, is_island)] += 1
    return seen


def _make_rows(code: Ledger, kernels: Sequence[LocatedKernel]) -> list[LedgerRow]:
    total = _sum_durations(kernels)
    times: dict[str, float] = defaultdict(float)
    formats: dict[tuple[str, str], set[str]] = defaultdict(set)
    for kernel, place in ((one.kernel, one.place) for one in kernels):
        for name in place.modules if place is not None else ():
            assert place is not None
            # The time of a kernel of several modules is divided equally.
            times[name] += kernel.duration_us / len(place.modules) / total
            formats[name, place.direction] |= {place.format} - {""}
    rows = [
        dataclasses.replace(
            row,
            time_share=times.pop(row.module, 0.0),
            forward=_merge_formats(row.forward, formats[row.module, "forward"]),
            backward=_merge_formats(row.backward, formats[row.module, "backward"]),
        )
        for row in code.rows
    ]
    return rows + [LedgerRow(module=name, planned="-", time_share=time) for name, time in times.items()]


def _merge_formats(of_code: str, found: set[str]) -> str:
    """Return a kernel's format for modules that multiply; one that is only fused with such a module has none."""
    return ", ".join(sorted(found)) if found and of_code != "-" else of_code


def _list_kernels(kernels: Sequence[LocatedKernel]) -> list[KernelRow]:
    total = _sum_durations(kernels)
    times: dict[tuple[str, LaunchPurpose | None], list[float]] = defaultdict(list)
    for one in kernels:
        times[one.kernel.name, one.place].append(one.kernel.duration_us)
    rows = [
        KernelRow(
            name=name, modules=place.modules if place else (), direction=place.direction if place else "-",
            format=place.format if place else "", calls=len(own), time_share=sum(own) / total,
        )
        for (name, place), own in times.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row.time_share)


def _summarise(kernels: Sequence[LocatedKernel], num_differences: int) -> str:
    total = _sum_durations(kernels)
    unmapped = sum(one.kernel.duration_us for one in kernels if one.place is None) / total
    by_format: dict[str, float] = defaultdict(float)
    for one in kernels:
        if one.place is not None and one.place.format:
            by_format[one.place.format] += one.kernel.duration_us
    of_products, longest_first = sum(by_format.values()), sorted(by_format.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{format_percent(time / of_products)} {name}" for name, time in longest_first)
    verdict = f"{num_differences} differ from the plan" if num_differences else "all as planned"
    return (
        f"{len(kernels)} kernels, {format_percent(1 - unmapped)} of their time mapped to modules, "
        f"{format_percent(unmapped)} not mapped; library matmuls, convolutions and attention by time: "
        f"{shown or 'none'}; {verdict}"
    )


def _sum_durations(kernels: Sequence[LocatedKernel]) -> float:
    return max(sum(one.kernel.duration_us for one in kernels), 1e-9)


# --- the modules an operation belongs to ---
# Autograd numbers its nodes as forward makes them, and the profiler reports the same numbers. So no module hook is
# needed, which would make models run without our kernels. A node that reads weights, directly or through casts and
# views, belongs to the modules of these weights. A node that reads none belongs to the common enclosing
# module of the nodes around it.


CASTS_AND_VIEWS = (
    "ToCopy", "T", "Transpose", "Permute", "View", "Reshape", "ReshapeAlias", "UnsafeView", "Alias", "Clone", "Slice",
    "Squeeze", "Unsqueeze", "Expand", "Select", "Split",
)  # fmt: skip


def find_node_owners(loss: Tensor, model: nn.Module) -> dict[int, Modules]:
    """Return the modules of every autograd node of this loss, by sequence number."""
    if loss.grad_fn is None:
        return {}
    # By identity: leaves of the graph hold the parameters themselves.
    names = {id(p): name or ROOT for name, m in model.named_modules() for p in m.parameters(recurse=False)}
    nodes = {_get_number(node): node for node in _iterate_nodes(loss.grad_fn) if not _is_leaf(node)}
    own = {number: _find_weight_owners(node, names) for number, node in nodes.items()}
    inputs = {
        number: [_get_number(n) for n, _ in node.next_functions if n is not None] for number, node in nodes.items()
    }
    return _fill_from_neighbours(own, inputs)


def _iterate_nodes(root: Any) -> Iterator[Any]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)


def _find_weight_owners(node: Any, names: Mapping[int, str]) -> Modules:
    weights = (_find_weight(inner, number) for inner, number in node.next_functions if inner is not None)
    return tuple(dict.fromkeys(names.get(id(weight), OUTSIDE) for weight in weights if weight is not None))


def _find_weight(node: Any, number: int) -> Any:
    """Return the weight that this output of a node is a cast or a view of; None for a computed one."""
    if _is_leaf(node):
        return node.variable
    inner = [(n, k) for n, k in node.next_functions if n is not None]
    if len(inner) == 1 and node.name().rstrip("0123456789").removesuffix("Backward") in CASTS_AND_VIEWS:
        return _find_weight(*inner[0])
    is_of_many = number < len(inner) and all(_is_leaf(n) for n, _ in inner)  # casts of many weights at once
    return inner[number][0].variable if is_of_many and _gives_as_many(node, len(inner)) else None


def _gives_as_many(node: Any, num: int) -> bool:
    """True if a node has one output per input: then they correspond in order."""
    metadata = getattr(node, "_input_metadata", None)
    return metadata is not None and len(metadata) == num


def _fill_from_neighbours(own: Mapping[int, Modules], inputs: Mapping[int, list[int]]) -> dict[int, Modules]:
    """Give nodes without weights the common path of the nodes before and after them."""
    readers: dict[int, list[int]] = {number: [] for number in own}
    for number, given in inputs.items():
        for one in given:
            if one in readers:
                readers[one].append(number)
    # Sequence numbers grow along the data flow, so one pass in ascending order sees all inputs of a node before it, and
    # one in descending order all its readers.
    above = _find_nearest(own, inputs, sorted(own))
    below = _find_nearest(own, readers, sorted(own, reverse=True))
    return {
        number: modules or ((find_common_path(above[number] + below[number]),) if below[number] else (OUTSIDE,))
        for number, modules in own.items()
    }


def _find_nearest(
    own: Mapping[int, Modules], towards: Mapping[int, list[int]], order: Iterable[int]
) -> dict[int, Modules]:
    """Return, for each node, the modules of the nearest nodes that have some, in one direction; numbers grow along the
    data flow."""
    found: dict[int, Modules] = {}
    for number in order:
        near = [own[other] or found.get(other, ()) for other in towards.get(number, ()) if other in own]
        found[number] = tuple(dict.fromkeys(name for names in near for name in names))
    return found


def find_common_path(names: Iterable[str]) -> str:
    """Return the longest common path: `h.0` for `h.0.attn.c_attn` and `h.0.ln_1`."""
    paths = [name.split(".") for name in names if name != OUTSIDE]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or ROOT


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _get_number(node: Any) -> int:
    return int(node._sequence_nr())
