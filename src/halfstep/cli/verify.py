"""`halfstep verify`: is all of it true?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from halfstep.cli.options import DataDir, Device, Json, Precision, Simulate, Trust, WordsOrRun

if TYPE_CHECKING:
    from halfstep.evidence.proofs import ProofLine

CONFIGURATION = "configuration aligned"


def command(
    words: WordsOrRun,
    precision: Precision = None,
    data_dir: DataDir = None,
    device: Device = None,
    simulate: Simulate = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Is all of it true? One page, each line shown by an observation.

    Configuration aligned, NaN handling operational, gradient clipping active, learning rate as scheduled, AMP/BF16
    synchronised; then GPU use, memory, skipped steps and capsules. A few steps are made on a copy.

    Exit code 0: every line that can be measured holds; 1: one does not.

    Example:

        halfstep verify runs/unet-20250101-120000

        halfstep verify configs/train.yaml --precision bf16
    """
    from halfstep.use.verify import verify

    flags = {"precision": precision, "data_dir": data_dir, "device": device, "simulate": simulate}
    lines = [configuration(words[0]), *verify(words[0], flags=flags, overrides=words[1:], trust=trust)]
    if as_json:
        found = [{"line": one.name, "verdict": one.verdict, "observed": one.text} for one in lines]
        typer.echo(json.dumps(found, indent=1))
    else:
        width = max(len(one.name) for one in lines)
        for one in lines:
            typer.echo(f"{one.name.ljust(width)}  {one.verdict.ljust(14)}  {one.text}")
    if any(one.holds is False for one in lines):
        raise typer.Exit(1)


def configuration(word: str) -> ProofLine:
    """Return what `halfstep check` finds in the config file; a workload given by name has none."""
    from halfstep.cli.check import INSTALL, IS_INSTALLED, load_own
    from halfstep.evidence.proofs import ProofLine

    run = Path(word) / "config.yaml"
    file = run if run.is_file() else Path(word)
    if not file.is_file():
        return ProofLine(name=CONFIGURATION, holds=None, text="no config file: the workload's own defaults")
    if not IS_INSTALLED:
        return ProofLine(name=CONFIGURATION, holds=None, text=f"not checked: install halfstep-check: {INSTALL}")
    from halfstep_check.check import check
    from halfstep_check.rules import get_severity

    report = check([file], load_own=load_own)
    wrong = [str(error) for error in report.unreadable]
    wrong += [f"{one.place}: {one.message}" for one in report.findings if get_severity(one) != "info"]
    if wrong:
        return ProofLine(name=CONFIGURATION, holds=False, text="; ".join(wrong))
    return ProofLine(name=CONFIGURATION, holds=True, text=f"halfstep check finds nothing in {file}")
