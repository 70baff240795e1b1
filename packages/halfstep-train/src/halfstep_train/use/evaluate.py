"""`halfstep evaluate`: score a stored run on its validation data or on other data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.disk import write_atomically
from halfstep.errors import DataError, HalfstepError, MemoryLimitError
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.memory import describe_memory
from halfstep.precision.plan import Plan
from halfstep.step.randomness import choose_algorithms
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.loader import Loader, Samples
from halfstep_train.data.seeds import Key
from halfstep_train.report.results import EvaluationResult
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.folder import find_moved_data, make_paths_absolute
from halfstep_train.run.frozen_modules import name_lost_files
from halfstep_train.run.journal import find_hint
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.stored_state import load_for_use
from halfstep_train.run.validate import enter_evaluation, validate
from halfstep_train.use.open_run import (
    OpenedRun,
    check_frozen_parts,
    choose_plan,
    load_weights,
    make_fresh_folder,
    open_run,
    wrap_trained,
)
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import load_part, resolve_options
from halfstep_train.workloads.base.using import EvaluateRequest, PlainEvaluation, use_folder
from halfstep_train.workloads.base.workload import Batch, Workload


def evaluate(
    path: Path,
    *,
    report: RunReport,
    data: Path | None = None,
    checkpoint: str = "best",
    device: str | None = None,
    precision: str | None = None,
    batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    out: Path | None = None,
    trust: bool = False,
) -> EvaluationResult:
    """Compute metrics as in training, scores per class, and pictures in a new folder."""
    clock = Stopwatch()
    run = open_run(path, checkpoint=checkpoint, trust=trust)
    kind = KINDS.of(run.config.workload)
    evaluating_as: Any = load_part(kind.evaluate.evaluation) if kind.evaluate else PlainEvaluation
    wanted = resolve_options(kind.evaluate.options if kind.evaluate else (), options or {}, run.config.workload)
    with name_lost_files(run.frozen):
        config, workload = load_data(run, evaluating_as, data, report)
    workload = replace(workload, frozen=check_frozen_parts(run, workload.frozen))
    plan = choose_plan(run, workload.model, device=device, precision=precision, frozen=workload.frozen)
    is_usual = batch_size in (None, config.train.val_batch_size or config.train.batch_size)
    differing = () if is_usual else workload.by_batch
    scores = [f"--batch-size {batch_size} gives different scores from training: {what}" for what in differing]
    for note in (*run.notes, *plan.warnings, *workload.notes, *scores):
        report.notice(note, "warning")
    evaluation = evaluating_as(workload)
    with (
        make_fresh_folder(out, run.folder.report / "evaluation") as folder,
        choose_algorithms(deterministic=config.train.deterministic),
    ):
        model = load_weights(run, workload.model, plan, workload.frozen, workload.values)
        loaded = LoadedModel(run, config, workload, model, plan, report, batch_size)
        metrics = loaded.score(evaluation, wanted)
        pictures = evaluation.draw_pictures(folder, loaded.look)
        metrics |= loaded.score_raw()
        summary = folder / "evaluation.json"
        found = EvaluationResult(
            **run.collect_facts(plan),
            data=str(config.data.dir or "the workload's own"),
            samples=evaluation.num_scored or len(workload.val_samples),
            metrics=metrics,
            scoring=workload.scoring,
            scored_at=evaluation.scored_at,
            classes=evaluation.score_classes(),
            ranking=evaluation.ranking,
            hint=find_hint(config.workload, metrics),
            files=tuple(str(file) for file in (*pictures, summary)),
            seconds=round(clock.elapsed_s, 2),
        )
        write_atomically(summary, found.to_json() + "\n")
    return found


def load_data(
    run: OpenedRun, kind: type[PlainEvaluation], data: Path | None, report: RunReport
) -> tuple[RunConfig, Workload]:
    """Load the run's validation data, or all data of another folder."""
    config = make_paths_absolute(run.config)
    stored = Path(config.data.dir) if config.data.dir else None
    # The run's own folder given explicitly means its validation split, as without --data.
    if data is not None and not (stored and stored.exists() and data.samefile(stored)):
        if stored and not stored.exists() and (moved := _find_moved_data(run, kind, data)):
            report.notice(f"{data} has as many samples as the run's data, which are no longer in {stored}: "
                          "evaluating only its validation split, as in training", "warning")  # fmt: skip
            return moved
        other = kind.change_data_folder(config, data)
        try:
            return other, kind.use_all_samples(build_workload(kind.drop_training_settings(other), run.store))
        except DataError as error:
            if "data." in error.fix or "halfstep train" in error.fix:  # an evaluation takes no settings
                error.fix = f"give data in the layout of the run's data, {stored or 'its demo data'}"
            raise
    config, notes = find_moved_data(run.config, run.folder)
    for note in notes:
        report.notice(note, "warning")
    workload = build_workload(kind.drop_training_settings(config), run.store)
    if len(workload.val_samples) == 0:
        raise DataError(
            f"the run has no validation data in {config.data.dir}",
            why="it was trained on all data, and training data cannot measure generalisation",
            fix="--data DIR with unseen data",
        )
    return config, workload


