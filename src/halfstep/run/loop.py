"""The loop: windows through the step, the guard's word, validation, checkpoints. Everything it knows is stored."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from halfstep.data.prefetch import Prefetcher, prefetch
from halfstep.errors import CheckpointError, ConfigError, Interrupted, MemoryLimitError, TrainingStopped
from halfstep.hardware.clock import Stopwatch, Throughput
from halfstep.run.assemble import Assembly
from halfstep.run.checkpoint import Checkpoint, Checkpoints
from halfstep.run.engine import engine_for
from halfstep.run.folder import how_to_go_on
from halfstep.run.interrupts import Interrupts
from halfstep.run.journal import START_STEPS, Journal, Waiting
from halfstep.run.memory.out_of_memory import OutOfMemory, explain_out_of_memory
from halfstep.run.memory.sizing import suggest_for_run
from halfstep.run.resume import Changes
from halfstep.run.step_ledger import RunLedger
from halfstep.run.stored_state import restore, stored
from halfstep.run.validate import averaged, sample, validate
from halfstep.step.facts import Facts, Hold, PhasedFacts, Reading
from halfstep.step.guard import LAG, Action, Verdict
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.step import Step

Looked = TypeVar("Looked")


class AskedToLeave(Exception):
    """The user asked for the end while the run was validating."""


class Loop:
    def __init__(self, parts: Assembly, checkpoints: Checkpoints, journal: Journal, interrupts: Interrupts) -> None:
        self.parts, self.checkpoints, self.journal, self.interrupts = parts, checkpoints, journal, interrupts
        self.position = Position()
        self.train_metrics = parts.workload.metrics()
        self.engine = engine_for(
            parts, parts.mode or "eager", journal.notice, lambda *found: self.train_metrics.update(*found),
            journal.compiling,
        )  # fmt: skip
        journal.train_metric = self._trained
        self.ledger: RunLedger | None = None
        if parts.config.log.ledger or parts.config.log.ledger_every:
            file = checkpoints.folder.parent / "report" / "ledger.json"
            self.ledger = RunLedger(parts, file, journal.notice, writes=checkpoints.writes)
        self.held = HeldWindows(parts) if parts.config.guard.hold else None
        if self.held is not None:
            parts.guard.make_again = self._make_again
            if parts.recorder is not None:
                parts.guard.look_early = parts.recorder.look_early
        self.throughput, self.waiting, self.num_samples = Throughput(), Waiting(), 0
        self.num_made = 0
        """Steps of this process; the first ones compile and capture."""
        self.settled: Callable[[], None] = lambda: None
        """Called once, when that start is over."""
        self._is_asked = False
        """Whether a process of several was asked to stop, as all of them have read in the facts of the same step."""
        self._num_posts = 0
        if parts.world is not None:
            parts.guard.observers.append(self._hear)
        self.validated_at = self.sampled_at = -1
        """The steps at which the model was last looked at: a resumed run does what was due, and nothing twice."""
        if parts.config.train.sample_every and parts.workload.sample is None:
            journal.notice(f"train.sample_every does nothing: {parts.workload.name} has no sample()", "warning")

    @property
    def is_over(self) -> bool:
        limit = self.parts.config.train.max_steps
        return 0 < limit <= self.parts.step.attempted or self.parts.stopping.should_stop

    @property
    def _is_validated(self) -> bool:
        return self.validated_at == self.parts.step.attempted or len(self.parts.val_loader) == 0

    def run(self) -> None:
        epochs = self.parts.config.train.epochs
        if self.parts.snapshots is not None and not self.parts.snapshots.states:
            self.parts.snapshots.take(self.parts.model, self.parts.step)
        # A run that was killed in its last validation has made all its steps and still has to validate.
        while self.position.epoch < epochs and not (self.is_over and self._is_validated):
            try:
                self._train_epoch()
                self._act_on(self.parts.guard.drain())
                self._end_epoch()
            except OutOfMemory as error:
                error.__traceback__ = None  # its frames hold the activations that did not fit
                raise self._explained(error) from error
        if self.parts.stopping.should_stop and self.position.epoch < epochs:
            when = f"step {self.parts.step.attempted}" if self._by_steps else f"epoch {self.position.epoch}"
            self.journal.early_stop(when, self.parts.stopping)

    def _explained(self, error: OutOfMemory) -> MemoryLimitError:
        parts, num_ranks = self.parts, 1 if self.parts.world is None else self.parts.world.size
        return explain_out_of_memory(
            error, parts.config, self.engine.pieces, parts.device, num_ranks, suggest_for_run(parts)
        )

    def _trained(self) -> dict[str, float]:
        """Metrics of the epoch's training so far, where steps give outputs that they know."""
        return self.train_metrics.compute() if self.engine.counts else {}

    # --- several processes ---

    def _hear(self, facts: object, reading: Reading) -> None:
        self._is_asked |= reading.is_asked
        self.engine.follow(reading)

    @property
    def _must_leave(self) -> bool:
        """Whether the run was asked to end; of several processes all find it so at the same step."""
        return bool(self.interrupts) if self.parts.world is None else self._is_asked

    def hear_others(self) -> None:
        """Their warnings, on the one screen there is."""
        world = self.parts.world
        if world is not None and world.is_first:
            self._num_posts, lines = world.read_posts(self._num_posts)
            for line in lines:
                self.journal.notice(line, "warning")

    def _counted_by_all(self) -> dict[str, Tensor]:
        """What training metrics counted, over all processes; the first one's stored state stands for all."""
        own = self.train_metrics.state_dict()
        return own if self.parts.world is None else self.parts.world.sum_over_ranks(own, self.parts.device)

    # --- one epoch ---

    def _train_epoch(self) -> None:
        parts = self.parts
        feed = prefetch(parts.train_loader.epoch(self.position.epoch, self.position.batch), parts.device)
        windows = parts.step.windows(feed)
        self._pause()  # what was due when the run was stopped
        while not self.is_over and (left := len(parts.train_loader) - self.position.batch) > 0:
            steps_left = parts.config.train.max_steps - parts.step.attempted
            num_windows = -(-left // parts.step.accumulate)
            self._train_until_pause(windows, feed, min(num_windows, steps_left) if steps_left > 0 else num_windows)
            self._pause()

    def _train_until_pause(self, windows: Iterator[Any], feed: Prefetcher, num_windows: int) -> None:
        """The windows of an epoch, up to the next look at the model."""
        parts = self.parts
        self.throughput.restart()
        clock, waited_s = Stopwatch(), feed.waited_s
        with self.journal.training(self.position.epoch, num_windows):
            for window in windows:
                facts = self._one_step(window)
                samples = sum(parts.train_loader.sizes(self.position.batch, len(window)))
                # Before the guard's word, which may be to save and stop: this window must not come again.
                self.position.batch += len(window)
                self._act_on(parts.guard.watch(facts))
                waiting = Waiting(trained_s=clock.elapsed_s, waited_s=feed.waited_s - waited_s)
                self._count_start(waiting)
                self._after_step(samples, waiting)
                if self.is_over or self._samples_are_due() or self._validation_is_due():
                    break
        self.waiting.add(clock.elapsed_s, feed.waited_s - waited_s)

    def _count_start(self, since: Waiting) -> None:
        """Note how long the start took, once it is over; `since` is what `self.waiting` does not count yet."""
        self.num_made += 1
        if self.waiting.start_s == 0 and self.num_made >= START_STEPS[self.engine.mode]:
            self.waiting.start_s = self.waiting.trained_s + since.trained_s
            self.waiting.start_waited_s = self.waiting.waited_s + since.waited_s
            self.settled()

    def _one_step(self, window: list[dict[str, Tensor]]) -> Facts | PhasedFacts:
        parts, position = self.parts, self.position
        if parts.world is not None and self.interrupts:
            parts.ask_to_stop()
        with self.ledger.around(self.engine) if self.ledger is not None else nullcontext():
            facts = self._made(window, position)
        self.journal.attempted = parts.step.attempted
        if self.ledger is not None:
            self.ledger.look(self.engine, window)
        return facts

    def _made(self, window: list[dict[str, Tensor]], position: Position) -> Facts | PhasedFacts:
        parts = self.parts
        if self.held is not None:
            self.held.keep(parts.step.attempted, window, position, self.train_metrics)
        with parts.recorder.watch(window) if parts.recorder is not None else nullcontext():
            facts = self.engine(window, parts.train_loader.sizes(position.batch, len(window)))
        facts.epoch, facts.window = position.epoch, position.batch // parts.step.accumulate
        return facts

    def _make_again(self, held: list[Facts]) -> list[Facts | PhasedFacts]:
        """The steps that a fault held, with their own windows, generators and counts."""
        assert self.held is not None
        self.held.release()
        windows = [self.held.of(facts.attempted) for facts in held]
        if windows:
            self.parts.step.attempted, self.train_metrics = held[0].attempted, windows[0].metrics
        made = []
        for kept in windows:
            restore_generators(kept.generators)
            made.append(self._made(kept.window, kept.position))
        return made

    def _after_step(self, samples: int, waiting: Waiting) -> None:
        parts, attempted, every = self.parts, self.parts.step.attempted, self.parts.config.train.checkpoint_every
        self.num_samples += samples
        self.throughput.add(samples)
        self.journal.stepped(attempted, self.throughput.per_s(), waiting)
        if attempted % self.journal.report_every == 0:
            self.hear_others()
        if parts.snapshots is not None and parts.snapshots.is_due(attempted):
            parts.guard.release_held()
            parts.snapshots.take(parts.model, parts.step)
        if every and attempted % every == 0:
            self.save()
        if self._must_leave:
            self._leave()

    # --- the guard's word ---

    def _act_on(self, verdict: Verdict) -> None:
        if verdict.action is not Action.CONTINUE:
            self.parts.guard.release_held()
        if verdict.action is Action.ROLLBACK:
            self._roll_back(verdict)
        elif verdict.action is Action.STOP:
            # Said and done: a resumed run goes on with the next window and counts its faults from there.
            self.parts.guard.acknowledge()
            path = self.save()
            raise TrainingStopped(
                f"training stopped: {verdict.reason}",
                why=f"the weights are as they were before those steps, saved in {path}",
                fix=verdict.fix,
            )

    def _roll_back(self, verdict: Verdict) -> None:
        """Weights, buffers, optimizer, average and scale go back; data and generators go forward; the rate is cut."""
        parts = self.parts
        state = parts.snapshots.find_before(verdict.first_fault_committed) if parts.snapshots is not None else None
        if parts.snapshots is None or state is None:
            return self._act_on(Verdict(action=Action.STOP, reason=f"{verdict.reason}; no snapshot is old enough",
                                        fix="a smaller guard.margin, or a lower learning rate"))  # fmt: skip
        parts.snapshots.go_back(state, parts.model, parts.step)
        parts.guard.note_rollback()
        self._set_rate_factor()
        self.journal.rolled_back(parts.step.attempted, verdict, state["step"]["committed"], parts.guard)
        return None

    def _set_rate_factor(self) -> None:
        plateau = self.parts.plateau.factor if self.parts.plateau is not None else 1.0
        self.parts.step.set_rate_factor(plateau * self.parts.guard.rate_factor)

    # --- between two windows ---

    @property
    def _by_steps(self) -> bool:
        return self.parts.config.train.validate_every_steps > 0

    def _is_due(self, every: int, done_at: int) -> bool:
        attempted = self.parts.step.attempted
        return every > 0 and attempted > 0 and attempted % every == 0 and done_at != attempted

    def _samples_are_due(self) -> bool:
        wanted = self.parts.config.train.sample_every if self.parts.workload.sample is not None else 0
        return self._is_due(wanted, self.sampled_at)

    def _validation_is_due(self) -> bool:
        every = self.parts.config.train.validate_every_steps
        return self._is_due(every, self.validated_at) and len(self.parts.val_loader) > 0

    def _pause(self) -> None:
        """Look at the model, where it is due by steps."""
        if self._samples_are_due():
            self._sample()
        if self._validation_is_due():
            self._act_on(self.parts.guard.drain())
            is_best = self._validate(self.position.epoch, in_turn=True)
            self.train_metrics = self.parts.workload.metrics()
            self.save(is_best=is_best)
            if self._must_leave:
                self._leave()

    def _sample(self) -> None:
        folder = self.checkpoints.folder.parent / "report" / "samples" / f"{self.parts.step.attempted:08d}"
        self.sampled_at = self.parts.step.attempted
        self.parts.guard.release_held()
        if not self.checkpoints.writes:
            return
        try:
            written = self._with_room(lambda: sample(self.parts, folder))
            self.journal.notice(f"samples in {folder}: {', '.join(path.name for path in written)}")
        except CheckpointError as error:  # by-products: a full disk will stop the run at its next checkpoint
            self.journal.notice(str(error), "warning")

    # --- the end of an epoch ---

    def _end_epoch(self) -> None:
        parts, train = self.parts, self.parts.config.train
        epoch, is_whole = self.position.epoch, self.position.batch >= len(parts.train_loader)
        in_turn = not self._by_steps and (epoch + 1) % train.validate_every == 0
        is_last = self.is_over or epoch + 1 == train.epochs
        is_due = (in_turn or is_last) and self.validated_at != parts.step.attempted
        is_best = is_due and len(parts.val_loader) > 0 and self._validate(epoch, in_turn=in_turn and is_whole)
        # Only now: a run that ends while it validates, validates again when it is resumed.
        if is_whole:
            self.position = Position(epoch=epoch + 1)
        if is_due or not self._by_steps:
            self.train_metrics = parts.workload.metrics()
        # With checkpoints by steps an epoch's end is nothing special, but for what validation found.
        if is_due or not train.checkpoint_every:
            self.save(is_best=is_best)
        if self._must_leave:
            self._leave()

    def _validate(self, epoch: int, *, in_turn: bool) -> bool:
        """Whether it is the best so far. One out of turn, at the end of a run, decides nothing else."""
        parts = self.parts
        try:
            with self.journal.validating(epoch, len(parts.val_loader)) as advance:
                with averaged(parts.step):
                    found = self._with_room(lambda: self._found(self._unless_asked(advance)))
                if parts.workload.scores_raw and parts.step.ema is not None:
                    raw = self._with_room(lambda: self._found(self._unless_asked(lambda: None)))
                    found |= {f"raw_{name}": value for name, value in raw.items()}
        except AskedToLeave:
            self._leave()  # here the model holds its own weights again
        self.validated_at = parts.step.attempted
        value = found[parts.workload.metric]
        is_best = parts.stopping.observe(value, epoch, in_turn=in_turn)
        if parts.plateau is not None and in_turn:
            parts.plateau.observe(value)
            self._set_rate_factor()
        self.train_metrics.load_state_dict(self._counted_by_all())  # its last use
        self.journal.epoch(epoch, parts.step.attempted, self._trained(), found, is_best=is_best)
        return is_best

    def _unless_asked(self, advance: Callable[[], None]) -> Callable[[], None]:
        def go_on() -> None:
            advance()
            if self.parts.world is None and self.interrupts:  # the others would wait for this one's sums
                raise AskedToLeave

        return go_on

    def _with_room(self, look: Callable[[], Looked]) -> Looked:
        """A look at the model, with the memory of the captured steps where it does not fit beside them."""
        try:
            return look()
        except OutOfMemory as error:
            if not self.engine.graphs:
                raise
            error.__traceback__ = None  # its frames hold what did not fit
        self.engine.forget_graphs()  # nobody else can use their memory while they are kept
        return look()

    def _found(self, advance: Any) -> dict[str, float]:
        parts = self.parts
        parts.values.refresh()
        if parts.world is not None:
            parts.world.broadcast_(list(parts.model.buffers()))  # BatchNorm statistics are each process's own
        found = validate(
            parts.workload, parts.model, parts.plan, parts.val_loader, pieces=self.engine.pieces, world=parts.world,
            advance=advance,
        )  # fmt: skip
        # Early stopping and plateau follow them: machines that round otherwise must not part over it.
        return found if parts.world is None else parts.world.broadcast_from_first(lambda: found)

    # --- what is stored ---

    def _leave(self) -> NoReturn:
        path = self.save()
        raise Interrupted(
            f"stopped by {self.interrupts.received.name if self.interrupts.received else 'a signal to another rank'} "
            f"after step {self.parts.step.attempted}; everything is saved in {path}",
            fix=how_to_go_on(self.checkpoints.folder.parent),
            exit_code=self.interrupts.exit_code,
        )

    def save(self, *, is_best: bool = False) -> Path:
        self.parts.guard.release_held()
        own = {
            "position": asdict(self.position),
            **self.engine.stored(),
            "validated_at": self.validated_at,
            "sampled_at": self.sampled_at,
            "train_metrics": self._counted_by_all(),
            "journal": self.journal.state_dict(),
            "is_best": is_best,
        }
        path = self.checkpoints.save(self.parts.step.attempted, stored(self.parts, own))
        if is_best:
            self._mark_best(path)
        return path

    def restore(self, path: Path, checkpoint: Checkpoint, changes: Changes) -> None:
        """Continue exactly where the checkpoint was taken, but for the settings that were changed."""
        state = checkpoint.state
        for note in restore(self.parts, checkpoint, changes):
            self.journal.notice(note)
        self._set_rate_factor()
        self.position = Position(**state["position"])
        self.engine.go_on(state, is_same=not changes.are_binding)
        self.validated_at, self.sampled_at = int(state["validated_at"]), int(state["sampled_at"])
        if self.parts.world is None or self.parts.world.is_first:
            self.train_metrics.load_state_dict(state["train_metrics"])
        self.journal.load_state_dict(state["journal"])
        self.journal.attempted = self.parts.step.attempted
        if state["is_best"]:
            self._mark_best(path)  # a kill may have come between the checkpoint and its mark

    def _mark_best(self, path: Path) -> None:
        self.checkpoints.mark_best(path, self.parts.workload.metric, self.parts.stopping.best)


# --- guard.hold: windows that may be run again after a fault, with the state their steps started from ---


@dataclass(kw_only=True, slots=True)
class Position:
    """Where the run stands in its data: this many batches of this epoch are behind it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class HeldWindow:
    """One window as it was loaded, and what was there before its step."""

    attempted: int
    window: list[dict[str, Tensor]]
    position: Position
    generators: dict[str, Any]
    metrics: Any  # what training metrics had counted


class HeldWindows:
    """The last ones; their number is that of the steps in flight, so that memory stays bounded."""

    def __init__(self, parts: Assembly) -> None:
        if not isinstance(parts.step, Step):
            raise ConfigError(
                f"guard.hold with phases ({', '.join(parts.step.steps)})",
                why="phases commit one after another in an iteration, and only whole iterations can be made again",
                fix="guard.hold=false; capsules then say by how many commits they are inexact",
            )
        scaler = parts.step.scaler
        self.hold = Hold(parts.device, low=scaler.low if scaler.enabled else None)
        parts.step.hold = self.hold
        self._windows: deque[HeldWindow] = deque(maxlen=LAG + 1)

    def keep(self, attempted: int, window: list[dict[str, Tensor]], position: Position, metrics: Any) -> None:
        kept = HeldWindow(attempted, window, replace(position), read_generators(), copy.deepcopy(metrics))
        self._windows.append(kept)

    def of(self, attempted: int) -> HeldWindow:
        """As it was last made."""
        return next(kept for kept in reversed(self._windows) if kept.attempted == attempted)

    def release(self) -> None:
        self.hold.release()
