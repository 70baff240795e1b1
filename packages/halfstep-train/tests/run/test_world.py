"""What launchers say of the processes they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from halfstep.distributed.world import World
from halfstep.errors import ConfigError, RankLost
from halfstep_train.cli.train import explain_killed_ranks, parse_gpus, remove_gpus_flag, start_on_gpus
from halfstep_train.run import launch as world
from halfstep_train.run.launch import find_first_host, name_rank, read_launch
from ranks_together import together

pytestmark = pytest.mark.ranks

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29400"}


def test_torchrun_and_accelerate_say_all_there_is_to_know() -> None:
    launch = read_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert launch is not None
    assert (launch.rank, launch.size, launch.local_rank, launch.restarts) == (3, 4, 1, 2)
    assert launch.meeting == "env://"


def test_srun_says_it_in_its_own_words() -> None:
    launch = read_launch(
        {
            "SLURM_STEP_NUM_TASKS": "8",
            "SLURM_PROCID": "5",
            "SLURM_LOCALID": "1",
            "SLURM_JOB_ID": "1234567",
            "SLURM_STEP_NODELIST": "gpu[07-09,12]",
        }
    )
    assert launch is not None
    assert (launch.rank, launch.size, launch.local_rank) == (5, 8, 1)
    assert launch.meeting == "tcp://gpu07:24567"


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1,a2", "a1"), ("gpu[07-09,12],login1", "gpu07"), ("n[3]-ib", "n3-ib"), ("", "")]
)
def test_the_first_of_slurms_nodes_is_where_processes_meet(nodes: str, first: str) -> None:
    assert find_first_host(nodes) == first


def test_a_job_with_several_tasks_may_start_one_process_without_srun() -> None:
    assert read_launch({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("count", ["1", "", "many", "0"])
def test_one_process_is_no_matter_who_started_it(count: str) -> None:
    names = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    assert read_launch(dict.fromkeys(names, count)) is None


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_cannot_find_each_other_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2") as refused:
        read_launch({name: "2"})
    assert "torchrun" in refused.value.fix


def test_gpus_are_a_count_or_a_list() -> None:
    assert parse_gpus("8") == (8, "")
    assert parse_gpus("1,2") == (2, "1,2")
    assert parse_gpus("3,") == (1, "3")
    for wrong in ("0", "a", "1,1", "", "-1"):
        with pytest.raises(ConfigError, match="--gpus"):
            parse_gpus(wrong)


def test_each_process_gets_the_command_without_gpus() -> None:
    assert remove_gpus_flag(["train", "--gpus", "2", "unet", "--gpus=2", "--bf16"]) == ["train", "unet", "--bf16"]


def test_an_error_before_processes_meet_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "AFTER_FIRST_S", 0.0)
    errors = [ConfigError("no such file") for _ in range(2)]
    for rank, error in enumerate(errors):
        name_rank(error, {"RANK": str(rank)})
    assert [error.what for error in errors] == ["no such file", "rank 1: no such file"]


def test_processes_that_were_all_killed_are_named_with_the_signal() -> None:
    error = explain_killed_ranks({1: -9, 0: -15})
    assert error.what == "rank 0 was killed by SIGTERM; rank 1 was killed by SIGKILL"


def killed_launcher(rank: int, size: int, port: int) -> str:
    """The second process keeps the store, as torchrun does, and is killed when the first has met it."""
    store = TCPStore("127.0.0.1", port, is_master=rank == 1, wait_for_workers=False)
    if rank == 1:
        store.wait(["met"])
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    met = World()
    store.set("met", "")
    try:
        while True:
            met.read_posts(0)
    except RankLost as error:
        return str(error)


def test_a_launcher_that_was_killed_ends_its_processes_in_words(tmp_path: Path) -> None:
    assert "torchrun, which hosts it, was killed" in together(2, killed_launcher, tmp_path)[0]


def test_gpus_starts_processes_whose_common_error_is_all_that_is_shown(tmp_path: Path) -> None:
    """The one test that goes through torchrun's launcher: three processes import torch."""
    words = ["train", "rank_workload:build", "--gpus", "2", *("--device", "cpu"), *("--out", str(tmp_path / "run"))]
    command = [sys.executable, "-m", "halfstep", *words, "train.batch_size=1", "data.dir=anywhere"]
    folder = str(Path(__file__).parents[4] / "tests" / "support")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if not line.startswith("  ")] == [
        "error: train.batch_size=1 is too small for 2 ranks"
    ]
    assert not (tmp_path / "run").exists()


def test_gpus_that_are_not_there_or_beside_a_launcher_are_refused() -> None:
    with pytest.raises(ConfigError, match="launcher"):
        start_on_gpus("2", "auto", {"RANK": "0"})
    with pytest.raises(ConfigError, match="device cuda:1"):
        start_on_gpus("2", "cuda:1", {})
