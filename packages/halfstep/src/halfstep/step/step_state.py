"""Store and load a step's state: either all of it is loaded, or an error is raised and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.distributed.sharding import find_sharding
from halfstep.errors import CheckpointError
from halfstep.step.optim.by_name import OPTIMIZERS
from halfstep.step.schedule import make_groups_plain

if TYPE_CHECKING:
    from halfstep.step.step import GuardedStep

KEYS = ("attempted", "committed", "rate_factor", "scaler", "spikes", "optimizers", "ema")
SHAPED_LIKE_THE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "exp_inf", "ax", "prev", "step_size"),
}
TELLS_OPTIMIZERS_APART = {"betas", "momentum", "alpha", "rho", "etas", "lambd", "lr_decay", "beta2_decay", "ns_steps"}


def collect_state(step: GuardedStep) -> dict[str, Any]:
    """Return a step's state. Waits for the device."""
    return {
        "attempted": step.attempted,
        "committed": int(step.committed),
        "rate_factor": step.rates.cut if step.rates is not None else 1.0,
        "scaler": step.scaler.state_dict(),
        "spikes": step.spikes.state_dict(),
        "optimizers": [make_rates_plain(optimizer.state_dict()) for optimizer in step.optimizers],
        "parameters": list_parameter_names(step),
        "ema": step.ema.state_dict() if step.ema is not None else {},
    }


def load_state(step: GuardedStep, state: Mapping[str, Any]) -> None:
    step.attempted = int(state["attempted"])
    step.generation += 1
    step.committed.fill_(int(state["committed"]))
    step.scaler.load_state_dict(state["scaler"])
    step.spikes.load_state_dict(state["spikes"])
    if step.ema is not None:
        step.ema.load_state_dict(state["ema"])
    for optimizer, own in zip(step.optimizers, state["optimizers"], strict=True):
        # A copy: torch keeps tensors that already fit, and training on would write into what was loaded.
        optimizer.load_state_dict(copy.deepcopy(own))
        _match_layouts(optimizer)
    if step.rates is not None:
        step.rates.set_cut(float(state["rate_factor"]))
        step.rates.find_groups_again()
    for committer in step.committers:
        committer.forget()
    step.forget_writes()


def refuse_unfit(step: GuardedStep, state: Mapping[str, Any]) -> None:
    """Check that a state can be loaded before changing anything."""
    found = list(state) if isinstance(state, Mapping) else []
    if missing := [key for key in KEYS if key not in found]:
        holds = f" (keys {', '.join(map(str, found[:4]))})" if found else ""
        raise CheckpointError(
            f"this {type(state).__name__}{holds} is not the state of a step: it lacks {', '.join(missing)}",
            fix="pass what step.state_dict() returned; load a model's or optimizer's state with its load_state_dict()",
        )
    step.scaler.refuse_unfit(state["scaler"])
    if bool(state["ema"]) != (step.ema is not None):
        has, lacks = ("the checkpoint", "this step") if state["ema"] else ("this step", "the checkpoint")
        raise CheckpointError(
            f"{has} has an average of the weights, but {lacks} has none",
            why="the average would silently be lost, or begin anew",
            fix="create the step with the same ema_decay; drop the stored average with state | {'ema': {}}, or "
            "start one now with state | {'ema': step.ema.state_dict()}",
        )
    if step.ema is not None:
        step.ema.refuse_unfit(state["ema"])
    _refuse_different_optimizers(step.optimizers, state["optimizers"])
    for own, stored in zip(list_parameter_names(step), state.get("parameters", ()), strict=False):
        _refuse_different_order(own, stored)
    for optimizer, its_state in zip(step.optimizers, state["optimizers"], strict=True):
        _refuse_different_shapes(optimizer, its_state)
    if step.rates is not None:
        # A schedule may have ended; a longer table changes nothing.
        step.rates.cover(int(state["attempted"]), torch.tensor(int(state["committed"])))


def _refuse_different_optimizers(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    if len(optimizers) != len(states):
        raise _make_misfit(f"contains {len(states)} optimizers, but this step has {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=True):
        name = type(optimizer).__name__
        own, stored = optimizer.param_groups, state["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (stored, own)]
        if sizes[0] != sizes[1]:
            raise _make_misfit(
                f"contains groups of {_list_sizes(sizes[0])} parameters, but {name} here has {_list_sizes(sizes[1])}"
            )
        for mine, theirs in zip(own, stored, strict=True):
            if differing := sorted(TELLS_OPTIMIZERS_APART & (mine.keys() ^ theirs.keys())):
                raise _make_misfit(f"belongs to another optimizer than {name}: they differ in {', '.join(differing)}")


def _refuse_different_shapes(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse state of other shapes, for torch's optimizers only: AdamW8bit, for example, stores flat codes."""
    if type(optimizer) not in OPTIMIZERS.values():
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if key in SHAPED_LIKE_THE_PARAMETER and torch.is_tensor(value) and value.shape != parameter.shape:
                theirs, own = tuple(value.shape), tuple(parameter.shape)
                raise _make_misfit(f"has {key} of shape {theirs} for parameter {number}, whose shape is {own}")


def list_parameter_names(step: GuardedStep) -> list[list[str]]:
    """Return the model's names of each optimizer's parameters, in its order; empty for those outside of the model."""
    find_sharding(step.model)  # after an evaluation FSDP registers whole parameters instead of those of the optimizer
    # Compiled and DDP models hold the same parameters under longer names.
    found = {id(p): name.replace("_orig_mod.", "").removeprefix("module.") for name, p in step.model.named_parameters()}
    return [
        [found.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        for optimizer in step.optimizers
    ]


def _refuse_different_order(own: Sequence[str], stored: Sequence[str]) -> None:
    """Refuse state of parameters in another order: torch keeps it by position, so equal shapes would be mixed up."""
    for number, (here, there) in enumerate(zip(own, stored, strict=False)):
        if here != there:
            raise _make_misfit(f"has {there or 'a parameter without a name'} as parameter {number} of the optimizer, "
                               f"which has {here or 'one without a name'} there")  # fmt: skip


def _make_misfit(difference: str) -> CheckpointError:
    return CheckpointError(
        f"the stored state does not fit: it {difference}",
        fix="load it into a step created with the same model and the same optimizers, in the same order",
    )


def _list_sizes(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))


def make_rates_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Replace tensors of learning rates and betas by numbers: they are views of one vector, and bound again on load."""
    return {**state, "param_groups": make_groups_plain(state["param_groups"])}


def _match_layouts(optimizer: Optimizer) -> None:
    """Give state the memory layout of its weight (channels_last): fused kernels read both as flat arrays."""
    for parameter, own in optimizer.state.items():
        for name, value in own.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                own[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
