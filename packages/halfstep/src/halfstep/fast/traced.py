"""Trace a user's loss function, so that a CUDA graph can hold its code and no Python value is frozen.

`torch.compile(fullgraph=True)` traces `_call(loss_fn, batch)` with the backend below. On each call Dynamo evaluates its
guards on everything the Python code read, and then calls the function that the backend made for this combination of
values and shapes, an `Entry`. That function does not compute: it notes its inputs and returns empty tensors, which the
fast path fills when it has run or replayed the whole window (fast.py). So the user's Python, with its side effects on
lists and counters, runs once per micro-batch, as in an eager loop.

One trace gives all code of an entry. Dynamo's graph, unmodified, is the reference: under eager autograd it does what
the user's code does. What is captured is AOTAutograd's graph of it, as it is (torch's kernels) or compiled by Inductor.
Dynamo's graph itself could not be captured: there a changing float is a CPU tensor followed by `.item()`, which a
capture freezes. AOTAutograd turns it into a tensor input, which `place_numbers` puts on the device.

`NotTraced` says, with the user's line, why a loss function cannot be captured; the loop then stays eager.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code, set_eval_frame
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.source import ConstantSource, NumpyTensorSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables import TensorVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.lists import DequeVariable
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, tracing
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule, Node, has_side_effect
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from halfstep.backend_flags import Fp32Mode, MatmulLeaf, has_matmul_switch
from halfstep.fast.dynamo_gaps import TRACES_GRADIENTS, Questions, fill_gaps, is_random, keep_quiet
from halfstep.fast.kernel_choice import choose_kernels
from halfstep.fast.placement import is_elsewhere, make_inductor_pass, place_constants, place_numbers
from halfstep.fast.recurrent import use_cudnn_operator
from halfstep.fast.windows import (
    Call,
    Code,
    Compiler,
    Entry,
    NotTraced,
    NotTracedWhole,
    Outdated,
    Promise,
    list_tensors,
    refer_to,
)
from halfstep.our_code import OURS
from halfstep.precision.contexts import BACKWARD_AS_EAGER, CACHE_ENABLED, get_autocast_dtype, use_sound_attention
from halfstep.precision.plan import Plan

if TYPE_CHECKING:
    from halfstep.fast.fp8_trial import Fp8Trial

PURE = frozenset({"aten", "prims", "prim", "higher_order", "rngprims", "inductor", "inductor_prims", "halfstep"})
"""Namespaces of operations that read nothing but their inputs. A custom operation may read a global."""
ATOMIC = (
    *("embedding", "index_add", "index_put", "index_reduce", "scatter", "gather", "pool", "upsample", "grid_sampler"),
    *("convolution_backward", "cumsum", "bincount", "histc", "ctc_loss", "nll_loss2d"),
)
"""Operations whose kernels, forward or backward, may add up with atomics, in another order at every run."""
BY_DATA = frozenset({"prod", "cumprod", "interpolate", "multi_margin_loss", "grad"})
"""Functions whose traced code rounds differently for some values only: one comparison may not show it. The eager
gradient of a product, for one, uses a simpler formula if no input is zero. `grad` is torch.autograd's, in the loss."""
MAX_STREAK = 3  # new entries in a row for batches of one shape: some value changes at every step
IS_OFF = "torch's compiler is off, because of TORCH_COMPILE_DISABLE, torch.compiler.set_stance or a dispatch mode"
MAX_ENTRIES = 64  # of one loss function: shapes and combinations of Python values


NUMBERS = itertools.count()


class LookedUp(Exception):
    """The entry of a call is known, and its Python code has not run: Dynamo applies all side effects afterwards."""


class NoEntry(Exception):
    """No entry fits the Python values and shapes of a call."""