def _find_moved_data(run: OpenedRun, kind: type[PlainEvaluation], data: Path) -> tuple[RunConfig, Workload] | None:
    """Return the run's data if `data` is where they were moved to; None for other data."""
    config = use_folder(run.config, data)
    try:
        workload = build_workload(kind.drop_training_settings(config), run.store)
    except HalfstepError:  # another layout
        return None
    found = [len(workload.train_samples), len(workload.val_samples)]
    return (config, workload) if found == list(run.checkpoint.state["num_samples"]) and found[1] else None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and the data to evaluate it on."""

    run: OpenedRun
    config: RunConfig
    workload: Workload
    model: nn.Module
    plan: Plan
    report: RunReport
    batch_size: int | None
    """As given by the user."""

    def score(self, evaluation: Any, options: Mapping[str, Any]) -> dict[str, float]:
        """Return the scores that the family's options ask for, else those of validation."""
        if options:
            request = EvaluateRequest(
                config=self.config,
                trained=wrap_trained(self.model, self.plan, self.report),
                options=options,
                phase=self.report.show_phase,
                batch_size=self.batch_size,
            )
            found = evaluation.score_with_options(request)
            if found is not None:
                return dict(found)
        # Micro-batches as in training: a batch that did not fit then does not fit now.
        pieces = int(self.run.checkpoint.state["pieces"]) if self.batch_size is None else 1
        return self._validate(replace(self.workload, metrics=lambda: evaluation.metrics), pieces)

    def score_raw(self) -> dict[str, float]:
        """Score the weights without averaging too, if the workload wants that; the model keeps those weights."""
        if not (self.workload.scores_raw and self.run.checkpoint.ema):
            return {}
        load_for_use(self.model, replace(self.run.checkpoint, ema={}))
        return {f"raw_{name}": value for name, value in self._validate(self.workload, pieces=1).items()}

    def look(self, index: int, samples: Samples | None = None) -> tuple[Batch, Any]:
        """Return one validation sample, or one of other samples, as the model sees it, and the model's output."""
        seed, device = self.config.train.seed, torch.device(self.plan.device)
        sample = (self.workload.val_samples if samples is None else samples).sample(index, key=(seed, 0, index))
        raw = {name: tensor.unsqueeze(0).to(device) for name, tensor in sample.items()}
        batch = self.workload.prepare_batch(raw, key=Key.for_validation(index), training=False)
        with enter_evaluation(self.model), self.plan.forward():
            return batch, self.workload.forward(self.model, batch)

    def _validate(self, workload: Workload, pieces: int) -> dict[str, float]:
        """Compute the validation metrics of this workload; explain an out-of-memory error."""
        train, plan = self.config.train, self.plan
        size, workers = self.batch_size or train.val_batch_size or train.batch_size, self.config.data.num_workers
        loader = Loader(workload.val_samples, batch_size=size, seed=train.seed, num_workers=workers, shuffle=False)
        with closing(loader), self.report.show_phase("Evaluating", len(loader)) as bar:
            try:
                return validate(workload, self.model, plan, loader, pieces=pieces, advance=bar.advance)
            except OutOfMemory as error:
                raise MemoryLimitError(
                    f"out of memory on {plan.device} with batch size {size}",
                    why=describe_memory(torch.device(plan.device)),
                    fix=f"--batch-size {max(size // (2 * pieces), 1)}, --precision bf16, or --device cpu",
                ) from error
