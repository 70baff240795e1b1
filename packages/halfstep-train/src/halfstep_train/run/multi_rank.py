"""Connect the ranks of a run, by DDP or by dividing the model (FSDP2), and refuse what they cannot train together."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep import __version__
from halfstep.distributed.sharding import Sharding, find_sharding
from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import ConfigError, HalfstepError
from halfstep.precision.plan import Plan
from halfstep.precision.swapped import InFp32
from halfstep.recompute import Recomputing
from halfstep.step.facts import PhasedReading, Reading
from halfstep.step.phases import freeze_others
from halfstep.step.randomness import seed_everything
from halfstep.step.ranks import Ranks, refuse_differing_settings, wrap_regions
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig, TrainConfig
from halfstep_train.run.folder import digest_contents, flatten_settings
from halfstep_train.run.frozen_modules import compute_checksum
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.tune.modes import Batch, Mode, Region, cast_weights_again, compile_region
from halfstep_train.workloads.base.workload import Workload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# --- train.shard ---
#
# The units are the model's repeated blocks, several small ones together, and one for the rest. FSDP2 gathers a unit
# when its first module is called. Regions call whichever methods of a model they like, so the rest is a unit of a
# module around the model, whose forward is the region. Each unit goes from the host to the device and is cut there: the
# device never holds the whole model.
#
# Blocks of frozen networks are divided too, each by itself; what these networks have outside of blocks stays whole.


Found = TypeVar("Found")
OF_FROZEN = ":"
"""Separates a frozen network's name from its block's: `vae:decoder.up.0`."""
UNIT_PARAMETERS = 64_000_000
"""A unit has at least so many, 256 MB in fp32. FSDP2's hooks take the host about 1 ms per unit and step: GPT-2 XL with
4 x 1024 tokens takes a sixth longer with a unit per block (benchmarks/results/sharded_gpt2_xl_batch_4.json). At
NVLink's 350 GB/s the two gathers and the reduction of a unit take 2 ms. FSDP2's work per parameter takes the host
longer, and does not change."""
GROUPED = (nn.ModuleList, nn.Sequential)
MIN_UNITS = 8
"""A unit with this part of all blocks is large enough: what is gathered must stay small compared with the model."""


def choose_sharded_mode(fast: str, plan: Plan, say: Callable[[str], None]) -> Plan:
    """Return the plan with the mode of a sharded run. Nothing is timed: a trial would need a copy of the model."""
    is_on = fast in ("compile", "graph") or fast == "auto" and plan.on_cuda
    mode: Mode = "compile" if is_on and not plan.simulated and plan.shard_blocks else "eager"
    if fast == "graph":
        say(f"train.fast=graph: a sharded step is not captured; it runs in {mode} mode")
    reason = "a sharded model is compiled block by block" if mode == "compile" else f"train.fast={fast}"
    return dataclasses.replace(plan, mode=mode, mode_reason=reason)


def refuse_unshardable(config: RunConfig, workload: Workload, world: World | None) -> None:
    """Refuse what does not work with `train.shard`, before anything is sharded."""
    train = config.train
    if world is None:
        if train.shard == "auto":
            return
        raise ConfigError(
            "train.shard=true needs more than one rank",
            why="there is no other rank to divide the model with",
            fix="--gpus N, torchrun --nproc_per_node=N, or train.shard=false",
        )
    unfit = {
        "train.memory=low": (train.memory == "low", "train.activation_checkpointing=true"),
        "train.auto_batch=true": (train.auto_batch, "choose train.batch_size with halfstep plan --memory --ranks N"),
        "train.channels_last=true": (train.channels_last is True, "leave train.channels_last out"),
        "train.activation_checkpointing=true in a model without its own support": (
            train.activation_checkpointing and not any(isinstance(m, Recomputing) for m in workload.model.modules()),
            "train.activation_checkpointing=false; recomputing other models is checked on a copy",
        ),
        "guard.on_fault=rollback": (config.guard.on_fault == "rollback", "guard.on_fault=stop"),
        "guard.hold=true": (config.guard.hold, "guard.hold=false"),
        "log.ledger": (bool(config.log.ledger), "log.ledger=false"),
        "precision fp8": (config.precision.default == "fp8", "--precision bf16"),
        f"the phases of {workload.name}": (bool(workload.phases), "train.shard=false"),
    }
    for name, (is_asked, fix) in unfit.items():
        if is_asked:
            refuse_on_all(
                f"train.shard={str(train.shard).lower()} does not work with {name}",
                why="it needs the whole model, a copy of it, or weights that FSDP2 cannot shard",
                fix=fix,
            )


# --- dividing ---


def group_blocks(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group successive blocks of one list into units of at least `UNIT_PARAMETERS`.

    Blocks outside of lists are not grouped: validation may call some of them only, and FSDP2 frees a unit after its
    last block."""
    blocks = {name: list(model.get_submodule(name).parameters()) for name in names}
    sizes = {name: sum(p.numel() for p in parameters) for name, parameters in blocks.items()}
    least = min(UNIT_PARAMETERS, sum(sizes.values()) / MIN_UNITS)
    # FSDP2 gathers one format at a time, so blocks of another format are another unit.
    kinds = {name: (name.rpartition(".")[0], {p.dtype for p in blocks[name]}) for name in names}
    in_lists = {where for where, _ in kinds.values() if isinstance(model.get_submodule(where), GROUPED)}
    units: list[list[str]] = []
    for name in names:
        is_like = bool(units) and kinds[units[-1][0]] == kinds[name] and kinds[name][0] in in_lists
        if is_like and sum(sizes[other] for other in units[-1]) < least:
            units[-1].append(name)
        else:
            units.append([name])
    return units


