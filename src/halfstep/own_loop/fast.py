"""The fast path of hs.Step: run a user's loss function as captured CUDA graphs, without freezing a Python value.

    eager      the first steps, and whatever cannot be captured
    graph      the whole step as one CUDA graph of torch's own kernels: most of the gain where the host is the limit;
               without verdict and commit where an optimizer or a hook runs Python code
    compiled   the same with Inductor's code, which takes tens of seconds to compile

What happens in a step, once the first few have run eagerly:

1. The loss function is called once per micro-batch, through Dynamo (traced.py). Guards find the entry for the Python
   values of this call, and the entry notes its inputs. Nothing is computed yet.
2. Entries, optimizer settings and weights of the micro-batches are the key of a graph. If there is one, and it was
   captured from the same parameters and buffers, the inputs that change are copied into it, and it is replayed.
3. Otherwise the window runs uncaptured: the first time as a plain step, the second time it is captured, and the replay
   is compared with it (certificate.py).
4. The tensors that the loss function returned or stored are filled.

A replay contains what a step does on the device, forward to counters (step/graph.py), so a bad one is dropped inside.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from halfstep.backend_flags import read_effective_leaves
from halfstep.distributed.sharding import Sharding
from halfstep.own_loop.certificate import Certificate, ReplayDiffers, StepState
from halfstep.own_loop.compile_history import CompileHistory, Compiling
from halfstep.own_loop.hand_rates import HandRates
from halfstep.own_loop.loss import split_result
from halfstep.own_loop.traced import Call, Compiler, Entry, NotTraced, Outdated, TracedLoss
from halfstep.own_loop.user_warnings import warn_user
from halfstep.own_loop.windows import (
    Graph,
    Key,
    Replay,
    TracedWindow,
    describe_window,
    list_holders,
    refuse_changing,
    run_calls,
)
from halfstep.precision.plan import Plan
from halfstep.step.batches import Batch, read_sample_ids
from halfstep.step.facts import Facts
from halfstep.step.graph import CaptureFailed, GraphedBackward, GraphedStep
from halfstep.step.step import LossFn, Step

Fast = Literal["auto", "graph", "compile", "off"]
Eager = Callable[[LossFn], Facts]
"""Make a step by running a loss function's Python code."""

WARMUP_STEPS = 3
"""Eager steps before the first trace: optimizers build their state, cuDNN chooses its algorithms."""
MAX_TRACERS = 4  # combinations of backend flags that are not guarded by Dynamo
MAX_UNUSED = 4  # graphs captured in a row without one replay
COMPILED: Compiler = "inductor"
LOOK_EVERY = 20  # replays between two looks at whether compiling pays, or a check is due
CHECK_SHARE = 0.005  # of the time in steps, for comparing replays with uncaptured code again
TIMED = 20  # replays
ERROR = 2.0  # how much further from fp32 compiled gradients may be than those of torch's kernels
ROUNDING = 1e-5  # relative, of sums in another order in fp32


Capture = Callable[[Step, LossFn, list[dict[str, Tensor]], Any], Replay]

CAPTURES: dict[str, tuple[Capture, Capture]] = {"cuda": (GraphedStep, GraphedBackward)}
"""How a step, and its forward and backward alone, are captured, by type of device."""


