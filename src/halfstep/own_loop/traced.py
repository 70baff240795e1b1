"""Trace a user's loss function, so that a CUDA graph can hold its code and no Python value is frozen.

`torch.compile(fullgraph=True)` traces `_call(loss_fn, batch)` with the backend below. On each call Dynamo evaluates its
guards on everything the Python code read, and then calls the function that the backend made for this combination of
values and shapes, an `Entry`. That function does not compute: it notes its inputs and returns empty tensors, which the
fast path fills when it has run or replayed the whole window (fast.py). So the user's Python, with its side effects on
lists and counters, runs once per micro-batch, as in an eager loop.

The code of an entry is AOTAutograd's. Dynamo's graph would not do: there a changing float is a CPU tensor followed by
`.item()`, which a capture freezes, and activation checkpointing with dropout recomputes with another mask.
AOTAutograd turns a float that changes into a tensor input, which a replay reads anew.

`NotTraced` says, with the user's line, why a loss function cannot be captured; the loop then stays eager.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch.fx import GraphModule, Node, has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from halfstep.backend_flags import WANTED
from halfstep.precision.contexts import BACKWARD_AS_EAGER, CACHE_ENABLED, get_autocast_dtype, use_sound_attention
from halfstep.precision.plan import Plan

Compiler = Literal["aten", "inductor"]

PURE = frozenset({"aten", "prims", "prim", "higher_order", "rngprims", "inductor", "inductor_prims", "halfstep"})
"""Namespaces of operations that read nothing but their inputs. A custom operation may read a global."""
RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "exponential", "uniform", "philox")
MAX_STREAK = 3  # new entries in a row for batches of one shape: some value changes at every step
MAX_ENTRIES = 64  # of one loss function: shapes and combinations of Python values


NUMBERS = itertools.count()


class NotTraced(Exception):
    """The loss function cannot be captured; the message says why in one line."""


class Outdated(Exception):
    """An input requires a gradient and did not when the code was traced, or the other way round: torch 2.11 does not
    guard that for parameters."""


class NoEntry(Exception):
    """No entry fits the Python values and shapes of a call."""


@dataclass(eq=False)
class Entry:
    """One combination of Python values and shapes: the code for it, and what was found in its graph."""

    outputs: list[Any]
    """What the code returns, tensors as promises."""
    code: Callable[..., Sequence[Any]] = lambda *inputs: []
    why_not: str = ""
    """What in the graph keeps it from being captured; empty if nothing does."""
    mutated: frozenset[int] = frozenset()  # inputs that the graph writes into
    moved: frozenset[int] = frozenset()  # CPU inputs that the graph only copies to the device
    waits: frozenset[int] = frozenset()  # those of them whose copy the host waits for
    num_nodes: int = 0
    is_random: bool = False
    requires_grad: list[bool] = field(default_factory=list)  # of each input
    was_called: bool = False
    has_numbers: bool = False  # whether an input is no tensor
    has_side_effects: bool = True  # whether the Python code changes an object, such as a list or an attribute


@dataclass
class Call:
    """One call of a traced loss function: its flat inputs, the tensors it promised, and what it returned."""

    entry: Entry
    inputs: tuple[Any, ...]
    promised: list[Any]
    numbers: tuple[Any, ...] = ()  # inputs that are no tensors
    result: Any = None

    def find_promised(self, tensor: Tensor) -> int:
        """Return which output of the entry a tensor in the result is."""
        for number, one in enumerate(self.promised):
            if one is tensor:
                return number
        raise NotTraced("loss_fn returns a tensor that it did not compute")

    def forget_result(self) -> None:
        """Let go of what was returned, once it was looked at: what the user's code kept stays alive, and is filled."""
        self.result = None
        self.promised = [weakref.ref(one) if isinstance(one, Tensor) else one for one in self.promised]

    def fulfil(self, outputs: Sequence[Any]) -> None:
        """Copy what the code returned into the tensors that the user holds."""
        for promised, output in zip(self.promised, outputs, strict=True):
            held = promised() if isinstance(promised, weakref.ref) else None
            if held is not None:
                with torch.no_grad():
                    held.copy_(output)


