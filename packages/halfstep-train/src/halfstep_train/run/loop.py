"""The training loop: run windows through the step, act on the guard's verdicts, validate, save checkpoints.

Everything that decides what the next step does is stored in a checkpoint, so that a resumed run continues exactly.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError, Interrupted
from halfstep.hardware.clock import Stopwatch, Throughput
from halfstep.prefetching import Prefetcher, prefetch
from halfstep.step.facts import Facts, Hold, PhasedFacts, Reading
from halfstep.step.guard import LAG
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.step import GuardedStep
from halfstep.step.verdicts import VerdictHandler
from halfstep_train.report.listeners import CallbackFailed
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints
from halfstep_train.run.engine import make_engine
from halfstep_train.run.evidence import RunLedger, RunWatch
from halfstep_train.run.folder import Changes, suggest_resume
from halfstep_train.run.interrupts import Interrupts
from halfstep_train.run.journal import START_STEPS, Journal, Waiting
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.stored_state import capture_state, restore_state
from halfstep_train.run.validate import sample, use_average, validate

Looked = TypeVar("Looked")


class StopRequested(Exception):
    """Raised when the user asks to stop during validation."""


class Loop:
    """Train an assembled run from its position to its end."""

    def __init__(self, parts: Assembly, checkpoints: Checkpoints, journal: Journal, interrupts: Interrupts) -> None:
        self.parts, self.checkpoints, self.journal, self.interrupts = parts, checkpoints, journal, interrupts
        self.position = Position()
        self.train_metrics = parts.workload.metrics()
        self.engine = make_engine(
            parts, parts.mode or "eager", journal.notice, lambda *found: self.train_metrics.update(*found),
            journal.exclude_compiling,
        )  # fmt: skip
        journal.train_metric = self._compute_metrics
        report, writes = checkpoints.folder.parent / "report", checkpoints.writes
        self.ledger = RunLedger(parts, report, journal.notice, writes=writes) if parts.log.ledger else None
        self.watch = RunWatch(parts, self.engine, report, journal, writes=writes) if parts.log.watch else None
        self.held = HeldWindows(parts) if parts.holds else None
        if self.held is not None:
            parts.guard.make_again = self._run_again
            if parts.recorder is not None:
                parts.guard.look_early = parts.recorder.look_early
        self.verdicts = VerdictHandler(
            guard=parts.guard, model=parts.model, step=parts.step, snapshots=parts.snapshots,
            cut_rates=self._set_rate_factor, report=journal.record_rollback, save=self._save_before_stop,
        )  # fmt: skip
        self.throughput, self.waiting = Throughput(), Waiting()
        self.num_samples = 0
        """Training samples since this start."""
        self.num_made = 0
        """Steps since this start; the first ones compile and capture."""
        self.started_at = (0, 0)
        """Attempted and committed steps before this start."""
        self._is_settled = False
        self.settled: Callable[[], None] = lambda: None
        """Called once, after the first steps."""
        self._is_asked = False
        """Whether any rank was asked to stop; all ranks read it in the facts of the same step."""
        self._num_posts = 0
        if parts.world is not None:
            parts.guard.observers.append(self._follow_ranks)
        self.validated_at = self.sampled_at = -1
        """The steps of the last validation and samples: a resumed run does what was due, and nothing twice."""
        if parts.train.sample_every and parts.workload.sample is None:
            journal.notice(f"train.sample_every has no effect: {parts.workload.name} has no sample()", "warning")

    @property
    def is_over(self) -> bool:
        limit = self.parts.train.max_steps
        return 0 < limit <= self.parts.step.attempted or self.parts.stopping.should_stop

    @property
    def _is_validated(self) -> bool:
        return self.validated_at == self.parts.step.attempted or len(self.parts.val_loader) == 0

    def run(self) -> None:
        """Train until the epochs, max_steps or early stopping end the run."""
        epochs, step = self.parts.train.epochs, self.parts.step
        self.started_at = step.attempted, int(step.committed)
        if self.parts.snapshots is not None and not self.parts.snapshots.states:
            self.parts.snapshots.take(self.parts.model, self.parts.step)
        # A run that was killed in its last validation has finished its steps but still has to validate.
        while self.position.epoch < epochs and not (self.is_over and self._is_validated):
            self._train_epoch()
            self.verdicts.act_on(self.parts.guard.drain())
            self._end_epoch()
        self.checkpoints.wait()
        self._stop_for_callback()  # which may have failed in the last record
        if self.parts.stopping.should_stop and self.position.epoch < epochs:
            when = f"step {step.attempted}" if self.parts.train.validate_every_steps else f"epoch {self.position.epoch}"
            self.journal.record_early_stop(when)
        self._show_rank_warnings()

    def count_samples(self) -> int:
        """Return the training samples of the whole run, including those before it was resumed."""
        loader, position = self.parts.train_loader, self.position
        return position.epoch * sum(loader.list_sizes(0, len(loader))) + sum(loader.list_sizes(0, position.batch))

    def _compute_metrics(self) -> dict[str, float]:
        """Return the training metrics of the epoch so far, if the steps' outputs fit the workload's metrics."""
        return self.train_metrics.compute() if self.engine.counts else {}

    # --- several ranks ---

    def _follow_ranks(self, facts: object, reading: Reading) -> None:
        """Note whether any rank was asked to stop or fell back to a slower mode."""
        self._is_asked |= reading.is_asked
        self.engine.follow(reading)

    @property
    def _must_stop(self) -> bool:
        """True if the run was asked to stop; all ranks see it at the same step."""
        return self._wants_to_stop if self.parts.world is None else self._is_asked

    @property
    def _wants_to_stop(self) -> bool:
        """True if this rank has received a signal, or a callback has failed."""
        return bool(self.interrupts) or self.journal.report.failure is not None

    def _show_rank_warnings(self) -> None:
        """Show the warnings of other ranks."""
        world = self.parts.world
        if world is not None and world.is_first:
            self._num_posts, lines = world.read_posts(self._num_posts)
            for line in lines:
                self.journal.notice(line, "warning")

    def _sum_metrics(self) -> dict[str, Tensor]:
        """Return the state of the training metrics, summed over all ranks; rank 0 stores it."""
        own = self.train_metrics.state_dict()
        return own if self.parts.world is None else self.parts.world.sum_over_ranks(own, self.parts.device)

    # --- one epoch ---

    def _train_epoch(self) -> None:
        """Train the rest of the current epoch."""
        parts = self.parts
        feed = prefetch(parts.train_loader.iterate_epoch(self.position.epoch, self.position.batch), parts.device)
        # Groups batches into windows of `accumulate` micro-batches; the last window of an epoch may be shorter.
        windows = parts.step.windows(feed)
        self._pause()  # what was due when the run was stopped
        while not self.is_over and (left := len(parts.train_loader) - self.position.batch) > 0:
            # The bar shows only the steps that max_steps leaves.
            steps_left = parts.train.max_steps - parts.step.attempted
            num_windows = -(-left // parts.step.accumulate)
            self._train_until_pause(windows, feed, min(num_windows, steps_left) if steps_left > 0 else num_windows)
            self._pause()

    def _train_until_pause(self, windows: Iterator[Any], feed: Prefetcher[Any], num_windows: int) -> None:
        """Train on the epoch's windows up to the next validation or samples."""
        parts = self.parts
        self.throughput.restart()
        waiting, clock, waited_s = Waiting(), Stopwatch(), feed.waited_s
        with self.journal.show_training(self.position.epoch, num_windows):
            for window in windows:
                facts = self._run_step(window)
                samples = sum(parts.train_loader.list_sizes(self.position.batch, len(window)))
                # Advance before the guard's verdict: if that is to save and stop, this window must not come again.
                self.position.batch += len(window)
                self.verdicts.act_on(parts.guard.watch(facts))
                lap_s, lap_waited_s, waited_s = clock.restart(), feed.waited_s - waited_s, feed.waited_s
                waiting.add(lap_s, lap_waited_s)
                self._count_time(lap_s, lap_waited_s)
                self._finish_step(samples, waiting)
                # Leave the bar: validation and samples have their own output.
                if self.is_over or self._samples_are_due() or self._validation_is_due():
                    break
            # Read the last steps for the finished bar. Samples come before that: a rollback would change them.
            if not self._samples_are_due():
                self.verdicts.act_on(parts.guard.drain())
            self.journal.finish_bar()

    def _count_time(self, lap_s: float, waited_s: float) -> None:
        """Add the time of one step to that of the run; the first steps of a start compile and capture."""
        self.num_made += 1
        self.waiting.add(lap_s, waited_s)
        if self._is_settled:
            return
        self.waiting.start_s += lap_s
        self.waiting.start_waited_s += waited_s
        if self.num_made >= START_STEPS[self.engine.mode]:
            self._is_settled = True
            self.settled()

    def _run_step(self, window: list[dict[str, Tensor]]) -> Facts | PhasedFacts:
        """Run one window, with the ledger if it observes this step."""
        parts, position = self.parts, self.position
        if parts.world is not None and self._wants_to_stop:
            parts.ask_to_stop()
        with self.ledger.wrap_engine(self.engine) if self.ledger is not None else nullcontext():
            facts = self._run_window(window, position)
        self.journal.attempted = parts.step.attempted
        if self.ledger is not None:
            self.ledger.look(self.engine, window)
        if self.watch is not None:
            self.watch.finish(self.engine, window, facts)
        return facts

    def _translate_losses(self) -> AbstractContextManager[None]:
        """Name the rank that is gone where forward passes communicate, also in preparation and validation."""
        world = self.parts.world
        return nullcontext() if world is None or self.parts.sharded is None else world.translate_losses()

    def _run_window(self, window: list[dict[str, Tensor]], position: Position) -> Facts | PhasedFacts:
        parts = self.parts
        if self.held is not None:
            self.held.keep(parts.step.attempted, window, position, self.train_metrics)
        with parts.recorder.watch(window) if parts.recorder is not None else nullcontext(), self._translate_losses():
            facts = self.engine(window, parts.train_loader.list_sizes(position.batch, len(window)))
        # A capsule loads the window of a fault again by these numbers.
        facts.epoch, facts.window = position.epoch, position.batch // parts.step.accumulate
        return facts

    def _run_again(self, held: list[Facts]) -> list[Facts | PhasedFacts]:
        """Run the steps that a fault held again, with their own windows, generators and metrics."""
        assert self.held is not None
        self.held.hold.release()
        windows = [self.held.find(facts.attempted) for facts in held]
        # Go back to the state before the first held step; the metrics have counted its outputs already.
        if windows:
            self.parts.step.attempted, self.train_metrics = held[0].attempted, windows[0].metrics
        made = []
        for kept in windows:
            restore_generators(kept.generators)
            made.append(self._run_window(kept.window, kept.position))
        return made

    def _finish_step(self, samples: int, waiting: Waiting) -> None:
        """Do what follows a step: count it, show it, take a snapshot, save, or stop."""
        parts, attempted, every = self.parts, self.parts.step.attempted, self.parts.train.checkpoint_every
        self.num_samples += samples
        self.throughput.add(samples)
        self.journal.record_step(attempted, self.throughput.compute_rate(), waiting)
        if attempted % self.journal.report_every == 0:
            self._show_rank_warnings()
        # Run the steps that a fault holds back first: the snapshot must include their commits.
        if parts.snapshots is not None and parts.snapshots.is_due(attempted):
            parts.guard.release_held()
            parts.snapshots.take(parts.model, parts.step)
        saved = self.save() if every and attempted % every == 0 else None
        if self._must_stop:
            self._stop(saved or self.save())

    # --- the guard's verdict ---

    def _save_before_stop(self) -> str:
        path = self.save()
        self.checkpoints.wait()
        return f", saved in {path}"

    def _set_rate_factor(self) -> None:
        plateau = self.parts.plateau.factor if self.parts.plateau is not None else 1.0
        self.parts.step.set_rate_factor(plateau * self.parts.guard.rate_factor)

    # --- between two windows ---

    def _is_due(self, every: int, done_at: int) -> bool:
        """True if this step is due by its number and was not handled yet."""
        attempted = self.parts.step.attempted
        return every > 0 and attempted > 0 and attempted % every == 0 and done_at != attempted

    def _samples_are_due(self) -> bool:
        wanted = self.parts.train.sample_every if self.parts.workload.sample is not None else 0
        return self._is_due(wanted, self.sampled_at)

    def _validation_is_due(self) -> bool:
        every = self.parts.train.validate_every_steps
        return self._is_due(every, self.validated_at) and len(self.parts.val_loader) > 0

    def _pause(self) -> None:
        """Write samples and validate if they are due by steps."""
        if self._samples_are_due():
            self._sample()
        if self._validation_is_due():
            self.verdicts.act_on(self.parts.guard.drain())
            is_best = self._validate(self.position.epoch, in_turn=True)
            self.train_metrics = self.parts.workload.metrics()
            saved = self.save(is_best=is_best)
            if self._must_stop:
                self._stop(saved)

    def _sample(self) -> None:
        """Write samples of the model's outputs; only rank 0 does, unless ranks divide the model."""
        folder = self.checkpoints.folder.parent / "report" / "samples" / f"{self.parts.step.attempted:08d}"
        self.sampled_at = self.parts.step.attempted
        self.parts.guard.release_held()
        if not self.checkpoints.writes and self.parts.sharded is None:
            return
        try:
            written = self._run_with_room(lambda: sample(self.parts, folder))
            self.journal.notice(f"wrote samples to {folder}: {', '.join(path.name for path in written)}")
        except CheckpointError as error:  # samples are optional: a full disk stops the run at its next checkpoint
            self.journal.notice(str(error), "warning")

    # --- the end of an epoch ---

    def _end_epoch(self) -> None:
        """Validate if it is due, save a checkpoint, and move on to the next epoch."""
        parts, train = self.parts, self.parts.train
        epoch, is_whole = self.position.epoch, self.position.batch >= len(parts.train_loader)
        in_turn = not train.validate_every_steps and (epoch + 1) % train.validate_every == 0
        is_last = self.is_over or epoch + 1 == train.epochs
        is_due = (in_turn or is_last) and self.validated_at != parts.step.attempted
        is_best = is_due and len(parts.val_loader) > 0 and self._validate(epoch, in_turn=in_turn and is_whole)
        if is_whole and not train.validate_every_steps and self.validated_at != parts.step.attempted:
            self.train_metrics.load_state_dict(self._sum_metrics())  # its last use
            self.journal.record_epoch(epoch, parts.step.attempted, self._compute_metrics(), {})
        # Advance only after validation: a run that is stopped during it validates again when it is resumed.
        if is_whole:
            self.position = Position(epoch=epoch + 1)
        if is_due or not train.validate_every_steps:
            self.train_metrics = parts.workload.metrics()
        # If checkpoints are saved by steps, the end of an epoch needs one only after a validation.
        saved = self.save(is_best=is_best) if is_due or not train.checkpoint_every else None
        if self._must_stop:
            self._stop(saved or self.save())

    def _validate(self, epoch: int, *, in_turn: bool) -> bool:
        """Validate and return whether the result is the best so far.

        `in_turn` is False at the end of a run: that validation affects neither early stopping nor the plateau schedule.
        """
        parts = self.parts
        try:
            with self.journal.show_validation(epoch, len(parts.val_loader)) as advance:
                with use_average(parts.step):
                    found = self._run_with_room(lambda: self._compute_scores(self._check_interrupts(advance)))
                if parts.workload.scores_raw and parts.step.ema is not None:
                    raw = self._run_with_room(lambda: self._compute_scores(self._check_interrupts(lambda: None)))
                    found |= {f"raw_{name}": value for name, value in raw.items()}
        except StopRequested:
            self._stop(self.save())  # leaving the context has restored the model's weights
        self.validated_at = parts.step.attempted
        # With NaN outputs the scores mean nothing: an accuracy is then that of the first class.
        value = math.nan if math.isnan(found.get("loss", 0.0)) else found[parts.workload.metric]
        is_best = parts.stopping.observe(value, epoch, in_turn=in_turn)
        if parts.plateau is not None and in_turn:
            parts.plateau.observe(value)
            self._set_rate_factor()
        self.train_metrics.load_state_dict(self._sum_metrics())  # its last use
        train = self._compute_metrics()
        self.journal.record_epoch(epoch, parts.step.attempted, train, found, is_best=is_best)
        return is_best

    def _check_interrupts(self, advance: Callable[[], None]) -> Callable[[], None]:
        def go_on() -> None:
            advance()
            if self.parts.world is None and self._wants_to_stop:  # with several ranks the others would wait forever
                raise StopRequested

        return go_on

    def _run_with_room(self, look: Callable[[], Looked]) -> Looked:
        """Validate or sample; if that does not fit into memory next to the captured steps, drop them and try again."""
        try:
            with self._translate_losses():
                return look()
        except OutOfMemory as error:
            if not self.engine.graphs:
                raise
            error.__traceback__ = None  # its frames hold what did not fit
        self.engine.forget_graphs()  # their memory pool cannot be used by anything else
        return look()

    def _compute_scores(self, advance: Any) -> dict[str, float]:
        parts = self.parts
        parts.values.refresh()
        if parts.world is not None:
            parts.world.broadcast_(list(parts.model.buffers()))  # each rank has its own BatchNorm statistics
        found = validate(
            parts.workload, parts.model, parts.plan, parts.val_loader, pieces=self.engine.pieces, world=parts.world,
            call=None if parts.sharded is None else parts.sharded.call, advance=advance,
        )  # fmt: skip
        # Early stopping and plateau depend on the scores: ranks that round differently must not disagree.
        return found if parts.world is None else parts.world.broadcast_from_first(lambda: found)

    # --- saving and restoring ---

    def _stop(self, path: Path) -> NoReturn:
        """Raise Interrupted with the checkpoint of this moment and the command to resume."""
        self.checkpoints.wait()
        self._stop_for_callback()
        raise Interrupted(
            f"stopped by {self.interrupts.received.name if self.interrupts.received else 'a signal to another rank'} "
            f"after step {self.parts.step.attempted}; the run is saved in {path}",
            fix=suggest_resume(self.checkpoints.folder.parent, self.parts.world),
            exit_code=self.interrupts.exit_code,
        )

    def _stop_for_callback(self) -> None:
        """Raise if a callback has failed, on every rank with the message of rank 0, which calls them."""
        failure, world = self.journal.report.failure, self.parts.world
        what = failure.what if failure is not None else ""
        if world is not None:
            what = world.broadcast_from_first(lambda: what)
        if not what:
            return
        saved = self.checkpoints.list_all()[-1]
        raise CallbackFailed(
            what,
            why=f"training stopped after step {self.parts.step.attempted}; the run is saved in {saved}",
            fix=f"correct the function, then {suggest_resume(self.checkpoints.folder.parent, world)}",
        ) from failure

    def save(self, *, is_best: bool = False) -> Path:
        """Save a checkpoint of the whole run."""
        self.parts.guard.release_held()
        own = {
            "position": asdict(self.position),
            **self.engine.state_dict(),
            "validated_at": self.validated_at,
            "sampled_at": self.sampled_at,
            "train_metrics": self._sum_metrics(),
            # Before the journal: it may add records.
            "watch": self.watch.state_dict() if self.watch is not None else {},
            "journal": self.journal.state_dict(),
            "waiting": asdict(self.waiting),
            "is_best": is_best,
        }
        best = partial(self.checkpoints.mark_best, metric=self.parts.workload.metric, value=self.parts.stopping.best)
        return self.checkpoints.save(
            self.parts.step.attempted,
            capture_state(self.parts, own),
            on_saved=best if is_best else lambda path: None,
        )

    def restore(self, path: Path, checkpoint: Checkpoint, changes: Changes) -> None:
        """Continue exactly where the checkpoint was taken, except for changed settings."""
        state = checkpoint.state
        for note in restore_state(self.parts, checkpoint, changes):
            self.journal.notice(note)
        self._set_rate_factor()
        self.position = Position(**state["position"])
        self.engine.restore(state, is_same=not changes.touch(""))
        self.validated_at, self.sampled_at = int(state["validated_at"]), int(state["sampled_at"])
        # The stored metrics are sums over all ranks: only one rank may add them again.
        if self.parts.world is None or self.parts.world.is_first:
            self.train_metrics.load_state_dict(state["train_metrics"])
        self.journal.load_state_dict(state["journal"])
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"])
        self.journal.attempted = self.parts.step.attempted
        self.waiting = Waiting(**state["waiting"])
        if state["is_best"]:
            # The run may have been killed between writing the checkpoint and marking it.
            self.checkpoints.mark_best(path, self.parts.workload.metric, self.parts.stopping.best)


