"""The command line as a whole: help without torch, flags in both spellings, errors and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from halfstep import __version__
from halfstep_train.cli.main import COMMANDS, main, normalise_dashes
from halfstep_train.workloads import KINDS

EVERY_HELP = """
import contextlib, io, sys
import halfstep
from halfstep_train.cli.main import build_app, main
heavy = {"torch", "numpy", "matplotlib", "torchmetrics"}
names = [command.name for command in build_app().registered_commands]
assert {"detect", "formats", "train"} <= set(names), names
for argv in (["--help"], ["--version"], *([name, "--help"] for name in names)):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(argv)
        except SystemExit as stopped:
            assert not stopped.code, (argv, stopped.code)
    assert argv[-1] == "--version" or "Usage" in out.getvalue(), argv
    assert not heavy & set(sys.modules), (argv, heavy & set(sys.modules))
"""
FORMATS_AND_TABLE = """
import sys
from halfstep_train.cli.main import main
for argv in (["formats"], ["formats", "0.1"], ["detect", "v100"]):
    try:
        main(argv)
    except SystemExit as stopped:
        assert not stopped.code, (argv, stopped.code)
    assert "torch" not in sys.modules, argv
"""


@pytest.mark.parametrize("program", [EVERY_HELP, FORMATS_AND_TABLE], ids=["help", "formats and a GPU"])
def test_answers_that_need_no_torch_do_not_load_it(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["halfstep", "halfstep_train"])
def test_python_dash_m_is_the_same_command(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"halfstep {__version__}, halfstep-train {__version__}\n")


@pytest.mark.parametrize("start", ["from halfstep.__main__ import main; main()", "import halfstep; halfstep.train"])
def test_another_version_of_the_library_is_refused_with_the_install_command(start: str) -> None:
    code = f"import halfstep_train; halfstep_train.__version__ = '9.9.9'; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(
        f"needs halfstep-train of halfstep's version {__version__}, not 9.9.9: pip install -e ",
        done.stderr.splitlines()[-1],
    )


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (["--no_measure"], ["--no-measure"]),
        (["--data_dir", "my_dir"], ["--data-dir", "my_dir"]),
        (["--data_dir=my_dir"], ["--data-dir=my_dir"]),
        (["train.max_steps=3"], ["train.max_steps=3"]),
        (["--", "--not_a_flag"], ["--", "--not_a_flag"]),
        (["-3.5"], ["-3.5"]),
    ],
)
def test_dashes_and_underscores_in_flags_are_alike(given: list[str], understood: list[str]) -> None:
    assert normalise_dashes(given) == understood


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        (["train", "unet", "--epoks", "3"], "error: No such option: --epoks",
         "did you mean --epochs"),
        (["train", "unet", "--fp32"], "error: No such option: --fp32", "use --precision fp32"),
        (["bench", "unet", "--bf16"], "error: No such option: --bf16", "use --precisions bf16. "),
        (["dry-run", "unet", "--bf16"], "error: No such option: --bf16", "use --target bf16. "),
        (["train", "unet", "--lr", "x"], "error: --lr x: must be a valid number", "halfstep train --help"),
        (["train", "unet", "--bf16=3"], "error: Option '--bf16' does not take a value", "halfstep --help"),
        (["bench", "unet", "--batch-size", "0"], "error: --batch-size 0: must be greater than",
         "halfstep bench --help"),
        (["predict"], "error: Missing argument 'RUN'", "halfstep predict --help"),
        (["detect", "-v"], "error: No such option: -v", "halfstep detect --help"),
        (["plan", "--gpu"], "error: Option '--gpu' requires an argument", "halfstep --help"),
        (["trian", "unet"], "error: No such command 'trian'. Did you mean 'train'?", "halfstep --help"),
        (["train", "unet", "--epochs", "0"], "train.epochs = 0 (--epochs 0): must be greater than or equal to 1",
         "change or leave out train.epochs (passes over the training set); its default is 100"),
        (["train", "unet", "--bf16", "--fp16"], "`--bf16` and `--fp16` disagree", "keep one of them"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_call_reads_like_every_other_error(
    capsys: pytest.CaptureFixture[str], argv: list[str], what: str, fix: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    said = capsys.readouterr()
    assert (stopped.value.code, said.out) == (2, "")
    assert what in said.err
    assert f"  fix: {fix}" in said.err


def test_halfstep_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert not stopped.value.code
    out = capsys.readouterr().out
    assert "Usage: halfstep" in out
    assert all(name in out for name in COMMANDS)


def test_help_names_every_workload_and_wraps_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in KINDS)
    assert "or a custom one by import path" in out, "a line break of the docstring"


@pytest.mark.parametrize(
    ("words", "size"), [(["plan", "--memory"], 10**8), (["train", "--dry", "--quiet", "data.num_workers=0"], 10**12)]
)
def test_sizes_that_no_memory_holds_are_answered_without_a_traceback(
    words: list[str], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Allocated nowhere: torch and NumPy refuse them at once."""
    with pytest.raises(SystemExit) as stopped:
        main([words[0], "unet", f"data.image_size={size}", "--device", "cpu", *words[1:]])
    assert stopped.value.code == 2
    assert "error: out of memory" in capsys.readouterr().err


# --- closed pipes, full disks, and warnings with --quiet ---

HALFSTEP = f"{sys.executable} -m halfstep"


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@pytest.mark.parametrize(("command", "code"), [("check --explain all", 0), ("--help", 0), ("check bad.yaml", 1)])
def test_a_reader_that_leaves_does_not_change_the_exit_code(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "bad.yaml").write_text("workload: unet\nprecision: bf17\n")
    done = shell(f"set -o pipefail; {HALFSTEP} {command} | true; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert done.stdout.split()[-1] == str(code)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here: this was NOT tested")
def test_output_to_a_full_disk_is_an_error_in_words(tmp_path: Path) -> None:
    done = shell(f"{HALFSTEP} formats > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write: No space left on device\n")
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
