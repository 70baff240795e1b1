"""Captured steps: whose kernels a replayed CUDA graph runs, and how long.

A replay tells nothing but kernels in an order. So one uncaptured step of the same code is recorded too, in which each
launch stands inside the operation that made it, and the kernels of both are matched: by name and launch shape, in
order. A kernel that works for several modules has all of them. What has no counterpart stays unmapped and is shown.

The graph holds the step's own work behind backward, too: verdict and clipping, which the uncaptured step has as well,
and the commit, which it leaves out. What a replay runs behind its last matched kernel is that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from halfstep.evidence.compiled_sites import CompiledCode
from halfstep.evidence.trace import Event, Kernel, Launched, launched, sequence_of, types_of

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
class Place:
    """What a kernel was launched for."""

    modules: Modules
    direction: Direction
    operation: str = ""
    format: str = ""
    """Of the operands of a matmul, convolution or attention."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A kernel and its place; None where it is not known."""

    kernel: Kernel
    place: Place | None


def placed(events: Sequence[Event], owners: Mapping[int, Modules], code: CompiledCode) -> list[Placed]:
    """The kernels of an uncaptured step; `owners` are the modules of its autograd nodes."""
    found = launched(events)
    sites = _sites(found, code)
    return [Placed(one.kernel, _place(one, owners, sites.get(number))) for number, one in enumerate(found)]


def _place(one: Launched, owners: Mapping[int, Modules], site: Modules | None) -> Place | None:
    if not any(event["name"] == COMPUTING for event in one.within) and not _backward(one):
        return Place((GUARDING,), "step")
    direction: Direction = "backward" if _backward(one) else "forward"
    modules = _owners(one, owners) if site is None else site
    product = next((event for event in reversed(one.within) if event["name"] in PRODUCTS), None)
    operation = str(product["name"]).removeprefix("aten::") if product is not None else ""
    return Place(modules, direction, operation, _format(product)) if modules else None


def _backward(one: Launched) -> bool:
    return any(str(event["name"]).startswith(BACKWARD) for event in one.within)


def _owners(one: Launched, owners: Mapping[int, Modules]) -> Modules:
    """Of the innermost operation that autograd knows. A kernel between two of them belongs to the next, which reads it;
    in backward nothing runs outside of a node."""
    for event in reversed(one.within):
        if (number := sequence_of(event)) in owners:
            return owners[number]  # type: ignore[index]
    number = sequence_of(one.before) if one.before is not None else None
    return owners.get(number, ()) if number is not None and not _backward(one) else ()


def _format(product: Event | None) -> str:
    if product is None:
        return ""
    known = [TYPES[kind] for kind in types_of(product) if kind in TYPES]
    return max(known[:2], key=list(TYPES.values()).index, default="")  # the wider of the two operands


def _sites(found: Sequence[Launched], code: CompiledCode) -> dict[int, Modules]:
    """By place in the list: the modules of those launched inside compiled code."""
    runs: dict[int, list[tuple[int, str, object]]] = defaultdict(list)
    for number, one in enumerate(found):
        inside = [k for k, event in enumerate(one.within) if str(event["name"]).startswith(COMPILED)]
        if inside:
            call = _call(one, one.within[inside[-1] + 1 :])
            runs[id(one.within[inside[-1]])].append((number, *call))
    modules: dict[int, Modules] = {}
    for run in runs.values():
        calls = list(dict.fromkeys((callee, which) for _, callee, which in run))
        known = dict(zip(calls, code.modules([callee for callee, _ in calls]), strict=True))
        modules |= {number: known[callee, which] for number, callee, which in run}
    return modules


def _call(one: Launched, below: Sequence[Event]) -> tuple[str, object]:
    """What the generated code called, and which call it was: a library's call may launch several kernels."""
    if one.kernel.name.startswith("triton_"):
        return one.kernel.name, one.kernel.correlation
    operation = next((event for event in below if "::" in str(event["name"])), None)
    return (one.kernel.name, one.kernel.correlation) if operation is None else (
        str(operation["name"]).rpartition("::")[2], id(operation)
    )  # fmt: skip


# --- the replay ---


def matched(replay: Sequence[Kernel], reference: Sequence[Placed]) -> list[Placed]:
    """Each kernel of a replay with the place of its counterpart."""
    places: dict[int, Place | None] = {}
    mine, theirs = list(range(len(replay))), list(range(len(reference)))
    for key in (lambda kernel: (kernel.name, kernel.shape), lambda kernel: kernel.name, _kind):
        pairs = _pairs([key(replay[k]) for k in mine], [key(reference[k].kernel) for k in theirs])
        places |= {mine[a]: reference[theirs[b]].place for a, b in pairs}
        used = {theirs[b] for _, b in pairs}
        mine, theirs = [k for k in mine if k not in places], [k for k in theirs if k not in used]
    last = max((replay[number].start_us for number in places), default=float("inf"))
    committing = Place((COMMITTING,), "step")
    behind = {number: committing for number in mine if replay[number].start_us > last}
    return [Placed(kernel, places.get(number) or behind.get(number)) for number, kernel in enumerate(replay)]


def _kind(kernel: Kernel) -> object:
    """Inside a graph the driver sets and copies memory by kernels that it calls otherwise: `memset32`."""
    name = kernel.name.lower()
    return next((kind for kind in ("memset", "memcpy") if name.startswith(kind)), name)


def _pairs(mine: Sequence[object], theirs: Sequence[object]) -> list[tuple[int, int]]:
    """Those that both have equally often belong together in order, whatever ran beside them on another stream. Of the
    rest those that stand in the same order."""
    counts = Counter(mine)
    equal = {key for key, num in Counter(theirs).items() if counts[key] == num}
    places: dict[object, list[int]] = defaultdict(list)
    for number, key in enumerate(theirs):
        places[key].append(number)
    pairs = [(number, places[key].pop(0)) for number, key in enumerate(mine) if key in equal]
    matcher = SequenceMatcher(None, mine, theirs, autojunk=False)
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            if mine[block.a + k] not in equal:
                pairs.append((block.a + k, block.b + k))
    return pairs
