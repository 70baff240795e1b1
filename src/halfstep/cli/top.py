"""`halfstep top`: show it live."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    wants_json: Annotated[bool, typer.Option("--json", help="Look once, as JSON.")] = False,
) -> None:
    """A run that trains in another terminal, live: loss, metric, samples/s, GPU, memory, faults.

    It reads the run's records, never touches the run, and leaves when the run ends.

    Example:

        halfstep top runs/unet-20250101-120000
    """
    from rich.console import Console
    from rich.live import Live

    from halfstep.report.metrics_file import as_json
    from halfstep.report.top_view import top_facts, top_panel, top_table

    if wants_json:
        typer.echo(json.dumps(as_json(top_facts(run)), indent=2))
        return
    console = Console()
    if once or not console.is_terminal:
        console.print(top_table(run))
        return
    with Live(top_panel(run), console=console, auto_refresh=False) as live:
        while top_facts(run)["state"] != "ended":
            time.sleep(every)
            live.update(top_panel(run), refresh=True)
