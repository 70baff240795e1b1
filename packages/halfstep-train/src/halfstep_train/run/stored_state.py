"""Capture the state of a run for a checkpoint, restore it exactly or with accepted changes, and estimate its size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.distributed.sharding import shard_like
from halfstep.errors import CheckpointError, format_count
from halfstep.step.optim.adamw_bf16 import JudgedAdamW
from halfstep.step.optim.half_weights import is_kept_in_half
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.snapshots import find_loose_buffers, restore_buffers
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.checkpoint import Checkpoint
from halfstep_train.run.folder import Changes
from halfstep_train.run.frozen_modules import list_identities
from halfstep_train.run.multi_rank import seed_rank

ANOTHER_OPTIMIZER = ("optimizer.name", "optimizer.moment_bits", "optimizer.decay_norms_and_biases")
"""Changes after which the stored moments do not fit the optimizer."""
OTHER_MOMENTS = ("train.memory", "precision.", "device")
"""Changes after which moments may be stored in another number of bits; those optimizers have other options."""


def capture_state(parts: Assembly, own: Mapping[str, Any]) -> Checkpoint:
    """Return the whole state of a run as a checkpoint, with the loop's `own` state; waits for the device."""
    step = parts.step.state_dict()
    # Stored in its own file, ema.safetensors.
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
        "frozen": list_identities(parts.workload.frozen),
        "num_samples": [len(parts.workload.train_samples), len(parts.workload.val_samples)],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **own,
    }
    if parts.world is not None:
        state["rank_generators"] = parts.world.gather(read_generators())
    return Checkpoint(model=dict(parts.model.state_dict()), ema=average, state=state)


def restore_state(parts: Assembly, checkpoint: Checkpoint, changes: Changes) -> list[str]:
    """Restore everything except for accepted changes of settings; return notes on what could not be restored."""
    state = checkpoint.state
    try:
        with torch.no_grad():
            own = parts.model.state_dict()
            shards = {name: shard_like(tensor, own.get(name)) for name, tensor in checkpoint.model.items()}
            parts.model.load_state_dict(shards)
    except RuntimeError as error:
        raise CheckpointError(
            "the checkpoint does not contain the weights of this model", why=" ".join(str(error).split())[:300],
            fix="resume with the model the run was started with",
        ) from error  # fmt: skip
    restore_buffers(parts.model, state["buffers"])
    step, notes = _apply_changes(parts, state["step"], changes)
    parts.step.load_state_dict({**step, "ema": _choose_average(parts, checkpoint, changes)})
    notes += start_missing_low(parts.step.optimizers)
    parts.guard.load_state_dict(state["guard"])
    if parts.plateau is not None and state["plateau"]:
        parts.plateau.load_state_dict(state["plateau"])
    parts.stopping.load_state_dict(state["stopping"])
    # Snapshots belong to the previous settings; after a change the run takes new ones.
    if parts.snapshots is not None and state["snapshots"] and not changes.touch("optimizer.", "precision."):
        parts.snapshots.load_state_dict(state["snapshots"])
    notes += restore_generators(state["generators"])
    kept, world = state.get("rank_generators", ()), parts.world
    if world is not None and len(kept) == world.size:
        restore_generators(kept[world.rank])
    elif world is not None:  # another number of ranks starts with new ones
        seed_rank(parts.train.seed, parts.step.attempted, world.rank)
    return [*notes, *_use_threads(parts, int(state["threads"]))]


