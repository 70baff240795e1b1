"""`halfstep check`: the package's command with what halfstep adds: its own configs, this machine, its own errors."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from command_line import run_command
from halfstep_train.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    return run_command(capsys, "check", *argv)


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "radio.yaml").write_text("trainer:\n  amp: True\n  fp16: False  # by AMP\n")
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    return tmp_path


def test_it_is_the_command_of_the_package(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "radio.yaml", "acc.yaml")
    alone = subprocess.run([sys.executable, "-m", "halfstep_check", "radio.yaml", "acc.yaml"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert (code, out, err) == (alone.returncode, alone.stdout, alone.stderr) == (1, out, "")


def test_the_packages_errors_are_shown_as_ours(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "acc.yaml", "--explain", "clip-befor-unscale")
    assert (code, out) == (2, "")
    assert err.startswith("error: unknown rule 'clip-befor-unscale'\n  fix: did you mean")


RUN = "from halfstep_train.cli.main import main\nmain"


def without_the_package(*argv: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules['halfstep_check'] = None\n{RUN}({list(argv)})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_without_the_package_the_command_says_how_to_install_it(configs: Path) -> None:
    done = without_the_package("check", "acc.yaml", "--sarif", "--gpu", "t4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: halfstep check cannot run\n  why: the package halfstep-check is not installed\n"
    )
    assert re.search("fix: pip install -e .*/packages/halfstep-check\n", done.stderr)
    done = without_the_package("check", "--help")
    assert done.returncode == 0
    assert "halfstep-check" in done.stdout
    assert "check" in without_the_package("--help").stdout


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["check", "a.yaml", "--gpu", "t4"], 2)])
def test_another_version_of_the_package_refuses_only_this_command(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "halfstep_check.py").write_text("__version__ = '9.9.9'\n")  # it has nothing of what this one imports
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN}({words})"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    why = f"halfstep-check has version 9.9.9, and halfstep-train {halfstep.__version__}: they need the same one"
    assert (why in done.stderr) == (code == 2)


@pytest.mark.parametrize(
    "text",
    [
        "workload: unet\ntrain: {epochz: 3}\n",
        "workload: unet\ntrain: {epochs: many}\n",
    ],
)  # fmt: skip
def test_an_own_config_that_train_refuses_is_refused_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["train", "own.yaml"])
    words = capsys.readouterr().err.strip()
    assert words.startswith("error: ")
    code, out, err = run(capsys, "own.yaml")
    assert (code, err.strip()) == (2, words)
    assert "nothing wrong" not in out


def test_an_own_config_that_train_takes_has_nothing_wrong_and_own_workloads_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('imported')\n")
    for workload in ("unet", "mine:build", "${globals.name}\nglobals: {name: 'mine:build'}"):
        (tmp_path / "own.yaml").write_text(f"workload: {workload}\nprecision: bf16\n")
        code, out, err = run(capsys, "own.yaml")
        assert (code, err) == (0, "")
        assert "nothing wrong" in out


def test_two_files_take_less_than_half_a_second_of_work(configs: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "halfstep", "check", "radio.yaml", "acc.yaml"], capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, so that a busy machine does not matter; 0.42 s on a Neoverse-N1 core, doubled for slower ones.
    assert after.ru_utime - before.ru_utime < 0.9