# --- guard.hold: keep windows that may have to run again after a fault, with the state before their steps ---


@dataclass(kw_only=True, slots=True)
class Position:
    """The position in the data: this many batches of this epoch have been used."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class HeldWindow:
    """One window as loaded, and the state before its step."""

    attempted: int
    window: list[dict[str, Tensor]]
    position: Position
    generators: dict[str, Any]
    metrics: Any  # the training metrics before the step


class HeldWindows:
    """The windows of the steps in flight."""

    def __init__(self, parts: Assembly) -> None:
        if not isinstance(parts.step, GuardedStep):
            raise ConfigError(
                f"guard.hold=true does not work with phases ({', '.join(parts.step.steps)})",
                why="phases commit one after another in an iteration, and only whole iterations can run again",
                fix="set guard.hold=false; a capsule then records by how many commits its weights are too new",
            )
        scaler = parts.step.scaler
        self.hold = Hold(parts.device, low=scaler.low if scaler.enabled else None)
        parts.step.hold = self.hold
        self._windows: deque[HeldWindow] = deque(maxlen=LAG + 1)

    def keep(self, attempted: int, window: list[dict[str, Tensor]], position: Position, metrics: Any) -> None:
        kept = HeldWindow(attempted, window, replace(position), read_generators(), copy.deepcopy(metrics))
        self._windows.append(kept)

    def find(self, attempted: int) -> HeldWindow:
        """Return the window of a step, as it was last run."""
        return next(kept for kept in reversed(self._windows) if kept.attempted == attempted)
