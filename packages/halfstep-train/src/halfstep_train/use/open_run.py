"""Open a stored run: read its settings, load one intact checkpoint, and choose the precision to compute in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.disk import find_unused_path
from halfstep.errors import CheckpointError, HardwareError, suggest_nearest
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.names import normalise_precision
from halfstep.precision.plan import Plan
from halfstep.step.tables import Value, write_values_
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import place_model
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints, load
from halfstep_train.run.folder import RunFolder, load_stored, refuse_used_folder
from halfstep_train.run.frozen_modules import get_modules, match_stored, place_frozen_
from halfstep_train.run.stored_state import load_for_use
from halfstep_train.run.validate import enter_evaluation
from halfstep_train.workloads.base.using import TrainedModel
from halfstep_train.workloads.base.workload import FrozenPart


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """A stored run: settings and one checkpoint."""

    folder: RunFolder
    config: RunConfig
    path: Path
    """The checkpoint's folder."""
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
    """Notes for the user, such as a damaged checkpoint that was skipped."""

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
    """Read settings and weights; replace a damaged checkpoint by an intact one, with a note.

    `trust` imports custom code that the user did not train the run with.
    """
    folder = RunFolder.open(str(path))
    config = load_stored(folder.config, folder.read_settled().code, trust=trust).config
    notes: list[str] = []
    chosen, content = _load_first_whole(_list_candidates(folder.open_checkpoints(), checkpoint, notes), notes)
    return OpenedRun(folder=folder, config=config, path=chosen, checkpoint=content, notes=tuple(notes))


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


def _list_candidates(checkpoints: Checkpoints, asked: str, notes: list[str]) -> list[Path]:
    """Return the checkpoints to try, in order; only `best` and `last` have alternatives."""
    newest_first = checkpoints.list_all()[::-1]
    if not newest_first:
        raise CheckpointError(
            f"no checkpoint in {checkpoints.folder}", fix="train the run first, or give another run's folder"
        )
    if asked == "last":
        return newest_first
    if asked == "best":
        best = checkpoints.find_best()
        if best is None:
            notes.append("no checkpoint is marked as the best one (was there a validation?): using the newest")
            return newest_first
        return [best, *(path for path in newest_first if path != best)]
    named = {path.name: path for path in newest_first}
    # Newest last, so that the newest checkpoint of a step wins.
    by_step = {str(int(path.name.split("-")[1])): path for path in newest_first[::-1]}
    if found := named.get(asked) or by_step.get(asked):
        return [found]
    raise CheckpointError(
        f"no checkpoint {asked!r} in {checkpoints.folder}", fix=suggest_nearest(asked, ["best", "last", *sorted(named)])
    )


def _load_first_whole(candidates: Iterable[Path], notes: list[str]) -> tuple[Path, Checkpoint]:
    """Load the first checkpoint that is intact; note the damaged ones before it."""
    failures: list[CheckpointError] = []
    for path in candidates:
        try:
            content = load(path)
        except CheckpointError as error:
            failures.append(error)
            continue
        notes += [f"{error.what}; using {path.name} instead" for error in failures]
        return path, content
    raise CheckpointError(
        failures[0].what, why="no other checkpoint could be used", fix="try --checkpoint last, or train the run again"
    )


def wrap_trained(model: nn.Module, plan: Plan, report: RunReport) -> TrainedModel:
    """Wrap the model for a family's evaluation and prediction."""

    @contextmanager
    def enter() -> Iterator[None]:
        with enter_evaluation(model), plan.forward():
            yield

    return TrainedModel(
        model=model, device=torch.device(plan.device), inference=enter, warn=lambda text: report.notice(text, "warning")
    )