class TracedLoss:
    """The loss functions of one hs.Step as Dynamo sees them. One object per step: guards do not compare identities."""

    def __init__(
        self,
        plan: Plan,
        *,
        pure_ops: frozenset[str] = frozenset(),
        fp8: Fp8Trial | None = None,
        on_forget: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_forget` is called when the entries are traced anew, so that no graph of them is used again."""
        self.plan, self.device, self.fp8, self.on_forget = plan, torch.device(plan.device), fp8, on_forget
        self.pure_ops = PURE | pure_ops
        self._autocast = self._make_autocast()
        self.entries: list[Entry] = []
        self.reason = ""  # why the last trace failed, or differed from the eager step
        self._last: Call | None = None
        self._cause = ""  # of the last new entry: the guard that failed
        self._streaks: dict[object, int] = {}  # new entries in a row, by the shapes of the batch
        # `optimize` is what torch.compile calls; it also reports which guard failed.
        context: Any = torch._dynamo.optimize(self._add_entry, nopython=True, guard_fail_fn=self._note_cause)
        if not hasattr(context, "callback"):
            raise NotTraced(IS_OFF)
        # Its own code object: Dynamo keeps the entries of all tracers with the code, and tries each one's guards.
        name = f"_call_{next(NUMBERS)}"
        self._function = FunctionType(_call.__code__.replace(co_name=name), globals(), name)
        self._callback = context.callback = TraceCallback(context.callback, plan, self._function.__code__)
        self._call = context(self._function)

    def _make_autocast(self) -> torch.autocast:
        dtype = get_autocast_dtype(self.plan.granted)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=CACHE_ENABLED)

    def __call__(
        self,
        loss_fn: Callable[[Any], Any],
        batch: Any,
        before_new: Callable[[], None] = lambda: None,
        *,
        only_looks: bool = False,
    ) -> Call:
        """Run the Python of a loss function, and promise its tensors. Raise NotTraced where it cannot be traced. A call
        whose code was not compared with eager code yet is only looked up, so that nothing has happened, and every call
        with `only_looks`. `before_new` is called before new code is traced."""
        self._last, self._only_looks = None, only_looks
        self._callback.batch, self._callback.before_new = batch, before_new
        num_entries = len(self.entries)
        try:
            # Guards compare the state of autocast, the attention function and the precision of matmuls. Setting all
            # flags of the plan takes longer than a small model's step: that is left to the callback, for new entries.
            mode: Fp32Mode = "tf32" if self.plan.compute == "tf32" else "ieee"
            is_set = has_matmul_switch(mode)
            flags = use_sound_attention(self.plan.device) if is_set else self.plan.backend()
            with self._autocast, flags, MatmulLeaf(mode) if is_set else nullcontext():
                try:
                    result = self._run(loss_fn, batch)
                except LookedUp:
                    result = None
                    if len(self.entries) > num_entries == 0:
                        self._look_up_once(loss_fn, batch)
        # The second comes as itself in torch 2.11, the third from functions that Dynamo forbids, such as mark_dynamic.
        except (TorchDynamoException, GuardOnDataDependentSymNode, AssertionError) as error:
            if not self.take_compiled_path(explain(error)):
                raise NotTracedWhole(self.reason) from None
            return self(loss_fn, batch, before_new, only_looks=only_looks)
        call: Call | None = self._last
        if call is None:
            raise NotTraced("loss_fn runs no operation of torch")
        call.result = result
        return call

    def take_compiled_path(self, reason: str) -> bool:
        """Trace everything anew, where the code that asked last whether it is compiled gets the true answer. Return
        False if that changes nothing."""
        self.reason = reason
        if not self._callback.questions.trust_last():
            return False
        reset_code(self._function.__code__)
        self.entries.clear()
        self._streaks.clear()
        self.on_forget()
        return True

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

    def _look_up_once(self, loss_fn: Callable[[Any], Any], batch: Any) -> None:
        """Refuse a first entry whose guards fail at once: every step would be traced again."""
        for kept in _debug_get_cache_entry_list(self._function.__code__):
            found = kept.guard_manager.check_verbose({"loss_fn": loss_fn, "batch": batch})
            if not found.result:
                raise NotTraced(f"torch would trace it again at every step: {' '.join(found.verbose_code_parts)}")

    def _add_entry(self, module: GraphModule, examples: list[Any]) -> Code:
        """Make an entry of Dynamo's graph (this is the backend that torch.compile calls), and note each call of it."""
        module = copy_graph(module)  # Dynamo goes on with its own
        # To compile it later, fake tensors are enough, but a number is traced as one only from the real tensor.
        context = TracingContext.get()
        kept = [
            make_fake(one, context) if isinstance(one, Tensor) and not (one.ndim == 0 and one.is_cpu) else one
            for one in examples
        ]
        traced = use_cudnn_operator(copy_graph(module))

        def compile(compiler: Compiler) -> None:
            make = self._compile if compiler in ("aten", "inductor") else self._compile_changed
            make(entry, traced, kept, context, compiler)

        entry = Entry(module, find_outputs(module), compile)
        if any(isinstance(output, torch.SymInt | torch.SymFloat | torch.SymBool) for output in entry.outputs):
            entry.why_not = "loss_fn changes a Python number that it also computes with, such as a counter"
        losses = [k for k, one in enumerate(entry.outputs) if isinstance(one, Promise) and one.requires_grad]
        if len(losses) == 1:
            entry.loss = losses[0]
        elif losses:
            entry.why_not = find_kept(module, entry, losses)
        else:
            entry.why_not = "the loss does not depend on a tensor that requires a gradient"
        entry.has_numbers = not all(isinstance(example, Tensor) for example in examples)
        entry.requires_grad = list_requires_grad(examples, has_numbers=entry.has_numbers)
        is_double = any(isinstance(one, Promise) and one.dtype == torch.float64 for one in entry.outputs)
        if is_double and any(map(is_numpy_number, module.graph.find_nodes(op="placeholder"))):
            entry.why_not = "torch's compiler computes with a NumPy number in float64: use float(number)"
        entry.takes_gradient, wrong = find_inner_gradients(module)
        entry.why_not = entry.why_not or wrong
        entry.host_draws = find_host_draws(module, self.device)
        entry.has_side_effects, wrong = find_side_effects()
        entry.why_not = entry.why_not or wrong
        targets = [getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes]
        # A library that masks its attention in compiled code may leave the mask out in eager code, for some values.
        entry.rounds_by_data = bool(self._callback.questions.trusted) or not BY_DATA.isdisjoint(targets)
        entry.compile("aten")
        entry.why_not = entry.why_not or find_repeated(module, entry)
        if entry.why_not:
            self.reason = entry.why_not
            if self._callback.questions.last:
                raise NotTraced(entry.why_not)  # to Dynamo: it is traced once more
        self.entries.append(entry)
        returned = find_returned(module)

        def promise(*inputs: Any) -> Sequence[Any]:
            self._refuse(entry, inputs)  # before Dynamo applies the side effects of the user's Python
            numbers = tuple(one for one in inputs if not isinstance(one, Tensor)) if entry.has_numbers else ()
            if self._only_looks or not entry.is_compared:
                self._last = Call(entry, inputs, numbers)
                raise LookedUp
            promised = [output.make() if isinstance(output, Promise) else output for output in entry.outputs]
            self._last = Call(entry, inputs, numbers, refer_to(promised))
            for k, position in returned.items():
                promised[k] = inputs[position]
            return promised

        return promise

    def _compile_changed(
        self, entry: Entry, module: GraphModule, examples: list[Any], context: TracingContext, compiler: Compiler
    ) -> None:
        """Make code with chosen kernels or fp8 products. Whatever is wrong with it, the other code can be captured."""
        assert entry.last_inputs is not None
        try:
            if "tuned" in compiler:
                with self.plan.backend(), keep_quiet():
                    module = choose_kernels(module, self.device)
            if compiler.endswith("fp8"):
                assert self.fp8 is not None
                module = self.fp8.convert(module, entry.last_inputs)
            self._compile(entry, module, examples, context, compiler)
        finally:
            obstacle, entry.why_not = entry.why_not, ""
        if obstacle:
            raise NotTraced(obstacle)

    def _compile(
        self, entry: Entry, module: GraphModule, examples: list[Any], context: TracingContext, compiler: Compiler
    ) -> None:
        """Make the code of an entry by AOTAutograd, for torch's kernels or by Inductor."""
        if compiler.startswith("inductor") and entry.has_numbers:
            raise NotTraced("loss_fn computes with an integer that changes, and compiled code might not follow it")
        module = settle_outputs(module, entry, self.device)
        shared = find_shared(module)
        entry.codes[compiler] = self._compile_once(entry, share_casts(module, shared), examples, context, compiler)
        if not shared.isdisjoint(entry.mutated):
            # A weight that forward writes gets its gradient from AOTAutograd only if its casts are not shared.
            module = share_casts(module, shared - entry.mutated)
            entry.codes[compiler] = self._compile_once(entry, module, examples, context, compiler)

    def _compile_once(
        self, entry: Entry, module: GraphModule, examples: list[Any], context: TracingContext, compiler: Compiler
    ) -> Code:
        graphs: list[GraphModule] = []

        def keep(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
            if not graphs:
                assert context.fw_metadata is not None
                infos = enumerate(context.fw_metadata.input_info)
                entry.mutated = frozenset(number for number, info in infos if info.mutates_data)
                if any(info.output_type is OutputType.alias_of_input for info in context.fw_metadata.output_info):
                    entry.why_not = entry.why_not or "loss_fn keeps a view of a weight or of the batch: clone it"
                entry.num_nodes = 0
                note_moved(entry, graph, self.device)  # the inputs of backward are others
            entry.why_not = entry.why_not or find_obstacle(graph, self.device, self.pure_ops)
            graphs.append(graph)
            names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            entry.num_nodes += len(names)
            entry.is_random |= any(map(is_random, names))
            entry.uses_atomics |= any(part in name for name in names for part in ATOMIC)
            if not entry.why_not:
                inputs = place_numbers(graph, inputs, self.device)
            return run_boxed(graph) if compiler.startswith("aten") else compile_by_inductor(graph, inputs, settings)

        def split(joint: GraphModule, *arguments: Any, **named: Any) -> tuple[GraphModule, GraphModule]:
            place_constants(joint, self.device)
            return partition(joint, *arguments, **named)

        # A hit in AOTAutograd's cache would not pass through `keep`, and nothing would be scanned. Backward is compiled
        # at once, too, so that it is scanned before any of the user's code has run.
        settings = BACKWARD_AS_EAGER | {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        patch = torch._functorch.config.patch(settings)
        with tracing(context), self._make_autocast(), self.plan.backend(), patch, keep_quiet():
            if compiler.startswith("aten"):
                code = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=split)(module, examples)
                return lambda *inputs: code(*inputs)[: len(entry.outputs)]
            from torch._inductor.compile_fx import compile_fx  # imports Triton where there is one

            assert context.fake_mode is not None
            context.fake_mode.allow_non_fake_inputs = (
                True  # Inductor runs the graph, with its constants, on fake tensors
            )
            patches = {
                "joint_custom_pre_pass": make_inductor_pass(self.device),
                "coordinate_descent_tuning": "tuned" in compiler or torch._inductor.config.coordinate_descent_tuning,
            }
            compiled: Any = compile_fx(module, examples, inner_compile=keep, config_patches=patches)
            return lambda *inputs: compiled(*inputs)[: len(entry.outputs)]

    def _refuse(self, entry: Entry, inputs: Sequence[Any]) -> None:
        """Raise NotTraced for a call that a replay would not repeat as the user's code does."""
        if list_requires_grad(inputs, has_numbers=entry.has_numbers) != entry.requires_grad:
            raise Outdated
        if entry.why_not:
            raise NotTracedWhole(entry.why_not)
        if entry.takes_gradient and any(isinstance(one, Tensor) and one._backward_hooks for one in inputs):
            raise NotTraced("loss_fn takes a gradient itself, which traced code computes without the hooks on weights")
        if not entry.was_called and any(
            isinstance(one, Tensor) and one.requires_grad and not one.is_leaf for one in inputs
        ):  # a guard compares whether an input requires a gradient
            raise NotTraced("loss_fn reads a tensor that was computed outside of it and has an autograd graph")
        if entry.was_called and (not self._streaks or self._only_looks or not entry.is_compared):
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
    if not is_dynamo_compiling():  # this runs as it is: leave the user's code to the eager step
        raise NotTraced(IS_OFF)
    return loss_fn(batch)


class TraceCallback:
    """What Dynamo calls for code that it has not traced yet: sets the flags of the plan and Dynamo's own.

    Guards also cover the hooks of modules (not by default), and many shapes are allowed. Setting this at every call
    would cost as much as evaluating the guards."""

    def __init__(self, callback: Any, plan: Plan, code: CodeType) -> None:
        self._torchdynamo_orig_backend = callback  # the name by which Dynamo finds the backend
        self._plan, self._code = plan, code
        self.batch: Any = None
        self.before_new: Callable[[], None] = lambda: None
        self.only_looks_up = False
        self.questions = Questions()

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        if frame.f_code is not self._code:
            # A Python function that an entry calls: run it as it is. One of torch's own is never looked at again.
            return ConvertFrameReturn(apply_to_code=trace_rules.check(frame.f_code))
        if self.only_looks_up:
            raise NoEntry
        self.before_new()
        config: Any = torch._dynamo.config
        ignored = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
        settings = {
            "skip_nnmodule_hook_guards": False,
            "allow_rnn": True,
            **({"trace_autograd_ops": True, "enable_dynamo_decompositions": False} if TRACES_GRADIENTS else {}),
            "record_runtime_overhead": False,  # a span for torch's profiler around reading the inputs of an entry
            "recompile_limit": MAX_ENTRIES,
            "accumulated_recompile_limit": 4 * MAX_ENTRIES,
            ignored: getattr(config, ignored) | find_library_logs(),
        }
        with (
            config.patch(settings),
            self._plan.backend(),
            fill_gaps(self.questions),
            mark_static(self.batch),
            keep_quiet(),
        ):
            return self._torchdynamo_orig_backend(frame, *arguments)


@contextlib.contextmanager
def mark_static(batch: Any) -> Iterator[None]:
    """Let a ragged last batch get code of its own, not dynamic shapes. The marks do not stay on the user's tensors."""
    before = [(leaf, dict(vars(leaf))) for leaf in list_tensors(batch)]
    try:
        for leaf, attributes in before:
            vars(leaf)["_dynamo_static_indices"] = set(attributes.get("_dynamo_static_indices", ()))
            torch._dynamo.mark_static(leaf)
        yield
    finally:
        for leaf, attributes in before:
            vars(leaf).clear()
            vars(leaf).update(attributes)


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


def list_requires_grad(inputs: Sequence[Any], *, has_numbers: bool) -> list[bool]:
    """Return which inputs require a gradient. Without a loop in Python where all are tensors, as every step asks."""
    if has_numbers:
        return [isinstance(one, Tensor) and one.requires_grad for one in inputs]
    return list(map(_get_requires_grad, inputs))


_get_requires_grad = operator.attrgetter("requires_grad")


def find_side_effects() -> tuple[bool, str]:
    """Return whether the Python code that Dynamo traces now changes an object that existed before, and why traced code
    would change it in another way."""
    effects = InstructionTranslator.current_tx().output.side_effects
    modified = [one for one in effects.id_to_variable.values() if effects.is_modified(one)]
    changed = [one for one in modified if not isinstance(one.mutation_type, AttributeMutationNew | ValueMutationNew)]
    # torch's compiler appends to a full deque with maxlen without removing its first element.
    is_wrong = any(isinstance(one, DequeVariable) for one in changed)
    return bool(changed), "loss_fn changes a deque" if is_wrong else ""


def find_outputs(module: GraphModule) -> list[Any]:
    """Return what Dynamo's graph returns, tensors as promises."""
    outputs: Any = module.graph.output_node().args[0]
    values = [node.meta.get("example_value") if isinstance(node, Node) else node for node in outputs]
    return [Promise(tuple(v.shape), v.dtype, v.device, v.requires_grad) if isinstance(v, Tensor) else v for v in values]


def find_kept(module: GraphModule, entry: Entry, candidates: Sequence[int]) -> str:
    """Note which of the outputs that require a gradient is the loss that loss_fn returns, and that the others are only
    kept: after backward nothing can use their autograd graph, which is part of the loss's. Return why not, if one has
    a graph beyond that."""
    result = InstructionTranslator.current_tx().stack[-1].realize()
    result = result.items[0].realize() if isinstance(result, TupleVariable) and result.items else result
    outputs: Any = module.graph.output_node().args[0]
    name = result.as_proxy().node.name if isinstance(result, TensorVariable) else ""
    entry.loss = next((k for k in candidates if outputs[k].name == name), entry.loss)
    below = find_above([outputs[entry.loss]])
    if entry.loss not in candidates or any(outputs[k] not in below for k in candidates):
        return "besides the loss, loss_fn keeps a tensor that has an autograd graph: detach it"
    for k in set(candidates) - {entry.loss}:
        entry.outputs[k] = replace(entry.outputs[k], is_kept=True)
    return ""


def find_above(nodes: Sequence[Node]) -> set[Node]:
    """Return nodes and everything that they are computed from."""
    found, left = set[Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def find_inner_gradients(module: GraphModule) -> tuple[bool, str]:
    """Return whether the loss takes a gradient itself, and why the traced code would compute another one."""
    found = [node for node in module.graph.nodes if node.target is torch.autograd.grad]
    above = find_above([node for node in found if node.kwargs.get("create_graph")])
    # torch's compiler differentiates such a gradient without what the Function's backward depends on.
    if any("autograd_function" in str(node.target) for node in above):
        return True, "a gradient that loss_fn takes with create_graph=True passes through a torch.autograd.Function"
    return bool(found), ""


def list_draws(module: GraphModule) -> list[Node]:
    """Return the operations of Dynamo's graph that may draw random numbers into a tensor."""
    found = []
    for node in module.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op.startswith("call") and isinstance(node.meta.get("example_value"), Tensor):
            found += [node] if is_random(name) or "attention" in name else []
    return found


def find_host_draws(module: GraphModule, device: torch.device) -> list[Callable[[], Any]]:
    """Return what draws from the CPU's generator for a model on another device, as LayerDrop does. Traced code whose
    values depend on it is not captured (`find_obstacle`); the generator must advance in any case."""
    draws: list[Any] = [n for n in list_draws(module) if n.meta["example_value"].device.type != device.type]
    # Those of tensors, such as torch.rand_like, are left out: the comparison with the eager step shows them.
    return [functools.partial(one.target, *one.args, **one.kwargs) for one in draws if not one.all_input_nodes]


def settle_outputs(module: GraphModule, entry: Entry, device: torch.device) -> GraphModule:
    """Return a copy of the traced code that keeps no autograd graph but the loss's, and that also returns a sum of
    everything that it draws at random and does not use: AOTAutograd would remove that, and all later random numbers
    would differ from those of an eager step."""
    module = copy_graph(module)
    output = module.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    unused = set(list_draws(module)) - find_above([output])
    with module.graph.inserting_before(output):
        for k, one in enumerate(entry.outputs):
            if isinstance(one, Promise) and one.is_kept:
                outputs[k] = module.graph.call_method("detach", (outputs[k],))
        for node in module.graph.nodes:
            if node in unused and node.meta["example_value"].device.type == device.type:
                outputs.append(module.graph.call_method("sum", (module.graph.call_method("detach", (node,)),)))
    output.args = (tuple(outputs),)
    module.recompile()
    return module


def find_returned(module: GraphModule) -> dict[int, int]:
    """Return which outputs are inputs that the code writes into by `out=`, as spectral norm does with its buffers."""
    placeholders = module.graph.find_nodes(op="placeholder")
    outputs: Any = module.graph.output_node().args[0]
    written = [one.kwargs.get("out") if isinstance(one, Node) else None for one in outputs]
    return {k: placeholders.index(one) for k, one in enumerate(written) if one in placeholders}


def make_fake(example: Tensor, context: TracingContext) -> Tensor:
    """Return a fake tensor as AOTAutograd would make it. Those of Dynamo's graph have another mode, which torch 2.10
    refuses, and their metadata may have changed in the trace."""
    assert context.fake_mode is not None
    shapes = context.tensor_to_context.get(example)
    source = shapes.tensor_source if shapes is not None else ConstantSource("halfstep_example")
    return context.fake_mode.from_tensor(example, symbolic_context=shapes, source=source)


def is_numpy_number(node: Node) -> bool:
    return isinstance(getattr(node.meta.get("grapharg"), "source", None), NumpyTensorSource)


def copy_graph(module: GraphModule) -> GraphModule:
    """Return a copy whose nodes can be changed; the metadata of nodes is kept."""
    return GraphModule(module, copy.deepcopy(module.graph))


def find_shared(module: GraphModule) -> frozenset[int]:
    """Return the inputs whose casts eager autocast keeps, so that a weight that is used twice is cast once."""
    if CACHE_ENABLED is False:  # the eager step of this torch casts every use of a weight too
        return frozenset()
    placeholders = module.graph.find_nodes(op="placeholder")
    return frozenset(k for k, node in enumerate(placeholders) if is_cached(node.meta["example_value"]))


def share_casts(module: GraphModule, shared: frozenset[int]) -> GraphModule:
    """Return a copy of the traced code that casts these inputs once, however often they are used, as eager autocast
    does with its cache.

    Gradients of a cast that is shared are added up in half precision. AOTAutograd switches the cache off, so that no
    tensor of one trace reaches the next one; here it is emptied before and after."""
    module = copy_graph(module)
    if not shared:
        return module
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    with module.graph.inserting_after(placeholders[-1]):
        was_kept = module.graph.call_function(keep_casts, tuple(placeholders[k] for k in sorted(shared)))
    with module.graph.inserting_before(output):
        module.graph.call_function(drop_casts, (was_kept,))
    module.recompile()
    return module


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
    while backward goes on. Views copy where they must: kernels may return other strides than the trace expected."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()

    def run(arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()
        return graph.forward(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def find_repeated(module: GraphModule, entry: Entry) -> str:
    """Return why not, if a checkpointed block writes into a tensor, which eager steps do twice and traced code once; or
    if it draws random numbers and Dynamo's graph, which draws others in its second run, may have to make a step."""
    placeholders = module.graph.find_nodes(op="placeholder")
    written = {placeholders[k] for k in entry.mutated if k < len(placeholders)}
    blocks = [node for node in module.graph.nodes if "checkpoint" in str(node.target)]
    if any(not written.isdisjoint(node.all_input_nodes) for node in blocks):
        return "torch.utils.checkpoint runs a block that writes into a buffer, such as BatchNorm, twice"
    if blocks and entry.is_random and entry.has_side_effects:
        return "loss_fn changes Python objects, and draws random numbers inside torch.utils.checkpoint"
    return ""


def compile_by_inductor(graph: GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    code = compile_fx_inner(graph, inputs, **settings)
    if ".item()" in str(getattr(code, "source_code", "")):
        raise NotTraced("Inductor's code reads a number from the device")
    return code


def note_moved(entry: Entry, graph: GraphModule, device: torch.device) -> None:
    """Note the CPU inputs that a graph only copies to the device, which the fast path copies itself; and those of them
    that the host waits for."""
    moved = {
        number: list(node.users)
        for number, node in enumerate(graph.graph.find_nodes(op="placeholder"))
        if is_elsewhere(node, device) and node.meta["val"].ndim and all(is_copy_to(user, device) for user in node.users)
    }
    entry.moved = frozenset(moved)
    entry.waits = frozenset(k for k, users in moved.items() if not all(u.kwargs.get("non_blocking") for u in users))


def find_obstacle(graph: GraphModule, device: torch.device, pure_ops: frozenset[str]) -> str:
    """Return what in a graph of AOTAutograd a replay would not follow, with the user's line."""
    on_host: set[Node] = set()  # Python numbers as 0-dimensional CPU tensors: a replay gets them on the device
    for node in graph.graph.nodes:
        is_here = not is_elsewhere(node, device)
        if node.op == "placeholder" and not is_here and node.meta["val"].ndim == 0:
            on_host.add(node)
        if node.op != "call_function":
            continue
        name, namespace = str(node.target), getattr(node.target, "namespace", "")
        if free_unbacked_symbols(node.meta.get("val")):
            return f"the size of what {name} returns depends on values{find_line(node)}"
        if "_local_scalar_dense" in name:
            return f"a number is read from a tensor, as .item() does{find_line(node)}"
        said = f"{namespace}::{name.split('.')[1]}" if namespace else ""
        if said and pure_ops.isdisjoint((namespace, said)):
            reason = f"{said} may read more than its inputs (hs.Fast(pure_ops=[{said!r}]) declares that it does not)"
            return f"{reason}{find_line(node)}"
        if is_here:
            continue
        if not node.all_input_nodes or not on_host.issuperset(node.all_input_nodes):
            return f"{name} runs on the {node.meta['val'].device.type}{find_line(node)}"
        on_host.add(node)
    return ""


def is_copy_to(node: Node, device: torch.device) -> bool:
    target = node.kwargs.get("device")
    copies = str(node.target).startswith(("aten._to_copy", "prims.device_put", "aten.to."))
    return copies and isinstance(target, torch.device) and target.type == device.type


def find_line(node: Node) -> str:
    """Return " (file:line)" of the user's code that a node came from."""
    return name_line((node.meta.get("stack_trace") or "").splitlines())


def name_line(lines: Sequence[str]) -> str:
    found = [match for line in lines if (match := re.search(r'File "(.+?)", line (\d+)', line))]
    outside = [match for match in found if "/torch/" not in match[1] and not match[1].startswith(OURS)] or found
    return f" ({outside[-1][1]}:{outside[-1][2]})" if outside else ""


def explain(error: BaseException) -> str:
    """Return Dynamo's reason in one line, with the user's line."""
    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, NotTraced):
        return str(error.inner_exception)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if isinstance(error, BackendCompilerFailed) and len(lines) > 1:
        reason = lines[1]  # the first names this file's function only
    hint = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{reason}{': ' + hint if hint else ''}{name_line(lines)}"
