"""`halfstep detect`: what can this machine (or a GPU I may rent) do, and what should I use?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from halfstep.hardware.facts import Hardware
    from halfstep.precision.advice import Advice


def command(
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Answer for a known GPU instead: v100, 4090, M2 Max.")] = "",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Only this device: cuda:1, cpu, mps, xpu, or auto for the best.")
    ] = "",
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Only look, measure nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever was stored.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What can this machine (or a GPU I may rent) do, and what should I use?

    Looks at every device, measures a matmul and a convolution in each format (seconds; the result is stored),
    and says which precision and settings to use.

    Example:

        halfstep detect

        halfstep detect --gpu v100

        halfstep detect --device cuda:1 --fresh --json
    """
    if gpu and (device or fresh or no_measure):
        raise ConfigError(
            f"--gpu {gpu} asks the table, and --device, --fresh or --no-measure ask this machine",
            fix="give --gpu alone, or leave it out",
        )
    devices = (known(gpu),) if gpu else devices_here(device, look_only=no_measure, fresh=fresh)
    from halfstep.precision.advice import advise

    answers = [(hardware, advise(hardware)) for hardware in devices]
    if as_json:
        print_json(answers)
    else:
        print_tables(answers)


def known(name: str) -> Hardware:
    from halfstep.hardware.gpus import known_gpu

    return known_gpu(name)


def devices_here(name: str, *, look_only: bool, fresh: bool) -> tuple[Hardware, ...]:
    from rich.console import Console

    progress = Console(stderr=True)
    with progress.status("looking for devices"):
        from halfstep.hardware.probe import probe, probe_all

        found = (probe(name),) if name else probe_all()
    if look_only:
        return found
    from halfstep.hardware.cache import cache_directory, measured_once
    from halfstep.hardware.measure import measure

    measured = []
    for hardware in found:
        with progress.status(f"measuring {hardware.device} ({hardware.name}), a few seconds"):
            measured.append(measured_once(hardware, cache_directory(os.environ), measure, fresh=fresh))
    return tuple(measured)


def print_json(answers: list[tuple[Hardware, Advice]]) -> None:
    import json

    devices = [{**hardware.to_dict(), "advice": advice.to_dict()} for hardware, advice in answers]
    typer.echo(json.dumps({"devices": devices}, indent=2))


def print_tables(answers: list[tuple[Hardware, Advice]]) -> None:
    from rich.console import Console

    console = Console()
    for hardware, advice in answers:
        print_device(console, hardware, advice)
    if all(hardware.kind == "cpu" for hardware, _ in answers):
        console.print("No GPU here. `halfstep detect --gpu NAME` answers for one you may rent.", style="dim")


def print_device(console: Console, hardware: Hardware, advice: Advice) -> None:
    from rich.rule import Rule
    from rich.text import Text

    from halfstep.hardware.describe import format_columns, identity
    from halfstep.report.tables import columns_table, pairs_table, rows_table

    title = f"{hardware.device}  {hardware.name}" if hardware.device else hardware.name
    settings = ((s.name, shown(s.value), s.reason) for s in advice.settings)
    remarks = [
        ("lost", advice.lost),
        *(("warning", w) for w in advice.warnings),
        *(("note", n) for n in hardware.notes),
    ]
    console.print(
        Rule(Text(title, style="bold"), align="left"),
        pairs_table(identity(hardware)),
        "",
        columns_table(format_columns(hardware), left=("format", "support")),
        "",
        Text(advice.headline, style="bold green"),
        "",
        rows_table(("setting", "use", "why"), settings),
        "",
        pairs_table(remarks),
        "",
        sep="\n",
    )


def shown(value: str | bool | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
