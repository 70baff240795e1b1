"""`make soak`: what torchrun's elastic agents do with a sharded run when a worker, a node or the store's host is lost.

Each agent stands for a node: it is killed together with its workers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ranks_together import free_port
from whole_runs import TINY, assert_same_bits, newest

pytestmark = pytest.mark.soak
SETTINGS = {**TINY, "train.shard": True, "train.checkpoint_every": 1, "train.max_steps": 8, "train.rank_timeout_s": 90,
            "schedule.name": "constant", "schedule.warmup_steps": 0, "log.quiet": False}  # fmt: skip
LIMIT_S = 300.0


class Nodes:
    """torchrun agents that meet at one store, which the first of them hosts."""

    def __init__(self, folder: Path, ranks_per_node: int, nodes: str, **options: Any) -> None:
        self.run, self.folder, self.port = folder / "run", folder, free_port()
        overrides = [f"{k}={json.dumps(v)}" for k, v in {**SETTINGS, "model.options": options}.items()]
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc_per_node", str(ranks_per_node),
            "--max-restarts", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{self.port}",
            "--rdzv_id", "soak", "--rdzv_conf", "last_call_timeout=45", "-m", "halfstep", "train",
            "sharded_workload:build", "--out", str(self.run), *overrides,
        ]  # fmt: skip
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with (self.folder / f"{len(self.agents)}.log").open("wb") as log:
            self.agents.append(subprocess.Popen(self.command, stdout=log, stderr=log, env=environment))
        while len(self.agents) == 1:  # the first one hosts the store
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + LIMIT_S
        while not any((self.run / "checkpoints").glob("step-*")) or self.find_step() < step:
            assert time.monotonic() < until, self.read(0)
            time.sleep(0.1)

    def find_step(self) -> int:
        """The newest checkpoint; older ones are removed."""
        return max(int(path.name.split("-")[1]) for path in (self.run / "checkpoints").glob("step-*"))

    def lose(self, node: int) -> None:
        kill_tree(self.agents[node].pid)

    def end(self, node: int) -> int:
        return self.agents[node].wait(LIMIT_S)

    def read(self, node: int) -> str:
        return (self.folder / f"{node}.log").read_text(errors="replace")


def kill_tree(pid: int) -> None:
    """Kill an agent and its workers, which torchrun starts in sessions of their own."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(own): int(parent) for own, parent in map(str.split, listed.splitlines())}
    for one in (pid, *(child for child, parent in parents.items() if parent == pid)):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


@pytest.fixture
def started() -> Iterator[list[Nodes]]:
    found: list[Nodes] = []
    yield found
    for nodes in found:
        for agent in nodes.agents:
            kill_tree(agent.pid)
            agent.wait()


def test_a_lost_worker_restarts_with_the_same_ranks_and_the_same_bits(started: list[Nodes], tmp_path: Path) -> None:
    for name, options in (("kept", {}), ("lost", {"killed": [1, 4], "once": str(tmp_path / "once")})):
        (tmp_path / name).mkdir()
        started.append(Nodes(tmp_path / name, 2, "1", **options))
        started[-1].start()
        assert started[-1].end(0) == 0, started[-1].read(0)
    assert (tmp_path / "once").exists()
    assert "resuming from step-" in started[1].read(0)
    kept, lost = (newest(nodes.run) for nodes in started)
    assert kept.state["step"]["attempted"] == lost.state["step"]["attempted"] == 8
    assert_same_bits(kept.model, lost.model)


def start_two(started: list[Nodes], folder: Path) -> Nodes:
    """Start a run of two nodes with one rank each, and return them after its second step."""
    nodes = Nodes(folder, 1, "1:2", pause_s=1.0)
    started.append(nodes)
    nodes.start()
    nodes.start()
    nodes.wait_for_step(2)
    return nodes


def test_a_lost_node_leaves_fewer_ranks_and_the_same_global_batch(started: list[Nodes], tmp_path: Path) -> None:
    nodes = start_two(started, tmp_path)
    nodes.lose(1)
    assert nodes.end(0) == 0, nodes.read(0)
    said = nodes.read(0)
    assert "1 rank instead of 2: each batch is cut into 2 micro-batches, with the same samples per step" in said
    assert "was saved with 2 shards, but this is 1 shard: it cannot continue bit-exactly" in said
    state = newest(nodes.run).state
    assert state["step"]["attempted"] == 8
    assert state["pieces"] == 2


def test_a_lost_host_of_the_store_ends_the_run_with_one_message(started: list[Nodes], tmp_path: Path) -> None:
    nodes = start_two(started, tmp_path)
    nodes.lose(0)
    assert nodes.end(1) != 0
    assert nodes.read(1).count("error: ") == 1, nodes.read(1)
    assert newest(nodes.run).state["step"]["attempted"] >= 2
