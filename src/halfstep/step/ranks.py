"""Several processes that train one model: the one place that knows of them, on torch.distributed and DDP.

    before backward   SUM of the first weights: the unit that every rank weighs its micro-batches in
    backward          DDP averages the gradients of the window's last micro-batch; the others stay local (no_sync)
    after backward    one SUM of weight, loss x weight, who asked to stop and each rank's flags

Everything a verdict is made of comes out of that sum or of the averaged gradients, on the device, so every rank
commits, skips, rolls back and stops alike and the host waits for nothing. Gradients are those of the global batch: a
micro-batch counts by its weight, whatever the others have, and a rank of weight 0 runs backward as well.

What cannot be agreed any more, a rank that is gone or stuck, ends the others with `RankLost`: gloo says so at once,
NCCL after the limit, when the wait for a step's facts gives up.

Refused here: FSDP and its kind (spread.py). They would change this file.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import ConfigError, HalfstepError, ModelError, RankLost

LIMIT_S = 600.0
"""How long a rank is waited for."""
GRACE_S = 3.0
"""How long who lost a rank waits for that one's own words."""
UNCAPTURED = 11
"""Windows that DDP must have run before a CUDA graph may hold it, by torch's notes on CUDA graphs."""
NEVER = 2**30
"""Iterations of DDP between two of which it takes the time, after its first ten."""
LOST = ("connection", "timed out", "timeout", "broken pipe", "peer", "nccl", "gloo", "socket")
"""Words in the errors of a collective whose other side is gone."""

BAD, RUINED, EMPTY = 1, 2, 4
"""A rank's flags: loss not finite, a buffer not finite, nothing to train on."""

Made = TypeVar("Made")


