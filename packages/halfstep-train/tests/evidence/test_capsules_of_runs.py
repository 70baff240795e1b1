"""A run keeps the step of a fault, whole and bounded, and replay names the cause."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import CheckpointError, TrainingStopped
from halfstep.evidence import capsule, causes
from halfstep.evidence.attempts import refuse_another_model
from halfstep.step.facts import Reading
from halfstep_train.run.evidence import load_window, replay_run
from halfstep_train.workloads import load
from whole_runs import assemble_run, newest
from whole_runs import run as run_tiny


def run(out: Path, workload: str = "tiny_workload:build", **values: Any) -> Path:
    return run_tiny(out, {"train.epochs": 1, **values}, workload)


def kept(folder: Path) -> list[str]:
    return [path.name for path in capsule.list_capsules(folder / "capsules")]


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("faulty") / "run", **{"model.options.poisoned": [2]})


def test_a_fault_is_kept_with_its_batches_weights_and_names(faulty_run: Path) -> None:
    assert kept(faulty_run) == ["00000002"]
    found = capsule.read_capsule(faulty_run / "capsules" / "00000002")
    about = found.about
    assert about["reason"] == "loss is nan"
    assert (about["epoch"], about["window"], len(about["sample_ids"])) == (0, 2, 4)
    assert about["commits_after"] == 2  # steps 3 and 4 were made before the host learned of step 2
    assert "the weights are those of 2 committed steps later" in found.inexact
    assert [len(batch["label"]) for batch in found.window] == [4]
    assert "head.weight" in found.state
    assert about["plan"]["granted"] == "fp32"
    assert [row["attempted"] for row in about["trail"]] == [0, 1]


def test_replay_names_a_nan_that_came_past_the_loader_and_the_sample_it_is_in(faulty_run: Path) -> None:
    found = replay_run(faulty_run / "capsules" / "00000002")
    assert found.cause == causes.BAD_INPUT
    (place,) = found.diagnosis.places
    assert (place.key, place.index) == ("['image']", (0, 0, 0))
    assert place.sample == str(found.capsule.about["sample_ids"][0])
    assert found.remedy is not None
    assert found.remedy.works


def test_faults_in_a_row_are_one_capsule_and_a_run_keeps_so_many(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", **{"model.options.poisoned": [0, 1, 3, 5], "train.epochs": 2, "guard.capsules": 2})
    assert kept(folder) == ["00000000", "00000003"]
    assert kept(run(tmp_path / "b", **{"model.options.poisoned": [1], "guard.capsules": 0})) == []


def test_a_repeated_step_of_a_run_replaces_its_capsule_and_nothing_else_does(tmp_path: Path) -> None:
    path, about = tmp_path / "00000002", {"step": 2}
    for config in ("first", "resumed"):
        capsule.write_capsule(path, about, window=[torch.ones(1)], rng={}, state={}, config=config)
    assert capsule.read_capsule(path).config.read_text() == "resumed"
    with pytest.raises(CheckpointError, match="cannot write the capsule"):
        capsule.write_capsule(path, about, window=[torch.ones(1)], rng={}, state={})
    assert capsule.read_capsule(path).config.read_text() == "resumed"


def test_weights_and_losses_are_the_same_with_and_without_capsules(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / str(most), **{"model.options.poisoned": [1], "guard.capsules": most, "train.epochs": 2})
        for most in (0, 4)
    ]
    plain, recorded = (newest(folder).model for folder in folders)
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)


def test_routine_overflows_of_fp16_are_not_kept_those_at_the_floor_are(tmp_path: Path) -> None:
    fp16 = {"precision.default": "fp16", "precision.simulate": True, "model.options.poisoned": list(range(100))}
    with pytest.raises(TrainingStopped, match="floor"):
        run(tmp_path / "run", **fp16, **{"scaler.init_scale": 4.0, "guard.floor_patience": 3, "train.epochs": 4})
    assert kept(tmp_path / "run") == ["00000002"]  # scales 4 and 2 were the search for one
    assert capsule.read_capsule(tmp_path / "run" / "capsules" / "00000002").about["kind"] == "overflow at the floor"


def test_an_overflow_at_a_scale_far_below_the_first_is_kept_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp16 = {"precision.default": "fp16", "precision.simulate": True, "model.options.poisoned": list(range(11))}
    folder = run(tmp_path / "run", **fp16, **{"scaler.init_scale": 4096.0, "train.max_steps": 14, "train.epochs": 99})
    assert kept(folder) == ["00000010"]  # at scale 4
    assert capsule.read_capsule(folder / "capsules" / "00000010").about["kind"] == "overflow at a low scale"
    assert "warning: step 10: overflow at loss scale 4" in capsys.readouterr().err


def test_of_several_phases_the_one_at_fault_is_kept_and_replayed(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "phased_workload:build", **{"model.options.poisoned": {"critic": [1]}})
    found = replay_run(folder / "capsules" / "00000001")
    assert found.capsule.about["phase"] == "critic"
    assert found.cause == causes.BAD_INPUT
    assert {place.key for place in found.diagnosis.places} == {"['bad_critic']"}


def test_a_window_from_before_a_resume_is_read_again_by_epoch_and_index(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **{"model.options.poisoned": [8], "train.epochs": 2})
    parts = assemble_run(load(str(whole / "config.yaml")).config)
    kept_one = capsule.read_capsule(whole / "capsules" / "00000008")
    assert (kept_one.about["epoch"], kept_one.about["window"]) == (1, 2)
    reading = dataclasses.replace(READING, attempted=8, epoch=1, window=2)
    (again,) = load_window(parts, reading) or [{}]
    assert all(torch.equal(again[key], value) for key, value in kept_one.window[0].items())


READING = Reading(
    attempted=0, loss=0.0, grad_norm=0.0, is_bad=True, is_spike=False, is_empty=False, is_ruined=False, scale=1.0,
    committed=0, lr=0.1,
)  # fmt: skip


def test_a_damaged_capsule_is_refused_by_name(faulty_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(faulty_run / "capsules" / "00000002", tmp_path / "cut"))
    (copy / "state.safetensors").write_bytes((copy / "state.safetensors").read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"damaged: state.safetensors was changed"):
        capsule.read_capsule(copy)
    (copy / "state.safetensors").write_bytes((copy / "state.safetensors").read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"damaged: state.safetensors has 100 bytes"):
        capsule.read_capsule(copy)
    (copy / "capsule.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"damaged: capsule.json"):
        capsule.read_capsule(copy)


def test_a_capsule_of_another_version_names_the_one_that_reads_it(faulty_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(faulty_run / "capsules" / "00000002", tmp_path / "old"))
    about = json.loads((copy / "capsule.json").read_text())
    (copy / "capsule.json").write_text(json.dumps(about | {"version": 99}))
    with pytest.raises(CheckpointError, match="version 99") as refused:
        capsule.read_capsule(copy)
    assert about["versions"]["halfstep"] in refused.value.fix


def test_a_run_with_none_and_a_run_with_several_say_what_to_name(faulty_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains 1 capsule") as refused:
        capsule.read_capsule(faulty_run)
    assert "00000002" in refused.value.fix
    with pytest.raises(CheckpointError, match="has no capsules"):
        capsule.read_capsule(run(tmp_path / "good"))
    with pytest.raises(CheckpointError, match="there is no capsule"):
        capsule.read_capsule(tmp_path / "nowhere")


def test_a_model_whose_code_changed_is_refused(faulty_run: Path) -> None:
    found = capsule.read_capsule(faulty_run / "capsules" / "00000002")
    with pytest.raises(CheckpointError, match="another model") as refused:
        refuse_another_model(found, torch.nn.Linear(2, 2))
    assert "body.0.weight" in refused.value.why


def test_weights_that_are_too_large_are_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfstep.evidence.recorder.capsule.count_state_bytes", lambda model: 1 << 40)
    every_one = {"train.checkpoint_every": 1, "train.checkpoints_total_limit": 0}
    folder = run(tmp_path / "run", **{"model.options.poisoned": [2], **every_one})
    found = replay_run(folder / "capsules" / "00000002")
    assert not (folder / "capsules" / "00000002" / "state.safetensors").exists()
    assert "step-" in found.capsule.inexact
    assert found.cause == causes.BAD_INPUT
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match="has no weights"):
        replay_run(folder / "capsules" / "00000002")
