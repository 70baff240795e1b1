"""Whether blocks of a model may be recomputed: tried on copies of it, never assumed.

Two eager steps of two samples are made as the run would make them, with and without. Afterwards gradients, and all that
a module holds (weights, buffers, numbers, lists) must be the same to the bit, Python's and numpy's generators must
stand where they stood, and less must have been kept for backward. So it comes out if a forward pass writes a buffer,
counts, draws numbers that torch does not put back, or overwrites its input. Where two plain steps differ, on a device
that sums in any order, NOISE times what they differ is allowed. What fails together is tried kind by kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.config.schema import RunConfig
from halfstep.models.recompute import Recompute, Recomputing
from halfstep.precision.plan import Plan
from halfstep.step.randomness import generator_states
from halfstep.tune.memory_limit import first_line
from halfstep.tune.memory_low import CannotRun, MemorySetting
from halfstep.tune.own_blocks import by_kind, described, found_blocks
from halfstep.tune.trials import Rehearse, Trial
from halfstep.workloads.workload import Workload

NUM_STEPS = NUM_SAMPLES = 2
NOISE = 10.0

Mark = tuple[float, float]
"""A tensor's sum with weights of their own for all its values, and that of their magnitudes: to the bit, nearly."""


class Recomputable(NamedTuple):
    """Names of blocks that may be recomputed, in which ways, and why others may not."""

    names: tuple[str, ...]
    ways: tuple[Recompute, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What some steps left, by name."""

    left: Mapping[str, Any]
    saved_bytes: int
    calls: Mapping[tuple[str, bool], int]
    """Of the watched modules, by name and whether backward made them."""


def recomputable(config: RunConfig, workload: Workload, plan: Plan, rehearse: Rehearse) -> Recomputable:
    """Of the model as it trains in this plan."""
    model = workload.model
    if any(isinstance(module, Recomputing) for module in model.modules()):
        return Recomputable((), ("pointwise", "blocks"))
    if not found_blocks(model):
        return Recomputable((), (), (f"recomputing: no block of layers is repeated in {type(model).__name__}",))
    if workload.blocks and plan.mode not in ("", "eager"):
        return Recomputable((), (), ("recomputing: blocks have a forward of their own in captured steps",))
    problems = []
    for size in sorted({min(NUM_SAMPLES, config.train.batch_size), config.train.batch_size}):
        small = config.changed(train={"batch_size": size, "accumulate": 1}, scaler={"init_scale": 1.0})
        try:
            return Check(small, workload, dataclasses.replace(plan, pieces=1), rehearse).found()
        except CannotRun as error:
            problems.append(str(error))
    return Recomputable((), (), (f"recomputing: it cannot be checked: {problems[-1]}",))


class Check:
    def __init__(self, config: RunConfig, workload: Workload, plan: Plan, rehearse: Rehearse) -> None:
        self.config, self.workload, self.plan, self.rehearse = config, workload, plan, rehearse
        self.model = workload.model
        blocks = found_blocks(self.model)
        try:
            self.plain = self._taken("none", (), watched=blocks)
        except Exception as error:
            raise error if isinstance(error, CannotRun) else CannotRun(_told(error)) from error
        if any(isinstance(value, tuple) and not math.isfinite(value[1]) for value in self.plain.left.values()):
            raise CannotRun(f"a step of {config.train.batch_size} samples is not finite")
        self.noise: Mapping[str, float] = {}

    def found(self) -> Recomputable:
        own = tuple(name for name, in_backward in self.plain.calls if in_backward)
        if own:
            return Recomputable((), (), (f"recomputing: {described(self.model, own)} does that itself already",))
        called = {name for name, _ in self.plain.calls}
        blocks = found_blocks(self.model, set(found_blocks(self.model)) - called)
        notes: list[str] = []
        names = tuple(self._safe(by_kind(blocks).values(), notes))
        ways: list[Recompute] = ["blocks"] if names else []
        if names and (problem := self._problem("pointwise", names)):
            notes.append(f"recompute pointwise of {described(self.model, names)}: {problem}")
        elif names:
            ways.insert(0, "pointwise")
        return Recomputable(names, tuple(ways), tuple(notes))

    def _safe(self, kinds: Collection[Sequence[str]], notes: list[str]) -> Iterator[str]:
        everything = [name for names in kinds for name in names]
        if not self._problem("blocks", everything):
            yield from everything
            return
        for names in kinds:
            if problem := self._problem("blocks", names):
                notes.append(f"recompute blocks, {described(self.model, names)}: {problem}")
            else:
                yield from names

    def _problem(self, how: Recompute, names: Collection[str]) -> str:
        """Why these may not be recomputed; empty if they may."""
        try:
            tried = self._taken(how, names)
        except CannotRun:
            raise
        except Exception as error:
            return _told(error)
        gaps = gaps_between(self.plain.left, tried.left)
        if other := next((name for name in gaps if gaps[name] and gaps[name] > self._allowed(name)), None):
            return f"{other} is not the same after {NUM_STEPS} steps"
        return "" if tried.saved_bytes < self.plain.saved_bytes else "nothing of them is kept for backward"

    def _allowed(self, name: str) -> float:
        """How far two plain steps may be apart there."""
        if not self.noise:
            self.noise = gaps_between(self.plain.left, self._taken("none", ()).left)
        known = self.noise.get(name, 0.0)
        return known if math.isinf(known) else NOISE * max(filter(math.isfinite, self.noise.values()))

    def _taken(self, how: Recompute, names: Collection[str], watched: Collection[str] = ()) -> Outcome:
        memory = dataclasses.asdict(MemorySetting(recompute=how))
        plan = dataclasses.replace(self.plan, memory=memory, blocks=tuple(names))
        with self.rehearse(self.config, self.workload, plan) as trial:
            return outcome_of(trial, watched)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def outcome_of(trial: Trial, watched: Collection[str]) -> Outcome:
    """What eager steps leave behind."""
    model, calls, saved = trial.parts.model, Counter[tuple[str, bool]](), Counter[str]()

    def watch(name: str) -> Any:
        hook = lambda *_: calls.update([(name, torch._C._current_graph_task_id() != -1)])  # noqa: E731
        return model.get_submodule(name).register_forward_pre_hook(hook)

    def note(kept: Tensor) -> Tensor:
        saved["bytes"] += kept.nbytes
        return kept

    handles = [watch(name) for name in watched]
    engine = trial.engine(trial.parts, "eager", lambda text, level: None)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        for _ in range(NUM_STEPS):
            engine(trial.window)
    for handle in handles:
        handle.remove()
    return Outcome(dict(left_by(model)), saved["bytes"], calls)


def left_by(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that modules hold, where generators stand, gradients, weights: causes come before what follows from them."""
    for prefix, module in model.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters", "_buffers")}
        for key, value in {**held, **module._buffers}.items():
            yield f"{prefix}.{key}".removeprefix("."), [_mark(leaf) for leaf in tree_leaves(value)]
    for name, state in generator_states().items():
        yield f"the state of {name}'s random numbers", [_mark(leaf) for leaf in tree_leaves(state)]
    for name, parameter in model.named_parameters():
        yield f"the gradient of {name}", _mark(parameter.grad)
    for name, parameter in model.named_parameters():
        yield name, _mark(parameter)


def _mark(value: Any) -> Any:
    if not isinstance(value, Tensor):
        kind = nn.Module if isinstance(value, nn.Module) else type(value)  # its class may be swapped
        return value if isinstance(value, (int, float, str, type(None))) else kind
    flat = value.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    flat = (flat if flat.is_cuda else flat.cpu()).double()
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).cos_()
    return float(flat @ weights), float(flat.abs().sum())


def gaps_between(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Differences by name, relative to what is compared; infinite where that is no tensor."""
    return {name: _gap(one.get(name), other.get(name)) for name in {**one, **other}}


def _gap(one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    if isinstance(one, tuple) and isinstance(other, tuple):
        return abs(one[0] - other[0]) / max(one[1], other[1])
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(_gap, one, other), default=0.0)
    return math.inf
