"""Windows as the fast path sees them: the traced calls of a window, and the graph that was captured from one.

Nothing here needs torch's compiler, which traced.py imports when the first window is traced."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from halfstep.step.batches import Batch, Weight
from halfstep.step.facts import Facts
from halfstep.step.flat import are_same_objects, is_finite
from halfstep.step.step import GuardedStep, LossFn

if TYPE_CHECKING:
    from torch.fx import GraphModule

Key = tuple[object, ...]
Compiler = Literal[
    "aten", "aten tuned", "aten fp8", "inductor", "inductor tuned", "inductor fp8", "inductor tuned fp8"
]  # fmt: skip
"""What makes code of a graph; tuned: with kernels chosen by measurement; fp8: of a copy with fp8 products."""
Code = Callable[..., Sequence[Any]]


class NotTraced(Exception):
    """The loss function cannot be captured; the message says why in one line."""


class NotTracedWhole(NotTraced):
    """The loss function cannot be captured, but parts of it may be compiled."""


class Outdated(Exception):
    """An input requires a gradient and did not when the code was traced, or the other way round: torch 2.11 does not
    guard that for parameters."""


@dataclass(eq=False)
class Entry:
    """One combination of Python values and shapes: its operations, the code made from them, and what was found."""

    reference: GraphModule
    """Dynamo's graph, unmodified. Under eager autograd it does what the user's Python code does on the device."""
    outputs: list[Any]
    """What the code returns, tensors as promises."""
    compile: Callable[[Compiler], None]
    """Make `codes[compiler]` from the same graph."""
    loss: int = 0  # which output is the loss: the only one with an autograd graph
    codes: dict[Compiler, Code] = field(default_factory=dict)
    why_not: str = ""
    """What in the graph keeps it from being captured; empty if nothing does."""
    mutated: frozenset[int] = frozenset()  # inputs that the graph writes into
    moved: frozenset[int] = frozenset()  # CPU inputs that the graph only copies to the device
    waits: frozenset[int] = frozenset()  # those of them whose copy the host waits for
    num_nodes: int = 0
    is_random: bool = False
    rounds_by_data: bool = False  # whether eager code chooses between formulas by the values of a tensor
    host_draws: list[Callable[[], Any]] = field(default_factory=list)  # from the CPU's generator, for another device
    uses_atomics: bool = False  # whether sums may be added up in another order at every run
    requires_grad: list[bool] = field(default_factory=list)  # of each input
    was_called: bool = False
    is_compared: bool = False  # whether its code was compared with the eager step
    last_inputs: list[Any] | None = None  # weak references to the tensors of the last call
    changing: set[int] = field(default_factory=set)  # inputs that are other tensors at every step
    has_numbers: bool = False  # whether an input is no tensor
    takes_gradient: bool = False  # whether the loss function calls torch.autograd.grad itself
    has_side_effects: bool = True  # whether the Python code changes an object, such as a list or an attribute


@dataclass(frozen=True)
class Promise:
    """What a tensor that the code will return looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_kept: bool = False
    """Whether it is kept with an autograd graph that the loss's backward frees."""

    def make(self) -> Tensor:
        if self.is_kept:
            kept: Tensor = FreedGraph.apply(torch.empty(0, requires_grad=True), self)  # type: ignore[no-untyped-call]
            return kept
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


class FreedGraph(torch.autograd.Function):
    """The autograd graph of a tensor that the user keeps after the step."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, promise: Promise) -> Tensor:
        return torch.empty(promise.shape, dtype=promise.dtype, device=promise.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("backward ran a second time through the autograd graph of loss_fn, which the step has freed")


@dataclass
class Call:
    """One call of a traced loss function: its flat inputs, and what it returned and promised."""

    entry: Entry
    inputs: tuple[Any, ...]
    numbers: tuple[Any, ...]  # inputs that are no tensors
    promised: list[Any] = field(default_factory=list)
    """Weak references to the tensors of the outputs: what the user's code keeps stays alive, and is filled. Empty if
    the call was only looked up: the Python code has not run, and nothing was returned."""
    result: Any = None
    weight: Weight | int = 1
    weight_output: int | None = None  # which output of the entry the weight is, if it is one

    def find_promised(self, tensor: Tensor) -> int:
        """Return which output of the entry a tensor in the result is."""
        for number, held in enumerate(self.list_held()):
            if held is tensor:
                return number
        raise NotTraced("loss_fn returns a tensor that it did not compute")

    def note_changing(self) -> bool:
        """Note which inputs are other tensors than in the last call. Return False at the first call."""
        last = self.entry.last_inputs
        self.entry.last_inputs = refer_to(self.inputs)
        pairs = enumerate(zip(self.inputs, last or (), strict=False))
        self.entry.changing |= {k for k, (now, then) in pairs if isinstance(now, Tensor) and then() is not now}
        return last is not None

    def draw_on_host(self) -> None:
        """Let the CPU's generator advance as in an eager step."""
        for draw in self.entry.host_draws:
            draw()

    def list_held(self) -> list[Tensor | None]:
        """Return the promised tensors that something still holds, by the number of the output."""
        return [one() if isinstance(one, weakref.ref) else None for one in self.promised]

    def fulfil(self, outputs: Sequence[Any]) -> None:
        """Copy what the code returned into the tensors that the user holds."""
        for held, output in zip(self.list_held(), outputs, strict=True):
            if held is not None:
                with torch.no_grad():
                    held.copy_(output)

    def select(self, outputs: Sequence[Any]) -> tuple[Tensor, Weight]:
        """Return loss and weight among what the code returned."""
        weight = self.weight if self.weight_output is None else outputs[self.weight_output].detach().reshape(())
        return outputs[self.entry.loss], weight


