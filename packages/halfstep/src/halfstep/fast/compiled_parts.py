"""Compile the parts of a loss function that torch can trace, where it cannot trace the whole of it.

This is `torch.compile` with graph breaks and a backend of our own: the user's Python code runs at every step, once per
micro-batch, and calls what was compiled between two breaks, a `Part`. Lengths that change become dynamic shapes.

No part is used before it was compared, and before it is known to pay (parts_trial.py). At its first call torch's
kernels compute what training uses. On the side Inductor's code runs on the same inputs and random numbers, forward and
backward, and is compared with torch's kernels and with fp32; both are timed. So the user's code runs once, and a part
that is refused has changed nothing. Inductor draws torch's random numbers (`fallback_random`): they can be compared,
and generators end where they would without it.

Errors of the compiler do not reach the user's code: Dynamo's leave a frame to Python, Inductor's a part to torch's
kernels. If compiled code that was already used raises, the caller drops the step (parts_trial.py), because the user's
code, with its side effects, has run.

Gradients of gradients do not work: torch's compiler gives backward code without a derivative. A backward pass through a
part inside the loss function is noticed in its first step, while torch's kernels compute it, and refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback
from torch._dynamo.types import ConvertFrameReturn
from torch._guards import TracingContext
from torch._library.custom_ops import CustomOpDef, _maybe_get_opdef
from torch._ops import OpOverload
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule
from torch.nn.utils import get_total_norm

from halfstep.fast.certificate import find_eps, subtract
from halfstep.fast.compiled_trial import ERROR, MOST_APART, ROUNDING
from halfstep.fast.dynamo_gaps import Questions, answer, break_graphs
from halfstep.fast.traced import copy_graph, explain, find_library_logs
from halfstep.fast.windows import Code, NotTraced, are_finite
from halfstep.precision.contexts import BACKWARD_AS_EAGER
from halfstep.step.facts import read_rng_state, restore_rng
from halfstep.step.step import GuardedStep

MAX_VERSIONS = 8
"""Of one Python function, by guards: where more are needed, as for a list that grows, it runs as it is."""

NUM_RUNS = 4
"""Of each kind of code, to time it."""

NUMBERS = itertools.count()


class NotFinite(NotTraced):
    """Compiled code gives values that are not finite where torch's kernels do not."""


@dataclass(eq=False)
class Part:
    """The operations between two graph breaks."""

    module: GraphModule
    """Dynamo's graph, unmodified: under eager autograd it does what the user's Python code does on the device."""
    code: Code
    written: frozenset[int]
    """Inputs that the graph writes into."""
    plain_s: float = 0.0
    compiled_s: float = 0.0
    """What one call takes with torch's kernels, and with Inductor's code, forward and backward."""
    is_compared: bool = False
    was_used: bool = False
    reached: dict[int, frozenset[int]] = field(default_factory=dict)
    """To which inputs autograd gives a gradient, for each output that has an autograd graph."""

    @functools.cached_property
    def partly_reached(self) -> frozenset[int]:
        """The inputs that get a gradient from some outputs only."""
        sets = self.reached.values()
        return frozenset().union(*sets) - frozenset.intersection(*sets) if sets else frozenset()


