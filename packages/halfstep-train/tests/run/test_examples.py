"""The scripts under `examples/` run as their users run them."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import time
from pathlib import Path

import pytest

from halfstep_train.workloads.segmentation.demo import write_demo
from warm_processes import process

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def run_script(name: str, word: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [name, word]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def ran(name: str, word: str, said: Path) -> tuple[int | None, str]:
    with process(run_script, name, word, output=said) as script:
        script.join(timeout=120)
        return script.exitcode, said.read_text()


def test_the_loop_of_ones_own_skips_the_bad_step_and_learns(tmp_path: Path) -> None:
    code, said = ran("own_loop.py", "fp32", tmp_path / "said")
    assert code == 0, said
    outcomes = [line for line in said.splitlines() if line.startswith("Outcome")]
    assert "step 15 skipped" in outcomes[1]
    assert float(outcomes[-1].split("loss ")[1].split(",")[0]) < 0.3


@pytest.mark.slow  # starts three processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_resume_script_killed_in_the_middle_ends_with_the_same_weights(tmp_path: Path) -> None:
    code, whole = ran("resume.py", str(tmp_path / "whole"), tmp_path / "said whole")
    assert code == 0, whole
    state, said = tmp_path / "state", tmp_path / "said"
    with process(run_script, "resume.py", str(state), output=said) as script:
        while script.is_alive() and said.read_text().count("Outcome") < 4 if said.exists() else script.is_alive():
            time.sleep(0.01)
    code, again = ran("resume.py", str(state), said)
    assert code == 0, again
    assert "continuing after step" in again
    assert again.splitlines()[-1] == whole.splitlines()[-1]


def test_the_unet_script_trains_on_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is but for its size: its settings are for images of 512 pixels."""
    write_demo(tmp_path / "data", num_images=6, side=16)
    spec = importlib.util.spec_from_file_location("train_unet_example", EXAMPLES / "train_unet.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.CONFIG |= {"batch_size": 2, "num_epochs": 2, "data.image_size": 16, "model.base_channels": 2,
                      "model.depth": 1, "device": "cpu", "data.num_workers": 0}  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_unet.py", str(tmp_path / "data")])
    script.main()
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1
    assert (runs[0] / "checkpoints" / "best.json").is_file()


@pytest.mark.parametrize(
    ("script", "word", "says"),
    [("own_loop.py", "fp7", "unknown precision 'fp7'"), ("train_unet.py", "no/such/folder", "no/such/folder")],
)
def test_a_mistake_is_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, word: str, says: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, said = ran(script, word, tmp_path / "said")
    assert code == 1
    assert said.startswith("error: ")
    assert says in said
    assert "fix: " in said
    assert "Traceback" not in said
    assert not list((tmp_path / "here").iterdir())
