"""Which modules an operation works for, by the weights that its autograd node leads to.

Nodes are numbered as they are made, and the profiler tells the same numbers, so no hook has to be set, which would push
our own kernels aside. A node that reads weights, through casts and views of them or not, belongs to their
modules. One that reads none belongs to the part of the model that those around it have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from halfstep.evidence.observer import OUTSIDE
from halfstep.precision.plan import ROOT

Modules = tuple[str, ...]

CASTS_AND_VIEWS = (
    "ToCopy", "T", "Transpose", "Permute", "View", "Reshape", "ReshapeAlias", "UnsafeView", "Alias", "Clone", "Slice",
    "Squeeze", "Unsqueeze", "Expand", "Select", "Split",
)  # fmt: skip


def owners_of_nodes(loss: Tensor, model: nn.Module) -> dict[int, Modules]:
    """By number: the modules of every node of this loss."""
    if loss.grad_fn is None:
        return {}
    names = {id(p): name or ROOT for name, m in model.named_modules() for p in m.parameters(recurse=False)}
    nodes = {_number(node): node for node in _reachable(loss.grad_fn) if not _is_leaf(node)}
    own = {number: _owners(node, names) for number, node in nodes.items()}
    inputs = {number: [_number(n) for n, _ in node.next_functions if n is not None] for number, node in nodes.items()}
    return _with_neighbours(own, inputs)


def _reachable(root: Any) -> Iterator[Any]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)


def _owners(node: Any, names: Mapping[int, str]) -> Modules:
    weights = (_weight(inner, number) for inner, number in node.next_functions if inner is not None)
    return tuple(dict.fromkeys(names.get(id(weight), OUTSIDE) for weight in weights if weight is not None))


def _weight(node: Any, number: int) -> Any:
    """The weight that this output of a node is a cast or a view of; None for anything that was computed."""
    if _is_leaf(node):
        return node.variable
    inner = [(n, k) for n, k in node.next_functions if n is not None]
    if len(inner) == 1 and node.name().rstrip("0123456789").removesuffix("Backward") in CASTS_AND_VIEWS:
        return _weight(*inner[0])
    is_of_many = number < len(inner) and all(_is_leaf(n) for n, _ in inner)  # casts of many weights at once
    return inner[number][0].variable if is_of_many and _gives_as_many(node, len(inner)) else None


def _gives_as_many(node: Any, num: int) -> bool:
    """Whether it has an output for each input: then they belong together in order."""
    metadata = getattr(node, "_input_metadata", None)
    return metadata is not None and len(metadata) == num


def _with_neighbours(own: Mapping[int, Modules], inputs: Mapping[int, list[int]]) -> dict[int, Modules]:
    """Nodes without weights get what those before and behind them have in common."""
    readers: dict[int, list[int]] = {number: [] for number in own}
    for number, given in inputs.items():
        for one in given:
            if one in readers:
                readers[one].append(number)
    above = _nearest(own, inputs, sorted(own))
    below = _nearest(own, readers, sorted(own, reverse=True))
    return {
        number: modules or ((common(above[number] + below[number]),) if below[number] else (OUTSIDE,))
        for number, modules in own.items()
    }


def _nearest(own: Mapping[int, Modules], towards: Mapping[int, list[int]], order: Iterable[int]) -> dict[int, Modules]:
    """For each node the modules of the first ones that have some, in one direction; numbers grow with the data."""
    found: dict[int, Modules] = {}
    for number in order:
        near = [own[other] or found.get(other, ()) for other in towards.get(number, ()) if other in own]
        found[number] = tuple(dict.fromkeys(name for names in near for name in names))
    return found


def common(names: Iterable[str]) -> str:
    """The longest path that all begin with: `h.0` of `h.0.attn.c_attn` and `h.0.ln_1`."""
    paths = [name.split(".") for name in names if name != OUTSIDE]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or ROOT


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _number(node: Any) -> int:
    return int(node._sequence_nr())
