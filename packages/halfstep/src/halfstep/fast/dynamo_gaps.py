"""Let Dynamo trace what it refuses or traces differently from eager code, where that can be avoided.

`fill_gaps` is active only while a loss function of hs.Step is traced, so a user's own torch.compile is as it was. While
its parts are compiled, that is `break_graphs`: Python runs what Dynamo would trace to something else, because no part
is compared with Python code.

- *Libraries that ask whether they are compiled* take another path then: transformers leaves out an attention mask that
  masks nothing, but only in eager code. Attention with a mask is slower, and its kernel draws other dropout numbers.
  Code outside of torch and halfstep is therefore told that it is not compiled. A function whose eager path cannot be
  traced, such as a `ContextVar`, or is a long loop over time, where compiled code may call one operation, gets the true
  answer, and everything is traced once more. So does the last one that asked if the traced code cannot be captured, or
  does not equal the eager step. Long loops are traced if nothing else is left.
- *Branches whose way is known*: on a tensor that is made of constants, such as `torch.ones_like(ids).all()`, or on a
  number from [0, 1) compared with 0 or 1, as in LayerDrop. Every other branch on a tensor is still refused.
- `x.requires_grad = True` for a tensor that the loss function has made, as reentrant checkpointing and
  `torch.autograd.grad` need it.
- `torch.autograd.grad` without `retain_graph`, where the loss needs a part of the same graph again. Nothing is freed in
  traced code. In eager code, which runs first, it is an error unless that part, such as a cast, has nothing to free.
- `copy.deepcopy` of plain objects such as a model's configuration, which Dynamo itself traces from torch 2.13 on.

The generators are left to traced.py: what is drawn and not used must still be drawn in a replay.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import itertools
import logging
import operator
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    VariableTracker,
)
from torch._dynamo.variables.base import AttributeMutationNew
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.our_code import OURS

RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "exponential", "uniform", "philox")
KNOWING = (f"{Path(torch.__file__).parent}/", *OURS)
"""Folders of code that takes the right path for Dynamo: torch and halfstep."""
QUESTIONS: tuple[Any, ...] = (
    torch.compiler.is_compiling,
    torch.compiler.is_exporting,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)
"""How a library asks whether it is compiled."""
GROWING = ("append", "appendleft", "extend", "extendleft", "insert", "__iadd__")
CONVERSIONS = ("", "!s", "!r", "!a")  # of an f-string, by the flags of FORMAT_VALUE
ENDS = ("IF_TRUE", "IF_FALSE", "IF_TRUE_OR_POP", "IF_FALSE_OR_POP")
JUMPS = [name for name in dis.opmap if "JUMP" in name and name.endswith(ENDS)]
BACKWARD = [name for name in dis.opmap if "JUMP_BACKWARD" in name and not name.endswith(("NONE", "INTERRUPT"))]
TRANSLATORS = (
    symbolic_convert.InstructionTranslator,
    symbolic_convert.InliningInstructionTranslator,
    symbolic_convert.InliningGeneratorInstructionTranslator,
)
NAMESPACES = (torch, torch.nn.functional, operator)
NUM_CALLERS = 2  # of a function that asks: a library may ask in one function for all others
MAX_TRUSTED = 8  # functions that get the true answer after all: the loss function is traced anew for each
MAX_TURNS = 64  # of a loop in a function that was told no, or that such a function calls
TRACES_GRADIENTS = hasattr(torch._dynamo.config, "trace_autograd_ops")
"""Whether Dynamo knows `torch.autograd.grad`: since torch 2.11."""
CONTAINERS = (ConstDictVariable, ListVariable, TupleVariable)
GRAD_ARGUMENTS = tuple(inspect.signature(torch.autograd.grad).parameters)
BY_SHAPE = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
"""Functions that read the shape of a tensor, and not its values."""


class Questions:
    """Which code is told that it is not compiled, and which gets the true answer after all.

    Who asks is the code of a function and of its callers."""

    def __init__(self) -> None:
        self.last: tuple[CodeType, ...] = ()  # that was told no in this trace
        self.trusted: set[tuple[CodeType, ...]] = set()
        self._told: set[CodeType] = set()  # in this trace
        self._turns: Counter[Any] = Counter()  # of the loops of each frame in this trace
        self._trusts_all, self._has_limit, self._was_limited = False, True, False

    def begin(self) -> None:
        """Forget what was asked in the last trace."""
        self.last = ()
        self._told.clear()
        self._turns.clear()

    def deny(self, tx: Any) -> bool:
        """Return whether the code that Dynamo traces is told no."""
        asking = tuple(one.f_code for one in itertools.islice(list_frames(tx), NUM_CALLERS + 1))
        if self._trusts_all or asking in self.trusted:
            return False
        self.last = asking
        self._told.update(asking)
        return True

    def limit_turns(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return how a loop goes on: not for long in code that was told no, or that such code calls."""

        def jump_back(tx: Any, instruction: Any) -> None:
            if self._has_limit and self._told and not self._told.isdisjoint(one.f_code for one in list_frames(tx)):
                self._turns[tx] += 1
                if self._turns[tx] > MAX_TURNS:
                    self._was_limited = True
                    refuse("a long loop in code that asks whether it is compiled", tx.f_code.co_name)
            handler(tx, instruction)

        return jump_back

    def trust_last(self) -> bool:
        """Give the true answer to the code that was told no last, or to all code if too many are trusted. If nothing is
        left to trust, allow long loops. Return False if nothing is left to try."""
        if self.last and len(self.trusted) == MAX_TRUSTED:
            self._trusts_all = True
        elif self.last:
            self.trusted.add(self.last)
        elif self._was_limited:
            self.trusted.clear()
            self._trusts_all = self._has_limit = self._was_limited = False
        else:
            return False
        return True


