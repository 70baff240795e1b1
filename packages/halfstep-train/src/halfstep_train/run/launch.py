"""Read the launcher's environment variables (torchrun, srun, accelerate) and join the other ranks."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from halfstep.errors import ConfigError, HalfstepError, Interrupted, RankLost, TrainingStopped
from halfstep_train.config.statements import ACCELERATE_VARIABLE, Launcher

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from halfstep.distributed.world import World
    from halfstep_train.config.schema import TrainConfig

UNKNOWN = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Launchers that give no address to meet at."""
FIRST_PORT = 20000
AFTER_FIRST_S = 1.0  # how long other ranks let rank 0 show an error that all of them have


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The position of this process among the ranks, and the address where they connect."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    restarts: int = 0  # how often torchrun has started the processes again
    by_torchrun: bool = True
    keeps_store: bool = False  # whether torchrun's store at this address survives a restart

    @property
    def meeting(self) -> str:
        """Return the init method: torchrun keeps a store that survives restarts; elsewhere rank 0 opens one."""
        return "env://" if self.by_torchrun else f"tcp://{self.address}:{self.port}"


def read_launch(variables: Mapping[str, str]) -> Launch | None:
    """Return this process's rank and world from the variables; None for a single process."""
    size = _read_number(variables, "WORLD_SIZE")
    if size > 1 or size == 1 and "RANK" in variables:
        if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in variables]:
            raise ConfigError(
                f"WORLD_SIZE={size} is set without {', '.join(missing)}",
                why="this process cannot determine its rank or reach the other ranks",
                fix="start it with torchrun --nproc_per_node=N -m halfstep train ..., or unset WORLD_SIZE",
            )
        return _read_torchrun(variables)
    if _read_number(variables, "SLURM_STEP_NUM_TASKS") > 1:
        return _read_srun(variables)
    for name, launcher in UNKNOWN.items():
        if _read_number(variables, name) > 1:
            raise ConfigError(
                f"{name}={variables[name]}: this command was started {variables[name]} times, as {launcher} does",
                why=f"{launcher} does not set the address at which the ranks connect",
                fix="start it with torchrun or srun; if this is the only process, unset " + name,
            )
    return None


def read_launcher(variables: Mapping[str, str], num_gpus: int = 1) -> Launcher:
    """Return what the launcher says about the config; without one, `num_gpus` ranks will be started."""
    launch = read_launch(variables)
    # `accelerate launch` also sets "no" if no precision was chosen, so it does not ask for fp32.
    named = variables.get(ACCELERATE_VARIABLE, "").lower()
    return Launcher(
        num_ranks=launch.size if launch else num_gpus,
        mixed_precision=named if named != "no" else "",
    )


