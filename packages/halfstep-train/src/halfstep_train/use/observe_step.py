"""Observe single steps of a workload, a config or a run: `halfstep ledger`, `dry-run` and `verify`.

`assemble_step` builds a copy of everything that a run would build, so a stored run is never changed. `source` is a
run's folder, a config file or a workload.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from halfstep.errors import format_bytes, format_count
from halfstep.evidence.attempts import Subject
from halfstep.evidence.capsule import collect_state, copy_state
from halfstep.evidence.dry_run import Judgement, judge_modules, judge_updates
from halfstep.evidence.precision_ledger import Event, Ledger
from halfstep.formats import DryRunTarget
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.step.batches import Batch, Window
from halfstep.step.facts import read_rng_state
from halfstep.step.randomness import choose_algorithms
from halfstep.step.step import GuardedStep, LossFn
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import PrecisionConfig, RunConfig
from halfstep_train.report.page.read_run import RunRecord, read_run
from halfstep_train.run.assemble import (
    Assembly,
    Length,
    apply_settled,
    assemble,
    build_optimizer,
    build_workload,
    decide_plan,
    provide_data,
)
from halfstep_train.run.engine import Engine, make_engine, prepare_window
from halfstep_train.run.evidence import AnyEngine, Recording, drop_outputs, list_engines, observe_ledgers
from halfstep_train.run.folder import RunFolder, find_moved_data, is_run
from halfstep_train.run.frozen_modules import add_checksums, get_modules
from halfstep_train.run.journal import BUSY, SHORTEST_S, Waiting, format_gpu_use
from halfstep_train.run.memory.out_of_memory import split_window
from halfstep_train.tune.trials import MemorySetting
from halfstep_train.use.evaluate import check_frozen_parts, choose_plan, load_weights, open_run

MOST_STEPS = 8
"""Enough steps to capture a graph."""


def record_ledger(source: str, loaded: Loaded, *, trust: bool = False) -> list[Ledger]:
    """Record the formats of one step: of a run, with its weights and stored plan, or of what would be trained."""
    with assemble_step(source, loaded, trust=trust) as (_, parts, engine, window):
        return observe_ledgers(parts, engine, window, _record_replay(parts, engine, window))


def _record_replay(parts: Assembly, engine: AnyEngine, window: list[Batch]) -> list[Event]:
    """In graph mode, run steps until one is captured and return the profile of the next; otherwise return nothing."""
    if engine.mode == "graph":
        for _ in range(MOST_STEPS):
            if not engine.graphs:
                engine(window)
    if not engine.graphs:
        return []
    with Recording(parts.device) as recording:
        engine(window)
    return recording.events()


@contextmanager
def assemble_step(
    source: str, loaded: Loaded, *, trust: bool = False
) -> Iterator[tuple[RunConfig, Assembly, AnyEngine, list[Batch]]]:
    """Yield a config, its assembly after one step (so that the optimizer has state), engine and a window of data."""
    with provide_data(loaded.config) as config:
        if is_run(source):
            config, parts = _assemble_run(Path(source), config, trust=trust)
        else:
            workload = add_checksums(build_workload(config))
            config = apply_settled(config, workload)
            parts = assemble(config, workload, decide_plan(config, workload, probe(config.device)))
        deterministic = config.train.deterministic
        with closing(parts.train_loader), closing(parts.val_loader), choose_algorithms(deterministic=deterministic):
            engine = make_engine(parts, parts.mode or "eager", lambda text, level: None)  # the ledger reports modes
            window = read_batches(parts, parts.step.accumulate)
            engine(window)
            yield config, parts, engine, window


def _assemble_run(path: Path, config: RunConfig, *, trust: bool) -> tuple[RunConfig, Assembly]:
    run = open_run(path, checkpoint="last", trust=trust)
    found, _ = find_moved_data(config, run.folder)
    workload = build_workload(found, run.store)
    frozen = check_frozen_parts(run, workload.frozen)
    plan = choose_plan(run, workload.model, device=None, precision=None, frozen=frozen)
    parts = assemble(found, workload, plan)
    load_weights(run, parts.model, plan, workload.frozen, workload.values)
    parts.model.train()
    return found, parts


def read_batches(parts: Assembly, num: int) -> list[Batch]:
    """Return the first batches of the first epoch, on the device."""
    batches = itertools.islice(parts.train_loader.iterate_epoch(0), num)
    return [{name: value.to(parts.device) for name, value in batch.items()} for batch in batches]


JUDGED_BATCHES = 2
WARM_UP = 3
"""Steps before the one whose updates are judged: Adam's first updates are larger than later ones."""


