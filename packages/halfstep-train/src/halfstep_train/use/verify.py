"""`halfstep verify`: check what a run promises by observing a few steps on a copy and by reading its records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from halfstep.errors import format_bytes, format_count
from halfstep.step.batches import Batch, Window
from halfstep.step.step import GuardedStep, LossFn
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.page.read_run import RunRecord, read_run
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.engine import prepare_window
from halfstep_train.run.folder import RunFolder, is_run
from halfstep_train.run.journal import BUSY, SHORTEST_S, Waiting, format_gpu_use
from halfstep_train.run.memory.out_of_memory import split_window
from halfstep_train.run.optimizer import Length, build_optimizer
from halfstep_train.run.step_ledger import AnyEngine, drop_outputs, list_engines, observe_ledgers
from halfstep_train.tune.memory_low import MemorySetting
from halfstep_train.use.observe_step import assemble_step

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
    optimizer, schedules = build_optimizer(
        config.step_settings, parts.model, setting, length, groups=parts.workload.groups
    )
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
