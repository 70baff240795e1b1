"""`halfstep detect`: show what this machine, or a GPU by name, supports, and which precision to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.errors import ConfigError
from halfstep_train.cli.options import Json, option, refuse_unknown_device

if TYPE_CHECKING:
    from rich.console import Console

    from halfstep.hardware.device_facts import Hardware
    from halfstep.precision.advice import HardwareAdvice


LIST = "list"


def command(
    name: Annotated[
        list[str] | None,
        typer.Argument(metavar="GPU|DEVICE", help="Same as --gpu or --device: v100, rtx 4090, cuda:1."),
    ] = None,
    gpu: Annotated[str, option("Report a known GPU instead: v100, 4090; list: show all.", metavar="NAME")] = "",
    device: Annotated[
        str, option("Only this device: cuda:1, cpu, mps, xpu, or auto for the best.", callback=refuse_unknown_device)
    ] = "",
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

        halfstep detect --gpu list

        halfstep detect --device cuda:1 --fresh --json

        halfstep detect --bugs
    """
    if bugs:
        if name or gpu or device or no_measure or fresh:
            raise ConfigError(
                "--bugs cannot be combined with a device or another option",
                why="it tests the first GPU of this machine, or the CPU if there is none",
                fix="halfstep detect --bugs",
            )
        report_bugs(as_json=as_json)
        return
    gpu, device = resolve_name(" ".join(name or []), gpu, device)
    if gpu and (device or fresh or no_measure):
        raise ConfigError(
            f"--gpu {gpu} cannot be combined with --device, --fresh or --no-measure",
            fix="give --gpu alone, or leave it out",
        )
    if gpu.lower() == LIST:
        print_known(as_json=as_json)
        return
    from halfstep.hardware.gpus import look_up_gpu
    from halfstep.precision.advice import advise

    devices = (look_up_gpu(gpu),) if gpu else probe_devices(device, look_only=no_measure, fresh=fresh)
    answers = [(hardware, advise(hardware)) for hardware in devices]
    if as_json:
        print_json(answers)
    else:
        print_tables(answers)


def report_bugs(*, as_json: bool) -> None:
    """Test the known bugs of torch and cuDNN; exit with 1 if halfstep does not shield from one of them."""
    import torch

    from halfstep_train.use.library_bugs import describe_bugs, find_bugs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    findings = list(find_bugs(device))
    if as_json:
        import json

        report = {"torch": torch.__version__, "device": device, "bugs": describe_bugs(findings)}
        typer.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console

        from halfstep_train.report.console import make_rows_table

        console = Console()
        rows = [(finding.bug.name, finding.here, finding.with_halfstep, finding.bug.what) for finding in findings]
        console.print(f"torch {torch.__version__}, {device}\n")
        console.print(make_rows_table(("bug", "here", "with halfstep", "what happens in plain PyTorch"), rows))
        console.print("\ndocs/library_bugs.md has the public threads, and how halfstep avoids each bug.", style="dim")
    if any(finding.is_shielded is False for finding in findings):
        raise typer.Exit(1)


def resolve_name(name: str, gpu: str, device: str) -> tuple[str, str]:
    """Return --gpu and --device, with a bare name assigned to one of them."""
    if not name:
        return gpu, device
    # `cuda:1` is a device of this machine, `rtx 4090` a GPU of the table.
    from halfstep_train.config.schema import is_device

    is_here = is_device(name)  # any other name is looked up in the GPU table
    flag, given = ("--device", device) if is_here else ("--gpu", gpu)
    if given and given != name:
        raise ConfigError(f"{name!r} and {flag} {given} disagree", fix="keep one of them")
    return (gpu, name) if is_here else (name, device)


def print_known(*, as_json: bool) -> None:
    """Print every GPU of the table, one line per architecture."""
    from halfstep.hardware.gpus import KNOWN

    names: dict[str, list[str]] = {}
    for gpu in KNOWN:
        names.setdefault(f"{gpu.vendor} {gpu.architecture}", []).append(gpu.name)
    if as_json:
        import json

        typer.echo(json.dumps({"gpus": names}, indent=2))
        return
    from rich.console import Console

    from halfstep_train.report.console import make_pairs_table

    Console().print(make_pairs_table((family, ", ".join(models)) for family, models in names.items()))


def probe_devices(name: str, *, look_only: bool, fresh: bool) -> tuple[Hardware, ...]:
    """Probe one device or all, and measure their speed unless `look_only` is set."""
    from rich.console import Console

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


def print_json(answers: list[tuple[Hardware, HardwareAdvice]]) -> None:
    import json

    devices = [{**hardware.to_dict(), "advice": advice.to_dict()} for hardware, advice in answers]
    typer.echo(json.dumps({"devices": devices}, indent=2))


def print_tables(answers: list[tuple[Hardware, HardwareAdvice]]) -> None:
    from rich.console import Console

    console = Console()
    for hardware, advice in answers:
        print_device(console, hardware, advice)
    if all(hardware.kind == "cpu" for hardware, _ in answers):
        console.print(
            "This machine has no GPU. `halfstep detect NAME` reports one you may rent: v100, 4090, h200.", style="dim"
        )


def print_device(console: Console, hardware: Hardware, advice: HardwareAdvice) -> None:
    """Print what one device is, supports and should use."""
    from rich.rule import Rule
    from rich.text import Text

    from halfstep.hardware.describe import describe_identity, make_format_columns
    from halfstep_train.report.console import make_columns_table, make_pairs_table

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
