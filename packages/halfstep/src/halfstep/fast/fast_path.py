"""The fast path of hs.Step: run a user's loss function as captured CUDA graphs, without freezing a Python value.

What happens in a step, once the first few have run eagerly:

1. The loss function is called once per micro-batch, through Dynamo (traced.py). Guards find the entry for the Python
   values of this call, and the entry notes its inputs. Nothing is computed yet.
2. Entries, optimizer settings and weights of the micro-batches are the key of a graph. If there is one, and it was
   captured from the same parameters and buffers, the inputs that change are copied into it, and it is replayed.
3. Otherwise the step is made from the user's Python code. The first time, its gradients are compared with those of the
   traced code; the second time the window is captured, and the replay is compared (certificate.py).
   What is never captured may run compiled with graph breaks (parts_trial.py).
4. The tensors that the loss function returned or stored are filled.

A replay contains what a step does on the device, forward to counters (step/graph.py), so a bad one is dropped inside.
Where an optimizer or a hook runs Python code, it holds forward and backward, and the commit runs eagerly.

The border is `FastPath.run`. Whatever is raised while a window is traced, compiled, captured, compared or replayed,
the state is as before the step; compiled code, or capturing at all, is given up with one line; the step is made from
the user's Python code. If that code has run and has side effects, the step is made by Dynamo's graph instead.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from halfstep.backend_flags import read_effective_leaves
from halfstep.distributed.sharding import Sharding
from halfstep.errors import HardwareError
from halfstep.fast import compiled_trial
from halfstep.fast.certificate import Certificate, ReplayDiffers, StateCopy, StepState
from halfstep.fast.fp8_trial import Fp8Trial, try_fp8
from halfstep.fast.hand_rates import HandRates
from halfstep.fast.parts_trial import PartsTrial, Stage
from halfstep.fast.tuned_trial import TUNED, find_budget, try_tuned
from halfstep.fast.windows import (
    Call,
    Compiler,
    Graph,
    Key,
    NotTraced,
    NotTracedWhole,
    Outdated,
    Replay,
    Shape,
    TracedWindow,
    are_finite,
    describe_window,
    find_exchanges,
    list_holders,
    run_calls,
    run_reference,
)
from halfstep.step.batches import Batch, read_sample_ids
from halfstep.step.facts import Facts, Reading
from halfstep.step.graph import CaptureFailed, GraphedBackward, GraphedStep
from halfstep.step.loss_result import split_result
from halfstep.step.step import GuardedStep, LossFn, choose_gradient_types
from halfstep.step.user_warnings import warn_user

if TYPE_CHECKING:
    from halfstep.fast.traced import TracedLoss

FastMode = Literal["auto", "graph", "compile", "off"]
Eager = Callable[[LossFn], Facts]
"""Make a step by running a loss function's Python code."""


class State(enum.Enum):
    """How the steps after the first WARMUP_STEPS are made."""

    EAGER = "by the user's Python code"
    GRAPH = "as CUDA graphs of torch's kernels: most of the gain where the host is the limit"
    UNTRIED = "the same, until compiling is likely to pay, which takes tens of seconds"
    COMPILED = "as CUDA graphs of Inductor's code, tuned in long runs; rare shapes as graphs of torch's kernels"
    PARTS = "by the user's Python code, with Inductor's code for its parts once that is known to be faster"
    SUSPECT = "the same as COMPILED, but a step was bad: the next window is computed with torch's kernels as well"


UNCOMPILED = (State.EAGER, State.GRAPH, State.PARTS)
"""States without a compiled step, to which none leads back."""

Event = Literal["failed", "not whole", "accepted", "refused", "bad step", "cleared"]

START = {"off": State.EAGER, "graph": State.GRAPH, "auto": State.UNTRIED, "compile": State.COMPILED}
"""The state at first, unless something is known that prevents capturing."""

TRANSITIONS: dict[tuple[State, Event], tuple[State, str]] = {
    # From, and what happened: to, and how the line begins that the user sees.
    (State.UNTRIED, "accepted"): (State.COMPILED, "compiled: "),
    (State.UNTRIED, "refused"): (State.GRAPH, "not compiled: "),
    (State.COMPILED, "refused"): (State.GRAPH, "not compiled: "),
    (State.COMPILED, "bad step"): (State.SUSPECT, ""),
    (State.SUSPECT, "cleared"): (State.COMPILED, ""),
    (State.SUSPECT, "refused"): (State.GRAPH, "not compiled: "),
    (State.PARTS, "refused"): (State.EAGER, "runs eagerly, not compiled in parts: "),
    **{(state, "not whole"): (State.PARTS, "runs eagerly, not captured: ") for state in State},
    **{(state, "failed"): (State.EAGER, "runs eagerly, not captured: ") for state in State},
}

WARMUP_STEPS = 3
"""Eager steps before the first trace: optimizers build their state, cuDNN chooses its algorithms."""
MAX_TRACERS = 4  # combinations of backend flags that are not guarded by Dynamo
MAX_UNUSED = 4  # graphs captured, or entries compared again, for windows of one shape without one replay
IDLE_STEPS = 1000  # steps after which a graph that was not replayed gives its place to another
LOOK_EVERY = 20  # replays between two looks at whether compiling pays, or a check is due
CHECK_SHARE = 0.005  # of the time in steps, for comparing replays with uncaptured code again
COMPARE_SHARE, COMPARE_STEPS = 0.02, 1000  # of the time in so many steps, for comparing new entries with eager code
MOST_STEPS = 8  # what one comparison may cost, in steps

