"""Capsules of runs: store the step of a fault, and rebuild that step later."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.distributed.world import Share
from halfstep.errors import CheckpointError, HardwareError, summarise_error
from halfstep.evidence import capsule as capsules
from halfstep.evidence.attempts import LossFn, Subject, refuse_another_model
from halfstep.evidence.capsule import Capsule
from halfstep.evidence.recorder import CapsuleContext, Recorder
from halfstep.evidence.replay import Replayed
from halfstep.evidence.replay import replay as replayed
from halfstep.evidence.updates import Update
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide, decide_again
from halfstep.precision.plan import Plan
from halfstep.step.facts import Reading
from halfstep.step.step import GuardedStep
from halfstep_train.config.schema import GuardConfig, PrecisionConfig
from halfstep_train.data.loader import Loader, NamedSamples, implements
from halfstep_train.kernels.fast_forms import allow_chains, force
from halfstep_train.run.assemble import AssembledPhase, Assembly, assemble, build_workload
from halfstep_train.run.checkpoint import load as load_checkpoint
from halfstep_train.run.engine import prepare_window
from halfstep_train.run.folder import RunFolder, RunSource, load_stored
from halfstep_train.run.frozen_modules import get_modules, list_identities, match_stored
from halfstep_train.run.memory.out_of_memory import OutOfMemory, explain_model_too_large
from halfstep_train.tune.modes import Notice, Region
from halfstep_train.workloads.base.workload import Workload


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
