"""Capsules of runs: how a run keeps the step of a fault, and how that step is put together again."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.config.dump import to_yaml
from halfstep.config.schema import RunConfig
from halfstep.data.loader import Loader, NamedSamples
from halfstep.data.prefetch import RecentWindows
from halfstep.errors import CheckpointError, HardwareError
from halfstep.evidence import capsule as capsules
from halfstep.evidence.attempts import LossFn, Subject, refuse_another_model
from halfstep.evidence.capsule import Capsule
from halfstep.evidence.recorder import CapsuleContext, Recorder
from halfstep.evidence.replay import Replayed
from halfstep.evidence.replay import replay as replayed
from halfstep.hardware.probe import probe
from halfstep.kernels.fast_forms import chains, forced
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.run.assemble import Assembly, assemble, build_workload
from halfstep.run.checkpoint import load as load_checkpoint
from halfstep.run.engine import prepared_window
from halfstep.run.folder import RunFolder
from halfstep.run.frozen import as_stored, identities, modules_of
from halfstep.step.facts import Reading
from halfstep.step.guard import LAG
from halfstep.step.step import Step
from halfstep.tune.memory_limit import OutOfMemory, model_memory_error
from halfstep.tune.modes import Region
from halfstep.workloads import load
from halfstep.workloads.workload import Workload

FOLDER = "capsules"


def record_faults(parts: Assembly, folder: RunFolder, notice: Callable[[str], None]) -> None:
    """Keep the step of each fault in RUN/capsules, as far as the settings want it."""
    config = parts.config
    is_far = parts.world is not None and not parts.world.is_first
    if not config.guard.capsules or is_far:
        return
    parts.recent = RecentWindows(LAG + 1) if parts.world is None else None
    context = CapsuleContext(
        about={
            "workload": config.workload,
            "base_lr": config.optimizer.lr,
            "store": dict(parts.workload.store),
            "frozen": identities(parts.workload.frozen),
            "plan": json.loads(parts.plan.to_json()),
        },
        window_of=lambda reading: window_of(parts, reading),
        names_of=lambda ids: _names(parts.workload, ids),
        keeps_generators=parts.world is None,
        config=to_yaml(config),
        checkpoint=lambda: next((path.name for path in reversed(folder.checkpoints().all())), ""),
    )
    parts.recorder = Recorder(
        folder.path / FOLDER,
        parts.model,
        parts.step,
        context,
        notice=notice,
        most=config.guard.capsules,
        spikes=config.guard.capture_spikes,
    )
    parts.guard.observers.append(parts.recorder.observe)


def window_of(parts: Assembly, reading: Reading) -> list[dict[str, Tensor]] | None:
    """As it was loaded; read again by epoch and window where it was trained before the run was resumed, and where each
    of several processes has but its own part of it."""
    kept = parts.recent.of(reading.attempted) if parts.recent is not None else None
    if kept is not None or reading.epoch is None or reading.window is None:
        return kept
    train, accumulate = parts.config.train, parts.step.accumulate
    loader = Loader(parts.workload.train_samples, batch_size=train.batch_size, seed=train.seed, shuffle=True)
    return list(itertools.islice(loader.epoch(reading.epoch, reading.window * accumulate), accumulate))


def _names(workload: Workload, ids: Sequence[int]) -> list[str]:
    samples = workload.train_samples
    return [samples.name_of(index) for index in ids] if isinstance(samples, NamedSamples) else []


# --- the step again ---


def replay_run(path: Path, *, device: str | None = None) -> Replayed:
    """Build the run's model again and replay a step of it."""
    capsule = capsules.read(path)
    if not capsule.is_of_a_run:
        raise CheckpointError(
            f"the capsule {path} is of a loop of your own",
            why="its model and loss are code that only you can call",
            fix=f'hs.replay("{path}", model, loss_fn)',
        )
    try:
        return replayed(subject_of(capsule, device), capsule)
    except OutOfMemory as error:
        raise _too_large(capsule, error) from error


