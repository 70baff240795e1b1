"""`halfstep top`: watch a run from another terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from halfstep.disk import is_folder_locked
from halfstep.errors import format_bytes, suggest_command
from halfstep_train.cli.completion import complete_run
from halfstep_train.report.console import dump_json, make_pairs_table
from halfstep_train.report.page.read_run import SAMPLES, RunRecord, describe_progress, format_rate_unit


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=complete_run)],
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    wants_json: Annotated[bool, typer.Option("--json", help="Print once, as JSON.")] = False,
) -> None:
    """Watch a run that trains in another terminal: progress, time left, loss, metric, throughput, GPU, faults.

    Only reads the run's records, and exits when the run ends.

    Example:

        halfstep top runs/unet-20250101-120000
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from halfstep_train.report.page.read_run import read_run

    record, console = read_run(run), Console()
    facts = collect_facts(record)
    table = build_table(record, facts)
    if wants_json:
        return typer.echo(dump_json(facts))
    # A live display needs a terminal, and an ended run does not change.
    if once or not console.is_terminal or is_over(record):
        return console.print(table)
    hint = Text("Ctrl-C exits; the run continues", style="dim")
    with Live(Group(table, hint), console=console, auto_refresh=False) as live:
        while not is_over(record):
            time.sleep(EVERY_S)
            record = read_run(run)
            table = build_table(record, collect_facts(record))
            live.update(table if is_over(record) else Group(table, hint), refresh=True)
    return None


EVERY_S = 1.0
"""Seconds between updates."""
RECORDED = ("step", "total_steps", "left_s", "epoch", "loss", SAMPLES, "memory_bytes", "skipped")
GPU = {"utilization": "% busy", "power_w": "W", "temperature_c": "°C"}


def collect_facts(run: RunRecord) -> dict[str, Any]:
    """Collect the current numbers of a run; omit what is not recorded."""
    train, val, events = run.select_kind("train"), run.select_kind("val"), run.select_kind("event")
    latest: dict[str, Any] = train[-1] if train else {}
    facts: dict[str, Any] = {"run": str(run.path), "state": _describe_state(run)}
    facts |= {key: latest[key] for key in (*RECORDED, run.rate, *_list_loss_keys(run)) if latest.get(key) is not None}
    if (mean := run.epoch_loss) is not None:
        facts["epoch_loss"] = mean
    if run.has_ended:
        facts.pop("left_s", None)
    metric = run.metric
    if val and metric in val[-1]:
        facts[metric] = val[-1][metric]
    if best := run.best:
        facts["best"] = {"value": best[metric], "epoch": best["epoch"]}
    if run.monitor:
        facts |= {key: run.monitor[-1][key] for key in GPU if run.monitor[-1].get(key) is not None}
    if watched := run.select_kind("watch"):
        facts["watch"] = summarise_watch(watched)
    if events:
        last = events[-1]
        step, reason = last.get("bad_step", last["step"]), last.get("reason", last["event"])
        facts["last_fault"] = {"step": step, "reason": reason}
    return facts


def summarise_watch(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the module with the least headroom in the newest observation, and the newest warning."""
    newest = records[-1]
    module = min(newest["headroom"], key=lambda name: newest["headroom"][name], default="")
    warnings = [warning["message"] for record in records for warning in record["warnings"]]
    headroom = newest["headroom"].get(module, float("nan"))
    return {"step": newest["step"], "module": module, "headroom": headroom, "warning": warnings[-1] if warnings else ""}


def build_table(run: RunRecord, facts: dict[str, Any]) -> Table:
    """Build the table of the facts."""
    metric = run.metric
    lines = {"run": facts["run"], "state": facts["state"], "step": "none recorded yet"}
    if "step" in facts:
        lines |= {
            "step": f"{describe_progress(facts)} (epoch {facts['epoch']})",
            **{f"last {key.replace('/', ' ')}": f"{facts[key]:.4f}" for key in _list_loss_keys(run) if key in facts},
            "mean loss": f"{facts['epoch_loss']:.4f} (of the epoch)" if "epoch_loss" in facts else "",
            format_rate_unit(run.rate): f"{facts[run.rate]:,.1f}",
            "memory": format_bytes(facts["memory_bytes"], digits=3) if facts.get("memory_bytes") else "",
            "skipped": f"{facts['skipped']}",
        }
    if metric in facts:
        lines[f"last {metric}"] = f"{facts[metric]:.4f}"
    if best := facts.get("best"):
        lines[f"best {metric}"] = f"{best['value']:.4f} (epoch {best['epoch']})"
    lines["GPU"] = ", ".join(f"{facts[key]:.0f} {unit}" for key, unit in GPU.items() if key in facts)
    if watch := facts.get("watch"):
        least = f"{watch['module'] or 'the model'} {watch['headroom']:.1f} bits below fp16's largest number"
        lines["watch"] = watch["warning"] or f"{least} (step {watch['step']})"
    if fault := facts.get("last_fault"):
        lines["last fault"] = f"step {fault['step']}: {fault['reason']}"
    return make_pairs_table(pair for pair in lines.items() if pair[1])


def _list_loss_keys(run: RunRecord) -> list[str]:
    """Return the key of the loss, or of each phase's loss if phases alternate."""
    return [f"loss/{phase}" for phase in run.phases] or ["loss"]


def is_over(run: RunRecord) -> bool:
    """True if the run has ended, was stopped or killed; a resumed run still has the summary of its first end."""
    is_live = is_folder_locked(run.path)  # None: unknown, as on Windows
    return not is_live and run.has_ended or is_live is False


def find_state(run: RunRecord) -> str:
    """Return starting, running, possibly running, ended or stopped (also: killed)."""
    if is_over(run):
        return "ended" if run.has_ended else "stopped"
    if not (run.path / "metrics.jsonl").exists():
        return "starting"
    return "running" if is_folder_locked(run.path) else "possibly running"


def _describe_state(run: RunRecord) -> str:
    """Describe whether the run trains, has ended or was killed, and how to continue it."""
    state = find_state(run)
    if state == "stopped":
        if any(run.path.glob("checkpoints/step-*")):
            again = suggest_command("train", "--resume", run.path)
            return f"stopped or killed: its process has ended; continue with: {again}"
        return "stopped or killed before its first checkpoint: its process has ended; start it again"
    if not state.endswith("running"):
        return state
    seconds = max(time.time() - (run.path / "metrics.jsonl").stat().st_mtime, 0)
    return f"{state}, last record {seconds:.0f} s ago"
