"""What a checkpoint holds of an assembly, and how it comes back: exactly, or with the changes a user accepted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.config.schema import RunConfig
from halfstep.disk import get_free_bytes
from halfstep.errors import CheckpointError, format_bytes, format_count
from halfstep.run.assemble import Assembly
from halfstep.run.checkpoint import Checkpoint
from halfstep.run.folder import RunFolder
from halfstep.run.frozen_modules import identities
from halfstep.run.multi_rank import seed_of
from halfstep.run.resume import Changes
from halfstep.step.guard import LAG
from halfstep.step.optim.adamw_bf16 import JudgedAdamW
from halfstep.step.optim.half_weights import is_kept_in_half
from halfstep.step.randomness import read_generators, restore_generators, seed_everything
from halfstep.step.snapshots import find_loose_buffers, restore_buffers
from halfstep.tune.memory_low import MemorySetting, optimizer_for

ANOTHER_OPTIMIZER = ("optimizer.name", "optimizer.moment_bits", "optimizer.decay_norms_and_biases")
"""Changes after which the stored moments belong to other parameters or to nothing."""
OTHER_MOMENTS = ("train.memory", "precision.", "device")
"""Changes after which the moments may be stored in another number of bits: those optimizers have other options."""


def stored(parts: Assembly, own: Mapping[str, Any]) -> Checkpoint:
    """Everything, with what the loop adds of its own; waits for the device."""
    step = parts.step.state_dict()
    average: dict[str, Tensor] = step.pop("ema")
    state = {
        "step": step,
        "buffers": find_loose_buffers(parts.model),
        "guard": parts.guard.state_dict(),
        "plateau": parts.plateau.state_dict() if parts.plateau is not None else {},
        "stopping": parts.stopping.state_dict(),
        "snapshots": parts.snapshots.state_dict() if parts.snapshots is not None else {},
        "generators": read_generators(),
        "workload": parts.workload.name,
        "store": dict(parts.workload.store),
        "frozen": identities(parts.workload.frozen),
        "num_samples": [len(parts.workload.train_samples), len(parts.workload.val_samples)],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **own,
    }
    if parts.world is not None:
        state["rank_generators"] = parts.world.gather(read_generators())
    return Checkpoint(model=dict(parts.model.state_dict()), ema=average, state=state)


def restore(parts: Assembly, checkpoint: Checkpoint, changes: Changes) -> list[str]:
    """Put everything back but for the accepted changes of settings; what could not be put back is named."""
    state = checkpoint.state
    try:
        parts.model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise CheckpointError(
            "the checkpoint does not hold the weights of this model", why=" ".join(str(error).split())[:300],
            fix="resume with the model the run was started with",
        ) from error  # fmt: skip
    restore_buffers(parts.model, state["buffers"])
    step, notes = _with_changes(parts, state["step"], changes)
    parts.step.load_state_dict({**step, "ema": _average(parts, checkpoint, changes)})
    notes += resumed_without_low(parts.step.optimizers, changes)
    parts.guard.load_state_dict(state["guard"])
    if parts.plateau is not None and state["plateau"]:
        parts.plateau.load_state_dict(state["plateau"])
    parts.stopping.load_state_dict(state["stopping"])
    # Snapshots hold the former settings; after a change the run keeps new ones from here on.
    if parts.snapshots is not None and state["snapshots"] and not changes.touch("optimizer.", "precision."):
        parts.snapshots.load_state_dict(state["snapshots"])
    notes += restore_generators(state["generators"])
    _restore_own_generators(parts, state.get("rank_generators", ()))
    return [*notes, *_use_threads(parts, int(state["threads"]))]


def _restore_own_generators(parts: Assembly, kept: Sequence[Mapping[str, Any]]) -> None:
    """Of several processes each has its own; another number of them begins with new ones."""
    world = parts.world
    if world is not None and len(kept) == world.size:
        restore_generators(kept[world.rank])
    elif world is not None:
        seed_everything(seed_of(parts.config.train.seed, parts.step.attempted, world.rank))


def load_for_use(model: nn.Module, checkpoint: Checkpoint) -> None:
    """A checkpoint's weights as validation used them: the averaged ones where the run keeps them."""
    model.load_state_dict(checkpoint.model)
    restore_buffers(model, checkpoint.state["buffers"])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, average in checkpoint.ema.items():
            tensors[name].copy_(average)


