"""`halfstep train my_mod:build`: found where the user stands, without a data folder, with errors about the module."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from warm_processes import process

SUPPORT = Path(__file__).resolve().parents[4] / "tests" / "support"
SETTINGS = ["device=cpu", "train.max_steps=1", "train.batch_size=4", "data.num_workers=0"]


@pytest.mark.slow
def test_a_module_in_the_working_folder_is_found_and_needs_no_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_mod.py").write_text((SUPPORT / "tiny_workload.py").read_text())
    monkeypatch.chdir(tmp_path)
    with process(console_script, ["train", "my_mod:build", *SETTINGS, "--out", "run"], output=tmp_path / "said") as run:
        run.join(timeout=120)
        said = (tmp_path / "said").read_text()
        assert run.exitcode == 0, said
    assert "DEMO" not in said
    assert (tmp_path / "run" / "checkpoints").is_dir()


def console_script(words: list[str]) -> None:
    """Not `python -m`, whose path starts with the working folder anyway."""
    script = str(Path(sys.executable).with_name("halfstep"))
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize(
    ("source", "says"), [("def build(:\n", "bad.py:1"), ("x = 1\ny = missing\n", "'missing' is not defined")]
)
def test_a_file_that_cannot_be_imported_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    name = "bad" if "(:" in source else "worse"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be imported") as error:
        load(f"{name}:build")
    assert says in error.value.why
    assert f"{name}.py:{1 if name == 'bad' else 2}" in error.value.why


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("tiny_workload:Samples", "cannot be called as build"),
        ("operator:add_to_nothing", "operator has no function 'add_to_nothing'"),
        ("gives_none:build", "gives_none:build returns a NoneType, not a Workload"),
        ("of_torch:build", "train_samples of of_torch:build: list has no __len__ or sample(index, *, key)"),
        ("of_torch:counts", "metrics of of_torch:counts: dict has no compute, state_dict, load_state_dict"),
        ("tiny_workloda:build", "workload 'tiny_workloda:build' cannot be imported"),
        ("timm.models:create_model", "fix: Install it, run where the module is"),
        ("tiny_workload:biuld", "halfstep_train.workloads.base.workload.Workload; did you mean 'build'?"),
        ("broken_mod:build", "No module named 'no_such_thing'"),
    ],
)
def test_what_is_no_workload_is_an_error_about_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, says: str
) -> None:
    (tmp_path / "broken_mod.py").write_text("import no_such_thing\n")
    (tmp_path / "gives_none.py").write_text("def build(config, store): ...\n")
    (tmp_path / "of_torch.py").write_text(
        "import dataclasses, tiny_workload\n"
        "def build(config, store):\n"
        "    return dataclasses.replace(tiny_workload.build(config, store), train_samples=[{}])\n"
        "def counts(config, store):\n"
        "    return dataclasses.replace(tiny_workload.build(config, store), metrics=dict)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    with pytest.raises(ConfigError) as refused:
        train(load(path, overrides=SETTINGS), out=tmp_path / "run")
    assert says in str(refused.value)
    assert "data folder" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_misspelled_module_beside_the_right_one_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_segmentation.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        build_workload(load("my_segmentatoin:build").config)
    assert "did you mean 'my_segmentation'?" in refused.value.fix
