"""Measure the rows of a benchmark one after the other, and compare them: speedups, floor, loss, drift."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from halfstep import __version__
from halfstep.disk import write_atomically
from halfstep.errors import HardwareError, PrecisionError, TrainingStopped
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.ladder import explain_lack
from halfstep.precision.plan import Plan
from halfstep.prefetching import prefetch
from halfstep.step.facts import Facts, PhasedFacts
from halfstep.step.guard import Action
from halfstep.step.randomness import choose_algorithms, seed_everything
from halfstep_train.bench.measure_row import (
    Pause,
    Row,
    Schedule,
    describe_failure,
    find_other_users,
    make_unmeasured_row,
    measure_row,
)
from halfstep_train.bench.peers import MODULES, list_peers, parse_peer_name
from halfstep_train.bench.problem import (
    AfterStep,
    Batch,
    BenchMode,
    Problem,
    Runner,
    build_random_workload,
    compute_floor_ms,
    set_mode,
    set_precision,
)
from halfstep_train.config.dump import dump_values
from halfstep_train.config.foreign import flatten_keys
from halfstep_train.config.schema import RunConfig
from halfstep_train.config.statements import list_fields
from halfstep_train.models.initial_values import skip_initialisation
from halfstep_train.run.assemble import assemble, decide_plan
from halfstep_train.run.engine import Engine, PhasedEngine, RunRehearsal, make_engine
from halfstep_train.tune.choose import tune_plan
from halfstep_train.tune.trials import MemorySetting
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.workload import Workload

LOSS_BOUND = 0.1
"""Relative difference from the reference's loss after the same steps. Memorising random data is chaotic: bf16 and fp32
differ by a few percent."""
DRIFT_BOUND = 0.02
"""Relative change of the repeated row beyond its own spread."""

BASES = ("fp32", "tf32")
"""The precisions that speedups refer to."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """Which rows to measure, and for how long."""

    precisions: tuple[str, ...]
    modes: tuple[BenchMode, ...]
    against: tuple[str, ...] = ()
    """Peers: `plain`, or one variant of it, `plain:graphs`."""
    schedule: Schedule
    deadline: float | None = None
    """In `time.monotonic` seconds: no row starts after it."""

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


LATE = "no time was left to measure it"
STOPPED = "stopped by Ctrl-C"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """All rows, with warnings and references."""

    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    reference: str
    """The row whose loss the others are compared with."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """The row that speedups over fp32 and over TF32 refer to, if there is one."""
    repeated: Row | None = None
    """The first measured row, measured again at the end."""

    @property
    def is_stopped(self) -> bool:
        """True after Ctrl-C."""
        return any(row is not None and row.reason == STOPPED for row in (*self.rows, self.repeated))


def bench(problem: Problem, request: BenchRequest, hardware: Hardware, flops: int, tell: Tell) -> BenchResult:
    """Measure the requested rows; `hardware` has the matmul rates that turn `flops` into the floor."""
    busy = find_other_users(problem.device)
    rows: list[Row] = []
    first: Runner | None = None
    reason = ""

    def measure(runner: Runner, again: str = "") -> Row:
        nonlocal reason
        reason = reason or (LATE if request.is_late else "")
        if not reason:
            tell(f"{runner.name} {runner.variant} {runner.precision}{again}")
            try:
                return measure_runner(runner, problem, request)
            except KeyboardInterrupt:  # keep the rows measured so far
                reason = STOPPED
        return make_unmeasured_row(runner.name, runner.variant, runner.precision, reason)

    for runner in list_runners(problem, request, hardware):
        rows.append(runner if isinstance(runner, Row) else measure(runner))
        if first is None and not isinstance(runner, Row) and rows[-1].is_measured:
            first = runner
    # Did the machine change meanwhile?
    repeated = measure(first, " again") if first is not None and not reason and not request.is_late else None
    return conclude(rows, flops, hardware, busy=busy, repeated=repeated)


def conclude(
    rows: Sequence[Row], flops: int, hardware: Hardware, *, busy: str = "", repeated: Row | None = None
) -> BenchResult:
    """Add floor, speedups and warnings to the measured rows."""
    bases = {name: base for name in BASES if (base := find_baseline(rows, name))}

    def compare(row: Row) -> Row:
        speedups: dict[str, Any] = {f"speedup_{name}": base.ms / row.ms for name, base in bases.items()}
        return replace(row, floor_ms=compute_floor_ms(flops, hardware, row.precision), **speedups)

    rows = [compare(row) if row.is_measured else row for row in rows]
    # Eager fp32 if measured, else the first measured row.
    reference = find_baseline(rows, "fp32") or next((row for row in rows if row.is_measured), None)
    warnings = [busy, check_clocks(rows), *check_losses(rows, reference), check_drift(rows, repeated)]
    return BenchResult(
        rows=tuple(rows),
        warnings=tuple(filter(None, warnings)),
        reference=reference.label if reference else "",
        bases={name: base.label for name, base in bases.items()},
        repeated=repeated,
    )


def list_runners(problem: Problem, request: BenchRequest, hardware: Hardware) -> Iterator[Runner | Row]:
    """Yield a runner for each requested row, and an unmeasured row for each that cannot run."""
    unmeasured = replace(hardware, measurements=())  # so that formats that are slow here are timed too
    for precision in request.precisions:
        missing = explain_lack(precision, unmeasured)
        for mode in request.modes:
            if reason := missing or ("needs CUDA" if mode == "graph" and problem.device.type != "cuda" else ""):
                yield make_unmeasured_row("halfstep", mode, precision, reason)
            else:
                yield HalfstepRunner(problem, precision, mode, unmeasured)
        for peer in request.against:
            try:
                if missing:
                    raise HardwareError(missing)
                yield from list_peers([peer], problem, precision)
            except (HardwareError, PrecisionError) as error:
                name, _, variant = peer.partition(":")
                yield make_unmeasured_row(name, variant, precision, describe_failure(error))


def measure_runner(runner: Runner, problem: Problem, request: BenchRequest, pause: Pause | None = None) -> Row:
    """Measure one row; add the remarks of halfstep's own runner. `pause` is called once during the warm-up."""
    row = measure_row(runner, problem, request.schedule, pause=pause)
    if not isinstance(runner, HalfstepRunner) or not row.is_measured:
        return row
    return replace(row, remarks=tuple(runner.remarks))


