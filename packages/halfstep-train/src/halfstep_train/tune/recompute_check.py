"""Check on copies of a model whether its blocks may be recomputed.

Two eager steps of two samples run as the run would make them, with and without recomputation. Afterwards gradients and
everything that modules hold (weights, buffers, numbers, lists) must be the same, with tensors compared by a weighted
sum in fp64; generators must be in the same state, and less must have been kept for backward. So the check finds a
forward pass that writes a buffer, counts, draws numbers that torch does not restore, or overwrites its input. On a
device that sums in any order, where two plain steps differ, NOISE times that difference is allowed. What fails together
is tried kind by kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.errors import summarise_error
from halfstep.own_loop.repeated_blocks import describe_blocks, find_blocks, group_by_kind
from halfstep.precision.plan import Plan
from halfstep.recompute import Recompute, Recomputing
from halfstep.step.randomness import read_generators
from halfstep_train.tune.memory_low import CannotRun, MemorySetting
from halfstep_train.tune.trials import Rehearsal, Trial

NUM_STEPS = NUM_SAMPLES = 2
NOISE, MOST_NOISE = 10.0, 1e-2


class Recomputable(NamedTuple):
    """Names of blocks that may be recomputed, how, and why others may not."""

    names: tuple[str, ...]
    ways: tuple[Recompute, ...]
    notes: tuple[str, ...] = ()


class StepRecord(NamedTuple):
    """Results of trial steps: the final state by name, the bytes saved for backward, and calls of watched modules."""

    left: Mapping[str, Any]
    kept_bytes: int
    calls: set[tuple[str, Literal["in backward", "kept", "idle"]]]


def find_recomputable(plan: Plan, rehearsal: Rehearsal) -> Recomputable:
    """Find the blocks of a model that may be recomputed when it trains with this plan."""
    if any(isinstance(module, Recomputing) for module in rehearsal.workload.model.modules()):
        return Recomputable((), ("pointwise", "alternate", "blocks"))
    try:
        return _Check(dataclasses.replace(plan, pieces=1), rehearsal).find()
    except CannotRun as error:
        return Recomputable((), (), (f"recomputing: {error}",))


class _Check:
    def __init__(self, plan: Plan, rehearsal: Rehearsal) -> None:
        self.plan, self.rehearsal = plan, rehearsal
        self.model, self.noise = rehearsal.workload.model, dict[str, float]()
        if not (blocks := find_blocks(self.model)):
            raise CannotRun(f"no block of layers is repeated in {type(self.model).__name__}")
        if rehearsal.workload.blocks and plan.mode not in ("", "eager"):
            raise CannotRun("blocks have their own forward in captured steps")
        self.plain = self._record_steps("none", watched=blocks)
        if any(isinstance(mark, tuple) and not math.isfinite(mark[1]) for mark in self.plain.left.values()):
            raise CannotRun(f"a step of {NUM_SAMPLES} samples is not finite, so nothing can be compared")
        if own := [name for name in blocks if (name, "in backward") in self.plain.calls]:
            raise CannotRun(f"{describe_blocks(self.model, own)} does that itself already")
        idle = {name for name, _ in self.plain.calls if (name, "kept") not in self.plain.calls}
        called = find_blocks(self.model, {*blocks} - {name for name, _ in self.plain.calls})
        self.blocks = [name for name in called if name not in idle]
        if not self.blocks:
            raise CannotRun(f"{describe_blocks(self.model, idle)}: nothing trains in them or before them")

    def find(self) -> Recomputable:
        names, notes = self.blocks, list[str]()
        if self._find_problem("blocks", names):
            names = []
            for some in group_by_kind(self.model, self.blocks):
                if why := self._find_problem("blocks", [*names, *some]):
                    notes.append(f"recompute blocks, {describe_blocks(self.model, some)}: {why}")
                else:
                    names += some
        why = self._find_problem("pointwise", names) if names else ""
        if why:
            notes.append(f"recompute pointwise, {describe_blocks(self.model, names)}: {why}")
        ways: tuple[Recompute, ...] = ("blocks",) if why else ("pointwise", "alternate", "blocks")
        return Recomputable(tuple(names), ways if names else (), tuple(notes))

    def _find_problem(self, how: Recompute, names: Collection[str]) -> str:
        """Return why these blocks may not be recomputed; empty if they may."""
        try:
            tried = self._record_steps(how, names)
        except CannotRun as error:
            return str(error)
        gaps = compare_states(self.plain.left, tried.left)
        if other := next((name for name in gaps if gaps[name] and gaps[name] > self._compute_allowed_gap(name)), None):
            return f"{other} is not the same after {NUM_STEPS} steps"
        return "" if tried.kept_bytes < self.plain.kept_bytes else "they keep nothing for backward"

    def _compute_allowed_gap(self, name: str) -> float:
        self.noise = self.noise or compare_states(self.plain.left, self._record_steps("none").left)
        noise = max(gap for gap in self.noise.values() if math.isfinite(gap))
        return math.inf if math.isinf(self.noise.get(name, 0)) else min(NOISE * noise, MOST_NOISE)

    def _record_steps(self, how: Recompute, names: Collection[str] = (), watched: Collection[str] = ()) -> StepRecord:
        memory = dataclasses.asdict(MemorySetting(recompute=how))
        plan = dataclasses.replace(self.plan, memory=memory, blocks=tuple(names))
        small = {"batch_size": min(NUM_SAMPLES, self.rehearsal.config.train.batch_size), "accumulate": 1}
        with self.rehearsal.begin(plan, train=small, scaler={"init_scale": 1.0}) as trial:
            try:
                return _record_step(trial, watched)
            except Exception as error:  # inside the trial, so that it also ends on other ranks
                reason = f"a step of {NUM_SAMPLES} samples ends in {type(error).__name__}: {summarise_error(error)}"
                raise CannotRun(reason) from error


def _record_step(trial: Trial, watched: Collection[str]) -> StepRecord:
    model, calls, kept = trial.parts.model, set[tuple[str, Any]](), list[int]()

    def watch(name: str) -> Any:
        def called(module: nn.Module, *inputs: Any) -> None:
            values = (*tree_leaves(inputs), *module.parameters())
            is_kept = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
            in_backward = torch._C._current_graph_task_id() != -1
            calls.add((name, "in backward" if in_backward else "kept" if is_kept else "idle"))

        return model.get_submodule(name).register_forward_pre_hook(called, with_kwargs=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    handles = [watch(name) for name in watched]
    engine = trial.engine(trial.parts, "eager", lambda text, level: None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(NUM_STEPS):
            engine(trial.window)
    for handle in handles:
        handle.remove()
    return StepRecord(dict(list_state(model)), sum(kept), calls)


def list_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes and buffers of modules, generator states, gradients, weights: causes before their effects."""
    for prefix, module in model.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters", "_buffers")}
        for key, value in {**held, **module._buffers}.items():
            yield f"{prefix}.{key}".removeprefix("."), [_fingerprint(leaf) for leaf in tree_leaves(value)]
    for name, state in read_generators().items():
        yield f"the state of {name}'s random numbers", [_fingerprint(leaf) for leaf in tree_leaves(state)]
    for name, parameter in model.named_parameters():
        yield f"the gradient of {name}", _fingerprint(parameter.grad)
    for name, parameter in model.named_parameters():
        yield name, _fingerprint(parameter)


def _fingerprint(value: Any) -> Any:
    """Return a tensor's weighted sum and its sum of magnitudes: in fp64 nearly any changed bit shows."""
    if not isinstance(value, Tensor):
        kind = nn.Module if isinstance(value, nn.Module) else type(value)  # its class may be swapped
        return value if isinstance(value, (int, float, str, type(None))) else kind
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
    flat = (flat if flat.is_cuda else flat.cpu()).double()
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).cos_()
    size = float(flat.abs().sum())
    finite = flat.nan_to_num(1.25, 1.5, -1.5)
    return float(finite @ weights), size if math.isfinite(size) else math.inf


def compare_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Return relative differences by name; infinite for values other than tensors."""
    return {name: _compute_gap(one.get(name), other.get(name)) for name in {**one, **other}}


def _compute_gap(one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    if isinstance(one, tuple) and isinstance(other, tuple):
        size = max(one[1], other[1])
        return abs(one[0] - other[0]) / (size if math.isfinite(size) else 1.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(_compute_gap, one, other), default=0.0)
    return math.inf
