"""`halfstep verify`: check what a run or config promises, each promise by an observation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from halfstep.errors import suggest_own_install
from halfstep_train.cli.options import ArgumentsOrRun, Json, Trust, add_flags

if TYPE_CHECKING:
    from halfstep_train.use.observe_step import ProofLine

CONFIGURATION = "configuration aligned"


@add_flags("precision", "data_dir", "device", "simulate")
def command(arguments: ArgumentsOrRun, trust: Trust = False, as_json: Json = False, **settings: Any) -> None:
    """Check what a run or config promises: one line per promise, each shown by an observation.

    Checks the configuration, NaN handling, gradient clipping, the learning rate and the precision of a step; for a run
    also GPU use, memory, skipped steps and capsules. The checks train a few steps on a copy and leave a run unchanged.

    Exit code 0: every promise that can be measured holds; 1: at least one does not.

    Example:

        halfstep verify runs/unet-20250101-120000

        halfstep verify configs/train.yaml --precision bf16
    """
    target, *overrides = arguments
    from halfstep_train.run.folder import load_target

    loaded = load_target(target, flags=settings, overrides=overrides, trust=trust)
    from halfstep_train.use.observe_step import verify

    lines = [check_configuration(target), *verify(target, loaded, trust=trust)]
    if as_json:
        found = [{"line": one.name, "verdict": one.verdict, "observed": one.text} for one in lines]
        typer.echo(json.dumps(found, indent=1))
    else:
        width = max(len(one.name) for one in lines)
        for one in lines:
            typer.echo(f"{one.name.ljust(width)}  {one.verdict.ljust(14)}  {one.text}")
    if any(one.holds is False for one in lines):
        raise typer.Exit(1)


def check_configuration(target: str) -> ProofLine:
    """Run `halfstep check` on the config file; a workload that is given by name has no file to check."""
    from halfstep_train.cli.check import OBSTACLE, load_own
    from halfstep_train.use.observe_step import ProofLine

    run = Path(target) / "config.yaml"
    file = run if run.is_file() else Path(target)
    if not file.is_file():
        return ProofLine(CONFIGURATION, None, "no config file: the workload's defaults are used")
    if OBSTACLE:
        text = f"not checked: {OBSTACLE} ({suggest_own_install('halfstep-check')})"
        return ProofLine(CONFIGURATION, None, text)
    from halfstep_check.check import check
    from halfstep_check.rules import get_severity

    report = check([file], load_own=load_own)
    wrong = [str(error) for error in report.unreadable]
    wrong += [f"{one.place}: {one.message}" for one in report.findings if get_severity(one) != "info"]
    if wrong:
        return ProofLine(CONFIGURATION, False, "; ".join(wrong))
    return ProofLine(CONFIGURATION, True, f"halfstep check finds nothing in {file}")
