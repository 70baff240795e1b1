"""`halfstep runs`: list the runs in a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.errors import CheckpointError, HalfstepError, format_duration
from halfstep_train.cli.options import Json
from halfstep_train.cli.top import collect_facts, find_state
from halfstep_train.report.console import dump_json, make_columns_table, open_result_console

RUNS = Path("runs")
"""Where runs are unless --out says otherwise; before the first one there is no such folder."""
CHECKPOINT = re.compile(r"step-(\d+)(-\d+)?")


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the runs.")] = RUNS,
    as_json: Json = False,
) -> None:
    """List the runs in a folder, newest first: state, progress, time left, best metric, precision.

    Example:

        halfstep runs

        halfstep runs runs/sweep --json
    """

    if not folder.is_dir() and folder != RUNS:
        raise CheckpointError(f"there is no folder {folder}", fix="give the folder that contains your runs")
    found = sorted(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    rows = []
    for file in found:
        try:
            rows.append(list_facts(file.parent))
        except HalfstepError as error:  # one damaged run must not hide the others
            typer.echo(f"warning: {file.parent} is left out: {error.what}", err=True)
    if as_json:
        return typer.echo(dump_json(rows))
    if not rows:
        return typer.echo(f"no runs in {folder}; `halfstep runs DIR` lists another folder")
    columns = {title: [format_facts(row)[title] for row in rows] for title in format_facts(rows[0])}
    return open_result_console().print(make_columns_table(columns, left=("run", "state")))


def list_facts(path: Path) -> dict[str, Any]:
    """Return what the list shows about one run; omit what is not recorded."""
    from halfstep_train.report.page.read_run import read_run

    run = read_run(path)
    facts = collect_facts(run)
    shown: dict[str, Any] = {key: facts[key] for key in ("step", "total_steps", "left_s", "best") if key in facts}
    if run.has_ended:  # the last record may be a few steps older
        shown["step"] = run.summary["steps"]
    elif stored := [int(found[1]) for file in path.glob("checkpoints/*") if (found := CHECKPOINT.fullmatch(file.name))]:
        shown["step"] = max(shown.get("step", 0), *stored)
    precision = str(run.plan.get("granted", "")) + (" (simulated)" if run.plan.get("simulated") else "")
    return {"run": str(path), "state": find_state(run), "metric": run.metric, "precision": precision, **shown}


def format_facts(facts: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one run, by column."""
    whole = f"/{facts['total_steps']:,}" if facts.get("total_steps") else ""
    is_live = facts["state"] not in ("ended", "stopped")
    best = facts.get("best")
    return {
        "run": Path(facts["run"]).name,
        "state": facts["state"],
        "step": f"{facts['step']:,}{whole}" if "step" in facts else "",
        "left": format_duration(facts["left_s"]) if is_live and facts.get("left_s") else "",
        "best": f"{facts['metric']} {best['value']:.4f}" if best else "",
        "precision": facts["precision"],
    }
