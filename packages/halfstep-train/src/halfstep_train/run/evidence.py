"""Record what the steps of a run do: the ledger of formats, the watch over ranges, and capsules of faults.

The ledger observes the first step in each mode that the run reaches, then steps at regular intervals.
Eager and compiled code are observed in an extra step whose effects are undone. For a captured step the profiler records
the kernels of a replay, which is a step of the run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.disk import write_atomically
from halfstep.distributed.world import Share
from halfstep.errors import CheckpointError, HardwareError, summarise_error
from halfstep.evidence import capsule as capsules
from halfstep.evidence.attempts import Subject, refuse_another_model
from halfstep.evidence.capsule import Capsule, to_strict_json
from halfstep.evidence.compiled_code import read_graphs, record_graphs
from halfstep.evidence.forecast import WatchWarning
from halfstep.evidence.module_hooks import LOGITS
from halfstep.evidence.precision_ledger import (
    Event,
    Ledger,
    Weights,
    make_captured_ledger,
    make_ledger,
    observe,
    split_replays,
    undo_after,
)
from halfstep.evidence.recorder import CapsuleContext, Recorder
from halfstep.evidence.replay import Replayed
from halfstep.evidence.replay import replay as replayed
from halfstep.evidence.updates import Update
from halfstep.evidence.watch import UPDATE, Observation, Watch, WatchRow
from halfstep.formats import FP16
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide, decide_again
from halfstep.precision.plan import Plan
from halfstep.step.batches import count_samples
from halfstep.step.facts import Facts, PhasedFacts, Reading
from halfstep.step.step import GuardedStep, LossFn
from halfstep_train.config.schema import GuardConfig, PrecisionConfig
from halfstep_train.data.loader import Loader, NamedSamples, implements
from halfstep_train.kernels.fast_forms import allow_chains, force
from halfstep_train.run.assemble import AssembledPhase, Assembly, assemble, build_workload
from halfstep_train.run.checkpoint import load as load_checkpoint
from halfstep_train.run.engine import Engine, Idle, PhasedEngine, prepare_window
from halfstep_train.run.folder import RunFolder, RunSource, load_stored
from halfstep_train.run.frozen_modules import get_modules, list_identities, match_stored
from halfstep_train.run.journal import Journal
from halfstep_train.run.memory.out_of_memory import OutOfMemory, explain_model_too_large, split_window
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.tune.modes import Batch, Notice, Region
from halfstep_train.workloads.base.workload import Workload

AnyEngine = Engine | PhasedEngine
CAPTURED = "captured"


def list_engines(engine: AnyEngine) -> Iterator[tuple[str, Engine]]:
    """Yield the engine of each phase with its name; a run without phases has an empty name."""
    if isinstance(engine, PhasedEngine):
        yield from engine.engines.items()
    else:
        yield "", engine


def observe_ledgers(
    parts: Assembly, engine: AnyEngine, window: list[Batch], replay: Sequence[Event] = ()
) -> list[Ledger]:
    """Return the ledgers of each phase for this window; the run's state is unchanged.

    One ledger is of the eager code, one of the compiled code if steps run compiled, and one of the captured step if one
    was replayed.
    """
    iteration = parts.step.attempted - 1
    due = {own.phase.name for own in parts.phases if own.phase.is_due(iteration)} or {""}
    captured = [name for name, own in list_engines(engine) if name in due and own.mode == "graph"]
    # The kernels of each replayed phase; they come in the order of the phases.
    found, replayed = [], dict(zip(captured, split_replays(replay), strict=False))
    for phase, own in list_engines(engine):
        prepared = split_window(prepare_window(parts, window), own.pieces)
        # On a GPU in a fresh thread: cuDNN keeps its choice of algorithms per thread, and this is not a step.
        work = partial(_observe_one, parts, own, prepared, phase)
        ledgers = run_in_fresh_thread(work, parts.device) if parts.device.type == "cuda" else work()
        found += ledgers
        if phase in replayed:
            found.append(make_captured_ledger(ledgers[-1], replayed[phase], _name_mode("captured", phase)))
    return found


def _name_mode(mode: str, phase: str) -> str:
    return f"{mode}, {phase}" if phase else mode


def _observe_one(parts: Assembly, engine: Engine, prepared: list[Batch], phase: str) -> list[Ledger]:
    """Return the ledgers of one engine's code."""
    step, frozen = engine.guarded, get_modules(parts.workload.frozen)
    observer, weights = observe(step, drop_outputs(engine.parts.eager), prepared, frozen)
    weights.states = Weights.collect(step.model, step.optimizers).states  # as they are after the commit
    to_ledger = partial(
        make_ledger, parts.plan, model=step.model, weights=weights, frozen=frozen, step=parts.step.attempted
    )
    eager = to_ledger(observer.seen, mode=_name_mode("eager", phase))
    if engine.mode == "eager" or parts.workload.blocks:
        return [eager]  # blocks are compiled once to save minutes, which tracing the whole model would cost
    compiled, graphs = record_graphs(engine.parts.eager)
    with undo_after(step), allow_chains(on=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the compiler, about code that is traced for the ledger only
        step.compute(drop_outputs(compiled), prepared)
    seen = read_graphs(graphs, step.model, frozen, observer.seen)
    notes = _describe_limits(engine, sum(direction == "forward" for direction, _ in graphs))
    return [eager, to_ledger(seen, mode=_name_mode("compiled", phase), notes=notes)]


def _describe_limits(engine: Engine, num_graphs: int) -> list[str]:
    """Return notes on what the ledger of compiled code cannot show."""
    notes = []
    if num_graphs > 1:
        notes.append(f"{num_graphs - 1} graph breaks: code between the graphs appears only in the eager rows")
    if engine.mode == "graph":
        notes.append("layers that run as chains of halfstep's kernels are shown as torch's layers")
    return notes


def drop_outputs(region: Region) -> LossFn:
    """Return the region as a loss function without the model's outputs."""

    def loss(batch: Any) -> tuple[Tensor, Tensor | float]:
        return region(batch)[:2]  # loss and weight

    return loss


def to_document(ledgers: list[Ledger]) -> dict[str, Any]:
    """Return the content of report/ledger.json: the rows of every mode."""
    each = [ledger.to_json() for ledger in ledgers]
    summary = " | ".join(f"{one.mode}: {one.summary}" for one in ledgers)
    return {
        "summary": summary,
        "rows": [row for one in each for row in one["rows"]],
        "findings": [{"mode": one["mode"], **found} for one in each for found in one["findings"]],
        "observed": [{key: one[key] for key in ("mode", "step", "summary", "notes")} for one in each],
        "kernels": [{"mode": one["mode"], **kernel} for one in each for kernel in one["kernels"]],
    }


class RunLedger:
    """Observe the steps of a run when they are due, and write report/ledger.json."""

    def __init__(self, parts: Assembly, report: Path, notice: Notice, *, writes: bool) -> None:
        self.parts, self.file, self.notice, self.writes = parts, report / "ledger.json", notice, writes
        """All ranks run the extra step, because it is collective; rank 0 writes."""
        self.every = 0 if parts.log.ledger is True else parts.log.ledger
        self.seen: dict[str, Ledger] = {}
        self._modes: set[str] = set()
        self._replay: Recording | None = None

    def wrap_engine(self, engine: AnyEngine) -> AbstractContextManager[object]:
        """Return the context of a step: it records a replay that is due to be observed."""
        # Profile only the replay that will be observed: the profiler is slow.
        is_due = bool(engine.graphs) and self._is_due(CAPTURED, self.parts.step.attempted + 1)
        self._replay = Recording(self.parts.device) if is_due else None
        return self._replay or nullcontext()

    def look(self, engine: AnyEngine, window: list[Batch]) -> None:
        """Observe the step of this window; a failure is a warning, and the run continues."""
        mode, attempted = CAPTURED if self._replay else engine.mode, self.parts.step.attempted
        if not self._is_due(mode, attempted):
            return
        self._modes.add(mode)
        try:
            self._keep(observe_ledgers(self.parts, engine, window, self._replay.events() if self._replay else ()))
        except Exception as error:  # all effects are undone, so the run can continue without this observation
            self.notice(f"the ledger could not observe step {attempted}: {summarise_error(error)}", "warning")

    def _is_due(self, mode: str, attempted: int) -> bool:
        return mode not in self._modes or bool(self.every) and attempted % self.every == 0

    def _keep(self, found: list[Ledger]) -> None:
        """Store ledgers, print new modes and new differences, and write report/ledger.json."""
        known = {finding for ledger in self.seen.values() for finding in ledger.findings}
        for ledger in found:
            if ledger.mode not in self.seen:
                self.notice(f"ledger, {ledger.mode}: {ledger.summary}", "info")
            self.seen[ledger.mode] = ledger
            for finding in ledger.findings:
                if finding not in known:
                    known.add(finding)
                    self.notice(f"{finding.module}: {finding.what}; {finding.why}; fix: {finding.fix}", "warning")
        if self.writes:
            write_atomically(self.file, json.dumps(to_document(list(self.seen.values())), indent=1) + "\n")


# --- captured steps, under torch's profiler ---


class Recording:
    """Profile what runs inside; the host waits for the device before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize(self.device)
        self.profiler.__exit__(*error)

    def events(self) -> list[Event]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(file))
            return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]


# --- log.watch ---
#
# Eager steps are observed as they are. Compiled and captured ones are not seen by hooks, so their code runs eagerly in
# a side step, whose effects are undone. With several ranks all of them measure, and rank 0 writes.


NOT_RANGES = ("variance", "loss scale", UPDATE)


class RunWatch:
    """Watch the step of a run, or of each of its phases."""

    def __init__(self, parts: Assembly, engine: AnyEngine, report: Path, journal: Journal, *, writes: bool) -> None:
        self.parts, self.file, self.journal, self.writes = parts, report / "watch.json", journal, writes
        self.watches: dict[str, Watch] = {}
        for phase, own in list_engines(engine):
            warn = partial(journal.notice, level="warning")
            watch = Watch(own.guarded, parts.log.watch, notice=journal.notice, warn=warn)
            watch.on_observation = partial(self._record, phase)
            own.observe = watch.enter_real_step
            self.watches[phase] = watch
        if parts.recorder is not None:
            parts.recorder.watches = self.watches

    def finish(self, engine: AnyEngine, window: list[Batch], facts: Facts | PhasedFacts) -> None:
        """Complete the observation of the step that was made from this window, and read earlier ones."""
        made = facts.phases if isinstance(facts, PhasedFacts) else {"": facts}
        for phase, own in list_engines(engine):
            if phase not in made:
                continue
            watch = self.watches[phase]
            if watch.lacks_activations:
                batch = prepare_window(self.parts, window[:1])[0]
                if not isinstance(batch, Idle):
                    watch.look_aside(drop_outputs(own.parts.eager), batch, num_rows=count_samples(batch))
            watch.finish(made[phase])

    def _record(self, phase: str, seen: Observation, new: Sequence[WatchWarning]) -> None:
        """Write the observation to metrics.jsonl, and its rows to report/watch.json."""
        headroom: dict[str, float] = {}
        for row in seen.rows.values():
            if row.kind not in NOT_RANGES and math.isfinite(row.high):
                bits = round(row.find_headroom(FP16), 1)
                headroom[row.module] = min(bits, headroom.get(row.module, math.inf))
        lost = {row.module: round(row.numbers["lost"], 4) for row in seen.rows.values() if "lost" in row.numbers}
        record = {
            "kind": "watch",
            "step": seen.step,
            **({"phase": phase} if phase else {}),
            "headroom": headroom,
            "lost": lost,
            "warnings": [{"module": w.module, "kind": w.kind, "message": w.message} for w in new],
        }
        self.journal.log(record)
        if self.writes:
            rows = [_to_json(row) for row in seen.rows.values()]
            document = {"step": seen.step, "phase": phase, "rows": rows}
            write_atomically(self.file, json.dumps(to_strict_json(document)) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to forecast as if it had not stopped. Reads everything that was sent."""
        for watch in self.watches.values():
            watch.drain()
        return {phase: watch.state_dict() for phase, watch in self.watches.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for phase, own in state.items():
            if phase in self.watches:
                self.watches[phase].load_state_dict(own)


def _to_json(row: WatchRow) -> dict[str, Any]:
    """Return a row with its histogram: the exponent of the first count, and the counts."""
    found = {"module": row.module, "kind": row.kind, "format": row.format, **row.numbers}
    filled = [int(k) for k in row.counts.nonzero()[0]] if row.counts is not None and row.kind != LOGITS else []
    if filled:
        found["exponent"], found["counts"] = filled[0] - 127, row.counts[filled[0] : filled[-1] + 1].tolist()
    return found


# --- capsules ---


def record_faults(parts: Assembly, folder: RunFolder, notice: Notice, guard: GuardConfig, source: RunSource) -> None:
    """Keep the step of each fault in RUN/capsules, at most `guard.capsules` of them.

    With several ranks the rank at fault writes its own window: the only files that rank 0 does not write.
    """
    world, samples = parts.world, parts.workload.train_samples
    # What a capsule stores in addition to its step: config, plan, code, and how to load the window again.
    context = CapsuleContext(
        about={
            "workload": parts.name,
            "base_lr": source.base_lr,
            "store": dict(parts.workload.store),
            "frozen": list_identities(parts.workload.frozen),
            "code": source.code,
            "plan": json.loads(parts.plan.to_json()),
        },
        rank=None if world is None else world.rank,
        is_whole=lambda reading: world is not None and not reading.faulty_ranks,
        load_window=lambda reading: load_window(parts, reading),
        find_names=lambda ids: [samples.name_of(k) for k in ids] if implements(samples, NamedSamples) else [],
        describe_share=lambda reading: _describe_share(parts, reading),
        config=source.config,
        find_checkpoint=lambda: next((path.name for path in reversed(folder.open_checkpoints().list_all())), ""),
    )
    parts.recorder = Recorder(
        folder.path / "capsules",
        parts.model,
        parts.step,
        context,
        # Rank 0 shows only the warnings of other ranks, so their notices must be warnings.
        notice=lambda text: notice(text, "info" if world is None or world.is_first else "warning"),
        most=guard.capsules,
        spikes=guard.capture_spikes,
    )
    parts.guard.observers.append(parts.recorder.observe)


def _describe_share(parts: Assembly, reading: Reading) -> dict[str, Any]:
    """Return which rows of the global batches this rank has; empty if no single rank is at fault."""
    if parts.world is None or not reading.faulty_ranks or reading.window is None:
        return {}
    sizes = parts.train_loader.list_sizes(reading.window * parts.step.accumulate, parts.step.accumulate)
    return {"rank": parts.world.rank, "num_ranks": parts.world.size, "batch_sizes": [n for n in sizes if n > 0]}


def load_window(parts: Assembly, reading: Reading) -> list[dict[str, Tensor]] | None:
    """Load the batches of a step by its epoch and window: this rank's, or all ranks' if no single one is at fault."""
    if reading.epoch is None or reading.window is None:
        return None
    train, accumulate = parts.train, parts.step.accumulate
    is_whole = parts.world is None or not reading.faulty_ranks
    part = (0, 1) if parts.world is None or is_whole else (parts.world.rank, parts.world.size)
    samples, seed = parts.workload.train_samples, train.seed
    # Samples depend only on seed, epoch and index, so the batch can be loaded again.
    loader = Loader(samples, batch_size=train.batch_size, seed=seed, shuffle=True, part=part)
    return list(itertools.islice(loader.iterate_epoch(reading.epoch, reading.window * accumulate), accumulate))


# --- replay ---


def replay_run(path: Path, *, device: str | None = None, trust: bool = False) -> Replayed:
    """Run the step of a capsule again; `trust` allows custom code that the user did not train with."""
    capsule = capsules.read_capsule(path)
    if not capsule.is_from_run:
        raise CheckpointError(
            f"the capsule {path} comes from a custom loop",
            why="only your code can build its model and loss",
            fix=f'hs.replay("{path}", model, loss_fn)',
        )
    try:
        return replayed(build_capsule_subject(capsule, device, trust=trust), capsule)
    except OutOfMemory as error:
        raise CheckpointError(
            f"the step of {path} does not fit into the device's memory when replayed",
            why=summarise_error(error),
            fix="replay it with --device cpu",
        ) from error


def build_capsule_subject(capsule: Capsule, device: str | None, *, trust: bool = False) -> Subject:
    """Rebuild the model, window and state of a capsule's step."""
    config = load_stored(capsule.config, capsule.about["code"], trust=trust).config
    workload = build_workload(config, dict(capsule.about["store"]))
    stored = capsule.about["frozen"]
    # The frozen modules of the run, not newly initialised ones.
    workload = replace(workload, frozen=match_stored(workload.frozen, stored, capsule.path.parent.parent))
    frozen = {name: capsules.copy_state(part.module) for name, part in workload.frozen.items()}
    plan = choose_replay_plan(capsule, config.precision, workload, device)
    try:
        parts = assemble(config, workload, plan)
    except OutOfMemory as error:
        raise explain_model_too_large(error, workload.model, plan, has_ema=config.ema.enabled) from error
    refuse_another_model(capsule, parts.model)
    return _make_subject(capsule, config.precision, parts, frozen)


def _make_subject(
    capsule: Capsule, asked: PrecisionConfig, parts: Assembly, frozen: Mapping[str, dict[str, Tensor]]
) -> Subject:
    """Put the assembly into the state before the capsule's step, and return it as the subject of a replay."""
    # The phase at fault, or the whole step of a run without phases.
    own: AssembledPhase | Assembly
    own = next((phase for phase in parts.phases if phase.phase.name == capsule.about["phase"]), parts)
    # Augmentation and schedules depend on these counters.
    parts.step.attempted = capsule.step
    parts.step.committed.fill_(int(capsule.about["committed"]))
    parts.values.refresh()
    window = [{key: value.to(parts.device) for key, value in batch.items()} for batch in capsule.window]
    about = capsule.about
    share = Share(about["rank"], about["num_ranks"]) if "rank" in about else None
    assert isinstance(own.step, GuardedStep), "a capsule of a run with phases names one of them"
    return Subject(
        model=parts.model,
        loss=own.eager,
        window=prepare_window(parts, window, about.get("batch_sizes", ()), share),
        state=capsule.state or _load_checkpoint_state(capsule),
        rng=capsule.rng,
        plan=parts.plan,
        plan_for=partial(
            decide_again,
            parts.plan,
            parts.workload.model,
            asked.modules,
            fragile=parts.workload.fragile,
            frozen=get_modules(parts.workload.frozen),
            force=asked.force,
        ),
        scale=scale if isinstance(scale := capsule.about["scale"], (int, float)) else 1.0,
        update=Update.parse(capsule.about.get("update")),
        variants=_make_variants(parts.plan, own.region),
        frozen=get_modules(parts.workload.frozen),
        other_state=dict(frozen),
        trained=own.step.find_trained_parameters(),
    )


def choose_replay_plan(capsule: Capsule, asked: PrecisionConfig, workload: Workload, device: str | None) -> Plan:
    """Return the run's plan if its device is available, else a plan with its numerics for the device that is."""
    stored = Plan.from_json(json.dumps(capsule.about["plan"]))
    with contextlib.suppress(HardwareError):
        if probe(device or stored.device).device == stored.device:
            return stored
    hardware = probe(device or "auto")
    # Another device has other kernels; on a CPU the format is simulated to keep the numerics.
    request = asked.model_copy(update={"default": stored.granted, "simulate": hardware.kind == "cpu"})
    return decide(request, hardware, workload.model, fragile=workload.fragile, frozen=get_modules(workload.frozen))


def _make_variants(plan: Plan, region: Region) -> dict[str, LossFn]:
    """Return two more ways to run the region of a compiled run: as recorded, and without our kernels."""
    if plan.mode not in ("compile", "graph"):
        return {}

    def run_as_recorded(batch: Any) -> Any:
        with allow_chains(on=plan.mode == "graph"):
            return region(batch)

    def run_without_kernels(batch: Any) -> Any:
        with force(False):
            return region(batch)

    return {"as it was": run_as_recorded, "kernels off": run_without_kernels}


def _load_checkpoint_state(capsule: Capsule) -> dict[str, Tensor]:
    """Load the weights of a capsule that was too large to store them: they are those of a checkpoint."""
    named = str(capsule.about["weights"])
    path = capsule.path.parent.parent / "checkpoints" / named
    if not named or not path.is_dir():
        raise CheckpointError(
            f"the capsule {capsule.path} has no weights",
            why=f"they were too large to store, and its checkpoint no longer exists ({named or 'there was none yet'})",
            fix="train with train.checkpoint_every, and keep that checkpoint",
        )
    found = load_checkpoint(path)
    return {**found.model, **found.state["buffers"]}
