"""Progress bars, events and metric records of a run, from facts that the guard has already read from the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.errors import format_bytes, format_count, format_duration
from halfstep.hardware.clock import Clock, Stopwatch
from halfstep.hardware.gpus import find_known
from halfstep.hardware.memory import get_peak_memory_bytes
from halfstep.precision.plan import Plan
from halfstep.step.facts import Facts, PhasedFacts, Reading, load_reading, split_phases
from halfstep.step.guard import Guard, Verdict
from halfstep_train.data.loader import NamedSamples, implements
from halfstep_train.report.run_report import Bar, Level, RunReport
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.monitor import Monitor
from halfstep_train.tune.modes import UNCAPTURED, Mode
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import Unit, load_part

METRIC_EVERY_S = 2.0
"""Computing the training metric waits for the device, so it is refreshed by time, not at every step."""

COMPILING = "compiling the step for batches of this shape: only this step takes longer"


@dataclass(slots=True)
class PhaseProgress:
    """The newest step of one phase, and the losses of this epoch's committed steps."""

    newest: Reading | None = None
    loss_sum: float = 0.0
    num_losses: int = 0

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.num_losses if self.num_losses else math.nan


PACE_MEMORY_S = 60.0
"""Time constant of the mean over steps: a step this long ago has a weight of 1/e."""
ANNOUNCE_AFTER_S, ANNOUNCED_FROM_S = 20.0, 60.0
"""Training time after which the duration of a run is announced, if it is longer than the second."""


class Pace:
    """Estimate the time that a run still takes, from its recent steps and the pauses between passes so far."""

    def __init__(self, total_steps: int, *, clock: Clock = time.perf_counter) -> None:
        self.total_steps = total_steps
        self._clock = Stopwatch(clock=clock)
        self._steps_s = self._num_steps = 0.0  # both decay, so their ratio follows a change of speed
        self._pauses_s, self._num_before_pause, self._num_all = 0.0, 0, 0
        self.trained_s = 0.0

    def begin_training(self) -> None:
        """End a pause: validation, checkpoint, samples."""
        paused_s = self._clock.restart()
        if self._num_all:
            self._pauses_s += paused_s
            self._num_before_pause = self._num_all

    def count_step(self, *, counts: bool) -> None:
        """Count one step; the first step and those that compile say nothing about the ones to come."""
        lap_s = self._clock.restart()
        self._num_all += 1
        if counts and self._num_all > 1:
            kept = math.exp(-lap_s / PACE_MEMORY_S)
            self._steps_s = self._steps_s * kept + lap_s
            self._num_steps = self._num_steps * kept + 1
            self.trained_s += lap_s

    def estimate_left_s(self, attempted: int) -> float | None:
        """Return the seconds left; None until two steps have run."""
        if not self._num_steps or not self.total_steps:
            return None
        a_step_s = self._steps_s / self._num_steps
        if self._num_before_pause:
            a_step_s += self._pauses_s / self._num_before_pause
        return max(self.total_steps - attempted, 0) * a_step_s