class World:
    """The processes of a run, this one among them, and how they talk."""

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self.rank, self.size, self.limit_s = dist.get_rank(), dist.get_world_size(), limit_s
        self._store = c10d.PrefixStore("halfstep", c10d._get_default_store())
        self._where: dict[int, tuple[str, int]] = dict(enumerate(self.gathered((socket.gethostname(), os.getpid()))))

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and screen."""
        return self.rank == 0

    def rows(self, num: int, rank: int | None = None) -> int:
        """How many of a global batch's samples are this rank's; the first ranks have one more where they must."""
        rank = self.rank if rank is None else rank
        return num // self.size + (rank < num % self.size)

    def place(self, num: int) -> int:
        """Where this rank's samples begin in a global batch."""
        return self.rank * (num // self.size) + min(self.rank, num % self.size)

    # --- talking, host to host ---

    def gathered(self, own: Made) -> list[Made]:
        """What every rank has, by rank."""
        found: list[Any] = [None] * self.size
        with self.listening():
            dist.all_gather_object(found, own)
        return found

    def from_first(self, make: Callable[[], Made]) -> Made:
        """What the first rank makes, or the error it meets, on every rank."""
        answer: list[Any] = [None]
        if self.is_first:
            try:
                answer = [make()]
            except HalfstepError as error:
                answer = [agreed(error)]
        with self.listening():
            dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], HalfstepError):
            raise agreed(answer[0])
        made: Made = answer[0]
        return made

    def summed(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """The sums over all ranks by name; a name that a rank lacks counts as zero there."""
        shapes = {
            name: (tuple(tensor.shape), tensor.dtype)
            for ranks in self.gathered({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
            for name, (shape, dtype) in ranks.items()
            for tensor in (torch.empty(shape, dtype=dtype, device="meta"),)
        }
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in sorted(shapes.items()):
            own = tensors.get(name)
            found[name] = torch.zeros(shape, dtype=dtype, device=device) if own is None else own.to(device, copy=True)
            with self.listening():
                dist.all_reduce(found[name])
        return found

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """The first rank's values, in place."""
        with self.listening(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    # --- what went wrong elsewhere ---

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A collective inside whose other side is gone becomes an error that names it."""
        try:
            yield
        except RuntimeError as error:
            if not is_loss(error):
                raise
            raise self.lost(error) from error

    def lost(self, error: BaseException | None = None) -> RankLost:
        """What is known of the ranks that do not answer."""
        time.sleep(0.2)  # a process that was killed needs a moment to be gone
        gone = [rank for rank in range(self.size) if rank != self.rank and not self._is_there(rank)]
        first = next(iter(str(error).strip().splitlines()), "") if error is not None else ""
        if gone:
            named = ", ".join(map(str, gone))
            what = f"rank {named} is gone" if len(gone) == 1 else f"ranks {named} are gone"
            why = "killed, or out of host memory: it ended without a word"
        else:
            what, why = (
                f"another rank did not answer within {self.limit_s:g} s",
                first or "it is stuck, or its machine is",
            )
        return RankLost(
            what,
            why=why,
            fix="go on from the last checkpoint with --resume RUN; torchrun --max-restarts does so by itself",
        )

    def _is_there(self, rank: int) -> bool:
        """Of ranks on other machines only their silence is known."""
        host, process = self._where[rank]
        if host != socket.gethostname():
            return True
        try:
            return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except OSError:
            return False

    def wait(self, event: torch.cuda.Event) -> None:
        """For a step's facts, with a limit: a captured step whose peers are gone would never end."""
        until = time.monotonic() + self.limit_s
        pause_s = 1e-5
        while not event.query():
            if time.monotonic() > until:
                raise self.lost()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def speaks(self, error: BaseException) -> bool:
        """Whether this rank is the one to show an error: who met it, not those who lost that rank because of it."""
        try:
            if isinstance(error, RankLost):
                until = time.monotonic() + GRACE_S
                while time.monotonic() < until:
                    if self._store.add("told", 0):
                        return False
                    time.sleep(0.05)
            return self._store.add("told", 1) == 1
        except RuntimeError:  # the store went with the rank that held it
            return all(not self._is_there(rank) for rank in range(self.rank))

    # --- notices of other ranks ---

    def post(self, text: str) -> None:
        """One line for the first rank's screen."""
        number = self._store.add("posts", 1)
        self._store.set(f"post/{number}", f"rank {self.rank}: {text}")

    def posted(self, seen: int) -> list[str]:
        """Lines of the others after the first `seen`, for whoever shows them."""
        return [self._store.get(f"post/{n}").decode() for n in range(seen + 1, self._store.add("posts", 0) + 1)]


Kind = TypeVar("Kind", bound=HalfstepError)


def agreed(error: Kind) -> Kind:
    """An error that every rank has: no rank's name belongs to it."""
    error.is_agreed = True
    return error


def is_loss(error: RuntimeError) -> bool:
    """Whether a collective failed because of its other side."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks found, on the device."""

    weight: Tensor
    loss: Tensor
    said: Tensor
    """Who asked to stop (how many), then each rank's flags."""

    def any_said(self, flag: int) -> Tensor:
        return (self.said[1:].long() & flag).any()


class Ranks:
    """A step's part in the world: its weights, its gradients, its verdict."""

    def __init__(self, world: World, wrapped: Sequence[DistributedDataParallel], device: torch.device) -> None:
        self.world, self.wrapped, self.device = world, list(wrapped), device
        self.asked = torch.zeros((), dtype=torch.float64, device=device)
        """1 where somebody asked this rank to stop; written by the host between steps."""
        self._own = torch.zeros(world.size, dtype=torch.float64, device=device)
        self._own[world.rank] = 1
        self._num_reduced = 0
        self._is_synced = any(isinstance(m, nn.SyncBatchNorm) for w in self.wrapped for m in w.modules())

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def can_be_captured(self) -> bool:
        """Whether DDP has settled its buckets and measured its first iterations."""
        return self._num_reduced >= UNCAPTURED

    def ask(self) -> None:
        """Have the next step tell all ranks that the run is to end."""
        self.asked.fill_(1)

    @contextmanager
    def reducing(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward: gradients travel with the window's last micro-batch only."""
        self._num_reduced += is_last
        with ExitStack() as quiet:
            for wrapped in () if is_last else self.wrapped:
                quiet.enter_context(wrapped.no_sync())
            yield

    def unit(self, weight: Tensor | float | int) -> Tensor:
        """The mean of all ranks' first weights: equal ones count exactly 1 each, as in plain DDP."""
        mean = self._tensor(weight) / self.size
        dist.all_reduce(mean)
        return torch.where(mean > 0, mean, torch.ones_like(mean)).float()

    def nothing(self, loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """A loss of 0 whose backward pass reaches every parameter: the other ranks wait for this one's gradients."""
        if self._is_synced:  # its layers talk in their backward pass, so that must be the same one
            return loss * 0
        trained = [p for p in parameters if p.requires_grad]
        return torch.stack([p.flatten()[:0].sum().float() for p in trained]).sum()

    def agree(self, loss_sum: Tensor, weight: Tensor | float | int, ruined: Tensor) -> Agreed:
        """One SUM over all ranks of what their windows came to."""
        share = self._tensor(weight)
        loss_sum = torch.where(share == 0, torch.zeros_like(share), loss_sum.double())
        flags = BAD * (loss_sum - loss_sum != 0).double() + RUINED * ruined.double() + EMPTY * (share == 0).double()
        both = torch.cat([torch.stack([share, loss_sum, self.asked]), self._own * flags])
        dist.all_reduce(both)
        loss = torch.where(both[0] == 0, torch.full_like(both[0], float("nan")), both[1] / both[0])
        return Agreed(weight=both[0].float(), loss=loss.float(), said=both[2:])

    def any_of(self, flag: Tensor) -> Tensor:
        """Whether any rank says so."""
        found = flag.float()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found > 0

    def refuse_unreduced(self, parameters: Sequence[Tensor], names: Callable[[], Mapping[int, str]]) -> None:
        """DDP leaves a bucket as it is where one of its parameters got no gradient: ranks would part in silence."""
        missing = [p for p in parameters if p.requires_grad and p.grad is None]
        if missing and not all(wrapped.find_unused_parameters for wrapped in self.wrapped):
            known = names()
            named = ", ".join(known.get(id(p), f"one of shape {tuple(p.shape)}") for p in missing[:4])
            raise ModelError(
                f"{len(missing)} trained parameters took no part in the loss: {named}",
                why="DDP waits for the gradients of all of them, and leaves those beside them unreduced",
                fix="train.find_unused=true (in your own loop DDP(..., find_unused_parameters=True)), or freeze them",
            )

    def _tensor(self, weight: Tensor | float | int) -> Tensor:
        if isinstance(weight, Tensor):
            return weight.detach().to(self.device, torch.float64).reshape(())
        return torch.full((), float(weight), dtype=torch.float64, device=self.device)


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_of(model: nn.Module, device: torch.device) -> Ranks | None:
    """How a model of the user's own takes part: by its DDP. A plain one among several processes is refused."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if wrapped:
        return Ranks(World(), wrapped, device)
    if (size := world_size()) > 1:
        raise ConfigError(
            f"torch.distributed runs {size} processes, and the model is not wrapped in DDP",
            why="each rank would train weights of its own",
            fix="two lines before the optimizer: from torch.nn.parallel import DistributedDataParallel; "
            "model = DistributedDataParallel(model)",
        )
    return None


Reduce = Literal["fp32", "bf16"]


class Regions(nn.Module):
    """Forward and loss of a model as one module, so that DDP can stand around them whatever they call of the model."""

    def __init__(self, model: nn.Module, regions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.model, self.regions = model, dict(regions)

    def forward(self, name: str, batch: Any) -> Any:
        return self.regions[name](batch)


def wrapped_regions(
    model: nn.Module,
    regions: Mapping[str, Callable[..., Any]],
    device: torch.device,
    *,
    reduce: Reduce = "fp32",
    find_unused: bool = False,
) -> DistributedDataParallel:
    """DDP around these regions of the model; the first rank's buffers are everybody's before each forward pass."""
    inside = Regions(model, regions)
    if device.type != "cuda":
        wrapped = DistributedDataParallel(inside, find_unused_parameters=find_unused)
    else:
        side = torch.cuda.Stream(device)  # so that a CUDA graph can hold its backward pass
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            wrapped = DistributedDataParallel(
                inside, device_ids=[device.index], find_unused_parameters=find_unused, gradient_as_bucket_view=False
            )
        torch.cuda.current_stream(device).wait_stream(side)
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)  # it waits for the device, which no capture survives
    formats = {p.dtype for p in model.parameters() if p.requires_grad}
    if formats != {SUMMED_IN[reduce]}:
        # A lambda: of annotations torch takes none but its own class, and ours are texts.
        wrapped.register_comm_hook(SUMMED_IN[reduce], lambda dtype, bucket: averaged_in(dtype, bucket))
    return wrapped


SUMMED_IN: dict[Reduce, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def averaged_in(dtype: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's mean over the ranks, summed in a number format of its own. Torch's own hook for bf16 is for NCCL alone."""
    own: Tensor = bucket.buffer()
    sums = own.to(dtype, copy=True).div_(dist.get_world_size())
    future = dist.all_reduce(sums, async_op=True).get_future()

    def back(done: torch.futures.Future[Any]) -> Tensor:
        return own.copy_(done.value()[0])

    averaged: torch.futures.Future[Tensor] = future.then(back)
    return averaged
