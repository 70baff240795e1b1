"""`halfstep guide`: ask a few questions, suggest configs, write one and start it."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halfstep.errors import ConfigError, Interrupted
from halfstep_train.cli.options import Device


def command(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: use and print all defaults.")] = False,
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers in YAML or JSON; missing ones use their default.")
    ] = None,
    device: Device = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Probe a GPU without measuring its formats.")
    ] = False,
) -> None:
    """Write a config by answering a few questions, and start it.

    Looks at this machine and your data, suggests two or three configs with reasons, writes the one you pick, and starts
    it if you like. Answers can come from a terminal, a pipe or a file.

    Example:

        halfstep guide

        halfstep guide --yes

        halfstep guide --answers answers.yaml

    where answers.yaml contains any of: task, model, data, goal, pick, file, start.
    """
    if answers is not None and not answers.exists():
        raise ConfigError(f"there is no answers file {answers}", fix="give a YAML or JSON file, or leave --answers out")
    from halfstep_train.cli.detect import probe_devices
    from halfstep_train.guide.guide import QUESTIONS, Prompt, Scripted, add_task, guide, read_answers

    console = Console()
    try:
        # sys.stdin is None if the caller closed it: treat that as an empty input.
        asker = Scripted(console, {}) if yes else Prompt(console, sys.stdin or io.StringIO())
        if answers is not None:
            asker = Scripted(console, add_task(read_answers(answers, QUESTIONS)))
        (hardware,) = probe_devices(device or "auto", look_only=True, fresh=False)
        # Training measures no CPU: by measurements the guide would suggest a precision that is then refused.
        if hardware.kind != "cpu" and not no_measure:
            (hardware,) = probe_devices(device or "auto", look_only=False, fresh=False)
        # Demo data and pictures are removed if the conversation ends early.
        with tempfile.TemporaryDirectory(prefix="halfstep-guide-") as scratch:
            file, start = guide(asker, console, hardware, device, Path(scratch))
    except KeyboardInterrupt:
        raise Interrupted("Ctrl-C: nothing was written") from None
    if start:
        from halfstep_train.run.train import train
        from halfstep_train.workloads import load

        train(load(str(file)))
