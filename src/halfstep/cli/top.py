"""`halfstep top`: show it live."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    wants_json: Annotated[bool, typer.Option("--json", help="Look once, as JSON.")] = False,
) -> None:
    """Watch a run that trains in another terminal: loss, metric, throughput, GPU, memory, faults.

    It reads the run's records, never touches the run, and quits when the run ends.

    Example:

        halfstep top runs/unet-20250101-120000
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from halfstep.report.metrics_file import as_json
    from halfstep.report.page.read_run import read_run
    from halfstep.report.top_view import explained, is_over, top_facts, top_table

    record, console = read_run(run), Console()
    with explained(record):
        facts = top_facts(record)
        table = top_table(record, facts)
    if wants_json:
        return typer.echo(json.dumps(as_json(facts), indent=2))
    if once or not console.is_terminal or is_over(record):
        return console.print(table)
    hint = Text("Ctrl-C leaves; the run goes on", style="dim")
    with Live(Group(table, hint), console=console, auto_refresh=False) as live:
        while not is_over(record):
            time.sleep(every)
            record = read_run(run)
            with explained(record):
                table = top_table(record, top_facts(record))
            live.update(table if is_over(record) else Group(table, hint), refresh=True)
    return None