class CompiledParts:
    """A loss function as Dynamo sees it, with graph breaks."""

    def __init__(self, step: GuardedStep) -> None:
        self.step = step
        self.parts: list[Part] = []
        self.failure = ""
        """Why compiled code is not used any more."""
        self.is_spoiled = False
        """Whether compiled code has raised in the present step: it must be dropped."""
        self.is_at_fault = False
        """Whether code that was used before gives values that are not finite where torch's kernels do not."""
        self.is_used = False
        """Whether compiled code makes the present step, or torch's kernels do."""
        self.plain_s = self.compiled_s = 0.0
        """What the parts of the present step take with torch's kernels, and with Inductor's code."""
        self.num_news = 0
        """How often something was compiled or compared, so far."""
        self.error = self.error_of_torch = 0.0
        """How far gradients were from fp32, at most, relative to their norm: of compiled code, and of torch's kernels
        in the same part."""
        self.cause = ""  # the guard that failed last
        self._is_inside = False
        context: Any = torch._dynamo.optimize(self._add_part, nopython=False, guard_fail_fn=self._note_cause)
        name = f"_call_parts_{next(NUMBERS)}"  # as in TracedLoss: entries are kept with the code
        function = FunctionType(_call.__code__.replace(co_name=name), globals(), name)
        context.callback = PartsCallback(context.callback, self)
        self._call = context(function)

    def __call__(self, loss_fn: Callable[[Any], Any], batch: Any) -> Any:
        self._is_inside = True
        try:
            return self._call(loss_fn, batch)
        finally:
            self._is_inside = False

    def start_step(self, *, is_used: bool) -> None:
        self.is_used, self.plain_s, self.compiled_s = is_used, 0.0, 0.0
        self.is_spoiled = False

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def check_again(self) -> None:
        """Compare every part at its next call."""
        for part in self.parts:
            part.is_compared = False

    def _note_cause(self, failure: Any) -> None:
        self.cause = " ".join(failure.reason.splitlines()[0].split())

    # --- compiling ---

    def _add_part(self, module: GraphModule, examples: list[Any]) -> Code:
        """Compile one of Dynamo's graphs (this is the backend), and return what Dynamo calls in its place."""
        self.num_news += 1
        kept = copy_graph(module)
        if has_python_operator(module):
            return kept.forward  # comparing would run the user's Python code again
        try:
            code = compile_part(module, examples)
        except (TorchDynamoException, *exceptions_allowed_to_be_fallback):  # Dynamo may trace again, with other breaks
            raise
        except Exception as error:
            self.fail(explain(error))
            return kept.forward
        context = TracingContext.get()
        assert context.fw_metadata is not None
        context.fw_metadata.bw_donated_idxs = []  # None counts as "some", and the user could not keep an autograd graph
        infos = context.fw_metadata.input_info[-len(examples) :] if examples else []
        written = frozenset(k for k, info in enumerate(infos) if info.mutates_data or info.mutates_metadata)
        if any(isinstance(examples[k], nn.Parameter) for k in written):
            return kept.forward  # autograd and the guard see writes into weights by their version
        part = Part(kept, code, written)
        self.parts.append(part)
        return lambda *inputs: self._run(part, inputs)

    def _run(self, part: Part, inputs: Sequence[Any]) -> Any:
        if self.failure or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return part.module.forward(*inputs)  # the user's hooks get what they get in eager steps
        if not (is_new := not part.is_compared) and self.is_used:
            return self._run_used(part, inputs)
        outputs = self._run_compared(part, inputs) if is_new else part.module.forward(*inputs)
        self.plain_s += part.plain_s
        self.compiled_s += part.compiled_s
        return outputs

    def _run_used(self, part: Part, inputs: Sequence[Any]) -> Any:
        part.was_used = True
        edges = find_edges(inputs, part.partly_reached)
        try:
            outputs = part.code(*inputs)
        except Exception as error:
            reason = explain(error)
        else:
            if not give_no_zeros(part, edges, outputs):
                self.fail("autograd does not show which gradients of compiled code are zeros")
            return outputs
        # Outside of the except block, whose error holds activations. If this raises, too, the error is the user's.
        outputs = part.module.forward(*inputs)
        self.is_spoiled = True  # compiled code may have written into the inputs
        self.fail(reason)
        return outputs

    # --- comparing ---

    def _run_compared(self, part: Part, inputs: Sequence[Any]) -> Any:
        """Run torch's kernels, and compare Inductor's code on the side."""
        self.num_news += 1
        device = self.step.device
        given = [one.detach().clone() if k in part.written else one for k, one in enumerate(inputs)]
        before, edges = read_rng_state(device), find_edges(inputs, range(len(inputs)))
        outputs = part.module.forward(*inputs)
        after = read_rng_state(device)
        for one in outputs:
            if isinstance(one, Tensor) and one.grad_fn is not None and all(one is not other for other in inputs):
                one.register_hook(self._refuse_inner_backward)
        try:
            part.reached = find_reached(inputs, outputs, edges)
            part.is_compared = self._compare(part, given, before, after)
        except Exception as error:
            self.is_at_fault |= part.was_used and isinstance(error, NotFinite)
            self.fail(explain(error))
        finally:
            restore_rng(after, device)
        return outputs

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _refuse_inner_backward(self, gradient: Tensor) -> None:
        if self._is_inside:
            self.fail("loss_fn takes a gradient itself, and compiled code has no second derivative")

    def _compare(self, part: Part, inputs: Sequence[Any], before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
        """Raise NotTraced if Inductor's code gives other results or gradients than torch's kernels. Return False if
        those are not finite, which shows nothing."""
        device, eps = self.step.device, find_eps(self.step)

        def run(code: Code, *, is_exact: bool = False) -> Results:
            restore_rng(before, device)
            return run_aside(code, part, inputs, device, is_exact=is_exact)

        plain = run(part.module.forward)
        if not are_finite([*plain.gradients, *(one for one in plain.outputs if one.requires_grad)]):
            return False
        compiled = run(part.code)
        ends = read_rng_state(device)
        if any(not torch.equal(ends[name], state) for name, state in after.items()):
            raise NotTraced("the compiled code draws different random numbers")
        exact: Results | None = None
        with contextlib.suppress(RuntimeError):  # code that says .to(torch.bfloat16) does not run in fp32
            exact = run(part.module.forward, is_exact=True)
        for own in (compiled, exact):
            if own is not None and own.shapes != plain.shapes:
                raise NotTraced("the compiled code returns different tensors from torch's kernels")
        for k, one in enumerate(plain.outputs):
            judge("results", [one], [compiled.outputs[k]], [exact.outputs[k]] if exact else None, eps)
        if plain.gradients:
            errors = judge("gradients", plain.gradients, compiled.gradients, exact.gradients if exact else None, eps)
            self.error, self.error_of_torch = max((self.error, self.error_of_torch), errors)
        part.plain_s = measure(lambda: run(part.module.forward))
        part.compiled_s = measure(lambda: run(part.code))
        return True


def _call(loss_fn: Callable[[Any], Any], batch: Any) -> Any:
    return loss_fn(batch)


def compile_part(module: GraphModule, examples: Sequence[Any]) -> Code:
    """Return Inductor's code for one of Dynamo's graphs, forward and backward."""
    from torch._inductor.compile_fx import compile_fx  # imports Triton where there is one

    # Donated buffers: see _add_part.
    settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True, "donated_buffer": False}
    with torch._functorch.config.patch({**BACKWARD_AS_EAGER, **settings}):
        return compile_fx(module, examples, config_patches={"fallback_random": True})  # type: ignore[return-value]


