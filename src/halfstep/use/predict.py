"""`predict`: use a stored run on files, with nothing but its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from halfstep.data.files import natural_key, some_of
from halfstep.disk import write_whole
from halfstep.errors import ConfigError, DataError
from halfstep.measure.clock import Stopwatch
from halfstep.models.first_values import unfilled
from halfstep.report.prediction_view import Answer, Failure, Predictions
from halfstep.report.run_report import RunReport
from halfstep.run.frozen import naming_lost_files
from halfstep.step.randomness import algorithms
from halfstep.use.open_run import as_trained, fresh_folder, in_use, open_run, plan_for_use, with_weights
from halfstep.workloads import KINDS
from halfstep.workloads.kind import Kind
from halfstep.workloads.options import with_defaults
from halfstep.workloads.using import Input, Predictor, Trained, Wishes, frozen_of


def find_inputs(asked: Iterable[Path], endings: Sequence[str]) -> tuple[list[Input], list[Failure]]:
    """Each file once, in the order asked for; what is not there, or holds nothing, is a failure."""
    found: dict[Path, Input] = {}
    failed: list[Failure] = []
    for place in asked:
        below = _inputs(place, endings)
        if not below:
            why = (
                f"nothing in it that can be read ({' '.join(endings)})"
                if place.is_dir()
                else "there is no such file or folder"
            )
            failed.append(Failure(file=str(place), why=why))
        for item in below:
            found.setdefault(item.path.resolve(), item)
    return list(found.values()), failed


def _inputs(place: Path, endings: Sequence[str]) -> list[Input]:
    if place.is_file():
        return [Input(path=place, name=Path(place.name))]  # whatever its ending: the user named it
    if not place.is_dir():
        return []
    names = (path.relative_to(place) for path in place.rglob("*") if path.suffix.lower() in endings and path.is_file())
    visible = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return [Input(path=place / name, name=name) for name in sorted(visible, key=lambda name: natural_key(str(name)))]


def predict(
    path: Path,
    asked: Sequence[Path],
    *,
    report: RunReport,
    wishes: Wishes,
    checkpoint: str = "best",
    device: str | None = None,
    precision: str | None = None,
    trust: bool = False,
) -> Predictions:
    """What the model says about every file; those that cannot be used are named, and fail only where all do."""
    clock = Stopwatch()
    run = open_run(path, checkpoint=checkpoint, trust=trust)
    kind = _kind_of(run.config.workload)
    wishes = replace(wishes, options=with_defaults(kind.predict_options, wishes.options, run.config.workload))
    _refuse_wrong_inputs(kind, asked, run.config.workload)
    with naming_lost_files(run.frozen), unfilled():
        predictor: Predictor = kind.part("predictor")(run.config, run.store)
    frozen = as_trained(run, frozen_of(predictor))
    inputs, failed = find_inputs(asked, predictor.endings)
    for failure in failed:
        _tell(failure, report)
    if kind.needs_input:
        _some_must_be_left(inputs, failed)
    plan = plan_for_use(run, predictor.model, device=device, precision=precision, frozen=frozen)
    for note in (*run.notes, *plan.warnings):
        report.notice(note, "warning")
    has_folder = wishes.out is not None or kind.writes_files
    place = fresh_folder(wishes.out, run.folder.path / "predictions") if has_folder else nullcontext()
    with place as folder, algorithms(deterministic=run.config.train.deterministic):
        model = with_weights(run, predictor.model, plan, frozen, getattr(predictor, "values", {}))
        answers = _answers(predictor, inputs, in_use(model, plan, report), replace(wishes, out=folder), report, failed)
        if failed:
            _some_must_be_left(answers, failed)
        made = Predictions(
            **run.facts(plan),
            answers=tuple(answers),
            failed=tuple(failed),
            out=str(folder) if folder else None,
            seconds=round(clock.elapsed_s, 2),
        )
        if folder:
            write_whole(folder / "predictions.json", made.to_json() + "\n")
    return made


def _kind_of(workload: str) -> Kind:
    kind = KINDS.of(workload)
    if kind.predictor is None:
        able = ", ".join(name for name in KINDS if KINDS[name].predictor is not None)
        raise ConfigError(
            f"halfstep predict does not know {workload}",
            why="its Kind has no predictor",
            fix=f"give it one (examples/own_workload.py); it knows {able}",
        )
    return kind


def _answers(
    predictor: Predictor,
    inputs: list[Input],
    trained: Trained,
    wishes: Wishes,
    report: RunReport,
    failed: list[Failure],
) -> list[Answer]:
    """One for each input that can be used; the others join those that failed."""
    answers: list[Answer] = []
    with report.phase("Predicting", len(inputs)) as bar:
        for result in predictor.answers(inputs, trained, wishes, bar):
            if isinstance(result, Answer):
                answers.append(result)
            else:
                failed.append(result)
                _tell(result, report)
            bar.advance()
    return answers


def _refuse_wrong_inputs(kind: Kind, asked: Sequence[Path], workload: str) -> None:
    if kind.needs_input and not asked:
        raise ConfigError(
            "no input to predict", why=f"{workload} answers for files", fix="name files, or folders of them, after RUN"
        )
    if asked and not kind.needs_input:
        raise ConfigError(f"{asked[0]} means nothing for {workload}", why="it needs no input", fix="leave it out")


def _tell(failure: Failure, report: RunReport) -> None:
    report.notice(f"left out {failure.file}: {failure.why}", "warning")


def _some_must_be_left(usable: Sequence[Input | Answer], failed: Sequence[Failure]) -> None:
    if not usable:
        raise DataError(
            f"none of the inputs can be used: {some_of(failure.file for failure in failed)}",
            why=failed[0].why,
            fix="name files that it can read, or folders that hold some",
        )