def find_baseline(rows: Sequence[Row], precision: str) -> Row | None:
    """Return the row that speedups over this precision refer to: halfstep eager if measured."""
    # False sorts first: prefer halfstep's rows, and of these the eager one.
    there = [row for row in rows if row.precision == precision and row.is_measured]
    return min(there, key=lambda row: (row.name != "halfstep", row.variant != "eager"), default=None)


def check_losses(rows: Sequence[Row], reference: Row | None) -> list[str]:
    """Return a warning for each row whose loss differs from the reference."""
    if reference is None or reference.loss is None:
        return []
    return [
        f"{row.label}: loss {row.loss:.4g} after the same steps, {reference.label} has {reference.loss:.4g}: "
        f"they differ by more than {LOSS_BOUND:.0%}"
        for row in rows
        if row.loss is not None and not abs(row.loss - reference.loss) <= LOSS_BOUND * abs(reference.loss)
    ]


def check_clocks(rows: Sequence[Row]) -> str:
    """Return a warning that names the rows slowed by heat or a power cap."""
    held = [f"{row.label} ({', '.join(row.clock_limits)})" for row in rows if row.clock_limits]
    return f"the device's clocks were throttled in {'; '.join(held)}" if held else ""


def check_drift(rows: Sequence[Row], repeated: Row | None) -> str:
    """Return a warning if the first row took a different time when it was measured again."""
    first = next((row for row in rows if row.is_measured), None)
    if first is None or repeated is None:
        return ""
    if not repeated.is_measured:
        return f"{first.label} could not be measured again at the end: {repeated.reason}"
    change = repeated.ms / first.ms - 1
    if abs(repeated.ms - first.ms) <= max(first.spread_ms + repeated.spread_ms, DRIFT_BOUND * first.ms):
        return ""
    return f"the machine drifted: {first.label} took {change:+.1%} when it was measured again at the end"


