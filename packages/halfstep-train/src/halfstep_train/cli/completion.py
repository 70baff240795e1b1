"""Shell completion of workloads, config files and run folders: `halfstep --install-completion`. No torch.

typer completes commands and options by itself. A shell calls the command again at every press of the Tab key, with the
words so far in environment variables (bash: COMP_WORDS; zsh and fish: _TYPER_COMPLETE_ARGS); an empty answer makes it
offer files.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "_HALFSTEP_COMPLETE"
"""Set by the shell while it asks for completions."""
WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")


def read_typed_words(variables: Mapping[str, str]) -> list[str]:
    """Return what follows `halfstep` on the line that is being completed."""
    return next((variables[name].split()[1:] for name in WORDS if name in variables), [])


def complete_target(incomplete: str) -> list[str]:
    """Complete a workload's name, a config file or the folder of a run."""
    from halfstep_train.workloads import KINDS

    files = sorted(glob.glob(f"{glob.escape(incomplete)}*.yaml"))
    return [*(name for name in KINDS if name.startswith(incomplete)), *files, *complete_run(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Complete the folder of a run: one that begins as typed, or one inside a folder that does."""
    found = (
        path for rest in ("*/config.yaml", "*/*/config.yaml") for path in glob.glob(glob.escape(incomplete) + rest)
    )
    return sorted(str(Path(path).parent) for path in found)