def _average(parts: Assembly, checkpoint: Checkpoint, changes: Changes) -> dict[str, Tensor]:
    """The stored one; an average that was switched on or off starts from the weights, or is dropped."""
    own = parts.step.ema
    if changes.touch("ema.") and (own is not None) != bool(checkpoint.ema):
        return {} if own is None else own.restart()
    return dict(checkpoint.ema)


def _with_changes(parts: Assembly, state: Mapping[str, Any], changes: Changes) -> tuple[dict[str, Any], list[str]]:
    """The step's stored state, with the configured options in place of the stored ones where those were changed."""
    fresh, merged = parts.step.state_dict(), dict(state)
    if bool(state["scaler"]) != bool(fresh["scaler"]):
        merged["scaler"] = fresh["scaler"]
    if "phases" not in fresh:
        own, notes = _optimizers_with_changes(state, fresh, changes)
        return merged | own, notes
    notes, phases = [], dict(state.get("phases", {}))
    for name in (name for name in fresh["phases"] if name in phases):
        own, found = _optimizers_with_changes(phases[name], fresh["phases"][name], changes)
        phases[name] = {**phases[name], **own}
        notes += [f"{name}: {note}" for note in found]
    return {**merged, "phases": phases}, notes


def _optimizers_with_changes(
    state: Mapping[str, Any], fresh: Mapping[str, Any], changes: Changes
) -> tuple[dict[str, Any], list[str]]:
    merged, notes = dict[str, Any](), list[str]()
    if changes.touch(*ANOTHER_OPTIMIZER) or changes.touch(*OTHER_MOMENTS) and _options(state) != _options(fresh):
        merged["optimizers"] = fresh["optimizers"]
        notes.append("the optimizer starts over: its stored state belongs to the former one")
    elif changes.touch("optimizer.", "device"):  # another device has other fast forms of the optimizer
        pairs = zip(state["optimizers"], fresh["optimizers"], strict=True)
        merged["optimizers"] = [{**kept, "param_groups": new["param_groups"]} for kept, new in pairs]
    if len(state["spikes"]["ring"]) != len(fresh["spikes"]["ring"]):
        merged["spikes"] = fresh["spikes"]
    return merged, notes


def _options(state: Mapping[str, Any]) -> list[set[str]]:
    return [set(group) for optimizer in state["optimizers"] for group in optimizer["param_groups"]]


def _use_threads(parts: Assembly, then: int) -> list[str]:
    """On a CPU the last bit of a sum depends on the number of threads it is split over."""
    now = torch.get_num_threads()
    if parts.device.type != "cpu" or now == then:
        return []
    torch.set_num_threads(then)
    return [f"using {then} CPU threads as the run did, not {now}: results stay the same to the bit"]


# --- weights in bf16: how they are rounded, and what was lost by it ---

LOSES = "updates below half of bf16's spacing (0.4 % of a weight) are lost, every time they come"
WITHOUT_LOW = "the run was stored without the low halves of its bf16 weights: it goes on rounded to nearest; " + LOSES
BEGINS_LOW = "the low halves of the bf16 weights begin at zero: what was rounded away before stays lost"

ROUNDED = {
    "split": "bf16, the 16 bits that it drops beside them (split)",
    "stochastic": "bf16, rounded stochastically",
    "nearest": "bf16, rounded to nearest",
}


def half_weights(optimizers: Iterable[Optimizer]) -> str:
    """How weights that are kept in half are rounded; empty where none is."""
    return ", ".join(
        ROUNDED[optimizer.rounding if isinstance(optimizer, JudgedAdamW) else "nearest"]
        for optimizer in optimizers
        if any(is_kept_in_half(p) for group in optimizer.param_groups for p in group["params"])
    )


def rounding_warnings(optimizers: Iterable[Optimizer]) -> list[str]:
    """Where weights in bf16 are rounded to nearest: on request, or because only our AdamW can do better."""
    found = []
    for optimizer in optimizers:
        half = [p for group in optimizer.param_groups for p in group["params"] if is_kept_in_half(p)]
        if half and not isinstance(optimizer, JudgedAdamW):
            name = type(optimizer).__name__
            found.append(
                f"{name} rounds {format_count(len(half), 'parameter')} in bf16 to nearest: {LOSES}; "
                "optimizer.name=adamw keeps the bits that bf16 drops, precision=bf16 keeps fp32 weights"
            )
        elif half and isinstance(optimizer, JudgedAdamW) and optimizer.rounding == "nearest":
            found.append(f"precision.rounding=nearest: {LOSES}; the summary counts them")
    return found