Capture = Callable[[GuardedStep, LossFn, list[dict[str, Tensor]], Any], Replay]

CAPTURES: dict[str, tuple[Capture, Capture]] = {"cuda": (GraphedStep, GraphedBackward)}
"""How a step, and its forward and backward alone, are captured, by type of device."""


@dataclass(eq=False)
class Level:
    """One way of running the traced code, with the graphs captured from it."""

    compiler: Compiler
    certificate: Certificate
    graphs: OrderedDict[Key, Graph] = field(default_factory=OrderedDict)  # least recently used first
    pool: Any = None
    num_replays: int = 0
    began_s: float = 0.0  # the time in steps when the first graph was captured
    checked_s: float = 0.0  # and when replays were last compared with uncaptured code
    check_s: float = 0.0  # how long that took
    num_trusted: int = 0  # replays until then

    @property
    def mode(self) -> str:
        commits = all(graph.replay.commits for graph in self.graphs.values())
        tuned = ", tuned" if "tuned" in self.compiler else ""
        return ("graph" if self.compiler == "aten" else f"compile+graph{tuned}") + ("" if commits else ", commit eager")


@dataclass(kw_only=True)
class Attempt(TracedWindow):
    """One step inside the border: its window, what was asked for, and how far it has come."""

    loss_fn: LossFn
    eager: Eager
    number: int  # the attempted steps before it
    shapes: dict[Key, Shape]
    owners: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """What modules held before the Python code ran: their dicts, and copies of those."""
    key: Key = ()
    level: Level | None = None  # what is tried at present
    is_left_out: bool = False  # whether there are more shapes than graphs
    is_handed_over: bool = False  # whether the user's own code is running, whose exceptions are the user's
    facts: Facts | None = None

    @property
    def is_traced(self) -> bool:
        return len(self.calls) == len(self.batches)

    @functools.cached_property
    def shape(self) -> Shape:
        """Describing a window takes as long as a small replay: it is put off until something asks."""
        return self.shapes.setdefault(describe_window(self.batches), Shape())


@dataclass(frozen=True, slots=True)
class Fast:
    """How hs.Step captures steps: the mode and its options. `fast=` takes this or the mode alone. ::

        step = hs.Step(model, optimizer, fast=hs.Fast(num_steps=100_000))

    Arguments:
        mode: "auto", "graph", "compile" or "off", as in hs.Step.
        num_steps: how many steps the training has, if known: whether compiling and tuning pay is then decided sooner.
        max_graphs: captured graphs that are kept, one for each shape of a window, unless a graph was not used for 1,000
            steps; other shapes run eagerly, or compiled for any size.
        pure_ops: custom operators that read nothing but their inputs, so that they may be captured:
            ["my_library::my_operator"], or ["my_library"] for all of a library.
    """

    mode: FastMode = "auto"
    _: KW_ONLY
    num_steps: int | None = None
    max_graphs: int = 8
    pure_ops: Iterable[str] = ()