def dry_run(source: str, loaded: Loaded, target: DryRunTarget, *, trust: bool = False) -> list[Judgement]:
    """Predict what the format would do, module by module; a stored run is not changed."""
    with assemble_step(source, loaded, trust=trust) as (config, parts, engine, _):
        windows = [prepare_window(parts, [batch]) for batch in read_batches(parts, JUDGED_BATCHES)]
        found: list[Judgement] = []
        for phase, own in list_engines(engine):
            rows = judge_modules(build_subject(own, windows[0], config.precision), target, windows)
            found += [dataclasses.replace(row, kind=f"{row.kind} ({phase})") if phase else row for row in rows]
        if target == "bf16-true":
            found += _judge_updates(config, parts, engine)
        return found


def build_subject(engine: Engine, window: list[Batch], asked: PrecisionConfig) -> Subject:
    """Collect what a dry run needs to run the step in other precisions."""
    parts, step = engine.parts, engine.guarded
    return Subject(
        model=parts.model,
        loss=parts.eager,
        window=window,
        state={name: value.detach().clone() for name, value in collect_state(parts.model).items()},
        rng=read_rng_state(parts.device),
        plan=parts.plan,
        plan_for=lambda precision, modules: _decide_plan(asked, parts, precision),
        frozen=get_modules(parts.workload.frozen),
        other_state={name: copy_state(part.module) for name, part in parts.workload.frozen.items()},
        trained=step.find_trained_parameters(),
    )


def _decide_plan(asked: PrecisionConfig, parts: Assembly, precision: str) -> Plan:
    request = asked.model_copy(
        update={"default": precision or parts.plan.granted, "simulate": precision != "fp32", "strict": False}
    )
    frozen = get_modules(parts.workload.frozen)
    return decide(request, probe(parts.plan.device), parts.model, fragile=parts.workload.fragile, frozen=frozen)


def _judge_updates(config: RunConfig, parts: Assembly, engine: AnyEngine) -> list[Judgement]:
    """Judge the weight updates of one step, after a few warm-up steps of the optimizer."""
    before = after = _copy_parameters(parts)
    for batch in read_batches(parts, WARM_UP + 1):
        before = after
        engine([batch])
        after = _copy_parameters(parts)
    rounding = config.precision.rounding
    is_kept = config.optimizer.name == "adamw" and rounding != "nearest"
    return judge_updates(before, after, f"precision.rounding={rounding}" if is_kept else "")


def _copy_parameters(parts: Assembly) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parts.model.named_parameters() if value.requires_grad}


# --- halfstep verify ---


CLIP, RATE = "gradient clipping active", "learning rate as scheduled"
Proof = Callable[[GuardedStep, LossFn, list[Batch]], tuple[bool | None, str]]


def verify(source: str, loaded: Loaded, *, trust: bool = False) -> list[ProofLine]:
    """Return all lines except that of the configuration, which `check` provides. Nothing of a run is changed."""
    record = read_run(Path(source)) if is_run(source) else None
    with assemble_step(source, loaded, trust=trust) as (config, parts, engine, window):
        amp = _check_amp(parts, engine, window)  # first, because the proofs below run steps
        lines = [
            _prove_each_phase("NaN handling operational", engine, window, parts, check_nan_is_dropped),
            _prove_each_phase(CLIP, engine, window, parts, check_clipping)
            if parts.train.clip_norm
            else ProofLine(CLIP, None, "train.clip_norm is 0: clipping is off, as configured"),
            _check_rate(config, parts, engine, window, record),
            amp,
        ]
    if record is None:
        text = "nothing has run yet: give a run's folder"
        names = ("GPU use", "memory", "skipped steps", "capsules")
        return [*lines, *(ProofLine(name, None, text) for name in names)]
    return [*lines, _check_gpu(record), _check_memory(record), _check_skipped(record), _check_capsules(record)]


