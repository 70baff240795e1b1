"""Several processes on one machine that talk by gloo. They are forked once, and do one thing after another."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from warm_processes import FORKED, Surroundings, nothing_waits_for_the_disk, surroundings, take_over

LIMIT_S = 120.0
FIRST_PORT, NUM_PORTS = 12_000, 20_000  # below the ports that the system gives to outgoing connections
_next_port = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """One that nobody takes before it is used: neither the system for a connection nor another worker for its own."""
    while True:
        port = FIRST_PORT + next(_next_port) % NUM_PORTS
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def be_rank(rank: int, size: int, port: int) -> None:
    """Set the variables that torchrun gives to a process."""
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": 1}
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size, **local}
    os.environ.update({name: str(value) for name, value in given.items()})


def together(
    size: int, scenario: Callable[..., Any], folder: Path, *arguments: Any, stuck: Sequence[int] = ()
) -> list[Any]:
    """What `scenario(rank, size, port, *arguments)` returns in each process; None of one that was killed. Those
    that are meant to be stuck are killed when the others have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    given = (size, port, folder.absolute(), surroundings(), arguments)
    made = [FORKED.Process(target=_act, args=(scenario, rank, *given)) for rank in range(size)]
    for process in made:
        process.start()
    for rank, process in enumerate(made):
        process.join(0 if rank in stuck else LIMIT_S)
    hung = [rank for rank, process in enumerate(made) if process.is_alive() and rank not in stuck]
    for process in made:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} did not end"
    return [_read(folder / str(rank)) for rank in range(size)]


def join(rank: int, size: int, port: int) -> None:
    """Meet the other processes, by gloo."""
    import torch.distributed as dist

    meeting, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=limit)


def _read(path: Path) -> Any:
    if not path.exists():
        return None
    found = pickle.loads(path.read_bytes())
    if isinstance(found, str) and found.startswith("Traceback"):
        raise AssertionError(found)
    return found


def _act(
    scenario: Callable[..., Any], rank: int, size: int, port: int, folder: Path, where: Surroundings, arguments: Any
) -> None:
    take_over(where)
    os.environ["OMP_NUM_THREADS"] = "1"
    nothing_waits_for_the_disk()
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through before each run
    try:
        found = scenario(rank, size, port, *arguments)
    except BaseException:
        found = traceback.format_exc()
    (folder / f".{rank}").write_bytes(pickle.dumps(found))
    (folder / f".{rank}").rename(folder / str(rank))
    os._exit(0)
