"""`halfstep predict`: apply a stored run to files, using only the run's folder."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from halfstep.disk import write_atomically
from halfstep.errors import ConfigError, DataError, Interrupted, format_count
from halfstep.hardware.clock import Stopwatch
from halfstep.step.randomness import choose_algorithms
from halfstep_train.data.files import list_files, list_some
from halfstep_train.models.initial_values import skip_initialisation
from halfstep_train.report.run_report import Answer, Failure, Predictions, RunReport
from halfstep_train.run.frozen_modules import name_lost_files
from halfstep_train.run.interrupts import catch_interrupts
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
from halfstep_train.workloads.base.using import Input, Predictor, PredictRequest
from halfstep_train.workloads.base.workload import wrap_frozen_parts

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
    return [Input(path=path, name=path.relative_to(given)) for path in list_files(given, endings, recursive=True)]


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
    frozen = check_frozen_parts(run, wrap_frozen_parts(getattr(predictor, "frozen", {})))
    inputs, failed = find_inputs(asked, predictor.endings)
    for failure in failed:
        _report_failure(failure, report)
    if command.needs_input:
        _refuse_none_usable(inputs, failed)
    plan = choose_plan(run, predictor.model, device=device, precision=precision, frozen=frozen)
    report.warn((*run.notes, *plan.warnings))
    has_folder = request.out is not None or command.writes_files
    opened: AbstractContextManager[Path | None] = nullcontext()
    if has_folder:
        opened = make_fresh_folder(request.out, run.folder.path / "predictions")
    with opened as folder, choose_algorithms(deterministic=run.config.train.deterministic):
        model = load_weights(run, predictor.model, plan, frozen, getattr(predictor, "values", {}))
        trained = wrap_trained(model, plan, report)
        answers: list[Answer] = []
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
        is_interrupted = asked_to_stop and bar.done < bar.total
        if failed and not is_interrupted:
            _refuse_none_usable(answers, failed)
        made = Predictions(
            **run.collect_facts(plan),
            answers=tuple(answers),
            failed=tuple(failed),
            out=str(folder) if folder else None,
            seconds=round(clock.elapsed_s, 2),
        )
        if folder and (answers or not is_interrupted):
            write_atomically(folder / "predictions.json", made.to_json() + "\n")
        if is_interrupted:
            name = signal.Signals(asked_to_stop.exit_code - 128).name
            num = f"{len(answers):,} of {format_count(len(answers) + bar.total - bar.done, 'prediction')}"
            where = f"are written to {folder}" if folder and answers else "are done; nothing was written"
            by = "Ctrl-C" if name == "SIGINT" else name
            raise Interrupted(f"stopped by {by}: {num} {where}", exit_code=asked_to_stop.exit_code)
    return made


def _find_command(workload: str) -> PredictCommand:
    command = KINDS.of(workload).predict
    if command is None:
        able = ", ".join(name for name in KINDS if KINDS[name].predict is not None)
        raise ConfigError(
            f"halfstep predict does not support {workload}",
            why="its Kind defines no predictor",
            fix="use halfstep evaluate, or define a predictor for a workload of yours (examples/own_workload.py shows "
            f"how); supported workloads: {able}",
        )
    return command


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
