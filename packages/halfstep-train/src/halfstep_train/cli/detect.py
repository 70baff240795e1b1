"""`halfstep detect`: show what this machine, or a GPU by name, supports, and which precision to use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from halfstep.errors import ConfigError
from halfstep_train.cli.options import Json, option
from halfstep_train.report.console import make_columns_table, make_pairs_table, make_rows_table

if TYPE_CHECKING:
    from halfstep.hardware.device_facts import Hardware
    from halfstep.precision.advice import HardwareAdvice


def command(
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GPU|DEVICE",
            help="A known GPU: v100, rtx 4090; list: show all; or one device: cuda:1, cpu, mps, xpu, auto (the best).",
        ),
    ] = None,
    no_measure: Annotated[bool, option("Probe only, measure nothing.", "--no-measure")] = False,
    fresh: Annotated[bool, option("Measure again instead of using cached results.", "--fresh")] = False,
    bugs: Annotated[bool, option("Test which known bugs of torch and cuDNN this machine has.", "--bugs")] = False,
    as_json: Json = False,
) -> None:
    """Show what this machine, or a GPU you may rent, supports, and which precision to use.

    Probes every device, measures a matmul and a convolution in each format (takes seconds; the result is cached), and
    recommends a precision.

    Example:

        halfstep detect

        halfstep detect v100

        halfstep detect list

        halfstep detect cuda:1 --fresh --json

        halfstep detect --bugs
    """
    asked = " ".join(name or [])
    if bugs:
        if asked or no_measure or fresh:
            raise ConfigError("--bugs tests the first GPU of this machine, or its CPU", fix="halfstep detect --bugs")
        return report_bugs(as_json=as_json)
    if asked.lower() == "list":
        return print_known(as_json=as_json)
    from halfstep.hardware.gpus import look_up_gpu
    from halfstep.precision.advice import advise
    from halfstep_train.config.schema import is_device

    # `cuda:1` is a device of this machine, `rtx 4090` a GPU of the table.
    if asked and not is_device(asked):
        devices: tuple[Hardware, ...] = (look_up_gpu(asked),)
    else:
        devices = probe_devices(asked, look_only=no_measure, fresh=fresh)
    answers = [(hardware, advise(hardware)) for hardware in devices]
    if as_json:
        found = [{**hardware.to_dict(), "advice": advice.to_dict()} for hardware, advice in answers]
        return typer.echo(json.dumps({"devices": found}, indent=2))
    console = Console()
    for hardware, advice in answers:
        print_device(console, hardware, advice)
    if all(hardware.kind == "cpu" for hardware, _ in answers):
        console.print(
            "This machine has no GPU. `halfstep detect NAME` reports one you may rent: v100, 4090, h200.", style="dim"
        )
    return None


def report_bugs(*, as_json: bool) -> None:
    """Test the known bugs of torch and cuDNN; exit with 1 if halfstep does not shield from one of them."""
    import torch

    from halfstep_train.use.library_bugs import find_bugs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    findings = list(find_bugs(device))
    if as_json:
        bugs = [
            {"name": one.bug.name, "what": one.bug.what, "here": one.is_here, "shielded": one.is_shielded}
            for one in findings
        ]
        typer.echo(json.dumps({"torch": torch.__version__, "device": device, "bugs": bugs}, indent=2))
    else:
        console = Console()
        rows = [(finding.bug.name, finding.here, finding.with_halfstep, finding.bug.what) for finding in findings]
        console.print(f"torch {torch.__version__}, {device}\n")
        console.print(make_rows_table(("bug", "here", "with halfstep", "what happens in plain PyTorch"), rows))
        console.print("\ndocs/library_bugs.md has the public threads, and how halfstep avoids each bug.", style="dim")
    if any(finding.is_shielded is False for finding in findings):
        raise typer.Exit(1)


def print_known(*, as_json: bool) -> None:
    """Print every GPU of the table, one line per architecture."""
    from halfstep.hardware.gpus import KNOWN

    names: dict[str, list[str]] = {}
    for gpu in KNOWN:
        names.setdefault(f"{gpu.facts.vendor} {gpu.facts.architecture}", []).append(gpu.name)
    if as_json:
        typer.echo(json.dumps({"gpus": names}, indent=2))
        return
    Console().print(make_pairs_table((family, ", ".join(models)) for family, models in names.items()))


def probe_devices(name: str, *, look_only: bool, fresh: bool) -> tuple[Hardware, ...]:
    """Probe one device or all, and measure their speed unless `look_only` is set."""
    progress = Console(stderr=True)
    # Importing torch and probing take seconds.
    with progress.status("looking for devices"):
        from halfstep.hardware.probe import probe, probe_all

        found = (probe(name),) if name else probe_all()
    if look_only:
        return found
    from halfstep.disk import find_cache_directory
    from halfstep.hardware.cache import measure_once
    from halfstep.hardware.measure import measure

    measured = []
    for hardware in found:
        with progress.status(f"measuring {hardware.device} ({hardware.name}), a few seconds"):
            measured.append(measure_once(hardware, find_cache_directory(), measure, fresh=fresh))
    return tuple(measured)


def print_device(console: Console, hardware: Hardware, advice: HardwareAdvice) -> None:
    """Print what one device is, supports and should use."""
    from halfstep.hardware.describe import describe_identity, make_format_columns

    title = f"{hardware.device}  {hardware.name}" if hardware.device else hardware.name
    remarks = [
        ("lost", advice.lost),
        *(("warning", w) for w in advice.warnings),
        *(("note", n) for n in hardware.notes),
    ]
    console.print(
        Rule(Text(title, style="bold"), align="left"),
        make_pairs_table(describe_identity(hardware)),
        "",
        make_columns_table(make_format_columns(hardware), left=("format", "support")),
        "",
        Text(advice.headline, style="bold green"),
        "",
        make_pairs_table(remarks),
        "",
        sep="\n",
    )
