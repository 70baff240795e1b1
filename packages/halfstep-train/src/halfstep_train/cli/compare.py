"""`halfstep compare`: test whether settings reach the same accuracy, and show what each costs."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.disk import make_absolute
from halfstep.errors import CheckpointError, ConfigError, Interrupted, format_count, suggest_command
from halfstep_train.cli.options import (
    DataDir,
    Device,
    Json,
    MaybeArguments,
    Strict,
    map_flags,
    option,
    read_given,
)

if TYPE_CHECKING:
    from halfstep_train.use.compare import Comparison

FREE = ("budget", "at_once", "price", "as_json")
"""Options that may change with --resume, because they do not change what is compared."""
Row = tuple[str, list[str]]
"""Name and overrides of a row."""
UNITS = {"s": 1, "m": 60, "h": 3600}


def command(
    context: typer.Context,
    arguments: MaybeArguments = None,
    data_dir: DataDir = None,
    device: Device = None,
    precisions: Annotated[str, option("One row each; the first is the baseline.", metavar="A,B,...")] = "fp32,bf16",
    rows: Annotated[
        list[str] | None,
        option(
            "Rows by settings instead of precisions; several may follow.", "--rows", metavar='"NAME: KEY=VALUE ..."'
        ),
    ] = None,
    seeds: Annotated[int, option("Paired seeds of every row.", min=5)] = 8,
    margin: Annotated[
        float | None,
        option(
            "Largest difference that counts as the same, in the metric's unit; default: half a point, or 1 % of a loss."
        ),
    ] = None,
    budget: Annotated[str | None, option("Stop after this total time: 90s, 30m, 8h.", metavar="30m")] = None,
    price: Annotated[float | None, option("Price of one device hour.", min=0)] = None,
    at_once: Annotated[int, option("Runs in parallel; gives metrics only, no times.", min=1)] = 1,
    strict: Strict = None,
    out: Annotated[Path | None, option("Folder.", metavar="DIR", show_default="runs/compare-WORKLOAD-TIME")] = None,
    resume: Annotated[Path | None, option("Continue an interrupted comparison.", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Test whether rows of settings reach the same accuracy, and show what each row costs.

    Runs use paired seeds and a margin that is fixed in advance. A format that the device lacks is simulated and
    marked; --strict refuses it.

    The verdict is "same" only if the confidence interval of the difference is inside the margin; otherwise it is lower,
    higher or not shown, with the number of seeds that would decide. --resume continues an interrupted comparison.

    Exit code 0: every row is the same; 1: one is lower, higher or not shown.

    Example:

        halfstep compare unet --data-dir data/carvana --precisions fp32,bf16,fp16 --budget 8h

        halfstep compare unet --rows "baseline: precision=fp32" "amp: precision=bf16 train.batch_size=16"

        halfstep compare --resume runs/compare-unet-20250101-120000
    """
    # Not part of what is compared, so --resume may change them.
    how: dict[str, Any] = {"budget_s": budget and parse_budget(budget), "at_once": at_once, "price": price}
    if resume is not None:
        folder, comparison = resume, _reopen(resume, context, how)
    else:
        target, overrides, named_rows = _read_rows(context)
        _refuse_bad_call(context, target, overrides, named_rows)
        from halfstep_train.use.compare import ComparedRow, CompareRequest, create_comparison

        compared = tuple(ComparedRow(name=name, overrides=tuple(settings)) for name, settings in named_rows)
        request = CompareRequest(
            target=target, overrides=tuple(overrides), rows=compared, seeds=seeds, margin=margin, **how
        )
        folder, comparison = create_comparison(request, out)
    _run(folder, comparison)
    from halfstep_train.report.console import open_result_console
    from halfstep_train.use.compare_table import convert_comparison, show_comparison

    if as_json:
        typer.echo(json.dumps(convert_comparison(comparison), indent=2, allow_nan=False))
    else:
        show_comparison(comparison, open_result_console())
    # A verdict that is still open counts as a failure: "same" must be shown, not assumed.
    if any(verdict.word != "same" for verdict in comparison.judge().values()):
        raise typer.Exit(1)


def _refuse_bad_call(context: typer.Context, target: str, overrides: list[str], rows: list[Row]) -> None:
    """Raise for an unknown target, missing data, bad rows and folders that cannot be used, before torch is imported."""
    from halfstep_train.run.folder import refuse_missing_paths, refuse_used_folder
    from halfstep_train.use.equivalence import refuse_bad_rows
    from halfstep_train.workloads import load

    given = context.params
    refuse_bad_rows([name for name, _ in rows], given["margin"])
    load(target, overrides=_split_arguments(given["arguments"])[1])  # refuses two that disagree; a row's replace them
    for _, settings in rows:
        last = {override.split("=", 1)[0]: override for override in (*overrides, *settings)}
        refuse_missing_paths(load(target, overrides=list(last.values())).config)
    if given["out"] is not None:
        refuse_used_folder(given["out"])