def _read_torchrun(variables: Mapping[str, str]) -> Launch:
    return Launch(
        rank=_read_number(variables, "RANK"),
        size=_read_number(variables, "WORLD_SIZE"),
        local_rank=_read_number(variables, "LOCAL_RANK", _read_number(variables, "RANK")),
        address=variables["MASTER_ADDR"],
        port=_read_number(variables, "MASTER_PORT"),
        restarts=_read_number(variables, "TORCHELASTIC_RESTART_COUNT"),
        keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_srun(variables: Mapping[str, str]) -> Launch:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    return Launch(
        rank=_read_number(variables, "SLURM_PROCID"),
        size=_read_number(variables, "SLURM_STEP_NUM_TASKS"),
        local_rank=_read_number(variables, "SLURM_LOCALID"),
        address=variables.get("MASTER_ADDR") or find_first_host(nodes) or "127.0.0.1",
        # A port per job, so that jobs on one node do not meet each other.
        port=_read_number(variables, "MASTER_PORT") or FIRST_PORT + _read_number(variables, "SLURM_JOB_ID") % 10_000,
        restarts=_read_number(variables, "SLURM_RESTART_COUNT"),
        by_torchrun=False,
    )


def find_first_host(nodes: str) -> str:
    """Return the first host of a SLURM list: `gpu[07-09,12],login1` begins with gpu07."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return f"{match[1]}{match[2] or ''}{match[3] or ''}" if match else ""


def _read_number(variables: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def choose_device(asked: str, backend: str, launch: Launch | None) -> str:
    """Return the device this rank trains on: on a machine with several ranks, the GPU of its local rank."""
    if launch is None or launch.size == 1:
        return asked
    import torch

    if re.fullmatch(r"cuda:\d+", asked):
        raise ConfigError(
            f"device={asked} cannot serve {launch.size} ranks",
            why="each rank uses a different GPU",
            fix="name the GPUs with --gpus 0,1, or leave device out and set CUDA_VISIBLE_DEVICES",
        )
    num_gpus = torch.cuda.device_count()
    if asked not in ("auto", "cuda") or num_gpus == 0:
        return "cpu" if asked == "auto" else asked
    if launch.local_rank >= num_gpus and backend != "gloo":
        raise ConfigError(
            f"local rank {launch.local_rank} has no GPU: this machine has {num_gpus}",
            fix=f"start {num_gpus} ranks on it, or train without GPUs: --device cpu",
        )
    return f"cuda:{launch.local_rank % num_gpus}"


@contextmanager
def join_world(device_asked: str, train: TrainConfig, launch: Launch | None) -> Iterator[World | None]:
    """Join the other ranks for the duration of the run; yield None for a single process. An error on one rank ends all
    and is shown once."""
    # A sharded run that has lost all other ranks goes on as a world of one.
    if launch is None or launch.size == 1 and train.backend == "auto" and train.shard is not True:
        yield None
        return
    import torch
    import torch.distributed as dist

    from halfstep.distributed.world import World
    from halfstep.hardware.probe import probe

    device = torch.device(probe(choose_device(device_asked, train.backend, launch)).device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{launch.size} ranks cannot train on {device.type}",
            why="ranks communicate with gloo or NCCL, which halfstep uses on CPUs and CUDA GPUs only",
            fix="use one rank, or --device cpu or cuda",
        )
    limit_s = train.rank_timeout_s
    by_nccl = device.type == "cuda" and train.backend != "gloo"
    if not dist.is_initialized():
        store = meet_at_kept_store(launch, limit_s) if launch.keeps_store else None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if by_nccl else "gloo",
            init_method=None if store else launch.meeting,
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=limit_s),
        )
    world = World(limit_s=limit_s)
    try:
        with _show_once(world):
            yield world
    except BaseException:
        # Collectives on the device that wait for a peer would never end: abort them.
        world.hang_up(dist.distributed_c10d._abort_process_group if by_nccl else dist.destroy_process_group)
        raise
    dist.destroy_process_group()


def meet_at_kept_store(launch: Launch, limit_s: float) -> Store:
    """Return torchrun's store with a prefix that only the ranks of this start share.

    torchrun keeps its store when it restarts ranks, and gloo would read the addresses of those that are gone. Restart
    counts differ between agents, so the ranks find each other by random tokens: rank 0 publishes those it sees, until
    every rank has confirmed a list with its own token.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(launch.address, launch.port, launch.size, is_master=False, timeout=timedelta(seconds=limit_s))
    token, until, listed, confirmed = secrets.token_hex(8), time.monotonic() + limit_s, "", ""
    store.set(f"halfstep/join/{launch.rank}", token)
    while time.monotonic() < until:
        if launch.rank == 0:
            keys = [f"halfstep/join/{rank}" for rank in range(launch.size)]
            if store.check(keys):
                listed = " ".join(store.get(key).decode() for key in keys)
                store.set("halfstep/listed", listed)
        elif store.check(["halfstep/listed"]):
            listed = store.get("halfstep/listed").decode()
        if token in listed.split():
            if listed != confirmed:
                store.set(f"halfstep/confirmed/{listed}/{launch.rank}", "")
                confirmed = listed
            if store.check([f"halfstep/confirmed/{listed}/{rank}" for rank in range(launch.size)]):
                return PrefixStore(f"halfstep/{listed}", store)
        time.sleep(0.02)
    raise RankLost(
        f"not all {launch.size} ranks started within {limit_s:g} s (train.rank_timeout_s)",
        why="a rank did not start, or ended while starting",
        fix="look at the errors of the other ranks, or set a longer train.rank_timeout_s",
    )


def name_rank(error: HalfstepError, variables: Mapping[str, str]) -> None:
    """Name the rank in an error raised before the ranks have connected, such as one in the config. The launcher ends
    the others when rank 0 has shown it."""
    if rank := _read_number(variables, "RANK"):
        time.sleep(AFTER_FIRST_S)
        error.what = f"rank {rank}: {error.what}"


@contextmanager
def _show_once(world: World) -> Iterator[None]:
    try:
        yield
    except HalfstepError as error:
        if not (error.is_agreed or isinstance(error, (TrainingStopped, Interrupted, RankLost))):
            error.what = f"rank {world.rank}: {error.what}"
        error.is_shown_elsewhere = not world.is_first_to_show(error)
        raise
    except Exception as error:  # a traceback follows: ranks that lose this one stay silent
        world.is_first_to_show(error)
        raise