def subject_of(capsule: Capsule, device: str | None) -> Subject:
    """The step of a run's capsule, ready to be run again."""
    config = load(str(capsule.config)).config
    workload = build_workload(config, dict(capsule.about["store"]))
    stored = capsule.about["frozen"]
    workload = replace(workload, frozen=as_stored(workload.frozen, stored, capsule.path.parent.parent))
    frozen = {name: _copy(part.module.state_dict()) for name, part in workload.frozen.items()}
    plan = plan_here(capsule, config, workload, device)
    try:
        parts = assemble(config, workload, plan)
    except OutOfMemory as error:
        raise model_memory_error(error, config, workload.model, torch.device(plan.device)) from error
    refuse_another_model(capsule, parts.model)
    return _subject(capsule, parts, frozen)


def _subject(capsule: Capsule, parts: Assembly, frozen: Mapping[str, dict[str, Tensor]]) -> Subject:
    own = next((phase for phase in parts.phases if phase.phase.name == capsule.about["phase"]), None)
    eager, region = (own.eager, own.region) if own is not None else (parts.eager, parts.region)
    step = own.step if own is not None else parts.step
    parts.step.attempted = capsule.step
    parts.step.committed.fill_(int(capsule.about["committed"]))
    parts.values.refresh()
    window = [{key: value.to(parts.device) for key, value in batch.items()} for batch in capsule.window]
    assert isinstance(step, Step), "of several phases the capsule names one"
    return Subject(
        model=parts.model,
        loss=eager,
        window=prepared_window(parts, window),
        state=capsule.state or _state_of_checkpoint(capsule),
        rng=capsule.rng,
        plan=parts.plan,
        plan_for=lambda precision, modules: _plan(parts.config, parts.workload, parts.plan, precision, modules),
        scale=_number(capsule.about["scale"], 1.0),
        variants=_variants(parts.plan, region),
        frozen=modules_of(parts.workload.frozen),
        frozen_state=dict(frozen),
        trained=step.trained_parameters(),
    )


def plan_here(capsule: Capsule, config: RunConfig, workload: Workload, device: str | None) -> Plan:
    """The run's own plan where its device is here, else its numerics on the device that is."""
    stored = Plan.from_json(json.dumps(capsule.about["plan"]))
    with contextlib.suppress(HardwareError):
        if probe(device or stored.device).device == stored.device:
            return stored
    hardware = probe(device or "auto")
    request = config.precision.model_copy(update={"default": stored.granted, "simulate": hardware.kind == "cpu"})
    return decide(request, hardware, workload.model, fragile=workload.fragile, frozen=modules_of(workload.frozen))


def _plan(config: RunConfig, workload: Workload, own: Plan, precision: str, modules: Mapping[str, str]) -> Plan:
    """Another precision for all, or the run's own with some parts apart; simulated where the run's is."""
    named = {} if precision else {**config.precision.modules, **modules}
    simulate = own.simulated or precision == "bf16" and not own.on_cuda
    request = config.precision.model_copy(
        update={"default": precision or own.granted, "modules": named, "simulate": simulate, "strict": False}
    )
    return decide(
        request, probe(own.device), workload.model, fragile=workload.fragile, frozen=modules_of(workload.frozen)
    )


def _variants(plan: Plan, region: Region) -> dict[str, LossFn]:
    """What ran compiled runs so again, with and without our kernels."""
    if plan.mode not in ("compile", "graph"):
        return {}

    def as_it_was(batch: Any) -> Any:
        with chains(on=plan.mode == "graph"):
            return region(batch)

    def without_kernels(batch: Any) -> Any:
        with forced(False):
            return region(batch)

    return {"as it was": as_it_was, "kernels off": without_kernels}


def _state_of_checkpoint(capsule: Capsule) -> dict[str, Tensor]:
    named = str(capsule.about["weights"])
    path = capsule.path.parent.parent / "checkpoints" / named
    if not named or not path.is_dir():
        raise CheckpointError(
            f"the capsule {capsule.path} has no weights",
            why=f"they were too large for it, and the checkpoint it names is gone: {named or 'there was none yet'}",
            fix="train with train.checkpoint_every, and keep that checkpoint",
        )
    found = load_checkpoint(path)
    return {**found.model, **found.state["buffers"]}


def _too_large(capsule: Capsule, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the step of {capsule.path} does not fit into the device's memory a second time",
        why=(str(error).splitlines() or [""])[0],
        fix="replay it with --device cpu",
    )


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise
