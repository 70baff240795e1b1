"""Windows as the fast path sees them: the traced calls of a window, and the graph that was captured from one."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.own_loop.traced import Call, NotTraced, list_tensors
from halfstep.step.batches import Batch, Weight
from halfstep.step.facts import Facts
from halfstep.step.step import LossFn, Step

Key = tuple[object, ...]


@dataclass
class TracedWindow:
    """The calls of one window: which entries, and where loss and weight are."""

    calls: list[Call]
    losses: list[int]
    weights: list[Weight | int]
    weight_outputs: list[int | None]
    batches: list[Batch]

    @property
    def key(self) -> Key:
        return tuple(
            (call.entry, loss, None if isinstance(weight, Tensor) else weight, call.numbers)
            for call, loss, weight in zip(self.calls, self.losses, self.weights, strict=True)
        )

    def find_dynamic(self, number: int, changing: set[int]) -> list[int]:
        """Return the inputs of a call that change between steps: the batch, Python numbers, tensors made anew."""
        own, call = {id(leaf) for leaf in list_tensors(self.batches[number])}, self.calls[number]
        return [
            position
            for position, one in enumerate(call.inputs)
            if isinstance(one, Tensor)
            and (
                id(one) in own
                or position in changing
                or position in call.entry.moved
                or is_number_input(call, position)
            )
        ]

    @property
    def reads_numbers(self) -> bool:
        """True if the code takes a Python number as an input: one that has changed before."""
        return any(is_number_input(call, position) for call in self.calls for position in range(len(call.inputs)))

    def list_written(self) -> list[Tensor]:
        """Return the inputs that the code writes into, such as BatchNorm statistics."""
        written = (call.inputs[k] for call in self.calls for k in call.entry.mutated if k < len(call.inputs))
        return [tensor for tensor in written if isinstance(tensor, Tensor)]

    def with_batches(self, window: list[Batch]) -> TracedWindow | None:
        """Return these calls with the tensors of another window of the same shapes; None if more than those differ."""
        last, now = [list_tensors(batch) for batch in self.batches], [list_tensors(batch) for batch in window]
        if list(map(describe_tensors, last)) != list(map(describe_tensors, now)):
            return None
        calls = []
        for call, olds, leaves in zip(self.calls, last, now, strict=True):
            new = {id(old): leaf for old, leaf in zip(olds, leaves, strict=True)}
            inputs = tuple(new.get(id(one), one) for one in call.inputs)
            calls.append(dataclasses.replace(call, inputs=inputs))
        return dataclasses.replace(self, calls=calls, batches=window)


def run_calls(traced: TracedWindow, outputs: list[Sequence[Any]]) -> LossFn:
    """Return a loss function that runs the traced code of one micro-batch after the other.

    It takes a call as it was, or a dict of inputs to use instead: the static tensors of a graph."""
    numbers = itertools.cycle(range(len(traced.calls)))

    def run(given: Call | dict[str, Tensor]) -> tuple[Tensor, Weight]:
        number = next(numbers)
        call = traced.calls[number]
        inputs = list(call.inputs)
        for position, tensor in given.items() if isinstance(given, dict) else ():
            inputs[int(position)] = tensor
        found = list(call.entry.code(*inputs))
        outputs.append(found)
        at = traced.weight_outputs[number]
        return found[traced.losses[number]], traced.weights[number] if at is None else found[at].detach().reshape(())

    return run


def is_number_input(call: Call, position: int) -> bool:
    """True for a Python number, which Dynamo passes as a 0-dimensional CPU tensor."""
    one = call.inputs[position]
    is_small = isinstance(one, Tensor) and one.ndim == 0 and one.is_cpu and not one.requires_grad
    return is_small and position not in call.entry.mutated


def describe_window(window: Sequence[Batch]) -> object:
    return [[(tensor.shape, tensor.dtype) for tensor in list_tensors(batch)] for batch in window]


def describe_tensors(tensors: Sequence[Tensor]) -> list[object]:
    return [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]


def refuse_changing(call: Call, changing: set[int]) -> None:
    """Refuse code that writes into inputs that are copied into a graph, or takes gradients of them."""
    for position, one in enumerate(call.inputs):
        is_copied = position in changing or position in call.entry.moved
        if isinstance(one, Tensor) and is_copied and (position in call.entry.mutated or one.requires_grad):
            raise NotTraced("loss_fn writes into a tensor that is a new one at every step, or takes its gradient")


# --- captured windows ---


class Replay(Protocol):
    """A captured step: GraphedStep, or what tests put in its place on a CPU."""

    inputs: list[dict[str, Tensor]]
    commits: bool
    """False if the graph holds forward and backward only."""

    @property
    def is_valid(self) -> bool: ...

    def __call__(self, window: list[dict[str, Tensor]], ids: tuple[Tensor, ...] = ()) -> Facts: ...

    def replay_gradients(self, window: list[dict[str, Tensor]]) -> tuple[Tensor, Weight]:
        """Run forward and backward alone, if `commits` is false."""
        ...


@dataclass
class Graph:
    """A captured window and what it may be replayed for."""

    replay: Replay
    device: torch.device
    outputs: list[Sequence[Any]]
    """What the entries return; a replay writes into these tensors."""
    fixed: list[tuple[list[int], list[Tensor], list[int]]]
    """Inputs that must be the same tensors at the same addresses: positions, tensors, addresses."""
    holders: list[int]
    """Identities of the objects that optimizers replace when state is loaded into them."""
    dynamic: list[list[tuple[int, str]]]
    """Inputs that are copied into it: position, and the name of its static tensor."""

    def fits(self, traced: TracedWindow, step: Step) -> bool:
        if not self.replay.is_valid or list(map(id, list_holders(step))) != self.holders:
            return False
        for call, (positions, tensors, addresses) in zip(traced.calls, self.fixed, strict=True):
            if not all(map(operator.is_, map(call.inputs.__getitem__, positions), tensors)):
                return False
            if list(map(Tensor.data_ptr, tensors)) != addresses:
                return False
        return True

    def select(self, traced: TracedWindow) -> list[dict[str, Tensor]]:
        """Return the inputs of a window that are copied into the graph."""
        window = []
        for call, own in zip(traced.calls, self.dynamic, strict=True):
            inputs = {name: call.inputs[position] for position, name in own}
            for position in call.entry.waits:  # the user may overwrite them as soon as the step returns
                inputs[str(position)] = inputs[str(position)].to(self.device)
            window.append(inputs)
        return window


def list_holders(step: Step) -> list[object]:
    """Return the objects that optimizers replace when state is loaded into them, or groups are added."""
    return [holder for o in step.optimizers for holder in (o.state, o.param_groups, *o.param_groups)]