def has_python_operator(module: GraphModule) -> bool:
    """True if a graph, or one inside it, calls a custom operator that is written in Python."""
    nodes = [node for one in module.modules() if isinstance(one, GraphModule) for node in one.graph.nodes]
    targets = [node.target for node in nodes if isinstance(node.target, OpOverload | CustomOpDef)]
    return any(_maybe_get_opdef(target) is not None for target in targets)


class PartsCallback:
    """What Dynamo calls for Python code that it has not traced yet: sets its settings, and keeps its errors."""

    def __init__(self, callback: Any, parts: CompiledParts) -> None:
        self._torchdynamo_orig_backend = callback  # the name by which Dynamo finds the backend
        self._parts = parts
        self._num_versions: dict[CodeType, int] = {}
        self._questions = Questions()

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        parts, number = self._parts, self._num_versions.get(frame.f_code, 0) + 1
        self._num_versions[frame.f_code] = number
        if parts.failure or number > MAX_VERSIONS:
            return ConvertFrameReturn(apply_to_code=False)  # run it as it is, this time
        config: Any = torch._dynamo.config
        ignored = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
        settings = {
            "skip_nnmodule_hook_guards": False,
            "record_runtime_overhead": False,
            "trace_numpy": False,  # traced, its random numbers would be torch's, and its numbers tensors in float64
            "allow_unspec_int_on_nn_module": True,  # a module that counts its calls gets no new code at every step
            "recompile_limit": 2 * MAX_VERSIONS,
            "accumulated_recompile_limit": 64 * MAX_VERSIONS,
            ignored: getattr(config, ignored) | find_library_logs(),
        }
        try:
            with config.patch(settings), answer(self._questions), break_graphs():
                return self._torchdynamo_orig_backend(frame, *arguments)
        except Exception as error:
            parts.fail(explain(error))
            return ConvertFrameReturn(apply_to_code=False)