def _read_rows(context: typer.Context) -> tuple[str, list[str], list[Row]]:
    """Return the target, the overrides of every row (flags are among them), and the rows."""
    given = context.params
    if {"rows", "precisions"} <= read_given(context).keys():
        raise ConfigError("--rows and --precisions cannot be combined", why="both set rows", fix="keep one of them")
    target, overrides, more_rows = _split_arguments(given["arguments"] or [])
    data_dir = given["data_dir"] and _make_absolute(given["data_dir"])
    # An unset switch stays open: a row's format may then be simulated.
    strict = "true" if given["strict"] else None
    flags = {"device": given["device"], "data.dir": data_dir, "precision.strict": strict}
    overrides += [f"{key}={value}" for key, value in flags.items() if value is not None]
    if rows := [*(given["rows"] or []), *more_rows]:
        return target, overrides, [_parse_row(text) for text in rows]
    names = [name.strip() for name in given["precisions"].split(",") if name.strip()]
    return target, overrides, [(name, [f"precision={name}"]) for name in names]


def _reopen(folder: Path, context: typer.Context, how: dict[str, Any]) -> Comparison:
    """Open an interrupted comparison to continue it; only the options in FREE may change."""
    if not (folder / "comparison.json").is_file():  # before torch is imported
        fix = "give a folder that `halfstep compare` created"
        raise CheckpointError(f"{folder} is not a comparison", why="comparison.json is missing", fix=fix)
    from halfstep_train.use.compare import open_comparison, refuse_incomparable_runs

    flags, names = map_flags(context), read_given(context)
    if fixed := [flags.get(name, "the settings") for name in names if name not in (*FREE, "resume")]:
        raise ConfigError(
            f"{', '.join(fixed)} cannot change with --resume {folder}",
            fix=f"only {', '.join(flags[name] for name in FREE)} may change",
        )
    comparison = open_comparison(folder)
    refuse_incomparable_runs(comparison)
    # Options that were not given keep the stored value, not their default.
    given = {key: value for key, value in how.items() if key.removesuffix("_s") in names}
    comparison.request = replace(comparison.request, **given)
    return comparison


def _run(folder: Path, comparison: Comparison) -> None:
    """Run the comparison; after an interruption raise with the command that continues it."""
    from rich.console import Console

    from halfstep_train.use.compare import run_comparison

    # Progress goes to stderr, so that stdout has only the result. This very file: runs redirect sys.stderr.
    screen, again = Console(file=sys.stderr), suggest_command("compare", "--resume", folder)
    screen.print(f"if interrupted, continue with: {again}", style="dim", soft_wrap=True)
    try:
        run_comparison(
            folder, comparison, lambda line: screen.print(line, highlight=False, markup=False, soft_wrap=True)
        )
    except (Interrupted, KeyboardInterrupt) as error:
        raise Interrupted(
            f"comparison stopped after {format_count(len(comparison.runs), 'run')}; the current run is saved too",
            fix=f"continue with: {again}",
            exit_code=getattr(error, "exit_code", 130),
        ) from error


def _split_arguments(arguments: list[str]) -> tuple[str, list[str], list[str]]:
    """Split the arguments into target, settings, and further rows (several may follow one `--rows`)."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError("nothing to compare", fix="give a workload or a file first: halfstep compare unet")
    target, *others = arguments
    # `amp: precision=bf16` is a row: its colon comes before its first `=`.
    rows = [argument for argument in others if ":" in argument.partition("=")[0]]
    if target.endswith((".yaml", ".yml")):
        target = _make_absolute(target)
    return target, [argument for argument in others if argument not in rows], rows


def _make_absolute(path: str) -> str:
    """Make an existing path absolute, so that --resume finds it from any working folder."""
    absolute = make_absolute(path)
    return str(absolute) if absolute.exists() else path


def _parse_row(text: str) -> Row:
    """Parse `amp: precision=bf16 train.batch_size=16`."""
    name, colon, settings = text.partition(":")
    overrides = settings.split()
    odd = next((setting for setting in overrides if "=" not in setting), None)
    if not colon or not name.strip() or not overrides or odd is not None:
        raise ConfigError(
            f"--rows {text!r} does not describe a row" + (f": {odd!r} is not KEY=VALUE" if odd else ""),
            fix='write a name, a colon and settings: --rows "amp: precision=bf16 train.batch_size=16"',
        )
    return name.strip(), overrides


def parse_budget(text: str) -> float:
    """Parse `90s`, `30m` or `1.5h` into seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise ConfigError(f"--budget {text!r} is not a time", fix="write 90s, 30m or 8h")
    return float(found[1]) * UNITS[found[2] or "s"]
