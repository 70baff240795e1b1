"""Put numbers and constants of a traced loss function, which are on the CPU, on the device.

*Numbers*: Python floats that change from step to step are 0-dimensional CPU tensors in AOTAutograd's graph. A capture
would freeze them, and Inductor would read them when it launches a kernel.

*Constants*: a model may write `torch.tensor([...])` or `torch.arange(n)` in forward and move the result to the device,
or compute a table from it first, such as relative positions. Eager steps make and copy it at every step. A capture
cannot: it would wait for the copy. What depends on no input and on no random number has one value, so it is computed
here and becomes an attribute of the graph. This happens before forward and backward are separated, so that a constant
is not saved in between as an activation on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes


def place_numbers(graph: GraphModule, inputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
    """Put Python numbers, which AOTAutograd's graph takes as 0-dimensional CPU tensors, and what is computed from them,
    on the device: a capture would freeze a CPU tensor, and Inductor would read it when it launches a kernel.

    Arithmetic with a CPU number is done in fp32 for half precision, and divides by multiplying with the inverse. With a
    tensor on the device it would not be, so that is written out. Return the inputs with these on the device."""
    mode = detect_fake_mode(inputs) or detect_fake_mode([n.meta.get("val") for n in graph.graph.nodes])
    placed: set[Node] = set()
    if mode is None:
        return inputs
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if not (isinstance(value, Tensor) and value.device.type != device.type and value.ndim == 0):
            if node.op == "call_function" and not placed.isdisjoint(node.all_input_nodes):
                write_out_arithmetic(graph, node, placed)
            continue
        if node.op == "placeholder":
            with mode:  # forward and backward share the metadata of a node: replace it
                node.meta = {**node.meta, "val": torch.empty((), dtype=value.dtype, device=device)}
        elif placed.isdisjoint(node.all_input_nodes):
            continue
        else:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
            refresh_value(node, mode)
        placed.add(node)
    graph.recompile()
    placeholders = graph.graph.find_nodes(op="placeholder")
    return [node.meta["val"] if node in placed else one for node, one in zip(placeholders, inputs, strict=True)]


def write_out_arithmetic(graph: GraphModule, node: Node, placed: set[Node]) -> None:
    """Let arithmetic of a tensor with a number on the device round as with a Python number."""
    aten, convert, value = torch.ops.aten, torch.ops.prims.convert_element_type.default, node.meta.get("val")
    if not isinstance(value, Tensor):
        return
    is_inverse = node.target is aten.div.Tensor and node.args[1] in placed
    is_half = value.dtype in (torch.float16, torch.bfloat16)
    is_half_sum = is_half and node.target in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
    if not (is_inverse or is_half_sum):
        return
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    mode = detect_fake_mode([value])

    def insert(target: Any, *arguments: Any, **named: Any) -> Node:
        made = graph.graph.call_function(target, arguments, named)
        refresh_value(made, mode)
        return made

    with graph.graph.inserting_before(node):
        args = [insert(convert, one, dtype) if isinstance(one, Node) else one for one in node.args]
        if is_inverse:
            number = node.args[1]
            while isinstance(number, Node) and number.target is convert and number.args[0] in placed:
                number = number.args[0]  # as the host does: the inverse of the double, rounded once
            args[1] = insert(convert, insert(aten.reciprocal.default, insert(convert, number, torch.float64)), dtype)
        target = aten.mul.Tensor if is_inverse else node.target
        exact = insert(target, *args, **node.kwargs)
        result = insert(convert, exact, value.dtype)
    node.replace_all_uses_with(result)
    result.meta = dict(node.meta)
    graph.graph.erase_node(node)


def refresh_value(node: Node, mode: Any) -> None:
    """Compute the fake value of a node anew from those of its inputs."""
    arguments, named = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with mode:
        node.meta = {**node.meta, "val": node.target(*arguments, **named)}  # type: ignore[operator]


def place_constants(module: GraphModule, device: torch.device) -> None:
    """Replace what a graph computes on the CPU from constants alone by constants on the device."""
    if device.type == "cpu":
        return
    values: dict[Node, Tensor] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            value = getattr(module, node.target, None)
            if isinstance(value, Tensor) and value.device.type == "cpu":
                values[node] = value
        elif node.op == "call_function" and is_constant(node, values, device):
            arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
            with _disable_current_modes():  # the values of the trace are fake tensors
                values[node] = node.target(*arguments, **named)
        elif node.op == "call_function" and not is_elsewhere(node, device):
            for one in [one for one in node.all_input_nodes if one in values]:
                place_constant(module, node, one, values[one], device)
    for node in reversed(values):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()


def is_constant(node: Node, values: dict[Node, Tensor], device: torch.device) -> bool:
    """True for a CPU tensor that depends on constants only."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_pure = getattr(node.target, "namespace", "") in ("aten", "prims") and not is_random
    return is_pure and is_elsewhere(node, device) and all(one in values for one in node.all_input_nodes)


def place_constant(module: GraphModule, user: Node, before: Node, value: Tensor, device: torch.device) -> None:
    """Let one operation read a constant on the device. Each has an attribute node of its own, because one that forward
    and backward share would be saved as an activation."""
    name = f"_halfstep_{before.name}"
    if not hasattr(module, name):
        with _disable_current_modes():
            module.register_buffer(name, value.to(device))
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    assert mode is not None
    with module.graph.inserting_before(user):
        constant = module.graph.get_attr(name)
    constant.meta = {"val": mode.from_tensor(getattr(module, name))}
    user.replace_input_with(before, constant)
    if value.ndim == 0:
        write_out_arithmetic(module, user, {constant})


def make_inductor_pass(device: torch.device) -> Any:
    """Return `place_constants` as Inductor takes it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass  # not before the first compiled code

    class PlaceConstants(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            assert graph.owning_module is not None
            place_constants(graph.owning_module, device)

        def uuid(self) -> str:
            return "halfstep.place_constants"  # its result is part of the graphs that Inductor compares

    return PlaceConstants()


def is_elsewhere(node: Node, device: torch.device) -> bool:
    """True if the value of a node is a tensor on another device."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type != device.type