class TracedLoss:
    """The loss functions of one hs.Step as Dynamo sees them. One object per step: guards do not compare identities."""

    def __init__(
        self,
        plan: Plan,
        compiler: Compiler = "aten",
        *,
        in_fp32: bool = False,
        pure_ops: frozenset[str] = frozenset(),
    ) -> None:
        self.plan, self.compiler, self.device = plan, compiler, torch.device(plan.device)
        self.pure_ops = PURE | pure_ops
        dtype = None if in_fp32 else get_autocast_dtype(plan.granted)
        self._autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        self.entries: list[Entry] = []
        self._last: Call | None = None
        self._cause = ""  # of the last new entry: the guard that failed
        self._streaks: dict[object, int] = {}  # new entries in a row, by the shapes of the batch
        # `optimize` is what torch.compile calls; it also reports which guard failed.
        context: Any = torch._dynamo.optimize(self._compile, nopython=True, guard_fail_fn=self._note_cause)
        # Its own code object: Dynamo keeps the entries of all tracers with the code, and tries each one's guards.
        name = f"_call_{next(NUMBERS)}"
        self._function = FunctionType(_call.__code__.replace(co_name=name), globals(), name)
        self._callback = context.callback = TraceCallback(context.callback, plan, self._function.__code__)
        self._call = context(self._function)

    def __call__(self, loss_fn: Callable[[Any], Any], batch: Any) -> Call:
        """Run the Python of a loss function, and promise its tensors. Raise NotTraced where it cannot be traced."""
        self._last = None
        self._callback.batch = batch
        try:
            # Guards compare the state of autocast, the attention function and the precision of matmuls. Setting all
            # flags of the plan takes longer than a small model's step: that is left to the callback, for new entries.
            flags = use_sound_attention(self.plan.device) if self._has_matmul_precision() else self.plan.backend()
            with self._autocast, flags:
                result = self._run(loss_fn, batch)
        except TorchDynamoException as error:
            raise NotTraced(explain(error)) from None
        if self._last is None:
            raise NotTraced("loss_fn runs no operation of torch")
        self._last.result = result
        return self._last

    def _run(self, loss_fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run the entry whose guards fit, or trace a new one. torch.compile's wrapper around a function, which prepares
        tracing, takes longer than the guards of a small model: it is left out where an entry fits."""
        if self.entries:
            self._callback.only_looks_up = True
            before = set_eval_frame(self._callback)  # type: ignore[arg-type]
            try:
                return self._function(loss_fn, batch)
            except NoEntry:
                pass  # raised in place of the first instruction: no code of the user has run
            finally:
                set_eval_frame(before)
                self._callback.only_looks_up = False
        return self._call(loss_fn, batch)

    def _has_matmul_precision(self) -> bool:
        """True if matmuls have the precision of the plan already, as a guard sees it."""
        try:
            now = torch._C._get_float32_matmul_precision()
        except RuntimeError:  # torch's old and new flags disagree
            return False
        return bool(now == WANTED["tf32" if self.plan.compute == "tf32" else "ieee"].matmul_precision)

    def _compile(self, module: GraphModule, examples: list[Any]) -> Callable[..., Sequence[Any]]:
        """Compile Dynamo's graph (this is the backend that torch.compile calls), and note each call of it."""
        entry = Entry(outputs=find_outputs(module))
        if any(isinstance(output, torch.SymInt | torch.SymFloat | torch.SymBool) for output in entry.outputs):
            entry.why_not = "loss_fn changes a Python number that it also computes with, such as a counter"
        if sum(isinstance(output, Promise) and output.requires_grad for output in entry.outputs) > 1:
            entry.why_not = "loss_fn keeps a tensor that has an autograd graph besides the loss: detach it"
        share_casts(module, examples)
        graphs: list[GraphModule] = []

        def keep(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
            if not graphs:
                context = TracingContext.try_get()
                if context is not None and context.fw_metadata is not None:
                    infos = enumerate(context.fw_metadata.input_info)
                    entry.mutated = frozenset(number for number, info in infos if info.mutates_data)
            graphs.append(graph)
            found, moved, waits = scan(graph, self.device, self.pure_ops)
            entry.why_not = entry.why_not or found
            entry.moved |= moved
            entry.waits |= waits
            entry.num_nodes += len(graph.graph.nodes)
            entry.is_random |= any(part in str(n.target) for n in graph.graph.nodes for part in RANDOM)
            if self.compiler == "aten":
                return run_boxed(graph)
            from torch._inductor.compile_fx import compile_fx_inner  # imports Triton where there is one

            return compile_fx_inner(graph, inputs, **settings)

        if self.compiler == "aten":
            with torch._functorch.config.patch(BACKWARD_AS_EAGER):
                entry.code = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)(module, examples)
        else:
            from torch._inductor.compile_fx import compile_fx

            # A hit in AOTAutograd's cache would not pass through `keep`, and nothing would be scanned.
            with torch._functorch.config.patch(BACKWARD_AS_EAGER | {"enable_autograd_cache": False}):
                entry.code = compile_fx(module, examples, inner_compile=keep)  # type: ignore[assignment]
        entry.has_numbers = not all(isinstance(example, Tensor) for example in examples)
        entry.requires_grad = list_requires_grad(examples, has_numbers=entry.has_numbers)
        entry.has_side_effects = has_side_effects()
        self.entries.append(entry)

        def promise(*inputs: Any) -> Sequence[Any]:
            self._refuse(entry, inputs)  # before Dynamo applies the side effects of the user's Python
            promised = [output.make() if isinstance(output, Promise) else output for output in entry.outputs]
            numbers = tuple(one for one in inputs if not isinstance(one, Tensor)) if entry.has_numbers else ()
            self._last = Call(entry, inputs, promised, numbers)
            return promised

        return promise

    def _refuse(self, entry: Entry, inputs: Sequence[Any]) -> None:
        """Raise NotTraced for a call that a replay would not repeat as the user's code does."""
        if list_requires_grad(inputs, has_numbers=entry.has_numbers) != entry.requires_grad:
            raise Outdated
        if entry.why_not:
            raise NotTraced(entry.why_not)
        if not entry.was_called and any(
            isinstance(one, Tensor) and one.requires_grad and not one.is_leaf for one in inputs
        ):  # a guard compares whether an input requires a gradient
            raise NotTraced("loss_fn reads a tensor that was computed outside of it and has an autograd graph")
        if entry.was_called and not self._streaks:
            return
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in list_tensors(self._callback.batch))
        streak = 0 if entry.was_called else self._streaks.get(shapes, 0) + 1
        self._streaks[shapes], entry.was_called = streak, True
        if not any(self._streaks.values()):
            self._streaks.clear()
        if streak > MAX_STREAK:
            raise NotTraced(f"it would be traced again at every step, because this changes: {self._cause}")

    def _note_cause(self, failure: Any) -> None:
        self._cause = re.sub(r"\s+", " ", failure.reason.splitlines()[0]).strip()


