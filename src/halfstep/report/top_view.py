"""`halfstep top`: a live run from another terminal, by what it has on record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from halfstep.report.page.read_run import RunRecord, read_run
from halfstep.report.tables import pairs_table

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
GPU = {"utilization": "% busy", "power_w": "W", "temperature_c": "°C"}


def top_lines(path: Path) -> dict[str, str]:
    """What there is to know of a run now."""
    run = read_run(path)
    train, val, events = run.of_kind("train"), run.of_kind("val"), run.of_kind("event")
    latest: dict[str, Any] = train[-1] if train else {}
    lines = {
        "run": str(path),
        "state": _state(run, path),
        "step": f"{latest['step']:,} (epoch {latest['epoch']})" if latest else "none on record yet",
        "loss": f"{latest['loss']:.4f}  {sparkline([r['loss'] for r in train])}" if latest else "",
        "samples/s": f"{latest['samples_per_s']:,.1f}" if latest else "",
        "memory": f"{latest['memory_bytes'] / 1e9:.2f} GB" if latest.get("memory_bytes") else "",
        "skipped": f"{latest['skipped']}" if latest else "",
    }
    metric = run.metric or _first_metric(val)
    if val and metric in val[-1]:
        lines[metric] = f"{val[-1][metric]:.4f}  {sparkline([r[metric] for r in val if metric in r])}"
    if run.monitor:
        now = run.monitor[-1]
        shown = [f"{now[key]:.0f} {unit}" for key, unit in GPU.items() if now.get(key) is not None]
        lines["GPU"] = ", ".join(shown)
    if events:
        last = events[-1]
        lines["last fault"] = f"step {last.get('bad_step', last['step'])}: {last.get('reason', last['event'])}"
    return {name: text for name, text in lines.items() if text}


def top_panel(path: Path) -> Group:
    return Group(pairs_table(top_lines(path).items()), Text("Ctrl-C leaves; the run goes on", style="dim"))


def sparkline(values: list[float]) -> str:
    """The newest values as bars, or nothing where there is only one."""
    finite = [value for value in values[-WIDTH:] if value == value and abs(value) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if len(finite) < 2 or low == high:
        return ""
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in finite)


def _state(run: RunRecord, path: Path) -> str:
    if run.has_ended:
        return "ended"
    file = path / "metrics.jsonl"
    if not file.exists():
        return "starting"
    seconds = max(time.time() - file.stat().st_mtime, 0)
    return f"running, last record {seconds:.0f} s ago" if seconds < 600 else f"no record for {seconds / 60:.0f} minutes"


def _first_metric(validations: list[dict[str, Any]]) -> str:
    skipped = {"kind", "step", "epoch", "loss", "elapsed_s", "best"}
    return next((name for record in validations for name in record if name not in skipped), "")
