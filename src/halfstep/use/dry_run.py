"""`halfstep dry-run`: a format judged on a workload, a config or a run, by steps in fp32 on real batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from halfstep.config.schema import RunConfig
from halfstep.errors import ConfigError
from halfstep.evidence.attempts import Subject
from halfstep.evidence.capsule import copied_state, state_of
from halfstep.evidence.dry_run import TARGETS, Judged, judged, lost_updates
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.run.assemble import Assembly
from halfstep.run.engine import Engine, prepared_window
from halfstep.run.frozen import modules_of
from halfstep.run.ledger import AnyEngine, engines_of
from halfstep.step.facts import rng_state
from halfstep.tune.modes import Batch
from halfstep.use.ledger import at_hand, is_run

WARM_UP = 3
"""Steps before the one whose updates are judged: the first of Adam are larger than those to come."""


def dry_run(
    word: str,
    target: str,
    *,
    num_batches: int,
    flags: Mapping[str, object],
    overrides: Sequence[str],
    trust: bool = False,
) -> list[Judged]:
    """What the format would do, module by module; nothing of a run is changed."""
    chosen = next((own for own in TARGETS if own == target), None)
    if chosen is None:
        raise ConfigError(f"--target {target} is not a format to judge", fix=f"one of {', '.join(TARGETS)}")
    own_precision = {} if is_run(word) else {"precision": "fp32"}
    with at_hand(word, flags={**flags, **own_precision}, overrides=overrides, trust=trust) as (parts, engine, _):
        windows = windows_of(parts, num_batches)
        found: list[Judged] = []
        for phase, own in engines_of(engine):
            rows = judged(subject_of(own, windows[0]), chosen, windows)
            found += [_named(row, phase) for row in rows]
        if chosen == "bf16-true":
            found += _updates(parts, engine)
        return found


def windows_of(parts: Assembly, num: int) -> list[list[Batch]]:
    batches = itertools.islice(parts.train_loader.epoch(0), num)
    placed = ({name: value.to(parts.device) for name, value in batch.items()} for batch in batches)
    return [prepared_window(parts, [batch]) for batch in placed]


def subject_of(engine: Engine, window: list[Batch]) -> Subject:
    parts, step = engine.parts, engine.guarded
    return Subject(
        model=parts.model,
        loss=parts.eager,
        window=window,
        state={name: value.detach().clone() for name, value in state_of(parts.model).items()},
        rng=rng_state(parts.device),
        plan=parts.plan,
        plan_for=lambda precision, modules: _plan(parts.config, parts, precision),
        frozen=modules_of(parts.workload.frozen),
        beside_state={name: copied_state(part.module) for name, part in parts.workload.frozen.items()},
        trained=step.trained_parameters(),
    )


def _plan(config: RunConfig, parts: Assembly, precision: str) -> Plan:
    request = config.precision.model_copy(
        update={"default": precision or parts.plan.granted, "simulate": precision != "fp32", "strict": False}
    )
    frozen = modules_of(parts.workload.frozen)
    return decide(request, probe(parts.plan.device), parts.model, fragile=parts.workload.fragile, frozen=frozen)


def _updates(parts: Assembly, engine: AnyEngine) -> list[Judged]:
    """Of one step, after some that settle the optimizer; where all of them were dropped, of none."""
    batches = itertools.islice(parts.train_loader.epoch(0), WARM_UP + 1)
    before = after = _parameters(parts)
    for batch in batches:
        before = after
        engine([{name: value.to(parts.device) for name, value in batch.items()}])
        after = _parameters(parts)
    rounding = parts.config.precision.rounding
    is_kept = parts.config.optimizer.name == "adamw" and rounding != "nearest"
    return lost_updates(before, after, f"precision.rounding={rounding}" if is_kept else "")


def _parameters(parts: Assembly) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parts.model.named_parameters() if value.requires_grad}


def _named(row: Judged, phase: str) -> Judged:
    return dataclasses.replace(row, kind=f"{row.kind} ({phase})") if phase else row