def _call(loss_fn: Callable[[Any], Any], batch: Any) -> Any:
    return loss_fn(batch)


class TraceCallback:
    """What Dynamo calls for code that it has not traced yet: sets the flags of the plan and Dynamo's own.

    Guards also cover the hooks of modules (not by default), and many shapes are allowed. Setting this at every call
    would cost as much as evaluating the guards."""

    def __init__(self, callback: Any, plan: Plan, code: CodeType) -> None:
        self._torchdynamo_orig_backend = callback  # the name by which Dynamo finds the backend
        self._plan, self._code = plan, code
        self.batch: Any = None
        self.only_looks_up = False

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        if self.only_looks_up and frame.f_code is self._code:
            raise NoEntry
        if self.only_looks_up:
            # A Python function that an entry calls: run it as it is. One of torch's own is never looked at again.
            return ConvertFrameReturn(apply_to_code=trace_rules.check(frame.f_code))
        for leaf in list_tensors(self.batch):
            torch._dynamo.mark_static(leaf)  # a ragged last batch gets code of its own, not dynamic shapes
        config: Any = torch._dynamo.config
        ignored = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
        settings = {
            "skip_nnmodule_hook_guards": False,
            "record_runtime_overhead": False,  # a span for torch's profiler around reading the inputs of an entry
            "recompile_limit": MAX_ENTRIES,
            "accumulated_recompile_limit": 4 * MAX_ENTRIES,
            ignored: getattr(config, ignored) | find_library_logs(),
        }
        with config.patch(settings), self._plan.backend():
            return self._torchdynamo_orig_backend(frame, *arguments)


def find_library_logs() -> set[Any]:
    """Return the logging methods of libraries whose models give a hint inside forward: without them, those models
    could not be traced. The eager first steps have shown the hint."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(("transformers", "diffusers")) and isinstance(logger, logging.Logger)
    ]
    names = ("debug", "info", "warning", "warning_once", "info_once", "warning_advice")
    methods = (getattr(logger, name, None) for logger in loggers for name in names)
    return {LogMethod(method) for method in methods if method is not None}


class LogMethod(str):
    """A method that equals itself in a set, and can be sorted and written as JSON: torch logs its settings so."""

    method: Any

    def __new__(cls, method: Any) -> LogMethod:
        self = super().__new__(cls, repr(method))
        self.method = method
        return self

    def __hash__(self) -> int:
        return hash(self.method)

    def __eq__(self, other: object) -> bool:
        return bool(self.method == (other.method if isinstance(other, LogMethod) else other))


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch: in mappings, sequences and dataclasses."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif dataclasses.is_dataclass(batch):
        batch = list(vars(batch).values())
    return [tensor for one in batch for tensor in list_tensors(one)] if isinstance(batch, list | tuple) else []


def list_requires_grad(inputs: Sequence[Any], *, has_numbers: bool) -> list[bool]:
    """Return which inputs require a gradient. Without a loop in Python where all are tensors, as every step asks."""
    if has_numbers:
        return [isinstance(one, Tensor) and one.requires_grad for one in inputs]
    return list(map(_get_requires_grad, inputs))


_get_requires_grad = operator.attrgetter("requires_grad")


def has_side_effects() -> bool:
    """True if the Python code that Dynamo traces now changes an object that existed before."""
    effects = InstructionTranslator.current_tx().output.side_effects
    modified = (one for one in effects.id_to_variable.values() if effects.is_modified(one))
    return any(not isinstance(one.mutation_type, AttributeMutationNew | ValueMutationNew) for one in modified)


def find_outputs(module: GraphModule) -> list[Any]:
    """Return what Dynamo's graph returns, tensors as promises."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    values = [node.meta.get("example_value") if isinstance(node, Node) else node for node in output.args[0]]
    return [Promise(tuple(v.shape), v.dtype, v.device, v.requires_grad) if isinstance(v, Tensor) else v for v in values]


def share_casts(module: GraphModule, examples: Sequence[Any]) -> None:
    """Let the traced code cast a weight once, however often it is used, as eager autocast does with its cache.

    Gradients of a cast that is shared are added up in half precision. AOTAutograd switches the cache off, so that no
    tensor of one trace reaches the next one; here it is emptied before and after."""
    if CACHE_ENABLED is False:  # the eager step of this torch casts every use of a weight too
        return
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    weights = [node for node, one in zip(placeholders, examples, strict=True) if is_cached(one)]
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    with module.graph.inserting_after(placeholders[-1]):
        was_kept = module.graph.call_function(keep_casts, tuple(weights))
    with module.graph.inserting_before(output):
        module.graph.call_function(drop_casts, (was_kept,))
    module.recompile()


def is_cached(example: object) -> bool:
    """True for an input whose casts autocast keeps."""
    return isinstance(example, Tensor) and example.requires_grad and example.is_leaf and not example._is_view()