def list_frames(tx: Any) -> Iterator[Any]:
    """Yield what Dynamo traces and its callers."""
    while tx is not None:
        yield tx
        tx = tx.parent


@contextlib.contextmanager
def break_graphs() -> Iterator[None]:
    """Let Python run what Dynamo would trace to something else, while this is active: only code with graph breaks can
    do so."""
    with contextlib.ExitStack() as stack:
        grow = DequeVariable.call_method
        stack.enter_context(mock.patch.object(DequeVariable, "call_method", break_at_growing(grow)))
        call = WrapperUserFunctionVariable.call_function
        stack.enter_context(mock.patch.object(WrapperUserFunctionVariable, "call_function", break_at_cached(call)))
        stack.enter_context(mock.patch.object(CheckpointHigherOrderVariable, "_call_function", break_at_checkpoint))
        translator = symbolic_convert.InstructionTranslatorBase
        stack.enter_context(mock.patch.object(translator, "_format_value", format_later(translator._format_value)))
        stack.enter_context(keep_quiet())
        yield


@contextlib.contextmanager
def fill_gaps(questions: Questions) -> Iterator[None]:
    """Let Dynamo trace more while this is active."""
    around = [
        *((name, jump_if_known) for name in JUMPS),
        *((name, questions.limit_turns) for name in BACKWARD),
        ("STORE_ATTR", require_or_store),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(answer(questions))
        for translator in TRANSLATORS:
            table: list[Any] = list(translator.dispatch_table)
            for name, wrap in around:
                handler: Any = table[dis.opmap[name]]
                table[dis.opmap[name]] = wrap(handler)
            stack.enter_context(mock.patch.object(translator, "dispatch_table", table))
        method = require_grad(TensorVariable.method_requires_grad_)
        stack.enter_context(mock.patch.object(TensorVariable, "method_requires_grad_", method))
        named: dict[str, Any] = getattr(TensorVariable, "tp_methods", {})  # where torch 2.15 looks methods up
        known = {name: type(one)(method) for name, one in named.items() if name == "requires_grad_"}
        stack.enter_context(mock.patch.dict(named, known))
        if TRACES_GRADIENTS:
            handlers, grad = TorchInGraphFunctionVariable._get_handlers(), torch.autograd.grad
            stack.enter_context(mock.patch.dict(handlers, {grad: retain(handlers[grad])}))
        call = BuiltinVariable.call_deepcopy
        stack.enter_context(mock.patch.object(BuiltinVariable, "call_deepcopy", copy_plain(call)))
        # Methods that Dynamo has looked up: those of a torch.compile before this, or after it.
        stack.enter_context(mock.patch.object(BuiltinVariable, "call_function_handler_cache", {}))
        yield


@contextlib.contextmanager
def keep_quiet() -> Iterator[None]:
    """Hide torch's advice and error logs on what it traces and compiles, which the user has not asked for, unless
    TORCH_LOGS asks for logs. halfstep says in one line what is captured, or why not."""
    loggers = [] if "TORCH_LOGS" in os.environ else list(logging.root.manager.loggerDict.values())
    own = [one for one in loggers if isinstance(one, logging.Logger) and one.name.startswith("torch")]
    handlers = [handler for logger in own for handler in logger.handlers]
    levels = [handler.level for handler in handlers]
    try:
        for handler in handlers:
            handler.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


# --- libraries that ask whether they are compiled ---


@contextlib.contextmanager
def answer(questions: Questions) -> Iterator[None]:
    """Answer the questions of the code that Dynamo traces while this is active."""
    questions.begin()
    handlers = TorchInGraphFunctionVariable._get_handlers()
    answers: dict[Any, Any] = {one: deny(handlers[one], questions) for one in QUESTIONS}
    # Dynamo cannot trace this question. Eager steps, which replays follow, are not captured.
    answers[torch.cuda.is_current_stream_capturing] = lambda *_: ConstantVariable.create(False)
    with mock.patch.dict(handlers, answers):
        yield


def deny(handler: Callable[..., Any], questions: Questions) -> Callable[..., Any]:
    """Return a handler that says no to code outside of torch that is not trusted."""

    def handle(variable: Any, tx: Any, *arguments: Any, **named: Any) -> Any:
        if not tx.f_code.co_filename.startswith(KNOWING) and questions.deny(tx):
            return ConstantVariable.create(False)
        return handler(variable, tx, *arguments, **named)

    return handle


# --- what is traced differently ---


def break_at_growing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the methods of a deque; Dynamo does not know the `maxlen` of one that existed before."""

    def call_method(deque: Any, tx: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if deque.source is not None and name in GROWING:
            refuse("a deque that grows", f"deque.{name}")
        return method(deque, tx, name, *arguments, **named)

    return call_method


def break_at_cached(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a wrapped function; Dynamo ignores what functools.lru_cache keeps."""

    def call_function(function: Any, tx: Any, arguments: Any, named: Any) -> Any:
        wrapper = function.wrapper_obj
        if not isinstance(wrapper, functools._lru_cache_wrapper) or str(wrapper.__module__).startswith("torch."):
            return call(function, tx, arguments, named)
        has_arguments = function.self_args() or arguments or named
        # What a library finds out once. Other results may be tensors, or not be known yet.
        value = wrapper() if wrapper.cache_info().currsize and not has_arguments else None
        if isinstance(value, bool | int | str):
            return ConstantVariable.create(value)
        refuse("a function with a cache", wrapper.__name__)

    return call_function


def break_at_checkpoint(function: Any, *_: Any) -> NoReturn:
    """Leave activation checkpointing to Python: Dynamo's graph draws other dropout masks when it recomputes."""
    refuse("activation checkpointing", type(function).__name__)


def format_later(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return how an f-string formats a value: of a number that changes, Dynamo loses the format."""

    def format_value(tx: Any, form: Any, flags: int) -> None:
        if not isinstance(tx.stack[-1], SymNodeVariable):
            method(tx, form, flags)
            return
        text = f"{{{CONVERSIONS[flags & 3]}:{form.as_python_constant()}}}"
        tx.push(StringFormatVariable.create(text, [tx.pop()], {}))

    return format_value


def refuse(what: str, context: str) -> NoReturn:
    unimplemented(gb_type=what, context=context, explanation="Python runs it", hints=[])


# --- copies of plain objects ---


def copy_plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return how `copy.deepcopy` is traced: an object is copied once, and again when what it holds has changed."""

    def call_deepcopy(function: Any, tx: Any, original: Any) -> Any:
        original, effects = original.realize(), tx.output.side_effects
        if isinstance(original, ConstantVariable):
            return original
        if type(original) in CONTAINERS:
            return tx.inline_user_function_return(VariableTracker.build(tx, copy_container), [original], {})
        if type(original) is not UserDefinedObjectVariable or not is_plain(original.value):
            return call(function, tx, original)
        held = [LazyVariableTracker.realize_all(original.var_getattr(tx, name)) for name in vars(original.value)]
        VariableTracker.visit(refuse_if_modified, held)
        value = copy.deepcopy(original.value)
        for name, written in effects.store_attr_mutations.get(original, {}).items():
            object.__setattr__(value, name, written.as_python_constant())
        source = GlobalSource(tx.output.install_global_by_id("copied", value))
        copied = VariableTracker.build(tx, value, source).realize()
        copied.mutation_type = AttributeMutationNew()  # what is written to the copy stays in this trace
        return copied

    return call_deepcopy


def is_plain(value: Any) -> bool:
    """True for an object that holds constants in containers, and is copied as Python does by default."""
    kind: Any = type(value)
    copies: dict[int, Any] = {}
    if hasattr(kind, "__deepcopy__") or hasattr(kind, "__slots__") or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    copied = copy.deepcopy(value, copies)
    return all(one is copied or type(one) in (dict, list, set, tuple) for one in copies.values())


def refuse_if_modified(held: Any) -> None:
    if getattr(held.mutation_type, "is_modified", False):
        refuse("a container that was changed before", "copy.deepcopy")


def copy_container(original: Any) -> Any:
    if isinstance(original, dict):
        return {name: copy.deepcopy(one) for name, one in original.items()}
    return type(original)([copy.deepcopy(one) for one in original])


# --- branches whose way is known ---


def jump_if_known(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Put the truth of a tensor in its place before Dynamo jumps by it, if it is the same in every step."""

    def jump(tx: Any, instruction: Any) -> None:
        value, num_values = tx.stack[-1].realize(), len(tx.stack)
        truth = find_truth(value.as_proxy().node) if isinstance(value, TensorVariable) else None
        if truth is not None:
            tx.stack[-1] = ConstantVariable.create(truth)
        handler(tx, instruction)
        if truth is not None and len(tx.stack) == num_values:  # it is the value of `a and b`
            tx.stack[-1] = value

    return jump


def find_truth(node: Node) -> bool | None:
    """Return whether a tensor is true, or None if that may change from step to step."""
    if node.target in (operator.lt, operator.le, operator.gt, operator.ge):
        ends = [find_ends(one) for one in node.args]
        if all(ends):
            # Monotonous in the random number: if both ends of [0, 1) agree, so does what is between them.
            found = {node.target(low, high) for low in ends[0] for high in ends[1]}
            return found.pop() if len(found) == 1 else None
    with _disable_current_modes():  # real tensors, not the fake ones of the trace
        value = compute_constant(node)
    return bool(value) if value is not None and value.numel() == 1 else None


def find_ends(one: Any) -> tuple[float, ...]:
    """Return the smallest and the largest value of a number in a comparison; empty if they are unknown."""
    if not isinstance(one, Node):
        return (one,) if isinstance(one, int | float) else ()
    is_rand = one.target is torch.rand and not one.all_input_nodes and is_untouched(one)
    return (0.0, 1.0 - 2.0**-24) if is_rand and one.meta["example_value"].numel() == 1 else ()


def is_untouched(node: Node) -> bool:
    """True if a tensor, or a view of it, was not written."""
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example._version == 0


def compute_constant(node: Node) -> Tensor | None:
    """Return the value of a node that depends on constants alone; None if it may change, or was written."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_torchs = node.op == "call_function" and any(getattr(one, name, None) is node.target for one in NAMESPACES)
    if not (is_torchs or node.op == "call_method") or not is_untouched(node) or is_random(name):
        return None
    values: dict[Node, Tensor] = {}
    for one in node.all_input_nodes:
        if name in BY_SHAPE and one is node.args[0]:
            example = one.meta["example_value"]
            value: Tensor | None = torch.empty(example.shape, dtype=example.dtype, device=example.device)
        else:
            value = compute_constant(one)
        if value is None:
            return None
        values[one] = value
    arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = getattr(Tensor, name) if node.op == "call_method" else node.target
    found = target(*arguments, **named)
    return found if isinstance(found, Tensor) else None


def is_random(name: str) -> bool:
    """True for the name of an operation that draws random numbers."""
    return any(part in name for part in RANDOM)


# --- gradients inside the loss function ---


def retain(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Trace `torch.autograd.grad` with `retain_graph=True`, and with lists of tensors for iterators of them."""

    def grad(variable: Any, tx: Any, *arguments: Any, **named: Any) -> Any:
        named = dict(zip(GRAD_ARGUMENTS, arguments, strict=False)) | named
        if isinstance(asked := named.get("retain_graph", variable).realize(), SymNodeVariable):
            asked.evaluate_expr()  # guards: eager code may not retain it in another step
        named["retain_graph"] = ConstantVariable.create(True)
        for name in ("outputs", "inputs"):
            if not isinstance(given := named[name].realize(), TensorVariable):
                named[name] = VariableTracker.build(tx, list).call_function(tx, [given], {})
        return handler(variable, tx, named.pop("outputs"), named.pop("inputs"), **named)

    return grad


def require_grad(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `requires_grad_` for a tensor that the traced code makes."""

    def requires_grad_(variable: Any, *arguments: Any, **named: Any) -> Any:
        given = [one for one in (*arguments, *named.values()) if isinstance(one, VariableTracker)]
        return variable if require(variable, *given) else method(variable, *arguments, **named)

    return requires_grad_


def require_or_store(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Treat `x.requires_grad = True` as `x.requires_grad_()`."""

    def store(tx: Any, instruction: Any) -> None:
        owner = tx.stack[-1].realize()
        is_asked = instruction.argval == "requires_grad" and isinstance(owner, TensorVariable)
        if is_asked and require(owner, tx.stack[-2].realize()):
            tx.popn(2)
        else:
            handler(tx, instruction)

    return store


def require(variable: Any, *given: Any) -> bool:
    """Let a tensor that the traced code makes require a gradient, unless False is given. Return whether it does."""
    if variable.source is not None or not all(one.as_python_constant() for one in given):
        return False
    proxy = variable.as_proxy()
    proxy.requires_grad_()  # a node of the graph: torch.autograd.grad may be asked for this gradient
    proxy.node.meta["example_value"].requires_grad_()
    variable.requires_grad = True
    return True