def load_for_use(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights as validation used them: averaged ones if the run keeps them."""
    model.load_state_dict(checkpoint.model)
    restore_buffers(model, checkpoint.state["buffers"])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, average in checkpoint.ema.items():
            tensors[name].copy_(average)


def _choose_average(parts: Assembly, checkpoint: Checkpoint, changes: Changes) -> dict[str, Tensor]:
    """Return the stored average; if averaging was switched on meanwhile, start it from the weights."""
    own = parts.step.ema
    if changes.touch("ema.") and (own is not None) != bool(checkpoint.ema):
        return {} if own is None else own.restart()
    return dict(checkpoint.ema)


def _apply_changes(parts: Assembly, state: Mapping[str, Any], changes: Changes) -> tuple[dict[str, Any], list[str]]:
    """Return the step's stored state, with configured options instead of stored ones where they were changed."""
    fresh, merged = parts.step.state_dict(), dict(state)
    # The precision changed to or from fp16: loss scaling starts or ends.
    if bool(state["scaler"]) != bool(fresh["scaler"]):
        merged["scaler"] = fresh["scaler"]
    if "phases" not in fresh:
        own, notes = _apply_optimizer_changes(state, fresh, changes)
        return merged | own, notes
    notes, phases = [], dict(state.get("phases", {}))
    for name in (name for name in fresh["phases"] if name in phases):
        own, found = _apply_optimizer_changes(phases[name], fresh["phases"][name], changes)
        phases[name] = {**phases[name], **own}
        notes += [f"{name}: {note}" for note in found]
    return {**merged, "phases": phases}, notes


def _apply_optimizer_changes(
    state: Mapping[str, Any], fresh: Mapping[str, Any], changes: Changes
) -> tuple[dict[str, Any], list[str]]:
    """Return the parts of one step's state that changed settings replace, and notes about them."""
    merged, notes = dict[str, Any](), list[str]()
    if (
        changes.touch(*ANOTHER_OPTIMIZER)
        or changes.touch(*OTHER_MOMENTS)
        and _list_options(state) != _list_options(fresh)
    ):
        merged |= {key: fresh[key] for key in ("optimizers", "parameters")}
        notes.append("the optimizer starts without state: the stored state belongs to the previous optimizer")
    elif changes.touch("optimizer.", "device"):  # another device has other fused variants
        pairs = zip(state["optimizers"], fresh["optimizers"], strict=True)
        # Keep the moments, but use the new learning rate, betas and weight decay.
        merged["optimizers"] = [{**kept, "param_groups": new["param_groups"]} for kept, new in pairs]
    # guard.spike_window changed: the history has another length.
    if len(state["spikes"]["ring"]) != len(fresh["spikes"]["ring"]):
        merged["spikes"] = fresh["spikes"]
    return merged, notes


def _list_options(state: Mapping[str, Any]) -> list[set[str]]:
    return [set(group) for optimizer in state["optimizers"] for group in optimizer["param_groups"]]


def _use_threads(parts: Assembly, then: int) -> list[str]:
    """Use the stored number of CPU threads: the last bit of a sum depends on it."""
    now = torch.get_num_threads()
    if parts.device.type != "cpu" or now == then:
        return []
    torch.set_num_threads(then)
    return [f"using {then} CPU threads as the run did, not {now}: results stay bit-identical"]


# --- weights in bf16: how they are rounded, and what is lost ---

LOSES = "updates smaller than half of bf16's spacing (0.4 % of a weight) are lost"
BEGINS_LOW = "the low halves of the bf16 weights start at zero: what was rounded away before is lost"

ROUNDED = {
    "split": "bf16, with the low 16 bits in a second tensor (split)",
    "stochastic": "bf16, rounded stochastically",
    "nearest": "bf16, rounded to nearest",
}


def describe_half_weights(optimizers: Iterable[Optimizer]) -> str:
    """Describe how bf16 weights are rounded; empty if there are none."""
    return ", ".join(
        ROUNDED[optimizer.rounding if isinstance(optimizer, JudgedAdamW) else "nearest"]
        for optimizer in optimizers
        if any(is_kept_in_half(p) for group in optimizer.param_groups for p in group["params"])
    )


def warn_of_rounding(optimizers: Iterable[Optimizer]) -> list[str]:
    """Return warnings if bf16 weights are rounded to nearest: on request, or because the optimizer is not our AdamW."""
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


def start_missing_low(optimizers: Iterable[Optimizer]) -> list[str]:
    """Start low halves at zero where none were stored: the run had another rounding or precision."""
    without = [one for one in optimizers if isinstance(one, JudgedAdamW) and one.was_stored_without_low]
    for optimizer in without:
        optimizer.begin_low()
    return [BEGINS_LOW] if without else []


def count_lost_updates(optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
    """Return a summary row for each optimizer that counts lost updates; waits for the device."""
    shares = (o.compute_lost_share() for o in optimizers if isinstance(o, JudgedAdamW))
    return [("lost updates", f"{share:.1%} of all, rounded away") for share in shares if share is not None]