def refer_to(values: Sequence[Any]) -> list[Any]:
    """Return weak references to tensors, and other values as they are."""
    return [weakref.ref(one) if isinstance(one, Tensor) else one for one in values]


@dataclass
class TracedWindow:
    """The calls of one window."""

    batches: list[Batch]
    calls: list[Call] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    """Entries of modules that the Python code has replaced, registered or removed."""

    @property
    def entries_key(self) -> Key:
        return tuple(
            [
                (call.entry, None if isinstance(call.weight, Tensor) else call.weight, call.numbers)
                for call in self.calls
            ]
        )

    @property
    def has_side_effects(self) -> bool:
        return any(call.entry.has_side_effects for call in self.calls)

    @property
    def uses_atomics(self) -> bool:
        return any(call.entry.uses_atomics for call in self.calls)

    def find_dynamic(self, number: int, fixed: set[int]) -> list[int]:
        """Return the inputs of a call that change between steps: the batch, Python numbers, tensors made anew; `fixed`
        are identities of tensors that a graph reads where they are. Refuse code that writes into them, or takes their
        gradients."""
        call, linked = self.calls[number], self.find_linked(number)
        own = {id(leaf) for leaf in list_tensors(self.batches[number])}
        found = []
        for position, one in enumerate(call.inputs):
            if not isinstance(one, Tensor) or position in linked:
                continue
            is_new = position in call.entry.changing and id(one) not in fixed
            if id(one) in own or is_new or position in call.entry.moved or is_number_input(call, position):
                if position in call.entry.mutated or one.requires_grad:
                    raise NotTraced(
                        "loss_fn writes into a tensor that is replaced at every step, or takes its gradient"
                    )
                found.append(position)
        return found

    def find_linked(self, number: int) -> set[int]:
        """Return the inputs of a call that earlier calls of the window compute, such as a hidden state."""
        earlier = {id(held) for call in self.calls[:number] for held in call.list_held() if held is not None}
        return {position for position, one in enumerate(self.calls[number].inputs) if id(one) in earlier}

    def list_written(self) -> list[Tensor]:
        """Return the inputs that the code writes into, such as BatchNorm statistics."""
        written = (call.inputs[k] for call in self.calls for k in call.entry.mutated if k < len(call.inputs))
        return [tensor for tensor in written if isinstance(tensor, Tensor)]

    # --- what the Python code has replaced in modules, without having computed anything yet ---

    def undo_exchanges(self) -> None:
        for exchange in self.exchanges:
            exchange.put(exchange.before)

    def redo_exchanges(self) -> None:
        for exchange in self.exchanges:
            exchange.put(exchange.after)

    def list_replaced(self) -> list[tuple[Exchange, str]]:
        """Return the exchanged buffers, which outputs of calls replace, by name. Refuse other exchanges."""
        promised = {id(held) for call in self.calls for held in call.list_held() if held is not None}
        found = []
        for exchange in self.exchanges:
            for name in exchange.before.keys() | exchange.after.keys():
                before, after = exchange.before.get(name), exchange.after.get(name)
                if before is after:
                    continue
                is_alike = isinstance(before, Tensor) and isinstance(after, Tensor) and are_alike(before, after)
                if not is_alike or isinstance(before, nn.Parameter) or id(after) not in promised:
                    raise NotTraced(
                        "the model replaces or registers a tensor in its forward pass instead of writing into it"
                    )
                found.append((exchange, name))
        return found

    def settle_exchanges(self, bad: Tensor) -> None:
        """Leave the old tensor in a module if the step was bad. As in eager steps, that is another tensor."""
        for exchange, name in self.list_replaced() if self.exchanges else ():
            with torch.no_grad():
                exchange.owner[name] = torch.where(bad, exchange.before[name], exchange.after[name])


@dataclass
class Exchange:
    """The parameters, buffers or children of one module, before and after the Python code ran."""

    owner: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]

    def put(self, entries: dict[str, Any]) -> None:
        self.owner.clear()
        self.owner.update(entries)