class Journal:
    """Record what a run does: bars, notices and metrics.jsonl. Nothing in it waits for the device."""

    def __init__(self, report: RunReport, parts: Assembly) -> None:
        workload, train = parts.workload, parts.train
        self.report, self.plan, self.device, self.metric = report, parts.plan, parts.device, workload.metric
        self.stopping = parts.stopping
        # At least ten records per run, so that short runs have curves too.
        every = max(1, min(10, parts.total_steps // 10))
        self.report_every = every if train.report_every == "auto" else train.report_every
        self.epochs = math.ceil(parts.total_steps / math.ceil(len(parts.train_loader) / train.accumulate))
        self.name, self.unit, self._peak_flops = parts.name, parts.unit, find_peak_flops(parts.plan)
        self._low_scale = parts.step.scaler.low
        self._named = workload.train_samples if implements(workload.train_samples, NamedSamples) else None
        self.attempted = 0
        self.num_records = 0
        self.latest: Reading | None = None
        self.num_skipped = 0
        self.phases = tuple(own.phase.name for own in parts.phases)
        self.seen = {name: PhaseProgress() for name in self.phases or ("",)}
        """By phase; a run without phases has one entry with an empty name."""
        self.train_metric: Callable[[], dict[str, float]] = dict
        self.gpu: Callable[[], str] = str  # the GPU's utilisation in short; empty if unknown
        self._epoch, self._samples_per_s, self._waiting = 0, 0.0, Waiting()
        self._bar: Bar | None = None
        self._has_record = False  # whether this bar has shown a record
        self._is_due = False  # whether a record was written that the bar does not show yet
        self.pace, self._is_announced = Pace(parts.total_steps), False
        self._is_compiling = False
        self._shown_metric: str | None = None  # None: not computed in this pass
        self._since_metric = Stopwatch()
        self._clock, self._before_s = Stopwatch(), 0.0
        parts.guard.observers.append(self.observe)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds of the whole run, including those before it was resumed."""
        return self._before_s + self._clock.elapsed_s

    # --- one step ---

    def observe(self, facts: Facts | PhasedFacts | None, reading: Reading) -> None:
        """Record what the guard has read: the step of two steps ago, and at the end of an epoch also the last ones."""
        del facts  # the reading holds what the host may know
        self.latest = reading
        for name, part in split_phases(reading).items():
            self.seen[name].newest = part
            self._report_reading(part, name)
        step = reading.attempted + 1  # `attempted` counts the steps before this one
        # Before the first regular record also steps 1, 2, 4, ..., so that bar and `top` show progress from the start.
        is_early = step < self.report_every and step.bit_count() == 1
        if is_early or step % self.report_every == 0:
            self._record(reading)

    def _report_reading(self, reading: Reading, phase: str) -> None:
        """Print and record what went wrong in a step, and add up the losses of committed ones."""
        step = f"step {reading.attempted}" + (f" of {phase}" if phase else "")
        if reading.is_spike and not reading.is_bad:
            self._record_event("spike", reading, f"{step}: the loss spiked to {reading.loss:.4g}", "warning", phase)
        if not reading.is_bad:
            self.seen[phase].loss_sum += reading.loss
            self.seen[phase].num_losses += 1
            return
        self.num_skipped += 1
        if self.plan.needs_loss_scaling and not reading.is_spike and not reading.is_empty:
            is_low = reading.scale <= self._low_scale
            which = "a low scale: these values may overflow at any scale" if is_low else "routine in fp16"
            text = f"{step}: overflow at loss scale {reading.scale:g}, step skipped ({which})"
            self._record_event("overflow", reading, text, "warning" if is_low else "info", phase)
        else:
            text = f"{step} skipped: {reading.reason}; samples {self._format_samples(reading)}"
            self._record_event("skipped", reading, text, "warning", phase)

    def record_step(self, attempted: int, samples_per_s: float, waiting: Waiting) -> None:
        """Show one finished step in the progress bar."""
        self._samples_per_s, self._waiting, self.attempted = samples_per_s, waiting, attempted
        self.pace.count_step(counts=not self._is_compiling)
        if self._bar is not None:
            self._advance(self._bar)
        if not self._is_announced and self.pace.trained_s >= ANNOUNCE_AFTER_S:
            # Once: a log file would not show how long the run takes before its first epoch ends.
            self._is_announced = True
            if (self.pace.estimate_left_s(attempted) or 0.0) > ANNOUNCED_FROM_S:
                self.report.notice(self.describe_progress())

    def describe_left(self) -> str:
        """Return `about 1 h 10 min left`; empty while unknown, and at the end."""
        left_s = self.pace.estimate_left_s(self.attempted)
        return f"about {format_duration(left_s)} left" if left_s and left_s >= 0.5 else ""

    def describe_progress(self) -> str:
        """Return position and time left, estimated from the whole run until this start has its own pace."""
        left_s = self.elapsed_s / self.attempted * (self.pace.total_steps - self.attempted) if self.attempted else 0.0
        left = self.describe_left() or (f"about {format_duration(left_s)} left" if left_s > 0 else "")
        return ", ".join(filter(None, [f"step {self.attempted:,} of {self.pace.total_steps:,}", left]))

    def _format_whole(self) -> tuple[str, str]:
        """Return position and time left of the whole run, short enough for a bar."""
        return f"step {self.attempted:,}/{self.pace.total_steps:,}", self.describe_left().removeprefix("about ")

    def _record(self, r: Reading) -> None:
        """Write the record of one step to metrics.jsonl."""
        # The first phase represents the run.
        first = next(iter(self.seen.values())).newest or r
        # The newest numbers of each phase may be from earlier steps.
        shown, read = ("loss", "grad_norm", "lr", "committed"), [(name, self.seen[name].newest) for name in self.phases]
        phases = {f"{key}/{name}": getattr(one, key) for name, one in read if one is not None for key in shown}
        phases |= {f"epoch_loss/{name}": self.seen[name].mean_loss for name in self.phases}
        left_s = self.pace.estimate_left_s(self.attempted)
        used = compute_utilisation(self.unit, self._samples_per_s, self._peak_flops)
        self._is_due = True
        self.log(
            {
                "kind": "train",
                "step": r.attempted + 1,
                "epoch": (self._epoch if r.epoch is None else r.epoch) + 1,
                "loss": first.loss,
                "epoch_loss": next(iter(self.seen.values())).mean_loss,
                "grad_norm": first.grad_norm,
                "lr": first.lr,
                **phases,
                "scale": r.scale,
                "committed": r.committed,
                "skipped": self.num_skipped,
                "samples_per_s": round(self._samples_per_s, 2),
                **self.unit.compute_rates(self._samples_per_s),
                **({"mfu": round(used, 4)} if used else {}),
                "total_steps": self.pace.total_steps,
                **({} if left_s is None else {"left_s": round(left_s, 1)}),
                "memory_bytes": get_peak_memory_bytes(self.device),
            }
        )

    def _advance(self, bar: Bar) -> None:
        # With each record, so that bar, metrics.jsonl and `top` show the same numbers; every step until the first one.
        is_wanted = self._is_due or not self._has_record
        is_read = any(one.num_losses for one in self.seen.values())  # a step of this epoch
        fields = self._format_fields() if is_wanted and is_read else None
        bar.advance(fields, begins_pace=self._is_compiling)
        self._has_record |= self._is_due and fields is not None
        self._is_due &= fields is None
        self._is_compiling = False

    def finish_bar(self) -> None:
        """Show the last step that was read: a finished bar must not show the numbers of an earlier one."""
        if self._bar is not None and any(one.num_losses for one in self.seen.values()):
            self._shown_metric, self._is_due = None, False
            self._bar.show(self._format_fields())

    def _format_fields(self) -> dict[str, str]:
        """Return the fields next to the progress bar, most important first."""
        r = self.latest
        assert r is not None
        if self._since_metric.elapsed_s > METRIC_EVERY_S or self._shown_metric is None:
            found = self.train_metric()
            self._shown_metric = f"{found[self.metric]:.3f}" if self.metric in found else ""
            self._since_metric.restart()
        metric = {self.metric: self._shown_metric} if self._shown_metric else {}
        means = {name: one.mean_loss for name, one in self.seen.items() if one.num_losses}
        losses = {f"mean loss {name}".rstrip(): f"{mean:.4f}" for name, mean in means.items()}
        fields = {**losses, **metric, "last loss": f"{r.loss:.4f}", "lr": f"{r.lr:.1e}"}
        if self._samples_per_s:
            fields["speed"] = self.unit.format_rate(self._samples_per_s)
        if used := compute_utilisation(self.unit, self._samples_per_s, self._peak_flops):
            fields["mfu"] = f"{used:.0%}"
        fields |= self._format_waits()
        if gpu := self.gpu():
            fields["gpu"] = gpu
        fields["precision"] = self._precision
        memory = get_peak_memory_bytes(self.device)
        return fields | ({"memory": format_bytes(memory)} if memory else {})

    def _format_waits(self) -> dict[str, str]:
        """Return the share of time spent waiting for data, if it is worth reporting."""
        return {"data": f"{self._waiting.share:.0%}"} if self._waiting.share > WORTH_SAYING else {}

    @property
    def _precision(self) -> str:
        is_mixed = self.plan.granted in ("bf16", "fp16", "fp8")
        return f"{'mp ' if is_mixed else ''}{self.plan.granted}{' (simulated)' if self.plan.simulated else ''}"

    def _record_event(self, event: str, reading: Reading, text: str, level: Level, phase: str) -> None:
        """Print a notice about a step and write it to metrics.jsonl as an event."""
        self.report.notice(text, level)
        self.log(
            {
                "kind": "event",
                "step": self.attempted,
                "event": event,
                "bad_step": reading.attempted,
                **({"phase": phase} if phase else {}),
                "reason": reading.reason or "loss spike",
                "loss": reading.loss,
                "grad_norm": reading.grad_norm,
                "scale": reading.scale,
                "sample_ids": list(reading.sample_ids),
                "files": self._list_files(reading),
            }  # fmt: skip
        )

    def list_latest_files(self) -> str:
        """Return the files of the newest step; empty if samples are not files."""
        return _format_few(self._list_files(self.latest)) if self.latest is not None else ""

    def _list_files(self, reading: Reading) -> list[str]:
        if self._named is None:
            return []
        return [name for index in reading.sample_ids if (name := self._named.name_of(index))]

    def _format_samples(self, reading: Reading) -> str:
        files = self._list_files(reading)
        numbers = _format_few(reading.sample_ids) or "unknown"
        return f"{numbers} ({_format_few(files)})" if files else numbers

    def log(self, record: Mapping[str, object]) -> None:
        self.report.log(record)
        self.num_records += 1

    # --- phases ---

    @contextmanager
    def show_training(self, epoch: int, num_windows: int) -> Iterator[None]:
        """Show a progress bar for the training steps of an epoch."""
        label = f"Epoch {epoch + 1}/{self.epochs}"
        whole = self._format_whole if self.pace.total_steps else None
        self.pace.begin_training()
        with self.report.show_phase(label, num_windows, whole=whole, is_summarised=True) as bar:
            self._epoch, self._bar, self._has_record, self._shown_metric = epoch, bar, False, None
            bar.show({"precision": self._precision})
            try:
                yield
            finally:
                self._bar = None

    @contextmanager
    def show_validation(self, epoch: int, num_batches: int) -> Iterator[Callable[[], None]]:
        """Show a progress bar for a validation; yield the function that advances it."""
        label = f"Epoch {epoch + 1}/{self.epochs} [Val]"
        with self.report.show_phase(label, num_batches, is_summarised=True) as bar:
            yield lambda: bar.advance()

    def record_epoch(
        self, epoch: int, attempted: int, train: Mapping[str, float], val: Mapping[str, float], *, is_best: bool = False
    ) -> None:
        """Print and record training and, if `val` is not empty, validation; start the next epoch's mean losses."""
        # The first phase represents the run.
        mean_loss = next(iter(self.seen.values())).mean_loss
        names = [name for name in val or train if name != "loss" and "/" not in name]
        rows = [("loss", f"{mean_loss:.4f}", _format_score(val, "loss"))]
        rows += [(f"loss {name}", f"{self.seen[name].mean_loss:.4f}", "") for name in self.phases]
        rows += [(name, _format_score(train, name), _format_score(val, name)) for name in names]
        label = f"Epoch {epoch + 1}/{self.epochs}"
        lines = [self._format_training_line(label, mean_loss, train)]
        if val:
            lines.append(self._format_validation_line(label, val, is_best=is_best))
        self.report.show_epoch(label, lines, rows)
        if val and (hint := find_hint(self.name, val)):
            self.report.notice(f"hint: {hint}")
        trained = {f"train_{name}": train[name] for name in names if name in train} | {"train_loss": mean_loss}
        trained |= {f"train_loss/{name}": self.seen[name].mean_loss for name in self.phases}
        kind = "val" if val else "epoch"
        place = {"kind": kind, "step": attempted, "epoch": epoch + 1, "elapsed_s": round(self.elapsed_s, 3)}
        self.log({**place, **val, **trained, **({"best": is_best} if val else {})})
        for seen in self.seen.values():
            seen.loss_sum, seen.num_losses = 0.0, 0

    def _format_training_line(self, label: str, mean_loss: float, train: Mapping[str, float]) -> str:
        texts = [f"mean loss {mean_loss:.4f}"]
        if self.metric != "loss" and self.metric in train:
            texts.append(f"{self.metric} {train[self.metric]:.4f}")
        if self._samples_per_s:
            texts.append(self.unit.format_rate(self._samples_per_s))
        texts += [f"{name} {wait}" for name, wait in self._format_waits().items()]
        return f"{label} train: {', '.join(texts)}"

    def _format_validation_line(self, label: str, val: Mapping[str, float], *, is_best: bool) -> str:
        stopping = self.stopping
        best = " (best)" if is_best else f" (best {stopping.best:.4f} in epoch {stopping.best_epoch + 1})"
        texts = [f"loss {val['loss']:.4f}"] if self.metric != "loss" else []
        texts.append(f"{self.metric} {val[self.metric]:.4f}{best if math.isfinite(stopping.best) else ''}")
        return f"{label} val:   {', '.join(filter(None, [*texts, self.describe_left()]))}"

    # --- rare events ---

    def notice(self, text: str, level: Level = "info") -> None:
        self.report.notice(text, level)

    def exclude_compiling(self) -> None:
        """Announce that the next step compiles, and exclude it from the bar's rate."""
        self.report.notice(COMPILING)
        self._is_compiling = True

    def record_early_stop(self, when: str) -> None:
        """Print why the run ends early."""
        stopping = self.stopping
        best = f"better {self.metric} than {stopping.best:.4f} (epoch {stopping.best_epoch + 1})"
        best = best if math.isfinite(stopping.best) else f"finite {self.metric}"
        self.report.notice(f"early stopping after {when}: no {best} in {stopping.num_since} validations")

    def record_rollback(self, text: str, verdict: Verdict, committed: int, guard: Guard) -> None:
        """Print and record a rollback."""
        self.report.notice(f"{text}, rollback {guard.num_rollbacks} of {guard.options.max_rollbacks}", "warning")
        self.log({"kind": "event", "step": self.attempted, "event": "rollback", "reason": verdict.reason,
                         "to_committed": committed, "rate_factor": guard.rate_factor})  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {
            "latest": asdict(self.latest) if self.latest is not None else None,
            "num_records": self.num_records,
            "seen": {name: asdict(one) for name, one in self.seen.items()},
            "num_skipped": self.num_skipped,
            "elapsed_s": self.elapsed_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.latest = state["latest"] and load_reading(state["latest"])
        self.num_records = int(state["num_records"])
        for name, own in state["seen"].items():
            newest = own["newest"] and load_reading(own["newest"])
            self.seen[name] = PhaseProgress(newest, float(own["loss_sum"]), int(own["num_losses"]))
        self.num_skipped = int(state["num_skipped"])
        self._clock, self._before_s = Stopwatch(), float(state["elapsed_s"])


def _format_score(scores: Mapping[str, float], name: str) -> str:
    return f"{scores[name]:.4f}" if name in scores else ""


def _format_few(things: Sequence[int] | Sequence[str], most: int = 8) -> str:
    return ", ".join(str(thing) for thing in things[:most]) + (", ..." if len(things) > most else "")


def find_hint(workload: str, scores: Mapping[str, float]) -> str:
    """Return the family's hint about validation scores, or an empty string."""
    hint, is_finite = KINDS.of(workload).hint, math.isfinite(scores.get("loss", 0.0))
    # The scores of a diverged model mean nothing.
    return str(load_part(hint)(scores)) if hint is not None and is_finite else ""


# --- throughput, and what a run waits for: data or the host ---


WORTH_SAYING = 0.1  # share of the time above which waiting is reported


@dataclass(kw_only=True, slots=True)
class Waiting:
    """Host seconds of training, and the part of them spent waiting for batches."""

    trained_s: float = 0.0
    waited_s: float = 0.0
    start_s: float = 0.0
    """The part of `trained_s` until steps were compiled and captured, of every start of the run."""
    start_waited_s: float = 0.0
    """The part of `waited_s` in that time."""

    def add(self, trained_s: float, waited_s: float) -> None:
        self.trained_s += trained_s
        self.waited_s += waited_s

    @property
    def share(self) -> float:
        return self.waited_s / self.trained_s if self.trained_s else 0.0


def suggest_faster_data(num_workers: int, cores: int) -> str:
    """Suggest a setting that speeds up data loading: more workers if cores are free, else less work for them."""
    if num_workers < cores:
        return f"data.num_workers={cores} (it is {num_workers}, and this machine has {format_count(cores, 'core')})"
    return f"more cores, or smaller or already decoded samples (data.num_workers={num_workers} uses all cores)"


# --- model FLOPs utilisation (MFU, Chowdhery et al. 2022) ---
# The model's FLOP/s divided by the device's peak in the format of matmuls (the vendor's number, dense, with fp32
# accumulation). Recomputed operations are not counted, so recomputation lowers the utilisation.

PUBLISHED_AS = {"fp8": "fp8_e4m3"}


def find_peak_flops(plan: Plan) -> float | None:
    """Return the published peak FLOP/s of the plan's device in its format; None if unknown."""
    known = find_known(plan.device_name) if plan.device.startswith("cuda") else None
    rates = known.facts.published_tflops if known is not None else {}
    return rates.get(PUBLISHED_AS.get(plan.compute, plan.compute), 0.0) * 1e12 or None


def compute_utilisation(unit: Unit, samples_per_s: float, peak: float | None) -> float | None:
    return samples_per_s * unit.flops_per_sample / peak if peak and unit.flops_per_sample else None


# --- how busy the GPU was ---

START_STEPS: dict[Mode, int] = {"eager": 1, "compile": 2, "graph": UNCAPTURED + 1}
"""First steps by mode, in which kernels are chosen, compiled and captured."""
BUSY = 80.0  # percent below which the summary gives a reason
SHORTEST_S = 10.0  # below this NVML's averages are meaningless


def describe_gpu_use(monitor: Monitor, waiting: Waiting, elapsed_s: float, mode: Mode) -> str:
    """Return the summary's line on GPU utilisation; empty if the device does not report it."""
    if not monitor.is_able:
        return ""
    if monitor.trouble:
        return f"recording stopped early: {monitor.trouble}"
    return format_gpu_use(monitor.utilization, waiting, elapsed_s, mode)


def format_gpu_use(utilization: float | None, waiting: Waiting, elapsed_s: float, mode: str) -> str:
    """Return the utilisation after the first steps, in which code is compiled and captured."""
    steady_s = elapsed_s - waiting.start_s
    if utilization is None or steady_s < SHORTEST_S:
        return "not measurable: the run was too short"
    after = f" after a start of {waiting.start_s:.0f} s" if waiting.start_s >= SHORTEST_S else ""
    shown = f"{utilization:.0f}% busy{after}"
    if utilization >= BUSY:
        return shown
    return f"{shown}, under {BUSY:.0f}%: {explain_idle(utilization, waiting, elapsed_s, mode)}"


def explain_idle(utilization: float, waiting: Waiting, elapsed_s: float, mode: str) -> str:
    """Return what the GPU waited for most after the first steps: data, work between steps, or the host."""
    # All three are shares of the time after the start; what none of the first two explains is the host's.
    steady_s = elapsed_s - waiting.start_s
    data = (waiting.waited_s - waiting.start_waited_s) / steady_s
    between = max(elapsed_s - waiting.trained_s, 0.0) / steady_s
    host = max(1 - utilization / 100 - data - between, 0.0)
    faster = "a larger batch" if mode == "graph" else "a larger batch, or train.fast=graph"
    reasons = {
        f"{data:.0%} of the time it waited for data": data,
        f"{between:.0%} of the time went to validation and checkpoints": between,
        f"{host:.0%} of the time it waited for the host (small steps: {faster})": host,
    }
    return max(reasons, key=lambda reason: reasons[reason])