# --- gradients of zeros ---

Edge = tuple[Any, int]
"""Where autograd puts a gradient: a node, and the number of its output."""
Edges = dict[int, Edge]
"""Those of inputs, by position."""


def find_edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def find_edges(inputs: Sequence[Any], positions: Iterable[int]) -> Edges:
    """Return the edges of inputs; before the code runs, which may write into them."""
    tensors = {k: inputs[k] for k in positions if isinstance(inputs[k], Tensor) and inputs[k].requires_grad}
    return {k: find_edge(one) for k, one in tensors.items()}


def find_reached(inputs: Sequence[Any], outputs: Sequence[Any], edges: Edges) -> dict[int, frozenset[int]]:
    """Return which inputs the autograd graph of each output reaches. Views of inputs are left out: their gradients do
    not pass through compiled code."""
    positions = {edge: k for k, edge in edges.items()}
    found = {}
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor) or not output.requires_grad:
            continue
        if any(isinstance(one, Tensor) and torch._C._is_alias_of(one, output) for one in inputs):  # type: ignore[attr-defined]
            continue
        ends, left, seen = set[int](), [find_edge(output)], set[Any]()
        while left:
            edge = left.pop()
            if edge in positions:
                ends.add(positions[edge])
            elif edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                left += edge[0].next_functions
        found[number] = frozenset(ends)
    return found


