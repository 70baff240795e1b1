"""What is printed where: a reader that leaves, a full disk, warnings that --quiet and > keep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from halfstep_train.cli.main import main

HALFSTEP = f"{sys.executable} -m halfstep"


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@pytest.mark.parametrize(
    ("command", "code"), [("formats", 0), ("check --explain all", 0), ("--help", 0), ("check bad.yaml", 1)]
)
def test_a_reader_that_leaves_does_not_change_the_exit_code(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "bad.yaml").write_text("workload: unet\nprecision: bf17\n")
    done = shell(f"set -o pipefail; {HALFSTEP} {command} | true; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert done.stdout.split()[-1] == str(code)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here: this was NOT tested")
def test_output_to_a_full_disk_is_an_error_in_words(tmp_path: Path) -> None:
    done = shell(f"{HALFSTEP} formats > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write the output: No space left on device\n")
    assert "Traceback" not in done.stderr


def test_a_type_alone_is_a_warning_beside_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "unet", "--precision-type", "fp16", "--show-config"])
    assert "warning: `--precision-type fp16` is read as precision=fp16" in " ".join(capsys.readouterr().out.split())


def test_an_error_is_broken_between_words_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> str:
        with pytest.raises(SystemExit):
            main(["predict", "runs/" + "no-such-run-" * 9, "x.png"])
        return Text.from_ansi(capsys.readouterr().err).plain

    whole = said()
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    lines = said().splitlines()
    assert " ".join(lines).split() == whole.split()
    assert len(lines) > len(whole.splitlines())
    assert all(len(line) <= 80 or "no-such-run-" * 9 in line for line in lines)