@dataclass
class Level:
    """One way of running the traced code, with everything that belongs to it."""

    compiler: Compiler
    tracers: OrderedDict[object, TracedLoss] = field(default_factory=OrderedDict)
    graphs: OrderedDict[Key, Graph] = field(default_factory=OrderedDict)  # least recently used first
    ran: dict[Key, TracedWindow] = field(default_factory=dict)  # windows that ran uncaptured
    changing: dict[Entry, set[int]] = field(default_factory=dict)  # inputs that are other tensors at every step
    certificate: Certificate = field(default_factory=Certificate)
    pool: Any = None
    is_compared: bool = False  # whether the traced code was compared with the eager step
    num_tried: int = 0  # comparisons with it that could not be made, or failed
    num_unused: int = 0  # graphs in a row that were captured and not replayed
    num_replays: int = 0
    is_full: bool = False  # graphs were dropped before they could be replayed, so no more are captured
    began_s: float = 0.0  # the time in steps when the first graph was captured
    checked_s: float = 0.0  # and when replays were last compared with uncaptured code
    check_s: float = 0.0  # how long that took
    num_trusted: int = 0  # replays until then

    @property
    def mode(self) -> str:
        commits = all(graph.replay.commits for graph in self.graphs.values())
        return ("graph" if self.compiler == "aten" else "compile+graph") + ("" if commits else ", commit eager")

    def find_tracer(self, plan: Plan, pure_ops: frozenset[str]) -> TracedLoss:
        """Return the tracer for the backend flags in force: they select kernels, and Dynamo does not guard them."""
        flags = read_flags()
        if flags not in self.tracers:
            if len(self.tracers) >= MAX_TRACERS:
                self.tracers.popitem(last=False)
            self.tracers[flags] = TracedLoss(plan, self.compiler, pure_ops=pure_ops)
        return self.tracers[flags]