class HalfstepRunner:
    """Trains the problem with halfstep in one mode."""

    name = "halfstep"

    def __init__(self, problem: Problem, precision: str, mode: BenchMode, hardware: Hardware) -> None:
        self.problem, self.precision, self.variant, self.hardware = problem, precision, str(mode), hardware
        self.config = set_mode(set_precision(problem.config, precision), mode)
        self.remarks: list[str] = []
        """Notices of the run while it trained."""
        self._plan: Plan | None = None
        """Made once: only the first training pays for the trials."""

    def train(self, steps: int, after_step: AfterStep) -> float:
        """Train this many steps as a run would; raise if they did not run in the requested mode."""
        seed_everything(self.config.train.seed)
        workload = self.build_workload()
        if self._plan is None:
            decided = decide_plan(self.config, workload, self.hardware)
            self._plan = tune_plan(decided, RunRehearsal(self.config, workload), lambda text: None)
        plan = self._plan
        self.remarks = [f"{plan.mode}: {plan.mode_reason}"] if self.variant == "auto" else []
        if plan.memory_reason:
            self.remarks += [f"{MemorySetting(**plan.memory)}: {plan.memory_reason}", *plan.memory_trials]
        with choose_algorithms(deterministic=self.config.train.deterministic):
            parts = assemble(self.config, workload, plan)
            assert parts.mode is not None, "the plan was tuned"
            metrics = workload.metrics()
            engine = make_engine(parts, parts.mode, lambda text, level: self.remarks.append(text), metrics.update)
            batches = prefetch(itertools.repeat(self.problem.host_batch, steps), self.problem.device)
            loss = self._train_batches(engine, batches, after_step)
        if engine.mode != plan.mode or self.variant not in ("auto", engine.mode):
            # Raise, because a row must not show the time of another mode.
            raise HardwareError(f"could not run as {plan.mode}: {'; '.join(self.remarks) or f'ran as {engine.mode}'}")
        return loss

    def build_workload(self) -> Workload:
        """Build the workload as a run would, with the problem's seeded weights."""
        with skip_initialisation():
            workload = build_random_workload(self.config)
        # All phases begin at once: most steps of a run have all of them active.
        phases = tuple(replace(phase, from_step=phase.from_step % phase.every) for phase in workload.phases)
        return replace(workload, model=self.problem.make_model(), phases=phases)

    def _train_batches(self, engine: Engine | PhasedEngine, batches: Iterable[Batch], after_step: AfterStep) -> float:
        facts: Facts | PhasedFacts | None = None
        for batch in batches:
            facts = engine([batch])
            verdict = engine.parts.guard.watch(facts)
            if verdict.action is not Action.CONTINUE:
                raise TrainingStopped(f"training stopped: {verdict.reason}", fix=verdict.fix)
            after_step()
        assert facts is not None, "at least one step is asked for"
        return facts.read().loss


# --- the record: plain JSON with the rows and everything they depend on ---

VERSION = 1
"""Version of the file's layout."""

Record = dict[str, Any]


def describe_circumstances(
    problem: Problem, request: BenchRequest, hardware: Hardware, flops: int, command: str
) -> Record:
    """Return everything the rows depend on, known before the first one is measured."""
    return {
        "bench": VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": hardware.name,
        "versions": collect_versions(hardware, request.against),
        "problem": describe_problem(problem, flops),
        "unit": asdict(problem.unit),
        "sample_size": KINDS.of(problem.config.workload).describe_sample_size(problem.config),
        "steps": request.schedule.steps,
        "window_steps": request.schedule.window,
    }


def summarise_results(benched: BenchResult) -> Record:
    """Return the rows, their references and warnings."""
    return {
        "loss_reference": benched.reference,
        "loss_bound": LOSS_BOUND,
        "speedup_bases": dict(benched.bases),
        "rows": [row.to_dict() for row in benched.rows],
        "repeated": benched.repeated.to_dict() if benched.repeated else None,
        "warnings": list(benched.warnings),
        "stopped": benched.is_stopped,
    }


def describe_problem(problem: Problem, flops: int) -> dict[str, Any]:
    """Return what is trained: the facts of the title, and every setting."""
    config = problem.config
    threads = {"threads": torch.get_num_threads()} if problem.device.type == "cpu" else {}
    return {
        "workload": config.workload,
        "batch_size": config.train.batch_size,
        "image_size": config.data.image_size,
        "optimizer": config.optimizer.name,
        "clip_norm": config.train.clip_norm,
        "parameters": sum(parameter.numel() for parameter in problem.make_model().parameters()),
        "reduced": find_reduced_settings(config),
        "flops": flops,
        "config": dump_values(config),
        **threads,
    }


def find_reduced_settings(config: RunConfig) -> dict[str, Any]:
    """Return the model settings in which the demo's network is smaller than the workload's default."""
    fields, here = list_fields(type(config)), flatten_keys(config.model_dump(mode="json"))
    found = {}
    for path, value in type(config).demo.items():
        # Through JSON, which turns tuples into lists, so that equal values compare equal.
        small, full = json.loads(json.dumps([value, fields[path].default]))
        if path.startswith("model.") and here[path] == small != full:
            found[path] = small
    return found


def collect_versions(hardware: Hardware, against: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of everything that affects the speed of a step."""
    found: dict[str, str | None] = {
        "halfstep": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": hardware.driver,
        "python": platform.python_version(),
    }
    peers = sorted({parse_peer_name(peer) for peer in against} & MODULES.keys())
    return found | {name: importlib.metadata.version(name) for name in peers}


def save_record(found: Record, path: Path) -> None:
    """Write the record atomically."""
    write_atomically(path, json.dumps(found, indent=2) + "\n", follows_links=True)