def resumed_without_low(optimizers: Iterable[Optimizer], changes: Changes) -> list[str]:
    """A run that kept none goes on as it was, unless its precision is another one now: then as is asked for."""
    without = [one for one in optimizers if isinstance(one, JudgedAdamW) and one.was_stored_without_low]
    if without and changes.touch("precision."):
        for optimizer in without:
            optimizer.begin_low()
        return [BEGINS_LOW]
    return [WITHOUT_LOW] if without else []


def lost_updates(optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
    """A row of the summary for each optimizer that counted; waits for the device."""
    shares = (o.lost_share() for o in optimizers if isinstance(o, JudgedAdamW))
    return [("lost updates", f"{share:.1%} of all, rounded away") for share in shares if share is not None]


# --- disk space: compare what a run will write with what is free, before it trains for hours ---


REPORT_BYTES = 8_000_000  # metrics, pictures, settings: a few MB
SIDE = 256
"""Of the square weight on which an optimizer shows how much it keeps: large enough for what comes once a weight."""


def check_disk(parts: Assembly, folder: RunFolder) -> list[str]:
    """Refuse where not even the next checkpoints fit; what else to know as notes."""
    place = next(path for path in (folder.path, *folder.path.absolute().parents) if path.is_dir())
    stored = folder.checkpoints().all()
    size = folder_bytes(stored[-1]) if stored else checkpoint_bytes(parts)
    num_further = max(1, _num_kept(parts) - len(stored))
    # A checkpoint is written beside the one before it.
    at_least = min(2 - bool(stored), num_further) * size + REPORT_BYTES
    in_all, free = num_further * size + REPORT_BYTES, get_free_bytes(folder.path)
    if free < at_least:
        raise CheckpointError(
            f"{format_bytes(free)} are free in {place}, and this run needs {format_bytes(at_least)}",
            why=f"a checkpoint takes about {format_bytes(size)}, and is written beside the one before it",
            fix="make room" if stored else "make room, or choose another place with --out",
        )
    if free >= in_all:
        return []
    fitting = max(1, (free - REPORT_BYTES) // size + len(stored) - 2)
    return [
        f"the disk may fill up: {format_bytes(free)} are free in {place}, and this run will write about "
        f"{format_bytes(in_all)} ({num_further} checkpoints of {format_bytes(size)}): make room, or "
        f"train.checkpoints_total_limit={fitting}"
    ]


def checkpoint_bytes(parts: Assembly) -> int:
    """Weights, their average, optimizer, and the snapshots of `guard.on_fault=rollback`."""
    weights = _bytes(parts.model.state_dict().values())
    average = 4 * sum(tensor.numel() for tensor in parts.model.state_dict().values()) if parts.step.ema else 0
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    one = weights + average + round(trained * state_bytes_each(parts.config, MemorySetting(**parts.plan.memory)))
    guard = parts.config.guard
    num_snapshots = math.ceil((guard.margin + LAG) / guard.snapshot_every) + 1 if parts.snapshots is not None else 0
    return one * (1 + num_snapshots)


def state_bytes_each(config: RunConfig, setting: MemorySetting) -> float:
    """What the optimizer keeps for one weight, by a step of it on a small one."""
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    weight.grad = torch.zeros_like(weight)
    groups = [{"params": [weight], "weight_decay": 0.0}]
    optimizer = optimizer_for(setting, config.optimizer.name, groups, lr=1e-3, options=config.optimizer.options())
    optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return _bytes(kept) / weight.numel()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _num_kept(parts: Assembly) -> int:
    """Checkpoints that lie there at once: the newest, the best, and one that is being written."""
    train = parts.config.train
    steps_each = train.checkpoint_every or max(1, math.ceil(len(parts.train_loader) / train.accumulate))
    steps_each = min(steps_each, train.validate_every_steps or steps_each)
    written = math.ceil(parts.total_steps / steps_each)
    return min(written, train.checkpoints_total_limit + 2) if train.checkpoints_total_limit else written


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