class FastPath:
    """Choose and run the mode of each step of an hs.Step."""

    def __init__(
        self,
        step: Step,
        asked: Fast,
        *,
        num_steps: int | None = None,
        max_graphs: int = 8,
        pure_ops: frozenset[str] = frozenset(),
        changed_optimizers: Sequence[str] = (),
    ) -> None:
        self.step, self.asked, self.num_steps, self.max_graphs = step, asked, num_steps, max_graphs
        self.pure_ops, self.changed_optimizers = pure_ops, changed_optimizers
        self.why_eager = "fast='off'" if asked == "off" else self._find_obstacle()
        self.level = self._make_level("inductor" if asked == "compile" else "aten")
        self.compiled: Level | None = None
        """Inductor's code for windows of the shapes that it was tried with: compiling takes too long for rare ones."""
        self.trial: Level | None = None
        """The same while it is tried; the steps it makes are real ones."""
        self.shapes: object = None
        self.uncompiled: Graph | None = None  # what the trial is compared with
        self.trial_began = 0.0
        self.history: CompileHistory | None = None
        self.expected: Compiling | None = None  # what compiling takes and saves, for windows of these shapes
        self.why_not_compiled = self._find_eager_commit() if asked == "auto" else f"fast={asked!r}"
        self.rates = HandRates(step)
        self.in_steps_s = 0.0
        """Seconds spent in steps: what the loop does in between, such as validation, pays for no check, and compiling
        does not shorten it."""
        self.is_pure = False  # whether the traced code of the last step changes no Python object
        self.first = step.attempted
        self.has_compiled_blocks = step.sharding is not None and asked == "compile" and not step.plan.simulated
        if step.sharding is not None and self.has_compiled_blocks:
            compile_sharded_blocks(step.sharding)
        elif self.why_eager and asked in ("graph", "compile"):
            say(f"runs eagerly: {self.why_eager}")
        elif asked == "auto" and step.ranks is not None and step.sharding is not None and step.ranks.world.is_first:
            say(f"runs eagerly: {self.why_eager}; fast='compile' compiles each sharded block")

    @property
    def mode(self) -> str:
        level = self.compiled or self.level
        return level.mode if level.graphs else "compile" if self.has_compiled_blocks else "eager"

    @property
    def certificate(self) -> Certificate:
        return (self.compiled or self.level).certificate

    def run(self, loss_fn: LossFn, window: list[Batch], eager: Eager) -> Facts:
        """Make one step, by a replay where possible; `eager` makes it by a Python function."""
        if self.why_eager or self.step.attempted < self.first + WARMUP_STEPS or is_watched(self.step):
            return eager(loss_fn)
        level = self._choose_level(window)
        if level is self.level and level.compiler == "aten" and level.ran and not level.is_compared:
            return self._compare_with_eager(loss_fn, window, eager)
        traced = TracedWindow([], [], [], [], [])
        try:
            facts = self._run_traced(level, traced, loss_fn, window)
        except Outdated:
            level.tracers.clear()
            level.graphs.clear()
            level.ran.clear()
            return self._run_rest(traced, loss_fn, window, eager)
        except NotTraced as error:
            is_last = level is self.level
            self._leave(level, str(error))
            if traced.calls or is_last:
                return self._run_rest(traced, loss_fn, window, eager)
            return self.run(loss_fn, window, eager)
        return facts

    def _make_level(self, compiler: Compiler) -> Level:
        return Level(compiler, certificate=Certificate(changed_optimizers=self.changed_optimizers))

    def _choose_level(self, window: list[Batch]) -> Level:
        compiled = self.trial or self.compiled
        return self.level if compiled is None or describe_window(window) != self.shapes else compiled

    def _run_traced(self, level: Level, traced: TracedWindow, loss_fn: LossFn, window: list[Batch]) -> Facts:
        references = self._trace_references(loss_fn, window) if level is self.trial and level.ran else None
        self._trace(level.find_tracer(self.step.plan, self.pure_ops), traced, loss_fn, window)
        if self.step.watch is not None:
            self.is_pure = not any(call.entry.has_side_effects for call in traced.calls)
        key = (*traced.key, *self.rates.key)
        graph = level.graphs.get(key)
        if graph is not None and graph.fits(traced, self.step):
            level.graphs.move_to_end(key)
            level.num_unused = 0
            level.num_replays += 1
            if level.num_replays % LOOK_EVERY == 0:
                if not self.why_not_compiled and self.trial is None and self._is_worth_compiling(traced.batches):
                    self._begin_trial(traced.batches, graph)
                if (self.in_steps_s - level.checked_s) * CHECK_SHARE > level.check_s:
                    self._check_again(level, graph, traced, loss_fn)
            return self._replay(graph, traced)
        if obstacle := self._find_obstacle():
            raise NotTraced(obstacle)
        if key not in level.ran or level.is_full:
            return self._run_uncaptured(level, key, traced)
        if not level.graphs and (no_room := self._find_no_room()):
            raise NotTraced(no_room)
        if references is not None and not self._compare_gradients(level, traced, *references):
            return self._run_uncaptured(level, key, traced)
        return self._capture(level, key, traced)

    # --- 1: guards, and what the loss function reads ---

    def _trace(self, tracer: TracedLoss, traced: TracedWindow, loss_fn: LossFn, window: list[Batch]) -> None:
        for batch in window:
            call = tracer(loss_fn, batch)
            is_plain = len(window) == 1 and isinstance(call.result, Tensor)
            # Alone in its window a batch counts whatever it weighs.
            split = (call.result, 1) if is_plain else split_result(call.result, batch, is_alone=len(window) == 1)
            loss, weight = split
            traced.calls.append(call)
            traced.losses.append(call.find_promised(loss))
            traced.weights.append(weight)
            traced.weight_outputs.append(call.find_promised(call.result[1]) if isinstance(weight, Tensor) else None)
            traced.batches.append(batch)
            call.forget_result()

    # --- 2: replay ---

    def _replay(self, graph: Graph, traced: TracedWindow) -> Facts:
        self.step.look_ahead()
        self.rates.write()
        facts = graph.replay(graph.select(traced), read_sample_ids(traced.batches))
        for call, outputs in zip(traced.calls, graph.outputs[-len(traced.calls) :], strict=True):
            call.fulfil(outputs)
        return facts

    # --- 3: uncaptured, then captured ---

    def _run_uncaptured(self, level: Level, key: Key, traced: TracedWindow) -> Facts:
        """Make a plain step of the traced code. Its backward is compiled only now, so its graph is scanned after it."""
        outputs: list[Sequence[Any]] = []
        facts = self.step.compute(run_calls(traced, outputs), traced.calls)
        facts.ids = read_sample_ids(traced.batches)
        self.step.commit(facts)
        for call, found in zip(traced.calls, outputs, strict=True):
            call.fulfil(found)
        if why_not := next((call.entry.why_not for call in traced.calls if call.entry.why_not), ""):
            self._leave(level, why_not)
        level.ran[key] = traced
        while len(level.ran) > 4 * self.max_graphs:
            level.ran.pop(next(iter(level.ran)))
        return facts

    def _capture(self, level: Level, key: Key, traced: TracedWindow) -> Facts:
        """Capture a window that has run before, and make this step by its first replay, if that equals two runs of the
        uncaptured code."""
        self._note_changing(level, traced, level.ran[key])
        level.ran[key] = traced
        level.num_unused += 1
        if level.num_unused > MAX_UNUSED and len(level.graphs) == self.max_graphs:
            level.is_full = True
            say(f"there are more shapes than max_graphs={self.max_graphs}: the others run without a graph")
            return self._run_uncaptured(level, key, traced)
        if level.num_unused > MAX_UNUSED:
            raise NotTraced("parameters, optimizer settings or numbers in the batch change at every step")
        began = time.monotonic()
        state = StepState(self.step, traced.list_written())
        before = state.copy()
        self.step.look_ahead()
        eager_commit = self._find_eager_commit()
        state.has_gradients = bool(eager_commit)
        try:
            with state.protect(before), self.rates.as_tensors():
                runs = [state.run_from(before, lambda: self._try(traced)) for _ in range(2)]
                state.restore(before)
                is_dropped = not eager_commit and torch.equal(runs[0].committed, before.committed)
                graph = None if is_dropped else self._make_graph(level, traced)
            if graph is None:  # a dropped step shows nothing: capture the next one
                level.num_unused -= 1
                return self._run_uncaptured(level, key, traced)
            with state.protect(before):
                if eager_commit:
                    found = state.run_from(before, lambda: self._replay_only(graph, traced))
                    state.restore(before)
                else:
                    facts = self._replay(graph, traced)
                    found = state.copy()
                level.certificate.exact, level.certificate.noisy = state.compare(found, runs, before)
            if eager_commit:
                facts = self._replay(graph, traced)
        except (CaptureFailed, ReplayDiffers, torch.OutOfMemoryError) as error:
            self._leave(level, (str(error).splitlines() or [type(error).__name__])[0])
            return self._run_uncaptured(level, key, traced)
        level.certificate.add("its uncaptured code")
        level.checked_s, level.num_trusted = self.in_steps_s, level.num_replays
        level.check_s = time.monotonic() - began  # with the capture: an upper bound until the first real check
        is_first = not level.graphs
        level.graphs[key] = graph
        while len(level.graphs) > self.max_graphs:
            level.graphs.popitem(last=False)
        if level is self.trial:
            self._end_trial(level, graph, StepState(self.step, traced.list_written()))
        elif is_first:
            level.began_s = self.in_steps_s
            alone = f"; the commit runs uncaptured: {eager_commit}" if eager_commit else ""
            say(f"captured as a CUDA graph of {NAMES[level.compiler]}: {level.certificate}{alone}")
        return facts

    def _check_again(self, level: Level, graph: Graph, traced: TracedWindow, loss_fn: LossFn) -> None:
        """Compare a replay with uncaptured code once more: a value that was frozen when the graph was made shows now,
        if it has changed since. It leaves no trace, and raises NotTraced if they differ.

        The user's Python code itself runs, if it changes no Python object and no compiler has rounded differently."""
        began = time.monotonic()
        is_python = level.compiler == "aten" and not any(call.entry.has_side_effects for call in traced.calls)
        state = StepState(self.step, traced.list_written())
        before = state.copy()
        self.step.look_ahead()
        window = traced.batches
        code = split_results(loss_fn, is_alone=len(window) == 1)
        with state.protect(before):
            with self.rates.as_tensors():
                state.has_gradients = True
                runs = [state.run_from(before, lambda: self._try(traced)) for _ in range(2)]
                python = state.run_from(before, lambda: self._try_code(code, window)) if is_python else None
            state.has_gradients = not graph.replay.commits
            found = state.run_from(before, lambda: self._replay_only(graph, traced))
            state.restore(before)
        try:
            state.compare(found, runs, before)
            if python is not None:
                state.compare_gradients(python, runs)
        except ReplayDiffers as error:
            num_suspect = level.num_replays - level.num_trusted
            warn_user(
                f"captured steps no longer equal uncaptured ones: {error}. The last {num_suspect} steps are suspect; "
                "load a checkpoint from before them. loss_fn, or an operation in it, reads a value that torch does not "
                "guard"
            )
            if is_python:
                traced.calls.clear()  # the traced code is suspect, too: make this step from the Python code
            raise NotTraced(f"replays differ from uncaptured steps, {num_suspect} steps are suspect") from None
        level.checked_s, level.num_trusted = self.in_steps_s, level.num_replays
        level.check_s = time.monotonic() - began
        level.certificate.num_checks += 1

    def _note_changing(self, level: Level, traced: TracedWindow, last: TracedWindow) -> None:
        """Find inputs that are other tensors than in the last window, apart from the batch: those are copied, too."""
        own = {id(parameter) for parameter in self.step.find_trained_parameters()}
        for call, then in zip(traced.calls, last.calls, strict=True):
            for position, (one, before) in enumerate(zip(call.inputs, then.inputs, strict=True)):
                if isinstance(one, Tensor) and one is not before and id(one) not in own:
                    level.changing.setdefault(call.entry, set()).add(position)
            refuse_changing(call, level.changing.get(call.entry, set()))

    def _make_graph(self, level: Level, traced: TracedWindow) -> Graph:
        device = self.step.device
        if not level.graphs and device.type == "cuda":  # a pool that no graph uses any more cannot be used again
            level.pool = torch.cuda.graph_pool_handle()
        positions = [
            traced.find_dynamic(number, level.changing.get(call.entry, set()))
            for number, call in enumerate(traced.calls)
        ]
        inputs = [
            {str(position): call.inputs[position].detach().to(device) for position in own}
            for call, own in zip(traced.calls, positions, strict=True)
        ]
        fixed = []
        for call, own in zip(traced.calls, positions, strict=True):
            others = [k for k, one in enumerate(call.inputs) if isinstance(one, Tensor) and k not in own]
            tensors = [call.inputs[k] for k in others]
            fixed.append((others, tensors, [tensor.data_ptr() for tensor in tensors]))
        outputs: list[Sequence[Any]] = []
        # A capture takes place on a stream of the current device, which need not be the model's.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            capture = CAPTURES[device.type][bool(self._find_eager_commit())]
            replay = capture(self.step, run_calls(traced, outputs), inputs, level.pool)
        # Detached: an autograd graph that is kept would tie gradients of later steps to the stream of the capture.
        outputs[:] = [[o.detach() if isinstance(o, Tensor) else o for o in own] for own in outputs]
        holders = list(map(id, list_holders(self.step)))
        return Graph(replay, device, outputs, fixed, holders, [[(k, str(k)) for k in own] for own in positions])

    def _try(self, traced: TracedWindow) -> None:
        """Make the device's part of a step of the traced code, whose result is discarded afterwards."""
        self._try_code(run_calls(traced, []), traced.calls)

    def _try_code(self, loss_fn: LossFn, window: Sequence[Any]) -> None:
        if self._find_eager_commit():
            self.step.clear_gradients()
            self.step.accumulate_gradients(loss_fn, window, self.step.find_trained_parameters())
        else:
            self.step.commit_on_device(self.step.forward_backward(loss_fn, window))

    def _replay_only(self, graph: Graph, traced: TracedWindow) -> None:
        """Replay what the graph holds, whose result is discarded afterwards."""
        self.rates.write()
        if graph.replay.commits:
            graph.replay(graph.select(traced))
        else:
            self.step.clear_gradients()
            graph.replay.replay_gradients(graph.select(traced))

    def _run_rest(self, traced: TracedWindow, loss_fn: LossFn, window: list[Batch], eager: Eager) -> Facts:
        """Make a step whose first micro-batches were traced, so that their Python has run, and the others not."""
        if not traced.calls:
            return eager(loss_fn)
        outputs: list[Sequence[Any]] = []
        run, plain = run_calls(traced, outputs), split_results(loss_fn, is_alone=len(window) == 1)
        left = [*traced.calls, *window[len(traced.calls) :]]
        facts = self.step.compute(lambda one: run(one) if isinstance(one, Call) else plain(one), left)
        facts.ids = read_sample_ids(window)
        self.step.commit(facts)
        for call, found in zip(traced.calls, outputs, strict=True):
            call.fulfil(found)
        return facts

    # --- the user's Python code against the traced code ---

    def _compare_with_eager(self, loss_fn: LossFn, window: list[Batch], eager: Eager) -> Facts:
        """Make this step eagerly, and repeat it twice with the traced code, from the same state.

        The Python code runs for both, before anything is computed. If it has side effects on Python objects, those
        must come once: then the traced calls are those of the last window, with the tensors of this one, which fails
        where the code reads a number that has changed since."""
        level = self.level
        last = level.ran[next(reversed(level.ran))]
        is_pure = not any(call.entry.has_side_effects for call in last.calls)
        traced = TracedWindow([], [], [], [], []) if is_pure else last.with_batches(window)
        if traced is not None and is_pure:
            try:
                self._trace(level.find_tracer(self.step.plan, self.pure_ops), traced, loss_fn, window)
            except (NotTraced, Outdated) as error:
                self._stay_eager(str(error) or "requires_grad of a weight has changed")
                return eager(loss_fn)
        has_eager_commit = bool(self._find_eager_commit())
        if traced is None or not is_pure and (last.reads_numbers or has_eager_commit):
            level.num_tried += 1
            level.is_compared = last.reads_numbers or has_eager_commit or level.num_tried > MAX_UNUSED
            return eager(loss_fn)
        state = StepState(self.step, traced.list_written())
        before = state.copy()
        state.has_gradients = True
        if has_eager_commit:  # its Python code must run once: compare gradients, and make the step afterwards
            with state.protect(before):
                plain = split_results(loss_fn, is_alone=len(window) == 1)
                after = state.run_from(before, lambda: self._try_code(plain, window))
                runs = [state.run_from(before, lambda: self._try(traced)) for _ in range(2)]
            state.restore(before)
            facts = eager(loss_fn)
        else:
            facts = eager(loss_fn)
            after = state.copy()
            with state.protect(after):
                runs = [state.run_from(before, lambda: self._try(traced)) for _ in range(2)]
            state.restore(after)
        if facts.read().is_bad:
            return facts  # a dropped step shows nothing
        try:
            is_equal = state.compare_gradients(after, runs)
        except ReplayDiffers as error:
            if is_pure:
                self._stay_eager(f"the traced code does not equal the eager step: {error}")
                return facts
            # The window may have taken another path through the code than the last one: trace once more.
            level.ran.clear()
            level.num_tried += 1
            level.is_compared = level.num_tried > 1
            return facts
        level.is_compared = True
        level.certificate.add("the eager step" + ("" if is_equal else " up to rounding"))
        return facts

    # --- Inductor's code in place of torch's kernels ---

    def _is_worth_compiling(self, window: list[Batch]) -> bool:
        """True once the time that compiled code is likely to save exceeds the time that compiling takes."""
        level, shapes = self.level, describe_window(window)
        if self.expected is None or shapes != self.shapes:
            num_nodes = sum(entry.num_nodes for tracer in level.tracers.values() for entry in tracer.entries)
            self.shapes, self.history = shapes, CompileHistory(self.step, shapes)
            self.expected = self.history.expect(num_nodes)
        spent = self.in_steps_s - level.began_s
        if self.num_steps is not None:
            spent *= max(0, self.num_steps - self.step.attempted) / level.num_replays
        return spent * self.expected.saving > self.expected.seconds

    def _begin_trial(self, window: list[Batch], graph: Graph) -> None:
        self.trial, self.shapes, self.uncompiled = self._make_level(COMPILED), describe_window(window), graph
        self.trial_began = time.monotonic()
        say("compiles the step next, which takes a while; both graphs use memory until the faster one is known")

    def _trace_references(self, loss_fn: LossFn, window: list[Batch]) -> tuple[TracedWindow, TracedWindow] | None:
        """Trace the window with torch's kernels, as planned and in fp32, before its real call, whose side effects
        replace those of these."""
        found = TracedWindow([], [], [], [], []), TracedWindow([], [], [], [], [])
        tracers = (
            self.level.find_tracer(self.step.plan, self.pure_ops),
            TracedLoss(self.step.plan, "aten", in_fp32=True, pure_ops=self.pure_ops),
        )
        for traced, tracer in zip(found, tracers, strict=True):
            self._trace(tracer, traced, loss_fn, window)
        return None if any(call.entry.is_random for call in found[0].calls) else found

    def _compare_gradients(
        self, level: Level, compiled: TracedWindow, plain: TracedWindow, exact: TracedWindow
    ) -> bool:
        """Raise NotTraced if the compiled code's gradients are further from fp32 than ERROR times those of torch's
        kernels. Return False if they are not finite, which shows nothing."""
        state = StepState(self.step, compiled.list_written())
        before = state.copy()
        gradients = []
        for traced in (exact, plain, compiled):
            loss_fn = run_calls(traced, [])
            with state.protect(before):
                self.step.forward_backward(turn_off_autocast(loss_fn) if traced is exact else loss_fn, traced.calls)
            self.step.writes.put_back()
            gradients.append([p.grad.float() for p in self.step.find_trained_parameters() if p.grad is not None])
            state.restore(before)
        of_plain, of_compiled = (float(measure_distance(own, gradients[0])) for own in gradients[1:])
        size = float(torch.nn.utils.get_total_norm(gradients[0]))
        if not math.isfinite(size):
            return False
        if not of_compiled <= ERROR * of_plain + ROUNDING * size:
            raise NotTraced(
                f"the compiled code's gradients are off by {of_compiled / size:.2g}, those of torch's kernels by "
                f"{of_plain / size:.2g}"
            )
        level.certificate.add(f"fp32 within {of_compiled / size:.1g} (uncompiled: {of_plain / size:.1g})")
        return True

    def _end_trial(self, level: Level, graph: Graph, state: StepState) -> None:
        """Keep the faster of the two levels."""
        assert self.uncompiled is not None
        before = state.copy()
        with state.protect(before):
            self.step.committed.zero_()  # the replays would run past the end of a table of learning rates
            times = [time_replays(one.replay, self.step.device) for one in (self.uncompiled, graph)]
        state.restore(before)
        if self.history is not None:
            self.history.write(Compiling(time.monotonic() - self.trial_began, 1 - times[1] / times[0]))
        if times[1] > times[0]:
            self._drop_trial(f"{times[1] * 1e3:.3g} ms per step, {times[0] * 1e3:.3g} ms without")
            return
        self.compiled, self.trial, self.uncompiled, self.why_not_compiled = level, None, None, "it is"
        self.level.graphs.clear()
        self.level.ran.clear()
        say(f"compiled: {times[1] * 1e3:.3g} ms per step, {times[0] * 1e3:.3g} ms without; {level.certificate}")

    def _drop_trial(self, reason: str) -> None:
        self.trial, self.compiled, self.uncompiled, self.why_not_compiled = None, None, None, reason
        say(f"not compiled: {reason}")

    # --- staying eager ---

    def _find_obstacle(self) -> str:
        """Return why no step can be captured at present; empty if nothing is known to prevent it."""
        step = self.step
        if step.sharding is not None and not step.plan.simulated:
            return step.why_never_captured()
        if step.device.type not in CAPTURES:
            return f"a CUDA graph needs a CUDA device, not {step.device}"
        if step.ranks is not None:
            return "several ranks train together, and their reductions are not captured"
        if step.plan.simulated:
            return "the precision is simulated"
        if any(GLOBAL_HOOKS):
            return "a global module hook is registered"
        # An attempt to trace one would change the masks of cuDNN's dropout.
        recurrent = [n for n, module in step.model.named_modules() if isinstance(module, nn.RNNBase)]
        if recurrent:
            return f"torch cannot trace RNN, GRU and LSTM layers ({', '.join(map(repr, recurrent))})"
        gradients = (parameter.grad for parameter in step.find_trained_parameters())
        are_sparse = any(gradient is not None and gradient.is_sparse for gradient in gradients)
        return "gradients are sparse" if are_sparse else ""

    def _find_eager_commit(self) -> str:
        """Return why only forward and backward can be captured; empty if the whole step can."""
        if self.step.on_gradients is not None or self.step.on_commit is not None:
            return "on_gradients= and on_commit= run Python code"
        return self.step.why_never_captured()

    def _find_no_room(self) -> str:
        """Return why `auto` does not capture, if that would leave too little memory for anything else: a graph keeps
        the memory of a step's activations, and validation would not get it."""
        device = self.step.device
        if self.asked != "auto" or device.type != "cuda":
            return ""
        allocated = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
        needed = torch.cuda.max_memory_allocated(device) - allocated
        if 2 * needed <= free:
            return ""
        return (
            f"a graph would keep {needed / 1e9:.1f} GB of activations, and {free / 1e9:.1f} GB are free; fast='graph' "
            "captures anyway"
        )

    def _leave(self, level: Level, reason: str) -> None:
        if level is self.level:
            self._stay_eager(reason)
        else:
            self._drop_trial(reason)

    def _stay_eager(self, reason: str) -> None:
        self.why_eager, self.trial, self.compiled = reason, None, None
        self.level = self._make_level(self.level.compiler)
        say(f"runs eagerly, not captured: {reason}")


