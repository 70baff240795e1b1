"""The engine runs one window through the step in the fastest mode that works.

    eager     kernel by kernel
    compile   model and loss through torch.compile
    graph     the whole step, compiled and captured as one CUDA graph, after several windows of one shape in a row

If compiling or capturing fails, the run continues in the next slower mode and prints one line with the reason. Batches
that are not full, such as an epoch's last, run eager: compiling for them would cost more than it gains. Batches of a
third shape (tune/compiling.py) also run eager and are not captured.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils._pytree import tree_map

from halfstep.distributed.world import Share, World
from halfstep.errors import ConfigError, HalfstepError, summarise_error
from halfstep.hardware.memory import release_unused_memory
from halfstep.precision.plan import Plan
from halfstep.step.batches import count_samples
from halfstep.step.facts import Facts, PhasedFacts, Reading, split_phases
from halfstep.step.graph import CaptureFailed, GraphedStep, Pool, Shape, describe_shape
from halfstep.step.phases import PhasedStep
from halfstep.step.randomness import choose_algorithms, read_generators, restore_generators
from halfstep.step.step import GuardedStep
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.loader import Key
from halfstep_train.kernels.fast_forms import allow_chains
from halfstep_train.run.assemble import Assembly, assemble, make_all_due
from halfstep_train.run.memory.out_of_memory import OutOfMemory, count_parts, describe_halving, split_window
from halfstep_train.tune.channels_last import match_layout
from halfstep_train.tune.compiling import CompiledShapes, CompilerWarnings, explain_compile_error, get_batch_shape
from halfstep_train.tune.fresh_thread import forget_compiled
from halfstep_train.tune.modes import UNCAPTURED, Batch, Level, Mode, Notice, allow_cudnn_trials
from halfstep_train.tune.trials import CannotRun, DoesNotFit, Rehearsal, Trial, load_first_batch
from halfstep_train.workloads.base.over_ranks import gather_over_ranks
from halfstep_train.workloads.base.workload import Workload

MOST_GRAPHS = 2  # each graph needs its own memory; windows of further shapes run uncaptured
FROM_FASTEST: tuple[Mode, ...] = ("graph", "compile", "eager")
MOST_DROPS = 3
"""How often graphs are dropped, and captured again, to make room for a step that does not fit next to them."""

Count = Callable[[Any, Batch], None]
"""Called with the outputs of each batch after its step, for example to count hits."""


@dataclass(frozen=True, slots=True)
class CapturedWindow:
    """A step captured as a graph, and the tensors that receive the model's outputs."""

    step: GraphedStep
    outputs: list[Any]


class Graphs(dict[Shape, CapturedWindow]):
    """Captured steps by window shape, in one memory pool that the engines of all phases share."""

    pool: Pool = None

    def get_pool(self, device: torch.device) -> Pool:
        """Return the memory pool of the graphs; a new one if there is no graph."""
        if not self and device.type == "cuda":
            # A pool ends with its last graph, and torch 2.11 fails to capture into it again.
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool


class Engine:
    """Run windows of a run, or of one of its phases, through its step."""

    counts = True  # whether training metrics count the outputs of its steps

    def __init__(
        self,
        parts: Assembly,
        mode: Mode,
        notice: Notice,
        count: Count = lambda outputs, batch: None,
        before_compiling: Callable[[], None] = lambda: None,
        graphs: Graphs | None = None,
    ) -> None:
        self.parts, self.mode, self.notice, self.count = parts, mode, notice, count
        self._before_compiling = before_compiling
        self.observe: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context of eager steps, in which a watch observes their modules."""
        self._compiler_warnings = CompilerWarnings(lambda text: self.notice(text, "warning"))
        self.pieces = parts.plan.pieces
        """Micro-batches each batch is cut into; more than 1 after an out-of-memory with train.auto_batch."""
        self.graphs = Graphs() if graphs is None else graphs
        self.shapes = CompiledShapes()
        self._shape: Shape = ()
        self._sizes: tuple[int, ...] = ()
        self._in_a_row = 0
        self._num_drops = 0
        whole = min(parts.train.batch_size, len(parts.workload.train_samples))
        self._full_batch = whole if parts.world is None else parts.world.count_rows(whole)
        # Some optimizers let the host decide about each commit, which a graph cannot wait for.
        if mode == "graph" and (reason := parts.step.why_never_captured()):
            self._stay_uncaptured(reason)

    def __call__(self, window: list[Batch], sizes: Sequence[int] = ()) -> Facts:
        """Prepare, compute and commit one loaded window; `sizes` are the sizes of its batches over all ranks."""
        return self.step(prepare_window(self.parts, window, sizes), sizes)

    @property
    def guarded(self) -> GuardedStep:
        assert isinstance(self.parts.step, GuardedStep), "phases have an engine each"
        return self.parts.step

    def step(self, prepared: list[Batch], sizes: Sequence[int] = ()) -> Facts:
        """Compute and commit one prepared window; count its outputs in the training metrics."""
        self._sizes = tuple(sizes)
        facts, outputs, pieces = self._run_window(prepared)
        with torch.no_grad():
            for found, batch in zip(outputs, pieces, strict=True):
                if not isinstance(batch, Idle):
                    self.count(found, batch)
        return facts

    def _run_window(self, prepared: list[Batch]) -> tuple[Facts, list[Any], list[Batch]]:
        """Run the window in the current mode; after a failure that can be handled, try again in a slower one."""
        while True:
            pieces = self._split(prepared)
            compiles = False
            try:
                captured = self._find_captured(pieces)
                if captured is not None:
                    return captured.step(pieces), captured.outputs, pieces
                # Shapes that were not compiled yet: this step compiles them and takes longer.
                compiled = {get_batch_shape(batch) for batch in pieces if self._runs_compiled(batch)}
                if compiles := not compiled <= self.shapes.ready:
                    self._before_compiling()
                outputs: list[Any] = []
                # cuDNN's trials for full batches only: for an epoch's last batch they cost more than they gain.
                tries_cudnn = self.parts.plan.cudnn_benchmark and not self.parts.train.deterministic
                with (
                    allow_cudnn_trials(tries_cudnn and all(map(self._is_full, pieces))),
                    self._compiler_warnings.shorten_warnings(),
                    self.observe() if self.mode == "eager" else nullcontext(),
                ):
                    facts = self.guarded.compute(self.make_loss(outputs), pieces)
            except OutOfMemory as error:
                self._make_room(error)
            except HalfstepError:
                raise
            except Exception as error:
                # Not only dynamo's exceptions: a missing compiler or driver raises other ones.
                if self.mode == "eager" or not compiles and not isinstance(error, TorchDynamoException):
                    raise
                self._go_eager(error)
            else:
                self.shapes.ready |= compiled
                self.guarded.commit(facts)
                ranks = self.guarded.ranks
                if ranks is not None and ranks.uncompiled is not None:
                    # This rank had to run its forward pass eagerly within the step.
                    self._run_eager(ranks.uncompiled)
                    ranks.uncompiled = None  # its frames hold the batch
                return facts, outputs, pieces

    def _split(self, prepared: list[Batch]) -> list[Batch]:
        """Cut a window into micro-batches. The ranks of a sharded model run equally many: one with fewer rows adds
        some of weight 0."""
        world = self.parts.world
        if self.parts.sharded is None or world is None or self.pieces == 1:
            return split_window(prepared, self.pieces)
        found: list[Batch] = []
        for batch, size in zip(prepared, self._sizes, strict=True):
            own = split_window([batch], self.pieces)
            most = max(count_parts(world.count_rows(size, rank), self.pieces) for rank in range(world.size))
            found += [*own, *(Idle(own[-1]) for _ in range(most - len(own)))]
        return found

    def follow(self, reading: Reading) -> None:
        """Follow a rank that could not compile or capture, from the same step on."""
        # All ranks read the same facts, so all change the mode at the same step.
        if reading.fell_to and FROM_FASTEST.index(reading.fell_to) > FROM_FASTEST.index(self.mode):
            ranks = ", ".join(map(str, reading.fallen_ranks))
            self.mode = reading.fell_to
            self._forget_code()
            self.notice(f"all ranks run steps in {self.mode} mode from here on, because rank {ranks} has to", "info")

    def fall_back_to(self, mode: Mode) -> None:
        """Resume in the slower mode that the run had fallen back to.

        Steps in the faster mode would round differently until it failed again.
        """
        if FROM_FASTEST.index(mode) > FROM_FASTEST.index(self.mode):
            self.mode = mode
            again = "to try a faster one again, set another train.fast with --allow-changes"
            self.notice(f"steps run in {mode} mode, as when the run was stopped ({again})", "info")

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "mode": self.mode, "compiled_shapes": list(self.shapes.taken)}

    def restore(self, state: Mapping[str, Any], *, is_same: bool) -> None:
        """Restore the number of micro-batches, and with unchanged settings also compiled shapes and mode."""
        self.pieces = int(state["pieces"])
        if is_same:
            self.shapes.taken = list(state["compiled_shapes"])
            self.fall_back_to(state["mode"])

    def forget_graphs(self) -> None:
        """Free the memory of all graphs; they are captured again when needed."""
        self.graphs.clear()
        self._in_a_row = 0
        torch.cuda.empty_cache()

    def make_loss(self, outputs: list[Any]) -> Callable[[Batch], tuple[Tensor, Tensor | float]]:
        """Return the loss function in the current mode; it appends the model's outputs to the list."""

        def loss(batch: Batch) -> tuple[Tensor, Tensor | float]:
            region = self.parts.region if self._runs_compiled(batch) else self.parts.eager
            with allow_chains(on=self.mode == "graph"), self._share_samples(len(outputs)):
                value, weight, found = region(batch)
            # The outputs are counted after the step; without detach they would keep the graph of autograd.
            outputs.append(tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, found))
            # A weight of 0 removes the samples of an idle rank from the mean.
            return value, 0 if isinstance(batch, Idle) else weight

        return loss

    def _share_samples(self, number: int) -> AbstractContextManager[None]:
        """Let a loss use the samples of other ranks, unless batches are cut into different numbers of micro-batches."""
        ranks = self.guarded.ranks
        if ranks is None or ranks.size == 1 or not self._sizes or self.pieces > 1:
            return nullcontext()
        world = ranks.world
        rows = [world.count_rows(self._sizes[number], rank) for rank in range(world.size)]

        def on_gather() -> None:
            ranks.talks_in_backward = True

        return gather_over_ranks(rows, world.rank, on_gather)

    def _runs_compiled(self, batch: Batch) -> bool:
        if self.mode == "eager" or not self._is_full(batch):
            return False
        has_code = self.shapes.admit(batch)
        if not has_code and (reason := self.shapes.explain_eager(batch)):
            self.notice(reason, "warning")
        return has_code

    def _is_full(self, batch: Batch) -> bool:
        """True for a full micro-batch: only these are worth compiling for."""
        return count_samples(batch) == -(-self._full_batch // self.pieces)

    # --- capturing ---

    def _find_captured(self, window: list[Batch]) -> CapturedWindow | None:
        """Return the captured step for a window of this shape; capture one after enough windows in a row."""
        if self.mode != "graph" or any(isinstance(batch, Idle) for batch in window):
            return None
        shape = (id(self), self._sizes, *describe_shape(window))
        self._in_a_row = self._in_a_row + 1 if shape == self._shape else 1
        self._shape = shape
        # A captured step reads rates and values from tables on the device: extend them before the replay.
        self.guarded.look_ahead()
        known = self.graphs.get(shape)
        if known is not None and known.step.is_valid:
            return known
        if known is not None:
            del self.graphs[shape]
            self._in_a_row = 1  # a loaded state may lack optimizer state, which must exist before capturing
        # DDP rearranges its buckets during the first steps, which a capture would freeze.
        is_warm = self.guarded.ranks is None or self.guarded.ranks.can_be_captured
        is_ready = is_warm and self._in_a_row > UNCAPTURED
        has_code = is_ready and all(self._runs_compiled(batch) for batch in window if self._is_full(batch))
        return self._capture(shape, window) if has_code else None

    def _capture(self, shape: Shape, window: list[Batch]) -> CapturedWindow | None:
        """Capture the step for this shape; after a failure stop capturing."""
        # shape[0] identifies the engine: phases share the dict but not the limit.
        if sum(shape[0] == other[0] for other in self.graphs) >= MOST_GRAPHS:
            self._stay_uncaptured(f"windows come in more than {MOST_GRAPHS} shapes")
            return None
        outputs: list[Any] = []
        try:
            step = GraphedStep(self.guarded, self.make_loss(outputs), window, self.graphs.get_pool(self.parts.device))
        except CaptureFailed as error:
            self._stay_uncaptured(str(error))
            return None
        self.graphs[shape] = CapturedWindow(step, outputs)
        return self.graphs[shape]

    def _stay_uncaptured(self, reason: str) -> None:
        """Run compiled from here on, on all ranks."""
        self.mode = "compile"
        self._forget_code()
        self.notice(f"not captured as a CUDA graph, running compiled: {reason}", "warning")
        if self.guarded.ranks is not None:
            self.guarded.ranks.announce_mode("compile")

    def _forget_code(self) -> None:
        self.forget_graphs()
        self.shapes.ready.clear()  # other modes do not use our chains of kernels: different code is compiled

    # --- failures ---

    def _go_eager(self, error: Exception) -> None:
        """Fall back to eager after a compile error."""
        self.guarded.abandon()
        if self.parts.world is not None and self.parts.world.size > 1:
            raise ConfigError(
                f"the backward pass cannot be compiled: {explain_compile_error(error)}",
                why="other ranks are already running it",
                fix="train.fast=off",
            ) from error
        self._run_eager(error)

    def _run_eager(self, error: Exception) -> None:
        self.mode = "eager"
        self.notice(f"not compiled, running eager: {explain_compile_error(error)}", "warning")

    def _make_room(self, error: OutOfMemory) -> None:
        """After an out-of-memory error drop the graphs, else halve the micro-batch, else raise it.

        run/memory/__init__.py describes the whole strategy.
        """
        parts, train = self.parts, self.parts.train
        error.__traceback__ = None  # its frames hold the activations that did not fit
        self.guarded.abandon()
        if parts.world is not None and parts.world.size > 1:
            raise error  # the other ranks are in the middle of this step
        if self.graphs:
            self._num_drops += 1
            if self._num_drops > MOST_DROPS:
                return self._stay_uncaptured(f"steps outside of the graph needed its memory {self._num_drops} times")
            self.forget_graphs()
            text = "a step did not fit into memory next to the captured one, which is dropped and captured again"
            return self.notice(f"{text} ({self._num_drops} of at most {MOST_DROPS} times)", "info")
        if not train.auto_batch or self.pieces >= train.batch_size:
            raise error
        torch.cuda.empty_cache()
        self.pieces *= 2
        self.shapes.forget()
        return self.notice(describe_halving(self.pieces, train.batch_size, parts.model), "warning")


class Idle(dict[str, Tensor]):
    """The batch of a rank that has no samples in this window: it takes part in the step with weight 0."""


def prepare_window(
    parts: Assembly, window: list[Batch], sizes: Sequence[int] = (), share: Share | None = None
) -> list[Batch]:
    """Prepare a loaded window for the model; `share` prepares it as another rank would."""
    sizes = sizes or [count_samples(batch) for batch in window]
    share, found = share or parts.world, list[Batch]()
    start = 0  # the window's samples before this batch, over all ranks: augmentation is keyed by position
    for k, (batch, size) in enumerate(zip(window, sizes, strict=True)):
        is_idle = share is not None and share.count_rows(size) == 0
        row = 0 if share is None or is_idle else share.find_first_row(size)
        key = Key.for_training(parts.train.seed, parts.step.attempted, k, start + row, row, size)
        prepared = match_layout(parts.model, parts.workload.prepare_batch(batch, key=key, training=True))
        found.append(Idle(prepared) if is_idle else prepared)
        start += size
    return found


# --- several phases: run one window through each phase that is due ---


UNCOMPILED = "runs eagerly: its loss computes gradients, which the compiler cannot trace"


class PhasedEngine:
    """Run windows through the phases that are due.

    Each phase has its own engine, compiled code and graphs; the graphs share one memory pool. The host decides by the
    number of iterations which phases are due.
    """

    def __init__(
        self,
        parts: Assembly,
        mode: Mode,
        notice: Notice,
        count: Count = lambda outputs, batch: None,
        before_compiling: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts, self.asked, self.notice = parts, mode, notice
        self.graphs = Graphs()
        self.counts = any(phase.is_counted for phase in parts.phases)
        self.engines: dict[str, Engine] = {}
        for own in parts.phases:
            name, counted = own.phase.name, count if own.is_counted else (lambda outputs, batch: None)
            alone = dataclasses.replace(parts, step=own.step, region=own.region, eager=own.eager, phases=())
            own_mode: Mode = mode if own.phase.compiles else "eager"
            say = partial(self._say, name)
            self.engines[name] = Engine(alone, own_mode, say, counted, before_compiling, self.graphs)
        self._has_announced = False

    def _say(self, name: str, text: str, level: Level) -> None:
        self.notice(f"{name}: {text}", level)

    @property
    def mode(self) -> Mode:
        """Return the slowest mode of all phases, except those that are never compiled."""
        modes = [self.engines[own.phase.name].mode for own in self.parts.phases if own.phase.compiles]
        return max(modes, key=FROM_FASTEST.index, default=self.asked)

    @property
    def pieces(self) -> int:
        return max(engine.pieces for engine in self.engines.values())

    def __call__(self, window: list[Batch], sizes: Sequence[int] = ()) -> PhasedFacts:
        return self.step(prepare_window(self.parts, window, sizes), sizes)

    def step(self, prepared: list[Batch], sizes: Sequence[int] = ()) -> PhasedFacts:
        if not self._has_announced and self.asked != "eager":
            for own in self.parts.phases:
                if not own.phase.compiles:
                    self._say(own.phase.name, UNCOMPILED, "info")
        self._has_announced = True
        iteration = self.parts.step.attempted
        due = [own.phase.name for own in self.parts.phases if own.phase.is_due(iteration)]
        assert isinstance(self.parts.step, PhasedStep)
        return self.parts.step.close({name: self.engines[name].step(prepared, sizes) for name in due})

    def follow(self, reading: Reading) -> None:
        """Follow, for each phase, a rank that could not compile or capture."""
        for name, own in split_phases(reading).items():
            self.engines[name].follow(own)

    def forget_graphs(self) -> None:
        for engine in self.engines.values():
            engine.forget_graphs()

    def state_dict(self) -> dict[str, Any]:
        own = {name: engine.state_dict() for name, engine in self.engines.items()}
        return {"pieces": self.pieces, "mode": self.mode, "compiled_shapes": [], "phases": own}

    def restore(self, state: Mapping[str, Any], *, is_same: bool) -> None:
        for name, engine in self.engines.items():
            engine.restore(state["phases"][name], is_same=is_same)


def make_engine(parts: Assembly, mode: Mode, notice: Notice, *hooks: Any) -> Engine | PhasedEngine:
    return (PhasedEngine if parts.phases else Engine)(parts, mode, notice, *hooks)


# --- trials on copies of a run ---


@dataclass(frozen=True)
class RunRehearsal:
    """The trials of a run."""

    config: RunConfig
    workload: Workload

    @contextmanager
    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> Iterator[Trial]:
        """Yield a trial on a copy of the run; generators, compiled code and memory are restored afterwards."""
        config, own = self.config.replace(**changes), self.workload
        release_unused_memory(torch.device(plan.device))  # a failed trial's error may have held memory
        generators = read_generators()
        copied = dataclasses.replace(own, model=_copy_model(own.model), phases=make_all_due(own.phases))
        try:
            with choose_algorithms(deterministic=config.train.deterministic):
                yield Trial(_assemble_trial(config, copied, plan), make_engine, load_first_batch(config.train, copied))
        finally:
            restore_generators(generators)
            del copied
            # The compiler caches code by shapes only, so the next trial would run this one's code.
            forget_compiled()
            release_unused_memory(torch.device(plan.device))


def _assemble_trial(config: RunConfig, workload: Workload, plan: Plan) -> Assembly:
    try:
        return assemble(config, workload, plan)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit("the model does not fit into memory, even without a batch") from error


def _copy_model(model: nn.Module) -> nn.Module:
    made: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, made)
    except Exception as error:  # a user's model may hold anything
        raise CannotRun(f"{type(model).__name__} cannot be copied for a trial ({summarise_error(error)})") from error
    for module in copied.modules():
        # deepcopy copies modules and tensors, but functions stay the same object.
        functions = {key: held for key, held in vars(module).items() if isinstance(held, FunctionType)}
        vars(module).update({key: _rebind_to_copies(held, made) for key, held in functions.items() if held.__closure__})
    return copied


def _rebind_to_copies(function: FunctionType, made: Mapping[int, Any]) -> FunctionType:
    """Rebind a closure such as `self.mlpf = lambda x: m.out(m.fc(x))`, which deepcopy leaves bound to the original."""
    cells = tuple(CellType(made.get(id(cell.cell_contents), cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)


# --- several ranks: rank 0 tries on its part of the batch, which is the largest, and the others wait for its plan ---


@dataclass(frozen=True)
class LeadingRehearsal(RunRehearsal):
    """Trials of rank 0 for all ranks, whose devices should be of one kind."""

    world: World
    device: str
    free_bytes: int  # on the GPU that has the least

    def plan(self, make: Callable[[Rehearsal], Plan]) -> Plan:
        """Return the plan that `make` decides on rank 0, for this rank's device."""
        if self.world.is_first:
            try:
                found = make(self).to_json()
            except HalfstepError as error:
                # The other ranks wait for a message: give them the same error.
                self.world.broadcast_from_first(partial(_raise, error))
                raise
            self._broadcast(found)
        else:
            while not (found := self._broadcast("")):
                pass  # one more trial or measurement begins
        return dataclasses.replace(Plan.from_json(found), device=self.device)

    @contextmanager
    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> Iterator[Trial]:
        self._broadcast("")
        with super().begin(plan, **changes) as trial:
            trial.announce = partial(self._broadcast, "")
            yield trial

    def _broadcast(self, message: str) -> str:
        return self.world.broadcast_from_first(lambda: message)


def _raise(error: HalfstepError) -> str:
    raise error
