"""Checkpoints: whole or not at all, damaged ones passed over, nothing lost to a full disk or a kill."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.disk import seal
from halfstep.errors import CheckpointError
from halfstep.state_files import pack, unpack
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints, load
from halfstep_train.run.folder import RunFolder
from warm_processes import process
from whole_runs import load_newest, small_disk


def checkpoint(value: float = 1.0) -> Checkpoint:
    return Checkpoint(
        model={"weight": torch.full((3, 2), value), "scalar": torch.tensor(7)},
        ema={},
        state={"optimizers": [{0: {"step": torch.tensor(value), "betas": (0.9, 0.999)}}], "lr": 0.1 + 0.2},
    )


def test_a_tree_of_everything_comes_back_as_it_was() -> None:
    tree = {
        "tensor": torch.arange(3), "tuple": (1, (2.5, None)), 3: {"nested": [True, "x"]},
        "array": np.arange(4, dtype=np.uint32), "third": 1 / 3,
    }  # fmt: skip
    packed, tensors = pack(tree)
    back = unpack(json.loads(json.dumps(packed)), tensors)
    assert torch.equal(back.pop("tensor"), tree.pop("tensor"))
    assert np.array_equal(back.pop("array"), tree.pop("array"))
    assert back == tree


def test_the_average_has_a_file_only_where_there_is_one(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "without").save(1, checkpoint())
    assert not (path / "ema.safetensors").exists()
    assert load(path).ema == {}
    averaged = Checkpoint(model={}, ema={"weight": torch.ones(2)}, state={})
    path = Checkpoints(tmp_path / "with").save(1, averaged)
    assert torch.equal(load(path).ema["weight"], torch.ones(2))
    (path / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is damaged: ema.safetensors"):
        load(path)


def test_channels_last_weights_can_be_saved(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    path = Checkpoints(tmp_path).save(1, Checkpoint(model={"w": weight}, ema={}, state={}))
    assert torch.equal(load(path).model["w"], weight)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, checkpoint(1.0))
    file = checkpoints.save(2, checkpoint(2.0)) / name
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    else:
        # The last byte of each file is data; of the JSON it is the closing brace.
        file.write_bytes(content[:-3] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    said: list[str] = []
    path, found = load_newest(checkpoints, said.append)
    assert path.name == "step-00000001"
    assert found.model["weight"][0, 0] == 1.0
    assert "step-00000002 is damaged" in said[0]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"layout": 1, "files": [], "state": {}},
        {"layout": 1, "files": {"model.safetensors": {}}, "state": {}},
        {"layout": 1, "files": {}, "state": {"__tensor__": "missing"}},
        {"layout": 1, "files": {}, "state": {"__tuple__": 7}},
    ],
)
def test_a_state_of_another_form_is_passed_over_like_damage(tmp_path: Path, document: dict[str, object]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, checkpoint(1.0))
    (checkpoints.save(2, checkpoint(2.0)) / "state.json").write_text(json.dumps(seal(document)))
    path, _ = load_newest(checkpoints, lambda text: None)
    assert path.name == "step-00000001"


def test_only_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        path = checkpoints.save(step, checkpoint(step))
        if step == 2:
            checkpoints.mark_best(path, "iou", 0.9)
    assert [path.name for path in checkpoints.list_all()] == ["step-00000002", "step-00000005", "step-00000006"]
    assert checkpoints.find_best() == tmp_path / "step-00000002"


@pytest.mark.parametrize("content", ["[", "{}", '{"checkpoint": 3}', '{"checkpoint": "../../elsewhere"}'])
def test_a_damaged_mark_of_the_best_drops_nothing(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.mark_best(checkpoints.save(1, checkpoint(1)), "iou", 0.9)
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"best.json cannot be read"):
        checkpoints.save(2, checkpoint(2))
    assert (tmp_path / "step-00000001").is_dir()


def interrupted(checkpoints: Checkpoints) -> Checkpoints:
    """The same folder, for a process that is stopped when a checkpoint has been written."""

    class Interrupted(Checkpoints):
        def _finish(self, *_: object) -> Path:
            raise KeyboardInterrupt

    return Interrupted(checkpoints.folder, keep=checkpoints.keep)


def test_a_step_saved_twice_replaces_nothing_until_the_new_one_is_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    first = checkpoints.save(4, checkpoint(1.0))
    with pytest.raises(KeyboardInterrupt):  # before anything is removed, both are there
        interrupted(checkpoints).save(4, checkpoint(1.5))
    assert [path.name for path in checkpoints.list_all()] == ["step-00000004", "step-00000004-1"]
    second = checkpoints.save(4, checkpoint(2.0))
    assert first == second
    assert checkpoints.list_all() == [second]
    checkpoints.mark_best(second, "iou", 0.5)
    third = checkpoints.save(4, checkpoint(3.0))
    assert checkpoints.find_best() == second
    _, newest = load_newest(checkpoints)
    assert newest.model["weight"][0, 0] == 3.0
    assert third.is_dir()


@pytest.mark.parametrize("keep", [1, 2])
def test_the_one_just_written_stays_when_a_later_one_was_damaged(tmp_path: Path, keep: int) -> None:
    for step in (4, 6, 8):
        Checkpoints(tmp_path).save(step, checkpoint(step))
    for step in (6, 8):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"x")
    checkpoints = Checkpoints(tmp_path, keep=keep)
    path, _ = load_newest(checkpoints, lambda text: None)
    assert path.name == "step-00000004"
    assert len(list(tmp_path.glob(".damaged-*"))) == 2
    written = checkpoints.save(5, checkpoint(5.0))
    assert checkpoints.list_all() == ([path] if keep == 2 else []) + [written]
    assert checkpoints.save(6, checkpoint(6.0)).name == "step-00000006"
    assert load_newest(checkpoints)[1].model["weight"][0, 0] == 6.0


def test_the_one_just_written_stays_whatever_has_a_later_number(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(9, checkpoint(9.0))
    written = Checkpoints(tmp_path, keep=1).save(5, checkpoint(5.0))
    assert Checkpoints(tmp_path).list_all() == [written]


def test_where_all_are_damaged_none_is_moved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.save(4, checkpoint()) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        load_newest(checkpoints, lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_file_of_somebody_else_is_no_checkpoint_and_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "step-00000005.bak").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert [checkpoints.save(5, checkpoint(k)).name for k in (1.0, 2.0)] == ["step-00000005"] * 2
    assert (tmp_path / "step-00000005.bak").is_dir()


def test_the_tenth_of_one_step_is_newer_than_the_second(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for k in range(12):
        path = checkpoints.save(5, checkpoint(float(k)))
        if k == 0:
            checkpoints.mark_best(path, "iou", 0.5)
    assert checkpoints.list_all()[-1].name == "step-00000005-11"
    assert load_newest(checkpoints)[1].model["weight"][0, 0] == 11.0


def test_a_full_disk_keeps_what_was_there_and_speaks_of_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    big = Checkpoint(model={"weight": torch.zeros(1 << 20)}, ema={}, state={})
    with small_disk(1 << 16), pytest.raises(CheckpointError, match="cannot write checkpoint") as failed:
        checkpoints.save(1, big)
    assert "start the run again" in failed.value.fix
    assert "--resume" not in failed.value.fix
    checkpoints.save(1, checkpoint())
    with small_disk(1 << 16), pytest.raises(CheckpointError, match="cannot write checkpoint") as failed:
        checkpoints.save(2, big)
    assert f"--resume {tmp_path.parent}" in failed.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load(tmp_path / "step-00000001").model["weight"][0, 0] == 1.0


def test_a_full_disk_keeps_the_former_mark_of_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first, second = checkpoints.save(1, checkpoint()), checkpoints.save(2, checkpoint())
    checkpoints.mark_best(first, "iou", 0.5)
    with small_disk(4), pytest.raises(CheckpointError, match=r"cannot write .*best.json"):
        checkpoints.mark_best(second, "iou", 0.6)
    assert checkpoints.find_best() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", first.name, second.name]


HOLDER = """
    import fcntl, sys
    file = open(sys.argv[1], "w")
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path / "run"), "unet")
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(folder.path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CheckpointError, match="trained by another process"), folder.lock():
            pytest.fail("two at once")
        process.kill()
    with folder.lock():
        pass


def write_checkpoints(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    for step in range(1, 100000):
        value = torch.full((200_000,), float(step))
        checkpoints.save(step, Checkpoint(model={"w": value}, ema={}, state={"step": step, "m": value}))
        print(step, flush=True)


def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """SIGKILL while checkpoints are written without a pause, at moments spread over many writes."""
    for attempt in range(3):
        folder, said = tmp_path / str(attempt), tmp_path / f"said-{attempt}"
        said.touch()
        with process(write_checkpoints, folder, output=said) as writer:
            while not said.read_text():  # until the first checkpoint is there
                assert writer.is_alive()
                time.sleep(0.002)
            time.sleep(0.017 * (attempt + 1))
        reported = [int(word) for word in said.read_text().split()]
        path, found = load_newest(Checkpoints(folder))
        assert found.state["step"] in (reported[-1], reported[-1] + 1)
        assert torch.equal(found.model["w"], found.state["m"])
        Checkpoints(folder).clean_up()
        assert not list(folder.glob(".writing-*"))
        assert path.is_dir()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot create"):
        RunFolder.create(str(tmp_path / "file" / "run"), "unet")


def test_two_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {RunFolder.create(None, "unet").path for _ in range(3)}
    assert len(paths) == 3
