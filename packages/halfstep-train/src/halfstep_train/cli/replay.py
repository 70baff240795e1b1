"""`halfstep replay`: run a recorded bad step again to find its cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from halfstep_train.cli.options import Json, Trust, UsedDevice


def command(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="A folder RUN/capsules/STEP.")],
    device: UsedDevice = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Find out why a step went bad: run it again as recorded, in fp32, in fp64, eager and without our kernels.

    Reports the cause and the first operation that produced a non-finite value, with its source line; proposes the
    smallest change, tries it on the same step, and prints the line for the config. Runs record bad steps automatically
    (guard.capsules).

    Example:

        halfstep replay runs/unet-20250101-120000/capsules/00000123
    """
    from halfstep.evidence.capsule_folder import find_capsule

    find_capsule(capsule)
    from rich.text import Text

    from halfstep_train.report.console import open_result_console, print_text
    from halfstep_train.run.evidence import replay_run

    found = replay_run(capsule, device=device, trust=trust)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    console = open_result_console()
    for line in found.format_lines():
        # The two format_lines that most users look for.
        is_strong = line.startswith(("cause:", "change:"))
        print_text(console, Text(line, style="bold" if is_strong else ""))