def _prove_each_phase(name: str, engine: AnyEngine, window: list[Batch], parts: Assembly, proof: Proof) -> ProofLine:
    """Run a proof for every phase; one failure fails the line, and one phase without an answer leaves it open."""
    found = []
    for phase, own in list_engines(engine):
        prepared = split_window(prepare_window(parts, window), own.pieces)
        holds, text = proof(own.guarded, drop_outputs(own.parts.eager), prepared)
        found.append((holds, f"{phase}: {text}" if phase else text))
    worst = next((one for one in found if one[0] is False), None) or next((o for o in found if o[0] is None), None)
    return ProofLine(name, (worst or found[0])[0], "; ".join(text for _, text in found))


def _check_amp(parts: Assembly, engine: AnyEngine, window: list[Batch]) -> ProofLine:
    ledgers = observe_ledgers(parts, engine, window)
    differing = [finding for ledger in ledgers for finding in ledger.findings]
    text = "; ".join(f"{ledger.mode}: {ledger.summary}" for ledger in ledgers)
    if differing:
        text += f" ({differing[0].module}: {differing[0].what})"
    return ProofLine("AMP/BF16 synchronised", not differing, text)


def _check_rate(
    config: RunConfig, parts: Assembly, engine: AnyEngine, window: list[Batch], record: RunRecord | None
) -> ProofLine:
    """Check every recorded rate of a run, or the rates of a few steps."""
    trained = record.select_kind("train") if record is not None else []
    # The recorded rate of a phase may be that of an earlier step, so phases are checked by new steps.
    if record is None or not trained or parts.phases:
        return _prove_each_phase(RATE, engine, window, parts, check_rates)
    before = RunFolder(record.path).read_settled().before
    used = [(int(one["until"]), type(config).model_validate(one["settings"])) for one in before]
    used.append((max(int(one["step"]) for one in trained), config))
    is_lowered = any(event.get("event") == "rollback" for event in record.select_kind("event"))
    if is_lowered or any(own.schedule.name == "plateau" for _, own in used):
        return ProofLine(RATE, None, "a plateau or a rollback lowered the rate by a factor that is not recorded")
    # A resume may change the run's length and with it the schedule: compare each step with the schedule of its time.
    schedules = [(until, _make_schedule(parts, own)) for until, own in used]
    for one in trained:
        scheduled = next(schedule for until, schedule in schedules if int(one["step"]) <= until)
        # `committed` is counted after the step: a committed step ran at the count before, a dropped one at this count.
        wanted = [scheduled(max(int(one["committed"]) - k, 0)) for k in (1, 0)]
        if not any(is_same_rate(float(one["lr"]), rate) for rate in wanted):
            text = f"step {one['step']} ran with {one['lr']:.4g}, and the schedule gives {wanted[0]:.4g}"
            return ProofLine(RATE, False, text)
    text = f"{format_count(len(trained), 'recorded rate')}, each as scheduled"
    changed_after = ", ".join(str(step) for step in sorted({one["until"] for one in before}))
    text += f"; the settings changed after step {changed_after}" if before else ""
    return ProofLine(RATE, True, text)


def _make_schedule(parts: Assembly, config: RunConfig) -> Callable[[int], float]:
    """Return the rate of the first parameter group by committed steps, in a run with these settings."""
    num_batches = math.ceil(len(parts.workload.train_samples) / config.train.batch_size)
    length = Length.of(config.train, num_batches)
    setting = MemorySetting(**parts.plan.memory)
    optimizer, schedules = build_optimizer(config, parts.model, setting, length, groups=parts.workload.groups)
    return lambda committed: float(optimizer.param_groups[0]["lr"]) * schedules[0](committed)


