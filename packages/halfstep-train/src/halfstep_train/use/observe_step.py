"""Observe single steps of a workload, a config or a run: `halfstep ledger` and `halfstep dry-run`.

`assemble_step` builds a copy of everything that a run would build, so a stored run is never changed. `source` is a
run's folder, a config file or a workload.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from torch import Tensor

from halfstep.evidence.attempts import Subject
from halfstep.evidence.capsule import collect_state, copy_state
from halfstep.evidence.dry_run import Judgement, judge_modules, judge_updates
from halfstep.evidence.precision_ledger import Event, Ledger
from halfstep.formats import DryRunTarget
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.step.facts import read_rng_state
from halfstep.step.randomness import choose_algorithms
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import PrecisionConfig, RunConfig
from halfstep_train.run.assemble import Assembly, apply_settled, assemble, build_workload, decide_plan, provide_data
from halfstep_train.run.engine import Engine, make_engine, prepare_window
from halfstep_train.run.folder import find_moved_data, is_run
from halfstep_train.run.frozen_modules import add_checksums, get_modules
from halfstep_train.run.step_ledger import AnyEngine, Recording, list_engines, observe_ledgers
from halfstep_train.tune.modes import Batch
from halfstep_train.use.open_run import check_frozen_parts, choose_plan, load_weights, open_run

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
