"""Run the command `halfstep` in this process."""

from __future__ import annotations

import pytest

from halfstep_train.cli.main import main


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(words)
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err