def _check_gpu(record: RunRecord) -> ProofLine:
    """Check that the GPU was busy after the first steps."""
    steady = [one for one in record.monitor if one.get("steady")]
    busy = [one["utilization"] for one in steady if one.get("utilization") is not None]
    elapsed_s = float(record.summary.get("elapsed_s", 0.0))
    if not busy:
        return ProofLine("GPU use", None, "no NVML record: not on an NVIDIA GPU, or too short")
    if elapsed_s < SHORTEST_S:
        return ProofLine("GPU use", None, f"the run took {elapsed_s:.1f} s, less than {SHORTEST_S:g} s")
    waiting = Waiting(**{field.name: float(record.summary[field.name]) for field in dataclasses.fields(Waiting)})
    utilization = sum(busy) / len(busy)
    line = format_gpu_use(utilization, waiting, elapsed_s, str(record.summary["steps_run"]))
    is_measurable = elapsed_s - waiting.start_s >= SHORTEST_S
    return ProofLine("GPU use", utilization >= BUSY if is_measurable else None, line)


def _check_memory(record: RunRecord) -> ProofLine:
    peak = record.summary.get("peak_memory_bytes")
    if not peak:
        return ProofLine("memory", None, "no peak was recorded: the run has not ended, or cannot measure it")
    return ProofLine("memory", True, f"{format_bytes(int(peak))} at most")


def _check_skipped(record: RunRecord) -> ProofLine:
    trained, events = record.select_kind("train"), record.select_kind("event")
    if not trained and not events:
        return ProofLine("skipped steps", None, "no step was recorded")
    attempted = max(int(one["step"]) for one in (*trained, *events))  # a run ended by faults records no later step
    faults = [event for event in events if event.get("event") == "skipped"]
    overflows = sum(event.get("event") == "overflow" for event in events)  # overflows at a low scale have capsules
    text = f"{len(faults)} of {attempted} steps skipped"
    text += f", {format_count(overflows, 'fp16 overflow')}" if overflows else ""
    text += f"; the last at step {faults[-1]['bad_step']}: {faults[-1]['reason']}" if faults else ""
    return ProofLine("skipped steps", not faults, text)


def _check_capsules(record: RunRecord) -> ProofLine:
    if not record.capsules:
        return ProofLine("capsules", True, "none: no fault was recorded")
    names = ", ".join(str(one["name"]) for one in record.capsules)
    return ProofLine("capsules", False, f"{names}: run `halfstep replay {record.path}/capsules/STEP`")


# --- proofs: each runs steps on a copy and returns what it observed ---

NOT_STATE = ("attempted", "scaler")
"""Entries of a step's state that a dropped step changes: a dropped step is an attempt, and in fp16 it lowers the loss
scale."""
ROUNDING = 1e-3
"""Relative: a norm over fp32 gradients summed in another order."""


@dataclass(frozen=True, slots=True)
class ProofLine:
    """One line of a page of evidence; `holds` is None if it cannot be measured."""

    name: str
    holds: bool | None
    text: str

    @property
    def verdict(self) -> str:
        return "not measurable" if self.holds is None else "holds" if self.holds else "DOES NOT HOLD"


def check_nan_is_dropped(step: GuardedStep, loss_fn: LossFn, window: Window) -> tuple[bool, str]:
    """Check that a NaN injected into a step, in forward and in backward, leaves all state bit-identical."""
    before = _copy_state(step)
    facts = step.compute(_scale_loss(loss_fn, float("nan")), window)
    step.commit(facts)
    changed = _list_changes(before, _copy_state(step))
    reading = facts.read()
    if changed:
        return False, f"a step with a NaN changed {', '.join(changed[:3])}" + (" ..." if len(changed) > 3 else "")
    if not reading.is_bad:
        return False, "a step with a NaN loss was not found to be bad"
    return True, f"a step with a NaN was dropped; {len(before)} tensors stayed bit-equal"