class FastPath:
    """Choose and run the mode of each step of an hs.Step."""

    def __init__(
        self,
        step: GuardedStep,
        options: Fast,
        *,
        changed_optimizers: Sequence[str] = (),
        pardon: Callable[[int], None] = lambda attempted: None,
        fp8: Fp8Trial | None = None,
    ) -> None:
        """`pardon` is called with a number: dropped steps before it are the compiler's fault."""
        self.step, self.options, self.asked = step, options, options.mode
        self.changed_optimizers, self.pardon = changed_optimizers, pardon
        asked = options.mode
        self.reason = "fast='off'" if asked == "off" else self._find_obstacle()
        self.state = State.EAGER if self.reason else START[asked]
        self.parts = PartsTrial(self)
        self.fp8, self.fp8_is_strict = fp8, fp8 is not None and fp8.asked.strict
        if fp8 is not None and self.state in UNCOMPILED:
            self._give_up_fp8(f"fp8 pays off in compiled steps only: {self.reason or 'fast=' + repr(asked)}")
        elif fp8 is not None:
            say("steps run in bf16 until the compiled one is measured in fp8")
        self.tracers: OrderedDict[object, TracedLoss] = OrderedDict()
        self.shapes: dict[Key, Shape] = {}
        self.level = self.make_level("aten")
        self.compiled = self.make_level(compiled_trial.COMPILED)
        self.tuned = self.make_level(TUNED[self.compiled.compiler])
        self.by_compiler: set[int] = set()  # attempted steps in flight that compiled code made
        self.rates = HandRates(step)
        self.in_steps_s = 0.0
        """Seconds spent in earlier steps, without what was done aside. What the loop does in between, such as
        validation, pays for no check."""
        self.aside_s = 0.0  # in the present step: tracing, compiling, capturing and comparing
        self.last_s = 0.0  # of these, seconds of what was done last
        self.compare_s = 0.0  # of these, seconds of comparing new entries
        self.has_lost_graphs = False  # whether memory of graphs that were given up is still reserved
        self.is_pure = False  # whether the traced code of the last step changes no Python object
        self.first = step.attempted
        self.eager_mode = "eager"
        if step.sharding is not None and asked == "compile" and not step.plan.simulated:
            self.eager_mode = "compile"
            compile_sharded_blocks(step.sharding)
        elif self.reason and asked in ("graph", "compile"):
            say(f"runs eagerly: {self.reason}")
        elif self.reason and asked == "auto" and (step.ranks is None or step.ranks.world.is_first):
            shards = "; fast='compile' compiles each sharded block" if step.sharding is not None else ""
            if shards or step.device.type == "cuda":
                say(f"runs eagerly: {self.reason}{shards}")

    def make_level(self, compiler: Compiler) -> Level:
        return Level(compiler, Certificate(changed_optimizers=self.changed_optimizers))

    def move(self, event: Event, reason: str = "") -> None:
        """Go to the next state, and tell the user in one line. What the new state does not use is freed."""
        self.state, line = TRANSITIONS[self.state, event]
        self.reason = reason
        self.has_lost_graphs = self.step.device.type == "cuda" and event in (
            "accepted",
            "refused",
            "failed",
            "not whole",
        )
        if self.state in UNCOMPILED:
            self.compiled, self.tuned = map(self.make_level, (compiled_trial.COMPILED, TUNED[compiled_trial.COMPILED]))
        if self.state in (State.EAGER, State.PARTS):
            self.level = self.make_level("aten")
            self.tracers.clear()
        if line:
            say(f"{line}{reason}")
        if self.state in UNCOMPILED and self.fp8 is not None:
            say(self._give_up_fp8(f"the step is not compiled as a whole: {reason}"))

    def _give_up_fp8(self, why: str) -> str:
        """Stay in bf16, or raise under `strict`. Return the warning."""
        trial, self.fp8 = self.fp8, None
        assert trial is not None
        self.step.plan = trial.fall_back(self.step.plan, why)
        return self.step.plan.warnings[-1]

    def tell(self, line: str) -> None:
        say(line)

    @property
    def flags(self) -> object:
        """Return the backend flags in force."""
        return read_flags()

    def note_parts(self, summary: str) -> None:
        """Tell the user that what is not captured runs compiled in parts from now on."""
        say(f"{'' if self.state is State.PARTS else 'shapes without a graph are '}compiled in parts: {summary}")

    def refuse_parts(self, reason: str) -> None:
        if self.state is State.PARTS:
            self.move("refused", reason)
        else:
            say(f"shapes without a graph run eagerly, not compiled: {reason}")

    @property
    def why_eager(self) -> str:
        """Return why steps run the user's Python code; empty if they are captured."""
        return self.reason if self.state in (State.EAGER, State.PARTS) else ""

    @property
    def levels(self) -> list[Level]:
        """Return what may be replayed, the best first."""
        is_compiled = self.state in (State.COMPILED, State.SUSPECT)
        return [self.tuned, self.compiled, self.level] if is_compiled else [self.level]

    @property
    def _best(self) -> Level:
        return next((level for level in self.levels if level.graphs), self.level)

    @property
    def mode(self) -> str:
        if self.runs_parts:
            return "compile"
        return self._best.mode if self._best.graphs else self.eager_mode

    @property
    def certificate(self) -> Certificate:
        return Certificate(parts=self.parts.summary) if self.runs_parts else self._best.certificate

    @property
    def runs_parts(self) -> bool:
        """True if steps run compiled with graph breaks."""
        return self.state is State.PARTS and self.parts.stage is Stage.USED

    # --- the border ---

    def run(self, loss_fn: LossFn, window: list[Batch], eager: Eager) -> Facts:
        """Make one step, by a replay where possible; `eager` makes it by a Python function."""
        if self.has_lost_graphs:  # what a graph's pool has cached serves no other pool
            gc.collect()
            torch.cuda.empty_cache()
            self.has_lost_graphs = False
        number = self.step.attempted
        is_ledger_open = self.step.observed is not contextlib.nullcontext  # what hs.ledger observes has to run
        if self.state is State.EAGER or number < self.first + WARMUP_STEPS or is_ledger_open:
            return eager(loss_fn)
        if self.state is State.PARTS:
            return self.parts.make_step(loss_fn, window, eager)
        attempt = Attempt(window, loss_fn=loss_fn, eager=eager, number=number, shapes=self.shapes)
        while not self.why_eager:
            try:
                if not self._make_step(attempt):
                    break
                assert attempt.facts is not None
                return attempt.facts
            except Outdated:
                self._forget_traces()
                if attempt.facts is not None:
                    return attempt.facts
                break
            except Exception as error:
                if self.fp8_is_strict and isinstance(error, HardwareError):  # it refuses bf16
                    attempt.undo_exchanges()
                    raise
                if attempt.is_handed_over or self.step.attempted > number and attempt.facts is None:
                    raise  # by the user's code: loss_fn in this step, or on_commit after it
                reason = explain(error)
                is_whole = not isinstance(error, NotTracedWhole | CaptureFailed) or not self.parts.is_open
            except BaseException:
                attempt.undo_exchanges()
                raise
            # Outside of the except block, whose error holds frames and so activations.
            failed: Event = "failed" if is_whole else "not whole"
            self.move("refused" if attempt.level in (self.compiled, self.tuned) else failed, reason)
            attempt.level = None
            if attempt.facts is not None:  # the step is made
                attempt.settle_exchanges(attempt.facts.bad)
                return attempt.facts
        return self._make_from_python(attempt)

    def _make_from_python(self, attempt: Attempt) -> Facts:
        """Make a step from the user's Python code. Where that has run and has side effects, it must not run again."""
        if attempt.is_left_out:
            return self.parts.make_step(attempt.loss_fn, attempt.batches, attempt.eager)
        if not attempt.is_traced:
            attempt.exchanges = find_exchanges(attempt.owners)
        attempt.undo_exchanges()
        if not attempt.has_side_effects:
            return attempt.eager(attempt.loss_fn)
        run, plain = run_reference(attempt), split_results(attempt.loss_fn, is_alone=len(attempt.batches) == 1)
        left = [*attempt.calls, *attempt.batches[len(attempt.calls) :]]
        facts = self.step.compute(lambda one: run(one) if isinstance(one, Call) else plain(one), left)
        facts.ids = read_sample_ids(attempt.batches)
        self.step.commit(facts)
        return facts

    # --- one step ---

    def _make_step(self, attempt: Attempt) -> bool:
        """Trace a window, and make the step by a replay. Return False if there is no graph that may be used."""
        if not attempt.is_traced:
            has_exceptions = any(s.is_uncompared or s.left_out_until >= attempt.number for s in self.shapes.values())
            if has_exceptions and self._is_left_out(attempt):
                attempt.is_left_out = True
                return False
            if has_exceptions and attempt.shape.is_uncompared or not self._trace(attempt):
                # Its code was not compared with eager code yet, and has not run, unless in earlier micro-batches.
                attempt.shape.is_uncompared = True
                return not attempt.calls and self._compare_with_eager(attempt)
        if self.step.watch is not None:
            inside = {id(slot.held) for slot in (*self.step.writes.slots.parameters, *self.step.writes.slots.buffers)}
            self.is_pure = not attempt.has_side_effects and all(id(one) in inside for one in attempt.list_written())
        attempt.key = (*attempt.entries_key, *self.rates.key)
        for level in self.levels:
            graph = level.graphs.get(attempt.key)
            if graph is not None and graph.fits(attempt, self.step):
                attempt.level = level
                level.num_replays += 1
                graph.shape.num_unused = 0
                self._look(level, graph, attempt)
                # Trying another level may have put its graph in place of this one.
                self._replay(next(one for one in self.levels if attempt.key in one.graphs), attempt)
                return True
        if obstacle := self._find_obstacle():
            raise NotTraced(obstacle)
        are_known = [call.note_changing() for call in attempt.calls]
        level = self._choose_level(attempt.shape)
        if level is self.compiled and all(self.tuned.compiler in call.entry.codes for call in attempt.calls):
            level = self.tuned  # its graph was lost, as when an optimizer's state is loaded
        if not all(are_known) or not self._has_place(level, attempt.shape):
            return False
        attempt.level = level
        graph = self.capture(level, attempt)
        if graph is None:
            return False
        if not level.graphs:
            level.began_s = self.in_steps_s
            reason = self.find_eager_commit()
            alone = f"; the commit runs uncaptured: {reason}" if reason else ""
            code = "torch's kernels" if level.compiler.startswith("aten") else "Inductor's code"
            say(f"captured as a CUDA graph of {code}: {level.certificate}{alone}")
        level.graphs[attempt.key] = graph
        graph.shape.num_unused += 1
        self._replay(level, attempt)
        return True

    def _trace(self, attempt: Attempt) -> bool:
        """Run the Python code of a window through Dynamo. Return False at code that was not compared with eager code
        yet: it has not run."""
        window = attempt.batches
        tracer, began = self._find_tracer(), time.monotonic()
        num_entries = len(tracer.entries)

        def note_owners() -> None:
            """Note what modules hold before Python code runs that may replace it."""
            attempt.owners = attempt.owners or self._copy_owners()

        if any(entry.has_side_effects for entry in tracer.entries):
            note_owners()
        for batch in window:
            call = tracer(attempt.loss_fn, batch, note_owners)
            if len(tracer.entries) > num_entries:
                self.aside_s += time.monotonic() - began
            if not call.promised:
                return False
            attempt.calls.append(call)  # at once: its Python code has run
            is_plain = len(window) == 1 and isinstance(call.result, Tensor)
            # Alone in its window a batch counts whatever it weighs.
            split = (call.result, 1) if is_plain else split_result(call.result, batch, is_alone=len(window) == 1)
            loss, call.weight = split
            if isinstance(call.weight, Tensor):
                call.weight_output = call.find_promised(call.result[1])
            if call.find_promised(loss) != call.entry.loss:
                raise NotTraced("loss_fn returns a loss that has no autograd graph")
            call.result = None
        attempt.exchanges = find_exchanges(attempt.owners)
        if attempt.exchanges and (self.step.ema is not None or self.find_eager_commit()):
            raise NotTraced("the model replaces a buffer in its forward pass, which an average or a hook may read")
        replaced = attempt.list_replaced() if attempt.exchanges else []
        # After a bad step a replay could not restore it.
        if replaced and not self.level.graphs and not are_finite(one.before[name] for one, name in replaced):
            raise NotTraced("the model replaces a buffer that is not finite")
        return True

    def _copy_owners(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the dicts in which modules hold what their forward pass may replace, each with a copy."""
        self.step.writes.slots.refresh()
        return [(owner, dict(owner)) for owner in self.step.writes.slots.owners]

    def _find_tracer(self) -> TracedLoss:
        """Return the tracer for the backend flags in force: they select kernels, and Dynamo does not guard them."""
        flags = read_flags()
        if flags not in self.tracers:
            from halfstep.fast.traced import TracedLoss  # imports torch's compiler

            if len(self.tracers) >= MAX_TRACERS:
                self.tracers.popitem(last=False)
            pure_ops = frozenset(self.options.pure_ops)
            self.tracers[flags] = TracedLoss(
                self.step.plan, pure_ops=pure_ops, fp8=self.fp8, on_forget=self._forget_graphs
            )
        return self.tracers[flags]

    def _forget_graphs(self) -> None:
        for level in (self.level, self.compiled, self.tuned):
            level.graphs.clear()
        self.has_lost_graphs = self.step.device.type == "cuda"

    def _forget_traces(self) -> None:
        self._forget_graphs()
        self.tracers.clear()

    # --- replays ---

    def _replay(self, level: Level, attempt: Attempt) -> None:
        level.graphs.move_to_end(attempt.key)
        graph = level.graphs[attempt.key]
        graph.used_at = attempt.number

        def fill() -> None:
            """Fill the tensors that were promised."""
            for call, outputs in zip(attempt.calls, graph.outputs[-len(attempt.calls) :], strict=True):
                call.fulfil(outputs)
                call.draw_on_host()

        self.step.look_ahead()
        self.rates.write()
        inputs, ids = graph.select(attempt), read_sample_ids(attempt.batches)
        attempt.is_handed_over = not graph.replay.commits  # then hooks and optimizers run Python code
        attempt.facts = graph.replay(inputs, ids, fill)
        attempt.is_handed_over = False
        if level is not self.level:
            self.by_compiler.add(attempt.number)
        attempt.settle_exchanges(attempt.facts.bad)

    def _look(self, level: Level, graph: Graph, attempt: Attempt) -> None:
        """Do what is due before a replay: check compiled code that is suspect, check replays again, try compiling."""
        if self.state is State.SUSPECT and level is not self.level:
            compiled_trial.check_again(self, graph, attempt)
        if level.num_replays % LOOK_EVERY:
            return
        if self.fp8 is not None and self.fp8.is_pending and self._try_fp8(self.fp8, level, graph, attempt):
            return
        # Where a hook runs, trying would run it many times.
        can_try = self.asked == "auto" and not self.find_eager_commit()
        if can_try and self.state is State.UNTRIED and compiled_trial.is_worth_it(self, attempt):
            say("compiles the step, which takes a while; both graphs use memory until the faster one is known")
            compiled_trial.try_compiled(self, graph, attempt)
        elif can_try and level is self.compiled and (budget_s := find_budget(self, attempt)):
            say(f"tunes the compiled step for at most about {budget_s:.0f} s, which pays off in a long run")
            if line := try_tuned(self, graph, attempt, budget_s):
                say(line)
        elif (self.in_steps_s - level.checked_s) * CHECK_SHARE > level.check_s:
            self._check_again(level, graph, attempt)

    def _try_fp8(self, trial: Fp8Trial, level: Level, graph: Graph, attempt: Attempt) -> bool:
        """Try fp8 if this graph shows whether it pays. Return False if it does not."""
        if eager_commit := self.find_eager_commit():
            say(self._give_up_fp8(f"the step is captured without its commit: {eager_commit}"))
            return True
        if level is not self.compiled:
            return False
        if line := try_fp8(self, trial, graph, attempt):
            say(line)
        return True

    def _check_again(self, level: Level, graph: Graph, attempt: Attempt) -> None:
        """Compare a replay with uncaptured code once more: a value that was frozen when the graph was made shows now,
        if it has changed since. It leaves no trace, and raises NotTraced if they differ.

        The user's Python code itself runs, if it changes no Python object and no compiler has rounded differently."""
        window = list[Any](attempt.calls)
        code = run_reference(attempt, has_exchanges=False)
        if not attempt.has_side_effects:
            code, window = split_results(attempt.loss_fn, is_alone=len(attempt.batches) == 1), attempt.batches
        python: StateCopy | None = None
        with self.aside(attempt) as (state, before):
            with self.rates.as_tensors():
                state.has_gradients = True
                runs = [state.run_from(before, lambda: self.try_calls(level.compiler, attempt)) for _ in range(2)]
                if level.compiler == "aten":
                    python = state.run_from(before, lambda: self._try_code(code, window))
            state.has_gradients = not graph.replay.commits
            found = state.run_from(before, lambda: self.replay_only(graph, attempt))
        if self.is_dropped(state, runs[0], before):
            return  # shows nothing
        try:
            state.compare(found, runs, before, uses_atomics=attempt.uses_atomics)
            if python is not None:
                state.compare_gradients(python, runs)
        except ReplayDiffers as error:
            num_suspect = level.num_replays - level.num_trusted
            warn_user(
                f"captured steps no longer equal uncaptured ones: {error}. The last {num_suspect} steps are suspect; "
                "load a checkpoint from before them. loss_fn, or an operation in it, reads a value that torch does not "
                "guard"
            )
            attempt.level = None  # other code of the same trace is suspect, too
            raise NotTraced(f"replays differ from uncaptured steps; {num_suspect} steps are suspect") from None
        self._note_check(level)
        level.certificate.num_checks += 1

    def _note_check(self, level: Level) -> None:
        level.checked_s, level.num_trusted = self.in_steps_s, level.num_replays
        level.check_s = self.last_s

    # --- new entries: the traced code against the user's Python code ---

    def measure_step(self) -> float:
        """Return the seconds of a step, without what is done aside."""
        return self.in_steps_s / max(1, self.step.attempted - self.first)

    def _compare_with_eager(self, attempt: Attempt) -> bool:
        """Make a step from the user's Python code, and compare its gradients, and what forward writes, with those of
        the traced code, from the same state. Return False, with nothing done, if that would take too much time. Raise
        NotTraced if they differ; the step is made anyway."""
        tracer, batches = self._find_tracer(), attempt.batches
        first = tracer(attempt.loss_fn, batches[0], only_looks=True)  # raises where it cannot be traced
        first.note_changing()
        allowed_s = COMPARE_SHARE * self.measure_step() * max(self.step.attempted - self.first, COMPARE_STEPS)
        if self.compare_s > allowed_s or self.step.watch is not None and self.step.watch.is_due():
            return False
        attempt.shape.is_uncompared = False
        trial, failed = TracedWindow(batches), list[Exception]()
        owners = self._copy_owners()
        state = StepState(self.step, TracedWindow(batches, [first]).list_written())
        before, eager = state.copy(), list[StateCopy]()
        state.has_gradients = True

        def look_and_run(batch: Batch) -> Any:
            """Look up each micro-batch when its Python code is about to run: it may change what the next one reads."""
            try:
                call = tracer(attempt.loss_fn, batch, only_looks=True)
                torch.clear_autocast_cache()
                trial.calls.append(call)
            except Exception as error:
                failed.append(error)
            result = attempt.loss_fn(batch)
            if len(batches) > 1 and not failed:
                call.weight = split_result(result, batch, is_alone=False)[1]
            return result

        look_and_run.__wrapped__ = attempt.loss_fn  # type: ignore[attr-defined]
        self.step.on_backward = lambda loss: eager.append(state.copy(loss))
        attempt.is_handed_over = True
        try:
            attempt.facts = attempt.eager(look_and_run)
        finally:
            self.step.on_backward = None
        attempt.is_handed_over = False
        state.note_optimizer_states()
        if failed:
            raise failed[0]
        if attempt.facts.read().is_bad:
            return True  # a step that is dropped shows nothing
        replaced = TracedWindow(batches, exchanges=find_exchanges(owners))
        gradients = [(parameter, parameter.grad) for parameter in self.step.find_trained_parameters()]
        after, runs = state.copy(), list[StateCopy]()
        with self.timed():
            try:
                replaced.undo_exchanges()
                runs.append(self._run_gradients(state, before, trial))
                if not (is_equal := state.has_bits_of(eager[0], runs[0])):
                    runs.append(self._run_gradients(state, before, trial))
                is_equal &= not any(call.entry.rounds_by_data for call in trial.calls)
            finally:
                state.restore(after)
                replaced.redo_exchanges()
                for parameter, gradient in gradients:
                    parameter.grad = gradient
        # Loading kernels for the first time may take long, and is not what comparing costs.
        self.compare_s += min(self.last_s, MOST_STEPS * self.measure_step())
        reason = ""
        if any(not torch.equal(eager[0].rng[name], state) for name, state in runs[0].rng.items()):
            reason = "the traced code draws different random numbers: a library may take another path while traced"
        elif len(runs) > 1:
            try:
                state.compare_gradients(eager[0], runs)
            except ReplayDiffers as error:
                reason = f"the traced code does not equal the eager step: {error}"
        if reason and tracer.take_compiled_path(reason):
            return True
        if reason:
            raise NotTraced(tracer.reason)
        tracer.reason = ""
        if all(call.entry.is_compared for call in trial.calls):  # another one was, when the window was traced
            attempt.shape.num_unused += 1
            refuse_unused(attempt.shape)
        for call in trial.calls:
            call.entry.is_compared = True
        self.level.certificate.add("the eager step", is_equal=is_equal)
        return True

    def _run_gradients(self, state: StepState, before: StateCopy, traced: TracedWindow) -> StateCopy:
        """Return the state and the gradients that the traced code leaves, before the commit."""
        state.restore(before)
        return state.copy(self._compute_gradients(run_calls(traced, "aten", self.step, []), traced.calls))

    # --- capturing ---

    def _choose_level(self, shape: Shape) -> Level:
        is_compiled = self.asked == "compile" or shape.is_compiled
        return self.compiled if is_compiled and self.compiled in self.levels else self.level

    def _is_left_out(self, attempt: Attempt) -> bool:
        """True for a shape that gets no graph. One that is new where no graph may be added is not even traced."""
        shape = attempt.shape
        level = self._choose_level(shape)
        if shape.left_out_until < attempt.number and level.graphs and self._is_full(level, shape):
            self._leave_out(shape)
        return shape.left_out_until >= attempt.number

    def _leave_out(self, shape: Shape) -> None:
        if all(one.left_out_until < self.step.attempted for one in self.shapes.values()):
            say(f"there are more shapes than max_graphs={self.options.max_graphs}: the others run eagerly")
        shape.left_out_until = self.step.attempted + IDLE_STEPS

    def _is_full(self, level: Level, shape: Shape) -> bool:
        """True if no graph of this shape can be added, and none has been used for so long that it may be replaced."""
        is_idle = self.step.attempted - next(iter(level.graphs.values())).used_at > IDLE_STEPS
        has_graph = any(graph.shape is shape for graph in level.graphs.values())
        return len(level.graphs) >= self.options.max_graphs and not is_idle and not has_graph

    def _has_place(self, level: Level, shape: Shape) -> bool:
        """True if one more graph may be captured. Refuse to capture windows of one shape again and again."""
        refuse_unused(shape)
        if not level.graphs and (no_room := self._find_no_room()):
            raise NotTracedWhole(no_room)
        if len(level.graphs) < self.options.max_graphs:
            return True
        oldest = next(iter(level.graphs))
        if self.step.attempted - level.graphs[oldest].used_at > IDLE_STEPS:
            del level.graphs[oldest]
            return True
        if self._is_full(level, shape):
            self._leave_out(shape)
        return False

    def capture(self, level: Level, attempt: Attempt) -> Graph | None:
        """Capture a window, and compare its replay with two runs of the uncaptured code, all from one state. Return
        None if the step would be dropped, which shows nothing, or could not be captured yet."""
        for call in attempt.calls:
            if level.compiler not in call.entry.codes:
                with self.timed():
                    call.entry.compile(level.compiler)
        if level.compiler != "aten" and not compiled_trial.compare_gradients(self, level, attempt):
            return None
        with self.aside(attempt) as (state, before):
            state.has_gradients = bool(self.find_eager_commit())
            with self.rates.as_tensors():
                runs = [state.run_from(before, lambda: self.try_calls(level.compiler, attempt)) for _ in range(2)]
                state.restore(before)
                if state.has_created or self.is_dropped(state, runs[0], before):
                    return None  # an optimizer makes the state of a new parameter in the step that is made now
                graph = self._make_graph(level, attempt)
            found = state.run_from(before, lambda: self.replay_only(graph, attempt))
        compared = state.compare(found, runs, before, uses_atomics=attempt.uses_atomics)
        level.certificate.exact, level.certificate.noisy = compared
        level.certificate.add("its uncaptured code")
        self._note_check(level)  # with the time of the capture: an upper bound until the first real check
        return graph

    def _make_graph(self, level: Level, attempt: Attempt) -> Graph:
        device = self.step.device
        if not level.graphs and device.type == "cuda":  # a pool that no graph uses any more cannot be used again
            level.pool = torch.cuda.graph_pool_handle()
        positions, inputs, fixed = [], [], []
        trained = {id(parameter) for parameter in self.step.find_trained_parameters()}
        for number, call in enumerate(attempt.calls):
            own = attempt.find_dynamic(number, trained)
            inputs.append({str(position): call.inputs[position].detach().to(device) for position in own})
            copied = {*own, *attempt.find_linked(number)}
            others = [k for k, one in enumerate(call.inputs) if isinstance(one, Tensor) and k not in copied]
            tensors = [call.inputs[k] for k in others]
            fixed.append((others, tensors, [tensor.data_ptr() for tensor in tensors]))
            positions.append({str(position): position for position in own})
        outputs: list[Sequence[Any]] = []
        # A capture takes place on a stream of the current device, which need not be the model's.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            capture = CAPTURES[device.type][bool(self.find_eager_commit())]
            replay = capture(self.step, run_calls(attempt, level.compiler, self.step, outputs), inputs, level.pool)
        # Detached: an autograd graph that is kept would tie gradients of later steps to the stream of the capture.
        outputs[:] = [[o.detach() if isinstance(o, Tensor) else o for o in own] for own in outputs]
        # Where the commit runs eagerly, its state is not part of the graph.
        holders = list_holders(self.step) if replay.commits else []
        return Graph(replay, device, outputs, fixed, holders, positions, attempt.shape)

    # --- runs whose result is discarded ---

    @contextlib.contextmanager
    def aside(self, attempt: Attempt) -> Iterator[tuple[StepState, StateCopy]]:
        """Keep the state of the step aside, and restore it at the end, whatever is raised: an interrupt, an error of
        the device. Modules hold what they held before the Python code ran."""
        attempt.undo_exchanges()
        state = StepState(self.step, attempt.list_written())
        before = state.copy()
        self.step.look_ahead()
        try:
            with self.timed():
                yield state, before
        except BaseException:
            self.step.forget_capture()
            raise
        finally:
            state.restore(before)
            attempt.redo_exchanges()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.last_s = time.monotonic() - began
            self.aside_s += self.last_s

    def try_calls(self, compiler: Compiler, traced: TracedWindow) -> None:
        """Make the device's part of a step of the traced code."""
        self._try_code(run_calls(traced, compiler, self.step, []), traced.calls)

    def _try_code(self, loss_fn: LossFn, window: Sequence[Any]) -> None:
        if self.find_eager_commit():
            self._compute_gradients(loss_fn, window)
        else:
            self.step.commit_on_device(self.step.forward_backward(loss_fn, window))

    def _compute_gradients(self, loss_fn: LossFn, window: Sequence[Any]) -> Tensor:
        """Run forward and backward alone, and return the loss."""
        self.step.clear_gradients()
        choose_gradient_types(self.step.optimizers, len(window))
        return self.step.accumulate_gradients(loss_fn, window, self.step.find_trained_parameters())[0]

    def replay_only(self, graph: Graph, traced: TracedWindow) -> None:
        """Replay what the graph holds."""
        self.rates.write()
        if graph.replay.commits:
            graph.replay(graph.select(traced))
        else:
            self.step.clear_gradients()
            graph.replay.replay_gradients(graph.select(traced))

    def is_dropped(self, state: StepState, run: StateCopy, before: StateCopy) -> bool:
        if self.find_eager_commit():
            return not are_finite(run.tensors[len(state.names) :])
        return torch.equal(run.committed, before.committed)

    def observe(self, facts: object, reading: Reading) -> None:
        """Look at a step when its facts have arrived: a bad one that compiled code made may be the compiler's."""
        if not self.by_compiler:
            return
        is_overflow = self.step.scaler.enabled and reading.scale > self.step.scaler.options.min_scale
        is_suspect = reading.attempted in self.by_compiler and reading.is_bad and not (reading.is_empty or is_overflow)
        if is_suspect:
            self.parts.check_again()
        if is_suspect and self.state is State.COMPILED:
            self.move("bad step")
        self.by_compiler = {number for number in self.by_compiler if number > reading.attempted}

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
        if self.has_global_hooks:
            return "a global module hook is registered"
        if recurrent := self.find_recurrent():
            return recurrent
        gradients = (parameter.grad for parameter in step.find_trained_parameters())
        are_sparse = any(gradient is not None and gradient.is_sparse for gradient in gradients)
        return "gradients are sparse" if are_sparse else ""

    @property
    def has_global_hooks(self) -> bool:
        return any(GLOBAL_HOOKS)

    def find_recurrent(self) -> str:
        """Return why recurrent layers are not captured; empty if they are. An attempt to trace dropout between layers
        would change cuDNN's masks."""
        layers = {name: one for name, one in self.step.model.named_modules() if isinstance(one, nn.RNNBase)}
        dropped = [name for name, one in layers.items() if one.dropout and one.num_layers > 1]
        if not dropped and (not layers or self.step.device.type == "cuda"):
            return ""
        names = ", ".join(map(repr, dropped or layers))
        return f"RNN, GRU and LSTM layers are captured on CUDA only, and without dropout between layers ({names})"

    def find_eager_commit(self) -> str:
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


def refuse_unused(shape: Shape) -> None:
    if shape.num_unused >= MAX_UNUSED:
        raise NotTraced(
            "parameters, optimizer settings, numbers in the batch or what loss_fn reads change at every step"
        )


def explain(error: BaseException) -> str:
    """Return one line for an error, with its type if it is not one of ours."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, (NotTraced, CaptureFailed)) else f"{type(error).__name__}: {line}".rstrip(": ")


def compile_sharded_blocks(sharding: Sharding) -> None:
    """Compile each module that FSDP gathers as one, in place; its root stays eager, unless it is the only one. FSDP's
    hooks run uncompiled around them."""
    blocks: list[Any] = list(sharding.modules)
    inner = [block for block in blocks if not any(other in blocks for other in block.modules() if other is not block)]
    for block in inner:
        if block._compiled_call_impl is None:  # the user may have compiled it
            block.compile()


def split_results(loss_fn: LossFn, *, is_alone: bool) -> LossFn:
    """Let a loss function return loss and weight, whatever form they have."""
    return lambda batch: split_result(loss_fn(batch), batch, is_alone=is_alone)


# --- what Dynamo does not guard ---

GLOBAL_HOOKS = (
    module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks,
    module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks,
)  # fmt: skip


FLAG_READERS = (
    torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark, torch._C._get_cudnn_deterministic,
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)  # fmt: skip
"""What the properties of torch.backends read, in a tenth of their time."""


def read_flags() -> object:
    """Return the backend flags that select kernels while a graph is traced, and that no guard compares."""
    return (*[read() for read in FLAG_READERS], *read_effective_leaves().values(), *map(len, GLOBAL_HOOKS))


def say(line: str) -> None:
    """Tell the user in one line what runs."""
    print(f"halfstep: {line}", file=sys.stderr, flush=True)
