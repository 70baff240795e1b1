"""Shell completion: commands, options, workloads, config files and runs, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES: dict[str, str] = {
    "tra": "train",
    "train --resu": "--resume",
    "train resnet1": "resnet18 resnet101 resnet152",
    "train my": "my.yaml",
    "plan vit_s": "vit_s_16",
    "evaluate runs/o": "runs/one",
    "predict ": "runs/one runs/two",
    "report runs/one ": "runs/one runs/two",
    "top runs/": "runs/one runs/two",
    "verify runs/t": "runs/two",
    "train unet optimizer.weight_d": "",
    "train --resume ru": "runs/one runs/two",
    "train unet --data-dir da": "",  # the shell completes files
}
COMPLETE_ALL = """
import contextlib, io, json, os, sys
from halfstep_train.cli.main import main

answers = {}
for line in json.loads(sys.argv[1]):
    os.environ |= {"_HALFSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "halfstep " + line}
    os.environ["COMP_CWORD"] = str(len(("halfstep " + line).split(" ")) - 1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([])
    answers[line] = said.getvalue().split()
print(json.dumps([answers, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    for name, workload in {"one": "unet", "two": "gpt2"}.items():
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text(f"workload: {workload}\n")
    (folder / "my.yaml").write_text("workload: gpt2\n")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[str]]:
    called = [sys.executable, "-c", COMPLETE_ALL, json.dumps(list(CASES))]
    found, has_torch = json.loads(subprocess.run(called, cwd=folder, check=True, stdout=subprocess.PIPE).stdout)
    assert not has_torch
    return found


@pytest.mark.parametrize("line", CASES)
def test_a_word_is_completed(line: str, answers: dict[str, list[str]]) -> None:
    assert answers[line] == CASES[line].split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell_is_installed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: NOT tested")
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    # A second command keeps the shell alive: bash would replace itself by a single one.
    script = f"{sys.executable} -m halfstep --install-completion && true"
    done = subprocess.run([shell, "-c", script], env=home, capture_output=True, text=True)
    assert f"{shell} completion installed" in done.stdout, done.stderr
    written = {"bash": ".bash_completions/halfstep.sh", "zsh": ".zfunc/_halfstep"}
    content = (tmp_path / written.get(shell, ".config/fish/completions/halfstep.fish")).read_text()
    assert f"_HALFSTEP_COMPLETE=complete_{shell}" in content


def test_the_installed_script_completes_in_bash(folder: Path) -> None:
    show = (
        f'halfstep() {{ {sys.executable} -m halfstep "$@"; }}; export -f halfstep; eval "$(halfstep --show-completion)"'
    )
    # What readline does at Tab: set the words, then call the function.
    press = "COMP_WORDS=(halfstep train vit_s); COMP_CWORD=2; _halfstep_completion $PWD/halfstep; echo ${COMPREPLY[*]}"
    (folder / "halfstep").write_text(f'#!/bin/sh\nexec {sys.executable} -m halfstep "$@"\n')
    (folder / "halfstep").chmod(0o755)
    done = subprocess.run(["bash", "-c", f"{show}; {press}"], cwd=folder, capture_output=True, text=True)
    assert done.stdout.strip() == "vit_s_16", done.stderr
