"""Open a stored run, and score it on its validation data or on other data (`halfstep evaluate`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.disk import find_unused_path, write_atomically
from halfstep.errors import CheckpointError, DataError, HalfstepError, HardwareError, MemoryLimitError, suggest_nearest
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.memory import describe_memory
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.names import normalise_precision
from halfstep.precision.plan import Plan
from halfstep.step.randomness import choose_algorithms
from halfstep.step.tables import Value, write_values_
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.loader import Key, Loader, Samples
from halfstep_train.report.run_report import EvaluationResult, RunReport
from halfstep_train.run.assemble import build_workload, place_model
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints, load
from halfstep_train.run.folder import RunFolder, find_moved_data, load_stored, make_paths_absolute, refuse_used_folder
from halfstep_train.run.frozen_modules import get_modules, match_stored, name_lost_files, place_frozen_
from halfstep_train.run.journal import find_hint
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.stored_state import load_for_use
from halfstep_train.run.validate import enter_evaluation, validate
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import load_part, resolve_options
from halfstep_train.workloads.base.using import EvaluateRequest, PlainEvaluation, TrainedModel, use_folder
from halfstep_train.workloads.base.workload import Batch, FrozenPart, Workload

# --- opening a stored run ---


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """A stored run: settings and one checkpoint."""

    folder: RunFolder
    config: RunConfig
    path: Path
    """The checkpoint's folder."""
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
    """Notes for the user, such as that no checkpoint is the best one."""

    @property
    def store(self) -> dict[str, Any]:
        """Return what the run stored about its data: classes, mask values, image format."""
        return dict(self.checkpoint.state["store"])

    @property
    def frozen(self) -> dict[str, dict[str, str]]:
        """Return checksum and file of each frozen module."""
        return dict(self.checkpoint.state["frozen"])

    @property
    def weights(self) -> str:
        """Describe the weights in use, which are those of validation."""
        return "averaged (EMA)" if self.checkpoint.ema else "as trained"

    def collect_facts(self, plan: Plan) -> dict[str, Any]:
        """Return the facts that every result records about its run."""
        return {
            "run": str(self.folder.path),
            "workload": self.config.workload,
            "checkpoint": self.path.name,
            "weights": self.weights,
            "precision": plan.granted,
            "simulated": plan.simulated,
            "device": f"{plan.device} ({plan.device_name})",
        }


def open_run(path: Path, *, checkpoint: str = "best", trust: bool = False) -> OpenedRun:
    """Read settings and weights of the `best` or `last` checkpoint, or of one by name or step.

    `trust` imports custom code that the user did not train the run with.
    """
    folder = RunFolder.open(str(path))
    config = load_stored(folder.config, folder.read_settled().code, trust=trust).config
    path, notes = _choose_checkpoint(folder.open_checkpoints(), checkpoint)
    try:
        opened = load(path)
    except CheckpointError as error:
        fix = "choose another one with --checkpoint last or STEP, or continue the run, which goes back to a whole one"
        raise CheckpointError(error.what, why=error.why, fix=error.fix or fix) from error
    return OpenedRun(folder=folder, config=config, path=path, checkpoint=opened, notes=notes)


def check_frozen_parts(run: OpenedRun, frozen: Mapping[str, FrozenPart]) -> dict[str, FrozenPart]:
    """Return the frozen modules in use; refuse them if they differ from those the run was trained with."""
    used = {name: known for name, known in run.frozen.items() if name in frozen}
    return match_stored(frozen, used, run.folder.path)


def choose_plan(
    run: OpenedRun,
    model: nn.Module,
    *,
    device: str | None,
    precision: str | None,
    frozen: Mapping[str, FrozenPart] | None = None,
) -> Plan:
    """Return the stored plan, or a new one for another device or precision, or if the run's device is missing."""
    stored = run.folder.read_plan()
    try:
        hardware = probe(device or stored.device)
    except HardwareError:
        if device is not None:
            raise
        hardware = probe("auto")  # this machine lacks the run's device
    if precision is None and hardware.device == stored.device:
        return stored
    request = run.config.precision
    if precision is not None:
        # Per-module precisions belong to the request that is replaced.
        request = request.model_copy(update={"default": normalise_precision(precision, "--precision"), "modules": {}})
    islands = [f"{row.module}: {row.reason}" for row in stored.rows if row.kind == "island"]
    plan = decide(request, hardware, model, fragile=islands, frozen=get_modules(frozen or {}))
    if device is None and plan.device != stored.device:
        moved = f"the run's device {stored.device} ({stored.device_name}) is not available: using {plan.device}"
        return replace(plan, warnings=(*plan.warnings, f"{moved} in {plan.granted}"))
    return plan


def load_weights(
    run: OpenedRun,
    model: nn.Module,
    plan: Plan,
    frozen: Mapping[str, FrozenPart] | None = None,
    values: Mapping[str, Value] | None = None,
) -> nn.Module:
    """Place the model on its device with the checkpoint's weights, the averaged ones if the run has them."""
    model = place_model(run.config, model, plan)
    place_frozen_(run.config.train.channels_last, run.config.workload, frozen or {}, plan)
    write_values_(values or {}, int(run.checkpoint.state["step"]["committed"]), torch.device(plan.device))
    try:
        load_for_use(model, run.checkpoint)
    except (RuntimeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{run.path.name} does not contain the weights of this run's {run.config.workload}",
            why=" ".join(str(error).split())[:300],
            fix=f"check whether {run.folder.config} or your model's code changed after training",
        ) from error
    return model.eval()


@contextmanager
def make_fresh_folder(out: Path | None, default: Path) -> Iterator[Path]:
    """Make an output folder: `out`, new or empty, or `default`, numbered if taken; remove it if left empty."""
    folder = out or find_unused_path(default)
    refuse_used_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


def _choose_checkpoint(checkpoints: Checkpoints, asked: str) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint that is asked for, and notes."""
    found = checkpoints.list_all()
    if not found:
        raise CheckpointError(
            f"no checkpoint in {checkpoints.folder}", fix="train the run first, or give another run's folder"
        )
    if asked == "last":
        return found[-1], ()
    if asked == "best":
        best = checkpoints.find_best()
        none = "no checkpoint is marked as the best one (was there a validation?): using the newest"
        return (found[-1], (none,)) if best is None else (best, ())
    # The newest checkpoint of a step wins.
    by_name = {path.name: path for path in found} | {str(int(path.name.split("-")[1])): path for path in found}
    if asked not in by_name:
        known = ["best", "last", *sorted(path.name for path in found)]
        raise CheckpointError(f"no checkpoint {asked!r} in {checkpoints.folder}", fix=suggest_nearest(asked, known))
    return by_name[asked], ()


def wrap_trained(model: nn.Module, plan: Plan, report: RunReport) -> TrainedModel:
    """Wrap the model for a family's evaluation and prediction."""

    @contextmanager
    def enter() -> Iterator[None]:
        with enter_evaluation(model), plan.forward():
            yield

    return TrainedModel(
        model=model, device=torch.device(plan.device), inference=enter, warn=lambda text: report.notice(text, "warning")
    )


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
    report.warn((*run.notes, *plan.warnings, *workload.notes, *scores))
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
    report.warn(notes)
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