def check_clipping(step: GuardedStep, loss_fn: LossFn, window: Window) -> tuple[bool | None, str]:
    """Check that gradients far above the limit are clipped to it. Nothing is committed."""
    limit, kind = step.clip.limit, step.clip.kind
    norm = _measure_norms(step, loss_fn, window)[0]
    if not math.isfinite(norm):
        return None, f"the step itself is bad: its {kind} norm is {norm:g}, and the whole step is dropped"
    # Scale the loss so that the norm is ten times the limit; a step that is above that already is used as it is.
    wanted = 10 * limit / norm if norm > 0 else 1.0
    raised = max(wanted, 1.0)
    before, after = _measure_norms(step, _scale_loss(loss_fn, raised), window)
    text = f"{kind} norm {norm:.3g} here"
    if raised > 1:
        text += f"; with the loss times {raised:.3g}: {before:.3g}"
    return after <= limit * (1 + ROUNDING), f"{text}, {after:.3g} after clipping at {limit:g}"


def _measure_norms(step: GuardedStep, loss_fn: LossFn, window: Window) -> tuple[float, float]:
    """Return the gradient norm before and after clipping."""
    try:
        facts = step.compute(loss_fn, window)
        gradients = [p.grad for o in step.optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        factor = 1.0 if facts.factor is None else float(facts.factor)
        kind = 2.0 if step.clip.kind == "l2" else math.inf
        return float(facts.grad_norm), float(torch.nn.utils.get_total_norm(gradients, norm_type=kind)) * factor
    finally:
        step.abandon()


def check_rates(step: GuardedStep, loss_fn: LossFn, window: Window, *, num_steps: int = 3) -> tuple[bool | None, str]:
    """Check over a few steps that the rate each reports matches its schedule."""
    if step.rates is None:
        return None, "no schedule: the learning rate is the optimizer's own"
    found = []
    for _ in range(num_steps):
        # The factor of a plateau or a rollback is the current one, because those of earlier steps are not recorded.
        scheduled = step.rates.functions[0](int(step.committed))
        wanted = float(step.rates.base[0]) * scheduled * float(step.rates.factor[0])
        facts = step.compute(loss_fn, window)
        step.commit(facts)
        found.append((facts.read().lr, wanted))
    wrong = [(ran, wanted) for ran, wanted in found if not is_same_rate(ran, wanted)]
    if wrong:
        return False, f"a step ran with {wrong[0][0]:.4g}, but its schedule gives {wrong[0][1]:.4g}"
    return True, f"{num_steps} steps ran with {', '.join(f'{ran:.3g}' for ran, _ in found)}, as scheduled"


def is_same_rate(ran: float, wanted: float) -> bool:
    """True if rates are equal in fp32, like the table on the device."""
    return abs(ran - wanted) <= 1e-6 * max(abs(wanted), 1e-12)


def _scale_loss(loss_fn: LossFn, factor: float) -> LossFn:
    def scaled(batch: Batch) -> Any:
        found = loss_fn(batch)
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    return scaled


def _copy_state(step: GuardedStep) -> dict[str, Tensor]:
    """Return copies of all tensors that a bad step must not change, by name."""
    own = {name: value for name, value in step.state_dict().items() if name not in NOT_STATE}
    found: dict[str, Tensor] = {}
    paths, _ = tree_flatten_with_path({"model": step.model.state_dict(), "step": own})
    for path, leaf in paths:
        value = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) if isinstance(leaf, int | float) else None
        # A group's `lr` is the rate of the newest attempt, read from the committed count, which is in here.
        if value is not None and not keystr(path).endswith("['lr']"):
            found[keystr(path)] = value.detach().clone()
    return found


def _list_changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    if before.keys() != after.keys():
        return sorted(before.keys() ^ after.keys())
    return [name for name in before if not torch.equal(_view_bits(before[name]), _view_bits(after[name]))]


def _view_bits(tensor: Tensor) -> Tensor:
    """View values as bits, because NaN differs from itself, and 0 equals -0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