NAMES = {"aten": "torch's kernels", "inductor": "Inductor's code"}


def compile_sharded_blocks(sharding: Sharding) -> None:
    """Compile each module that FSDP gathers as one, in place; its root stays eager, unless it is the only one. FSDP's
    hooks run uncompiled around them."""
    blocks: list[Any] = list(sharding.modules)
    inner = [block for block in blocks if not any(other in blocks for other in block.modules() if other is not block)]
    for block in inner:
        if block._compiled_call_impl is None:  # the user may have compiled it
            block.compile()


def time_replays(replay: Replay, device: torch.device) -> float:
    """Return the seconds of one replay. It trains: restore the state afterwards."""
    for num in (2, TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(num):
            replay(replay.inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / TIMED


def split_results(loss_fn: LossFn, *, is_alone: bool) -> LossFn:
    """Let a loss function return loss and weight, whatever form they have."""
    return lambda batch: split_result(loss_fn(batch), batch, is_alone=is_alone)


def turn_off_autocast(loss_fn: LossFn) -> LossFn:
    def run(batch: Batch) -> Any:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return loss_fn(batch)

    return run


def measure_distance(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(torch._foreach_sub(one, other))


# --- what Dynamo does not guard ---

GLOBAL_HOOKS = (
    module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks,
    module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks,
)  # fmt: skip


def read_flags() -> object:
    """Return the backend flags that select kernels while a graph is traced, and that no guard compares."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *read_effective_leaves().values(),
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        *(len(hooks) for hooks in GLOBAL_HOOKS),
    )  # fmt: skip


def is_watched(step: Step) -> bool:
    """True inside `with hs.ledger(step)`: what it observes has to run."""
    return step.observed is not contextlib.nullcontext


def say(line: str) -> None:
    """Tell the user in one line what runs."""
    print(f"halfstep: {line}", file=sys.stderr, flush=True)