@has_side_effect
def keep_casts(*weights: Tensor) -> bool:
    """Empty and switch on autocast's cache. It keeps casts of leaves only, which AOTAutograd's inputs are not."""
    for weight in weights:
        if not weight.is_leaf:
            weight.detach_().requires_grad_()
    was_kept = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    return was_kept


@has_side_effect
def drop_casts(was_kept: bool) -> None:
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(was_kept)


@dataclass(frozen=True)
class Promise:
    """What a tensor that the code will return looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


def partition(joint: GraphModule, *arguments: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
    """Split a graph into forward and backward. What a checkpointed block draws at random is kept, not recomputed: to
    draw it again, torch uses generators of its own, which neither follow the seed nor can be captured."""
    for node in joint.graph.nodes:
        if node.meta.get("recompute") is not None and is_drawn(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return default_partition(joint, *arguments, **settings)


def is_drawn(node: Node) -> bool:
    """True for a random operation, and for one of the tensors that it returns."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, Node) and torch.Tag.nondeterministic_seeded in getattr(source.target, "tags", ())


def run_boxed(graph: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a graph operation by operation. It takes its arguments as a list and empties it, which frees activations
    while backward goes on."""

    def run(arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()
        return graph.forward(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def scan(
    graph: GraphModule, device: torch.device, pure_ops: frozenset[str]
) -> tuple[str, frozenset[int], frozenset[int]]:
    """Return what in a graph of AOTAutograd a replay would not follow, or "", and the CPU inputs that it only copies
    to the device, which the fast path copies itself; and those of them that it waits for."""
    on_host: set[Node] = set()  # Python numbers as 0-dimensional CPU tensors: a replay gets them on the device
    moved: set[int] = set()
    waits: set[int] = set()
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_elsewhere = isinstance(value, Tensor) and value.device.type != device.type
        if node.op == "placeholder":
            if is_elsewhere and value.ndim == 0:
                on_host.add(node)
            elif is_elsewhere and all(is_copy_to(user, device) for user in node.users):
                moved.add(placeholders.index(node))
                if not all(user.kwargs.get("non_blocking") for user in node.users):
                    waits.add(placeholders.index(node))
            continue
        if node.op != "call_function":
            continue
        name = str(node.target)
        if "_local_scalar_dense" in name:
            return f"a number is read from a tensor, as .item() does{find_line(node)}", frozenset(), frozenset()
        namespace = getattr(node.target, "namespace", "")
        if namespace and pure_ops.isdisjoint((namespace, f"{namespace}::{name.split('.')[1]}")):
            said = f"{namespace}::{name.split('.')[1]}"
            reason = f"{said} may read more than its inputs (pure_ops=[{said!r}] declares that it does not)"
            return f"{reason}{find_line(node)}", frozenset(), frozenset()
        if is_elsewhere:
            inputs = node.all_input_nodes
            if not inputs or not on_host.issuperset(inputs):
                return f"{name} runs on the {value.device.type}{find_line(node)}", frozenset(), frozenset()
            on_host.add(node)
    return "", frozenset(moved), frozenset(waits)


def is_copy_to(node: Node, device: torch.device) -> bool:
    target = node.kwargs.get("device")
    copies = str(node.target).startswith(("aten._to_copy", "prims.device_put", "aten.to."))
    return copies and isinstance(target, torch.device) and target.type == device.type


def find_line(node: Node) -> str:
    """Return " (file:line)" of the user's code that a node came from."""
    return name_line((node.meta.get("stack_trace") or "").splitlines())


def name_line(lines: Sequence[str]) -> str:
    found = [match for line in lines if (match := re.search(r'File "(.+?)", line (\d+)', line))]
    outside = [match for match in found if "/torch/" not in match[1] and "/halfstep/" not in match[1]] or found
    return f" ({outside[-1][1]}:{outside[-1][2]})" if outside else ""


def explain(error: BaseException) -> str:
    """Return Dynamo's reason in one line, with the user's line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if isinstance(error, BackendCompilerFailed) and len(lines) > 1:
        reason = lines[1]  # the first names this file's function only
    hint = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{reason}{': ' + hint if hint else ''}{name_line(lines)}"
