"""`halfstep bench`: time a training step per precision and mode, and compare with other tools.

The command checks its arguments before it imports torch, measures one row after the other, and writes and prints the
result.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.errors import ConfigError, suggest_nearest
from halfstep_train.cli.options import Arguments, option, refuse_to_overwrite, refuse_unknown_device

if TYPE_CHECKING:
    from halfstep.hardware.device_facts import Hardware
    from halfstep_train.bench.bench import BenchRequest
    from halfstep_train.bench.problem import Problem


WHAT, OUTPUT = "What is measured", "Output"
PEER = "Tools to compare with: plain,lightning,accelerate; plain:graphs is one variant."


def command(
    arguments: Arguments,
    batch_size: Annotated[int | None, option("Samples per step.", panel=WHAT, min=1)] = None,
    image_size: Annotated[int | None, option("Image side in pixels.", panel=WHAT, min=1)] = None,
    precisions: Annotated[
        str | None, option("fp32,tf32,bf16,fp16,fp8,auto; default: all that this device supports.", panel=WHAT)
    ] = None,
    modes: Annotated[str | None, option("eager,compile,graph,auto; default: all that run here.", panel=WHAT)] = None,
    against: Annotated[str | None, option(PEER, panel=WHAT)] = None,
    steps: Annotated[int | None, option("Timed steps per row: 100, on a CPU 20.", panel=WHAT, min=10)] = None,
    device: Annotated[str | None, option("cpu, cuda, cuda:1.", panel=WHAT, callback=refuse_unknown_device)] = None,
    as_json: Annotated[bool, option("Print JSON.", "--json", panel=OUTPUT)] = False,
    save: Annotated[Path | None, option("Write the result as JSON.", panel=OUTPUT)] = None,
    force: Annotated[bool, option("Overwrite files.", "--force", panel=OUTPUT)] = False,
) -> None:
    """Time a training step on this machine, per precision and mode, and compare with other tools. Needs no data.

    One row per precision and mode: time, speedup, memory, energy, share of the arithmetic floor, loss, start-up time.

    Example:

        halfstep bench unet --precisions fp32,bf16

        halfstep bench resnet50 --batch-size 64 --modes auto --against plain

        halfstep bench unet --save before.json
    """
    target, *overrides = arguments
    flags = {"batch_size": batch_size, "image_size": image_size, "device": device}
    if save is not None:
        refuse_to_overwrite(save, force=force)
    variants = [f"{peer}:{kind}" for peer in PEERS for kind in VARIANTS]
    chosen_modes = split_choices(modes, "--modes", MODES)
    peers = split_choices(against, "--against", [*PEERS, *variants])
    from halfstep.precision.names import normalise_precision

    names = split_choices(precisions, "--precisions")
    chosen = tuple(dict.fromkeys(normalise_precision(name, "--precisions") for name in names))
    from halfstep_train.workloads import load

    loaded = load(target, flags=flags, overrides=overrides)
    import torch

    from halfstep.hardware.probe import probe
    from halfstep_train.bench.bench import BenchRequest
    from halfstep_train.bench.measure_row import make_schedule
    from halfstep_train.bench.peers import require_peers
    from halfstep_train.bench.problem import (
        build_problem,
        choose_default_modes,
        choose_default_precisions,
        load_bench_config,
        refuse_too_large,
    )

    require_peers(peers)
    hardware = probe(device or "auto")
    used = torch.device(hardware.device)
    num_steps = STEPS.get(used.type, STEPS["cpu"]) if steps is None else steps
    # `config` has the settings of a benchmark, `loaded` those of a run, with their origins.
    config = load_bench_config(target, overrides, flags, small=hardware.kind == "cpu", against=peers)
    if loaded.config.data.dir and config.data.dir is None:
        note = "is not read: the benchmark trains on one random batch of the same size"
        typer.secho(f"data.dir={loaded.config.data.dir} {note}", fg="yellow", err=True)
    request = BenchRequest(
        precisions=resolve_auto(chosen or choose_default_precisions(hardware), hardware),
        modes=chosen_modes or choose_default_modes(used),  # type: ignore[arg-type]
        against=peers,
        schedule=make_schedule(num_steps, used),
    )
    # Before anything is built: an allocation that is too large ends the process without an error.
    refuse_too_large(config, request.precisions, request.modes, hardware)
    time_rows(hardware, build_problem(config, used), request, save, as_json=as_json)


MODES = ("eager", "compile", "graph", "auto")
PEERS = ("plain", "lightning", "accelerate")
VARIANTS = ("documented", "tuned", "graphs")
STEPS = {"cuda": 100, "cpu": 20}
"""Timed steps by default."""
UNSET = "an empty argument is usually an unset shell variable"


def split_choices(text: str | None, option: str, allowed: Sequence[str] = ()) -> tuple[str, ...]:
    """Split `a,b` into its choices, in the order given; refuse an empty list and unknown choices."""
    if text is None:
        return ()
    found = tuple(dict.fromkeys(choice.strip().lower() for choice in text.split(",") if choice.strip()))
    if not found:
        fix = f"leave {option} out, or give some: {option} {','.join((allowed or ('fp32', 'bf16'))[:2])}"
        raise ConfigError(f"{option} {text!r} is empty", why=UNSET, fix=fix)
    for choice in found:
        if allowed and choice not in allowed:
            known = [one for one in allowed if (":" in one) <= (":" in choice)]  # a variant only for a variant
            raise ConfigError(f"unknown {option} {choice!r}", fix=suggest_nearest(choice, known))
    return found


def resolve_auto(precisions: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """Replace `auto` by the precision that `halfstep train` would choose on this device, and print why."""
    from halfstep.precision.decide import decide

    plan = decide("auto", hardware)
    if "auto" in precisions:
        typer.secho(f"auto means {plan.granted} here: {plan.reason}", fg="yellow", err=True)
    return tuple(dict.fromkeys(plan.granted if name == "auto" else name for name in precisions))


def time_rows(hardware: Hardware, problem: Problem, request: BenchRequest, save: Path | None, *, as_json: bool) -> None:
    """Measure every row; save and print the result. Exit with 1 if nothing was measured, 130 after Ctrl-C."""
    from rich.console import Console
    from rich.text import Text

    from halfstep.disk import find_cache_directory
    from halfstep.hardware.cache import measure_once
    from halfstep.hardware.measure import measure
    from halfstep_train.bench.bench import bench, describe_circumstances, save_record, summarise_results
    from halfstep_train.bench.problem import count_step_flops
    from halfstep_train.report.bench_view import show_bench
    from halfstep_train.report.console import open_result_console

    # Peers print to stdout, which belongs to the table or JSON.
    with contextlib.redirect_stdout(sys.stderr):
        console = Console(stderr=True)

        def tell(row: str) -> None:
            console.print(Text(f"measuring {row}"), soft_wrap=True)

        with console.status("measuring matmuls"):
            rated = measure_once(hardware, find_cache_directory(), measure)
        flops = count_step_flops(problem)
        about = describe_circumstances(problem, request, hardware, flops, shlex.join(["halfstep", *sys.argv[1:]]))
        benched = bench(problem, request, rated, flops, tell)
    record = about | summarise_results(benched)
    has_rows = any(row.is_measured for row in benched.rows)
    try:
        # Save before printing: a closed terminal must not lose minutes of measurements.
        if save and has_rows:
            save_record(record, save)
        elif save:  # an empty file would block the same command later
            typer.secho(f"{save} was not written: nothing was measured", fg="yellow", err=True)
    finally:
        if as_json:
            typer.echo(json.dumps(record, indent=2))
        else:
            show_bench(record, open_result_console(200))
    if benched.is_stopped:
        raise typer.Exit(130)
    if not has_rows:
        raise typer.Exit(1)
