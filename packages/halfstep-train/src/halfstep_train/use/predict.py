"""`halfstep predict`: apply a stored run to files, using only the run's folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from halfstep.disk import write_atomically
from halfstep.errors import ConfigError, DataError, Interrupted, format_count, make_printable
from halfstep.hardware.clock import Stopwatch
from halfstep.step.randomness import choose_algorithms
from halfstep_train.data.files import list_some, make_natural_key
from halfstep_train.models.initial_values import skip_initialisation
from halfstep_train.report.console import dump_json
from halfstep_train.report.run_report import Answer, Failure, Predictions, RunReport
from halfstep_train.run.folder import UNFINISHED
from halfstep_train.run.frozen_modules import name_lost_files
from halfstep_train.run.interrupts import Interrupts, catch_interrupts
from halfstep_train.use.evaluate import (
    check_frozen_parts,
    choose_plan,
    load_weights,
    make_fresh_folder,
    open_run,
    wrap_trained,
)
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import PredictCommand, load_part, resolve_options
from halfstep_train.workloads.base.using import Input, Predictor, PredictRequest, get_frozen_parts

FINISHING = "finishing this file; press Ctrl-C again to stop at once"


def find_inputs(asked: Iterable[Path], endings: Sequence[str]) -> tuple[list[Input], list[Failure]]:
    """Return each file once, in the order given; missing paths and folders without usable files are failures."""
    found: dict[Path, Input] = {}
    failed: list[Failure] = []
    for path in asked:
        below = _list_inputs(path, endings)
        if not below:
            nothing = f"it has no readable file ({' '.join(endings)})"
            why = nothing if path.is_dir() else "there is no such file or folder"
            failed.append(Failure(file=str(path), why=why))
        for item in below:
            found.setdefault(item.path.resolve(), item)
    return list(found.values()), failed


def _list_inputs(given: Path, endings: Sequence[str]) -> list[Input]:
    if given.is_file():
        return [Input(path=given, name=Path(given.name))]  # any ending, because the user named the file
    names = (path.relative_to(given) for path in given.rglob("*") if path.suffix.lower() in endings and path.is_file())
    visible = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return [
        Input(path=given / name, name=name) for name in sorted(visible, key=lambda name: make_natural_key(str(name)))
    ]


def predict(
    path: Path,
    asked: Sequence[Path],
    *,
    report: RunReport,
    request: PredictRequest,
    checkpoint: str = "best",
    device: str | None = None,
    precision: str | None = None,
    trust: bool = False,
) -> Predictions:
    """Predict every file; report files that cannot be used, and fail only if none can."""
    clock = Stopwatch()
    run = open_run(path, checkpoint=checkpoint, trust=trust)
    command = _find_command(run.config.workload)
    request = replace(request, options=resolve_options(command.options, request.options, run.config.workload))
    if command.needs_input and not asked:
        why = f"{run.config.workload} needs input files"
        raise ConfigError("no input to predict", why=why, fix="give files or folders after RUN")
    if asked and not command.needs_input:
        raise ConfigError(f"{asked[0]}: {run.config.workload} takes no input files", fix="leave it out")
    with name_lost_files(run.frozen), skip_initialisation():
        predictor: Predictor = load_part(command.predictor)(run.config, run.store)
    frozen = check_frozen_parts(run, get_frozen_parts(predictor))
    inputs, failed = find_inputs(asked, predictor.endings)
    for failure in failed:
        _report_failure(failure, report)
    if command.needs_input:
        _refuse_none_usable(inputs, failed)
    plan = choose_plan(run, predictor.model, device=device, precision=precision, frozen=frozen)
    for note in (*run.notes, *plan.warnings):
        report.notice(note, "warning")
    has_folder = request.out is not None or command.writes_files
    # Stored with an interrupted call: only the same call may continue it.
    call = {**run.collect_facts(plan), "options": request.options, "inputs": [str(path.absolute()) for path in asked]}
    left = _read_unfinished(request.out, call)
    opened: AbstractContextManager[Path | None] = nullcontext(request.out)
    if has_folder and not left:
        opened = make_fresh_folder(request.out, run.folder.path / "predictions")
    with opened as folder, choose_algorithms(deterministic=run.config.train.deterministic):
        model = load_weights(run, predictor.model, plan, frozen, getattr(predictor, "values", {}))
        trained = wrap_trained(model, plan, report)
        answers: list[Answer] = []
        if folder and left:
            answers, inputs = _continue(folder, left, inputs, report)
        try:
            with (
                catch_interrupts(answer=FINISHING) as asked_to_stop,
                report.show_phase("Predicting", len(inputs)) as bar,
            ):
                for result in predictor.answer_all(inputs, trained, replace(request, out=folder), bar):
                    if isinstance(result, Answer):
                        answers.append(result)
                    else:
                        failed.append(result)
                        _report_failure(result, report)
                    bar.advance()
                    # A signal during the last file needs no action: everything is done.
                    if asked_to_stop and bar.done < bar.total:
                        break
        except KeyboardInterrupt:
            has_files = folder is not None and any(folder.iterdir())
            raise Interrupted(
                f"stopped by a second Ctrl-C after {format_count(len(answers), 'prediction')}"
                + (f"; {folder} may contain an incomplete file" if has_files else "; nothing was written"),
                fix=f"remove {folder}, or choose another folder with --out" if has_files else "",
            ) from None
        if asked_to_stop and bar.done < bar.total:
            raise _store_unfinished(folder, call, command, answers, bar.total - bar.done, asked_to_stop)
        if failed:
            _refuse_none_usable(answers, failed)
        made = Predictions(
            **run.collect_facts(plan),
            answers=tuple(answers),
            failed=tuple(failed),
            out=str(folder) if folder else None,
            seconds=round(clock.elapsed_s, 2),
        )
        if folder:
            write_atomically(folder / "predictions.json", made.to_json() + "\n")
    return made


def _find_command(workload: str) -> PredictCommand:
    command = KINDS.of(workload).predict
    if command is None:
        able = ", ".join(name for name in KINDS if KINDS[name].predict is not None)
        raise ConfigError(
            f"halfstep predict does not support {workload}",
            why="its Kind defines no predictor",
            fix=f"define one (examples/own_workload.py shows how); supported workloads: {able}",
        )
    return command


# --- interrupted calls ---


def _read_unfinished(out: Path | None, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an interrupted call with the same arguments left in `--out`; empty if there is none.

    Any other folder with content is refused as usual.
    """
    if out is None or not (out / UNFINISHED).is_file():
        return {}
    try:
        left: dict[str, Any] = json.loads((out / UNFINISHED).read_text(encoding="utf-8"))
        return left if left["halfstep predict"] == json.loads(dump_json(call)) else {}
    except (ValueError, KeyError, TypeError):  # not written by halfstep
        return {}