def find_exchanges(before: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[Exchange]:
    """Return the exchanges since dicts were copied: pairs of a dict and its copy."""
    return [
        Exchange(owner, then, dict(owner))
        for owner, then in before
        if len(owner) != len(then) or not all(map(operator.is_, owner.values(), then.values()))
    ]


def run_calls(traced: TracedWindow, compiler: Compiler, step: GuardedStep, outputs: list[Sequence[Any]]) -> LossFn:
    """Return a loss function that runs the traced code of one micro-batch after the other.

    It takes a call as it was, or a dict of inputs to use instead: the static tensors of a graph. Python numbers are
    given on the device, captured or not, so that both compute the same."""
    calls = itertools.cycle(traced.calls)
    replaced = traced.list_replaced()
    made: dict[int, Any] = {}  # what earlier calls of the window have computed for later ones, by promised tensor

    def run(given: Call | dict[str, Tensor]) -> tuple[Tensor, Weight]:
        call = next(calls)
        static = given if isinstance(given, dict) else {}
        inputs = [static.get(str(position), made.get(id(one), one)) for position, one in enumerate(call.inputs)]
        for position, one in enumerate(inputs):
            if str(position) not in static and is_number_input(call, position):
                inputs[position] = one.to(step.device)
        found = list(call.entry.codes[compiler](*inputs))
        call.draw_on_host()
        outputs.append(found)
        if call.promised:
            made.update({id(h): o.detach() for h, o in zip(call.list_held(), found, strict=True) if h is not None})
        if call is traced.calls[-1]:
            step.writes.returned = [made[id(exchange.after[name])] for exchange, name in replaced]
        return call.select(found)

    return run


def run_reference(traced: TracedWindow, *, has_exchanges: bool = True) -> LossFn:
    """Return a loss function that does what the user's Python code did in these calls: it runs Dynamo's graphs under
    eager autograd, and fills the tensors that were promised. With `has_exchanges` modules get the tensors that the
    Python code put into them, after the last call; before the step, `undo_exchanges` took them out."""
    calls = itertools.cycle(traced.calls)

    def run(_: Any) -> tuple[Tensor, Weight]:
        call = next(calls)
        found = list(call.entry.reference.forward(*call.inputs))  # not __call__, which prints errors that are caught
        if call.promised:
            call.fulfil([one.detach() if isinstance(one, Tensor) else one for one in found])
        if has_exchanges and call is traced.calls[-1]:
            traced.redo_exchanges()
        return call.select(found)

    return run


def is_number_input(call: Call, position: int) -> bool:
    """True for a Python number, which Dynamo passes as a 0-dimensional CPU tensor."""
    one = call.inputs[position]
    is_small = isinstance(one, Tensor) and one.ndim == 0 and one.is_cpu and not one.requires_grad
    return is_small and position not in call.entry.mutated


def are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """True if all tensors are finite; waits for the device."""
    return all(bool(is_finite(tensor).all()) for tensor in tensors)


@dataclass
class Shape:
    """What is known about windows of one shape."""

    is_uncompared: bool = False  # whether it has code that was not compared with eager code yet
    left_out_until: int = -1  # the attempted step up to which it gets no graph
    num_unused: int = 0  # graphs captured in a row without a replay
    expected: tuple[float, float] | None = None  # seconds of compiling, and the share of a step's time that it saves
    is_compiled: bool = False  # whether Inductor's code is used for it
    tuning: tuple[float, float] | None = None  # the same as `expected`, of tuned code


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch: in mappings, sequences and dataclasses."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif dataclasses.is_dataclass(batch):
        batch = list(vars(batch).values())
    return [tensor for one in batch for tensor in list_tensors(one)] if isinstance(batch, list | tuple) else []


def describe_window(window: Sequence[Batch]) -> Key:
    return tuple(tuple((tensor.shape, tensor.dtype) for tensor in list_tensors(batch)) for batch in window)


# --- captured windows ---


class Replay(Protocol):
    """A captured step: GraphedStep, or what tests put in its place on a CPU."""

    inputs: list[dict[str, Tensor]]
    commits: bool
    """False if the graph holds forward and backward only."""

    @property
    def is_valid(self) -> bool: ...

    def __call__(
        self, window: list[dict[str, Tensor]], ids: tuple[Tensor, ...] | None = None, fill: Callable[[], None] = ...
    ) -> Facts: ...

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
    holders: list[object]
    """What optimizers, or a user's code, replace when state is loaded or reset."""
    dynamic: list[dict[str, int]]
    """Inputs that are copied into it: positions, by the name of its static tensor."""
    shape: Shape
    used_at: int = 0
    """The attempted steps when it was replayed last."""

    def fits(self, traced: TracedWindow, step: GuardedStep) -> bool:
        if not self.replay.is_valid:
            return False
        if self.replay.commits and not are_same_objects(list_holders(step), self.holders):
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
            inputs = {name: call.inputs[position] for name, position in own.items()}
            for position in call.entry.waits:  # the user may overwrite them as soon as the step returns
                inputs[str(position)] = inputs[str(position)].to(self.device)
            window.append(inputs)
        return window


def list_holders(step: GuardedStep) -> list[object]:
    """Return the objects of optimizers that a graph relies on: groups, and the tensors of their state."""
    holders: list[object] = []
    for optimizer in step.optimizers:
        holders += (optimizer.state, optimizer.param_groups, *optimizer.param_groups)
        holders += itertools.chain.from_iterable(map(dict.values, optimizer.state.values()))
    return holders