def give_no_zeros(part: Part, edges: Edges, outputs: Sequence[Any]) -> bool:
    """Let autograd give no gradient where eager code gives none. Return False if that is not possible.

    The backward of compiled code gives zeros to what only outputs reach that the loss does not use. To a weight,
    optimizers would add weight decay and momentum."""
    if not edges:
        return True
    node: Any = None
    numbers: dict[int, set[int]] = {}  # outputs of the part, by outputs of the node that has the compiled backward
    for number in part.reached:
        owner, k = find_edge(outputs[number])
        while owner is not None and not set(edges.values()) <= set(owner.next_functions):  # a view, for example
            owner, k = owner.next_functions[0] if owner.next_functions else (None, 0)
        if owner is None or node not in (None, owner):
            return False
        node = owner
        numbers.setdefault(k, set()).add(number)
    places = {position: node.next_functions.index(edge) for position, edge in edges.items()}

    def drop_zeros(gradients: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        used = [k for k, one in enumerate(given) if one is not None]
        if not all(k in numbers for k in used):  # what the code has written into an input
            return None
        reached = frozenset[int]().union(*(part.reached[number] for k in used for number in numbers[k]))
        dropped = {place for position, place in places.items() if position not in reached}
        return tuple(None if k in dropped else one for k, one in enumerate(gradients))

    node.register_hook(drop_zeros)
    return True


# --- runs on the side ---


@dataclass
class Results:
    """What a part returns and leaves in its inputs, and the gradients of its inputs. Tensors only."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    seconds: float

    @property
    def shapes(self) -> list[torch.Size]:
        return [one.shape for one in (*self.outputs, *self.gradients)]


def measure(run: Callable[[], Results]) -> float:
    """Return the seconds of a run."""
    return min(run().seconds for _ in range(NUM_RUNS))


def read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def run_aside(code: Code, part: Part, inputs: Sequence[Any], device: torch.device, *, is_exact: bool) -> Results:
    """Run a part forward and backward, on inputs of its own, with fp32 in place of half precision if it is exact."""
    leaves, given = [], list(inputs)
    for k, one in enumerate(inputs):
        if not isinstance(one, Tensor):
            continue
        is_half = one.dtype in (torch.float16, torch.bfloat16)
        leaf = one.detach().float() if is_exact and is_half else one.detach()
        given[k] = leaf.requires_grad_(one.requires_grad)
        if k in part.written:
            given[k] = leaf.clone()  # a copy for each run, and no leaf, into which autograd allows no writing
        if leaf.requires_grad:
            leaves.append(leaf)
    began = read_clock(device)
    with torch.autocast(device.type, enabled=False) if is_exact else contextlib.nullcontext():
        found = [one for one in code(*given) if isinstance(one, Tensor)]
    seconds = read_clock(device) - began
    outputs = [one for one in found if one.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if outputs and leaves:
        # Signs are exact in every format.
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        signs = [
            torch.randint(0, 2, o.shape, generator=generator, device=o.device).to(o.dtype) * 2 - 1 for o in outputs
        ]
        began = read_clock(device)
        with torch.autocast(device.type, enabled=False):
            gradients = torch.autograd.grad(outputs, leaves, signs, allow_unused=True)
        seconds += read_clock(device) - began
    written = [given[k] for k in sorted(part.written)]
    return Results([*found, *written], [g for g in gradients if g is not None], seconds)


@torch.no_grad()
def judge(
    what: str, plain: list[Tensor], compiled: list[Tensor], exact: list[Tensor] | None, eps: float
) -> tuple[float, float]:
    """Raise NotTraced if compiled code is further from fp32 than ERROR times torch's kernels, and than one rounding in
    the format of the step. Return both distances, relative to the norm. Where nothing runs in fp32, or torch's kernels
    are far from it because they draw other random numbers there, compiled code is compared with them."""
    if not plain[0].is_floating_point():  # indices, masks: near ties may be decided differently
        apart = float((plain[0] != compiled[0]).float().mean()) if plain[0].numel() else 0.0
        if apart > MOST_APART:
            raise NotTraced(f"{apart:.2g} of the compiled code's indices or masks differ")
        return 0.0, 0.0
    are_numbers = [one.isfinite() for one in plain]  # a mask holds -inf
    own, other, true = (
        [torch.where(is_number, one.float(), 0.0) for one, is_number in zip(tensors, are_numbers, strict=True)]
        for tensors in (plain, compiled, plain if exact is None else exact)
    )
    if not are_finite(other):
        raise NotFinite(f"the compiled code's {what} are not finite where those of torch's kernels are")
    size = float(get_total_norm(own))
    of_plain, of_compiled = (float(get_total_norm(subtract(one, true))) for one in (own, other))
    if exact is None or not of_plain <= MOST_APART * size:
        of_plain, of_compiled = 0.0, float(get_total_norm(subtract(other, own)))
        allowed = MOST_APART * size
    else:
        allowed = ERROR * of_plain + max(ROUNDING, eps) * size
    if not of_compiled <= allowed:
        off = f"{of_compiled / max(size, 1e-30):.2g}, those of torch's kernels by {of_plain / max(size, 1e-30):.2g}"
        raise NotTraced(f"the compiled code's {what} are off by {off}")
    return (of_compiled / size, of_plain / size) if size else (0.0, 0.0)