def _continue(
    folder: Path, left: Mapping[str, Any], inputs: list[Input], report: RunReport
) -> tuple[list[Answer], list[Input]]:
    """Return the answers of an interrupted call and the inputs that have none; remove what is drawn again."""
    (folder / UNFINISHED).unlink()  # its list becomes stale now
    for name in left["drawn again"]:
        (folder / name).unlink(missing_ok=True)
    answers = [Answer(**one) for one in left["answers"]]
    done = {answer.file for answer in answers}
    # All frames of a folder share one answer, under the folder's name.
    inputs = [item for item in inputs if done.isdisjoint(map(make_printable, (str(item.path), str(item.path.parent))))]
    if answers:
        report.notice(f"continuing in {folder} after {format_count(len(answers), 'prediction')} of an interrupted call")
    return answers, inputs


def _store_unfinished(
    folder: Path | None,
    call: Mapping[str, Any],
    command: PredictCommand,
    answers: list[Answer],
    num_left: int,
    asked_to_stop: Interrupts,
) -> Interrupted:
    """Store what the same call needs to continue; return the error that reports the progress."""
    name = signal.Signals(asked_to_stop.exit_code - 128).name
    by = "Ctrl-C" if name == "SIGINT" else name
    num = f"{len(answers):,} of {format_count(len(answers) + num_left, 'prediction')}"
    if not folder or not answers:
        return Interrupted(f"stopped by {by} after {num}; nothing was written", exit_code=asked_to_stop.exit_code)
    left: dict[str, Any] = {"halfstep predict": call, "answers": [], "drawn again": []}
    if command.needs_input:
        left["answers"] = [asdict(one) for one in answers]
    else:  # samples have no input that identifies them; the same seed draws them again
        named = {value for answer in answers for value in answer.found.values() if isinstance(value, str)}
        left["drawn again"] = [str(path.relative_to(folder)) for path in folder.rglob("*") if str(path) in named]
    write_atomically(folder / UNFINISHED, dump_json(left) + "\n")
    again = "continues" if command.needs_input else "draws all of them again"
    return Interrupted(
        f"stopped by {by}: {num} are written to {folder}",
        fix=f"run the same command with --out {folder}, which {again} there",
        exit_code=asked_to_stop.exit_code,
    )


# --- inputs ---


def _report_failure(failure: Failure, report: RunReport) -> None:
    report.notice(f"left out {failure.file}: {failure.why}", "warning")


def _refuse_none_usable(usable: Sequence[Input | Answer], failed: Sequence[Failure]) -> None:
    if not usable:
        raise DataError(
            f"none of the inputs can be used: {list_some(failure.file for failure in failed)}",
            why=failed[0].why,
            fix="give readable files, or folders with such files",
        )