class Around(nn.Module):
    """The module around a model whose forward runs any function: FSDP2 gathers the model's rest for its duration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class ShardedModel:
    """A model divided among the ranks, and how functions that use its parameters are called."""

    def __init__(self, train: TrainConfig, model: nn.Module, plan: Plan, world: World, device: torch.device) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.world, mesh = world, make_mesh(device)
        self._casts_again = plan.compute in ("bf16", "fp16") and train.shard_gather == "fp32"
        refuse_unfit_gather(train, plan)
        groups = group_blocks(model, [name for name in plan.shard_blocks if OF_FROZEN not in name])
        units = [[model.get_submodule(name) for name in names] for names in groups]
        kinds = {type(block) for unit in units for block in unit if "forward" in vars(type(block))}
        self.kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.nn.")}
        """Classes of blocks that are compiled; a Sequential of torch is not, because it may also hold blocks."""
        _make_contiguous_(model)
        # FSDP2 cannot cut a scalar; the step averages the gradients of what FSDP2 leaves out.
        scalars = {p for p in model.parameters() if not p.ndim}
        gathers_half = train.shard_gather == "bf16"
        shard = functools.partial(fully_shard, mesh=mesh, ignored_params=scalars)
        for unit in units:
            for alike in _find_own_units(unit, gathers_half=gathers_half):
                shard(alike, mp_policy=_make_policy(train.reduce, gathers_half=False))
            if rest := [block for block in unit if not isinstance(block, FSDPModule)]:
                shard(rest, mp_policy=_make_policy(train.reduce, gathers_half=gathers_half))
        # Only matters for units that are gathered again in backward, as the root is not.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPAround\) returned a view")
        self._root: Any = Around(model)
        shard(self._root, mp_policy=_make_policy(train.reduce, gathers_half=False))
        with torch.no_grad():
            for scalar in scalars:
                scalar.data = scalar.data.to(device)
        sharding = find_sharding(self._root)
        assert sharding is not None
        self.sharding: Sharding = sharding

    def call(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Call a function that uses the model; every rank does."""
        found: Found = self._root(functools.partial(function, *arguments))
        if not torch.is_grad_enabled():
            # No backward pass follows, which would divide the rest again. Weights may change before the next forward.
            self._root.reshard()
        return found

    def connect(self, eager: Region, plan: Plan, device: torch.device, **how: Any) -> tuple[Region, Region, Ranks]:
        """Return the eager and the compiled region of this model, and the step's ranks."""
        compiled = compile_region(eager, blocks=dict.fromkeys(self.kinds), **how) if self.kinds else eager

        def run_eager(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
            if not self._casts_again:
                return self.call(eager, batch)
            with cast_weights_again():  # half copies of a whole model would take more than its shard
                return self.call(eager, batch)

        ranks = Ranks(self.world, [], device, self.sharding)
        ranks.reduces_last = plan.reduces_last
        return run_eager, functools.partial(self.call, compiled), ranks


def make_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks, which cut parameters together."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard_frozen_(workload: Workload, plan: Plan, device: torch.device) -> None:
    """Divide the blocks of frozen networks, each by itself: their other modules may be called by any method."""
    from torch.distributed.fsdp import fully_shard

    for name in plan.shard_blocks:
        network, _, block = name.partition(OF_FROZEN)
        if block:
            part = workload.frozen[network].module.get_submodule(block)
            _make_contiguous_(part)
            fully_shard(part, mesh=make_mesh(device), reshard_after_forward=True)


def _make_contiguous_(module: nn.Module) -> None:
    """Undo channels_last: FSDP2 cuts contiguous weights only."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


def _make_policy(reduce: str, *, gathers_half: bool) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gathers_half else None,
        reduce_dtype=torch.bfloat16 if reduce == "bf16" else torch.float32,
        cast_forward_inputs=False,  # autocast decides per operation; casting inputs would round the residual stream
    )


def _find_own_units(unit: Sequence[nn.Module], *, gathers_half: bool) -> Iterator[list[nn.Module]]:
    """Yield modules of a unit that are gathered by themselves, those of one format together: those inside of blocks of
    another format than most of the unit (FSDP2 gathers one format at a time), and in half precision norms and modules
    that compute in fp32, which may be whole blocks."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in (p for block in unit for p in block.parameters()):
        sizes[parameter.dtype] += parameter.numel()
    usual = max(sizes, key=sizes.__getitem__, default=torch.float32)
    found: dict[torch.dtype, list[nn.Module]] = {}
    for part in (part for block in unit for part in block.modules()):
        own = list(part.parameters(recurse=isinstance(part, InFp32)))
        is_fp32 = gathers_half and (isinstance(part, (_NormBase, InFp32)) or "Norm" in type(part).__name__)
        if own and (is_fp32 or part not in unit and any(p.dtype != usual for p in own)):
            found.setdefault(own[0].dtype, []).append(part)
    yield from found.values()


def refuse_unfit_gather(train: TrainConfig, plan: Plan) -> None:
    if train.shard_gather == "bf16" and (plan.granted != "bf16" or plan.simulated):
        precision = f"simulated {plan.granted}" if plan.simulated else plan.granted
        refuse_on_all(
            f"train.shard_gather=bf16 does not fit precision {precision}",
            why="weights would be rounded to bf16 although they are used in a different format",
            fix="leave train.shard_gather out, or --precision bf16",
        )


OWN = ("device", "log.", "data.num_workers")  # settings that may differ between ranks


def connect_ranks(
    world: World | None,
    train: TrainConfig,
    model: nn.Module,
    regions: tuple[Region, Region],
    device: torch.device,
    trained: list[nn.Parameter] | None = None,
) -> tuple[Region, Region, Ranks | Literal["alone"]]:
    """Wrap the eager and the compiled region in DDP, and return them with the step's `Ranks`; unchanged on one rank.

    `trained` are the parameters of a phase: the others get no gradients, and DDP must not wait for them.
    """
    eager, compiled = regions
    if world is None:
        return eager, compiled, "alone"

    def run_compiled_or_eager(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
        """Fall back to eager within the step: the other ranks are in the same step, and the sums stay the same."""
        try:
            # By default dynamo splits a region inside DDP at its buckets, to overlap sums with backward. That fuses
            # less, and it fails on kernels that are custom autograd functions, as ours are.
            with torch._dynamo.config.patch(optimize_ddp=False):
                return compiled(batch)
        except (HalfstepError, OutOfMemory):
            raise
        except Exception as error:
            found = eager(batch)  # an error that eager raises too is not the compiler's
            ranks.uncompiled = error
            ranks.announce_mode("eager")
            return found

    own = [p for p in model.parameters() if p.requires_grad] if trained is None else trained
    # DDP looks at requires_grad when it wraps: it must not wait for gradients of other phases.
    with freeze_others(model, own):
        wrapped = wrap_regions(
            model,
            {"eager": eager, "compiled": run_compiled_or_eager},
            device,
            reduce=train.reduce,
            find_unused=train.find_unused,
        )
    ranks = Ranks(world, [wrapped], device)
    return partial(wrapped, "eager"), partial(wrapped, "compiled"), ranks


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace BatchNorm by SyncBatchNorm, as `train.sync_batch_norm` asks."""
    if device.type != "cuda":
        refuse_on_all(
            f"train.sync_batch_norm=true does not work on {device.type}",
            why="torch supports SyncBatchNorm on GPUs only",
            fix="leave it out, or train on GPUs",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def refuse_on_all(what: str, *, why: str, fix: str) -> NoReturn:
    """Raise ConfigError for what every rank refuses, so that it is shown without the number of one rank."""
    raise mark_agreed(ConfigError(what, why=why, fix=fix))


def refuse_small_batch(loaded: Loaded, size: int) -> None:
    """Refuse a batch that several ranks cannot divide, or that counts other ranks, before anything is built."""
    batch_size = loaded.config.train.batch_size
    if loaded.per_rank and loaded.num_ranks != size:
        refuse_on_all(
            f"{loaded.per_rank[0]} is given per GPU and was multiplied by {loaded.num_ranks}, not by {size} ranks",
            why="the config was loaded before the ranks were known",
            fix=f"name the workload or file in hs.train itself, or give {loaded.per_rank[0]} for all ranks",
        )
    if size > batch_size:
        refuse_on_all(
            f"train.batch_size={batch_size} is too small for {size} ranks",
            why="batch_size counts samples over all ranks, and each rank needs at least one",
            fix=f"train.batch_size={size} or more, or fewer ranks",
        )


def refuse_differences(config: RunConfig, workload: Workload, world: World, *, resumes: bool = False) -> None:
    """Refuse to start on all ranks if they would train different things."""
    settings = {key: repr(value) for key, value in flatten_settings(config).items() if not key.startswith(OWN)}
    own = {
        "halfstep": __version__,
        "torch": torch.__version__,
        **settings,
        "the number of training samples": str(len(workload.train_samples)),
        "the number of validation samples": str(len(workload.val_samples)),
        "the names and sizes of the data files": digest_contents(workload),
    }
    if not resumes:  # weights are uninitialised until the checkpoint is loaded
        own["the first weights"] = compute_checksum(workload.model)[:12]
    refuse_differing_settings(
        world,
        own,
        why="all ranks of a run train the same model on the same data",
        fix="give every rank the same command, data and versions",
    )


def gather_samples(world: World, reading: Reading) -> Reading:
    """Add the samples of the faulty ranks to a bad step's reading; all ranks call it at the same step."""
    if not reading.is_bad:
        return reading
    ids = world.gather(reading.sample_ids)
    # A stored reading may come from more ranks than there are now.
    faulty = [rank for rank in reading.faulty_ranks if rank < world.size] or range(world.size)
    found = tuple(dict.fromkeys(number for rank in faulty for number in ids[rank]))
    if not isinstance(reading, PhasedReading):
        return dataclasses.replace(reading, sample_ids=found)
    parts: Mapping[str, Any] = {name: dataclasses.replace(p, sample_ids=found) for name, p in reading.phases.items()}
    return dataclasses.replace(reading, sample_ids=found, phases=parts)


def seed_rank(seed: int, attempted: int, rank: int) -> None:
    """Seed a rank without stored generators; the seed differs by rank and after each resume."""
    mixed = hashlib.sha256(f"{seed},{attempted},{rank}".encode()).digest()
    seed_everything(int.from_bytes(mixed[:7], "little"))
