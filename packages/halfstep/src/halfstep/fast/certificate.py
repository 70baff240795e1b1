"""Show that a captured step equals an uncaptured one, before it is used.

From one state, kept aside, the same window runs twice uncaptured and once as a replay. A tensor that both uncaptured
runs leave with the same bits must have them after the replay, too. One that differs between them may differ by at most
`NOISE` times as much, or as such tensors usually do. Where atomics add up, two runs may agree by luck: there a tensor
may differ by `ATOMIC_NOISE` of what the step changes. All traced code is also compared with the eager step of the
user's Python code, up to `ROUNDINGS` in its gradients.

This cannot see a Python value that was frozen while the certificate was made: guards prevent that (traced.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.precision.contexts import get_autocast_dtype
from halfstep.step.facts import read_rng_state, restore_rng
from halfstep.step.flat import get_gradient, is_dense, is_writable_in_place, view_flat
from halfstep.step.step import GuardedStep

NOISE = 3.0
"""How much further a replay may be from an uncaptured run than two of those are from each other."""
ROUNDINGS = 8.0
"""How far the traced code's gradients may be from those of the eager step: so many roundings, in the format of the
computation, of their norm. It runs the same kernels, but autograd may add up gradients in another order."""
ATOMIC_NOISE = 0.01
"""The share of a step's change that counts as noise where sums are added up with atomics. Their order changes the last
bits of a gradient; Adam makes updates of full size of that where the true gradient is zero, in few elements."""
MOST_NOISE = 0.1
"""The largest share of a step's change that counts as noise without being seen in a tensor itself."""
ROOM = 6
"""Copies of state and gradients stay on the device while it has room for this many; otherwise they go to host memory.
Five exist at once, and comparing them takes some more."""


@dataclass
class Certificate:
    """What a captured step was compared with, and what came out."""

    exact: int = 0
    """Tensors of weights, buffers and state that are bit-equal."""
    noisy: list[str] = field(default_factory=list)
    """Tensors that differ between uncaptured runs as well, by name."""
    against: list[str] = field(default_factory=list)
    gradients: str = ""
    """How far compiled gradients are from fp32, or why they were not compared; empty for torch's kernels."""
    changed_optimizers: Sequence[str] = ()
    """Optimizers in another form than with fast="off"."""
    parts: str = ""
    """What compiled parts of a step that is not captured were compared with."""
    num_checks: int = 0
    """How often replays were compared with uncaptured code again, while training went on."""

    def add(self, compared_with: str, *, is_equal: bool = True) -> None:
        rounded = f"{compared_with} up to rounding"
        if compared_with in self.against and not is_equal:
            self.against.remove(compared_with)
        if not {compared_with, rounded} & set(self.against):
            self.against.append(compared_with if is_equal else rounded)

    def __str__(self) -> str:
        with_noise = f", {len(self.noisy)} within the noise of uncaptured runs" if self.noisy else ""
        if not self.against:
            return self.parts or "nothing is captured"
        checked = f", checked {self.num_checks} more times" if self.num_checks else ""
        names = ", ".join(self.changed_optimizers)
        form = f"; {names} in the form for graphs, whose last bits may differ from fast='off'" if names else ""
        gradients = f"; compiled gradients {self.gradients}" if self.gradients else ""
        return f"{self.exact} tensors bit-equal to {' and '.join(self.against)}{with_noise}{checked}{gradients}{form}"


class ReplayDiffers(Exception):
    """Raised if a CUDA graph's replay and an uncaptured step give different results; the message names the tensor."""


class StepState:
    """Everything a step writes, as tensors that keep their addresses."""

    def __init__(self, step: GuardedStep, others: Iterable[Tensor] = ()) -> None:
        self.step = step
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (*list_tensors(step), *(("a tensor outside of the model", t) for t in others)):
            if is_writable_in_place(tensor):
                found.setdefault(id(tensor), (name, tensor.detach()))
        self.names = [name for name, _ in found.values()]
        self.tensors = [tensor for _, tensor in found.values()]
        num_bytes = sum(t.numel() * t.element_size() for t in (*self.tensors, *step.find_trained_parameters()))
        self.note_optimizer_states()
        self.has_created = False
        """True if a run made optimizer state that did not exist before."""
        slots = step.writes.slots
        self.buffers = {slots.find_full_name(slot) for slot in slots.buffers}
        self.has_gradients = False
        """True to copy gradients as well, after the other tensors."""
        self.on_host = step.device.type == "cuda" and ROOM * num_bytes > torch.cuda.mem_get_info(step.device)[0]

    @torch.no_grad()
    def copy(self, loss: Tensor | None = None) -> StateCopy:
        """Copy the state, gradients if asked for, and a loss."""
        where = torch.device("cpu") if self.on_host else None
        gradients = map(get_gradient, self.step.find_trained_parameters()) if self.has_gradients else ()
        held = [*self.tensors, *(gradient for gradient in gradients if gradient is not None)]
        copies = [tensor.to(where or tensor.device, copy=True) for tensor in held]
        spikes = self.step.spikes.state_dict()  # the host may keep the losses
        return StateCopy(
            copies, self.step.committed.clone(), read_rng_state(self.step.device), self.step.attempted, spikes,
            torch.zeros(()) if loss is None else loss.clone(),
        )  # fmt: skip

    @torch.no_grad()
    def restore(self, copy: StateCopy) -> None:
        for tensor, then in zip(self.tensors, copy.tensors, strict=False):  # gradients are not restored
            tensor.copy_(then)
        self._remove_created()
        restore_rng(copy.rng, self.step.device)
        self.step.attempted = copy.attempted
        self.step.spikes.load_state_dict(copy.spikes)
        if self.step.rates is not None:
            self.step.rates.version = self.step.rates.now._version  # not a write by the user's code

    def note_optimizer_states(self) -> None:
        """Note which optimizer state exists, so that `restore` does not remove it."""
        self.states = [{p: set(own) for p, own in optimizer.state.items()} for optimizer in self.step.optimizers]

    def _remove_created(self) -> None:
        """Remove optimizer state that was made since: of parameters that got a gradient for the first time."""
        for optimizer, then in zip(self.step.optimizers, self.states, strict=True):
            for parameter, own in list(optimizer.state.items()):
                for name in own.keys() - then.get(parameter, set()):
                    del own[name]
                    self.has_created = True
                if parameter not in then:
                    del optimizer.state[parameter]
        if self.has_created:
            for committer in self.step.committers:
                committer.forget()

    def run_from(self, copy: StateCopy, run: Callable[[], object]) -> StateCopy:
        """Run something from a state, and return the state that it leaves."""
        self.restore(copy)
        run()
        return self.copy()

    def compare(
        self, found: StateCopy, runs: Sequence[StateCopy], start: StateCopy, *, uses_atomics: bool
    ) -> tuple[int, list[str]]:
        """Return how many tensors have the bits of an uncaptured run, and the names of the others, which may differ
        only by the noise of two such runs from `start`. Raise ReplayDiffers if one differs by more."""
        first, second = runs
        names = [*self.names, *["a gradient"] * (len(found.tensors) - len(self.names))]
        starts = [*start.tensors[: len(self.names)], *map(torch.zeros_like, found.tensors[len(self.names) :])]
        copies = list(zip(names, found.tensors, first.tensors, second.tensors, starts, strict=False))
        others = [copy for copy in copies if not have_same_bits(copy[1], copy[2])]
        usual = find_usual_noise([copy[2:] for copy in copies]) if others else 0.0
        if uses_atomics and not torch.are_deterministic_algorithms_enabled():
            usual = max(usual, ATOMIC_NOISE)
        for name, value, one, other, then in others:
            distance, noise = min(find_distance(value, one), find_distance(value, other)), find_distance(one, other)
            if not distance <= NOISE * max(noise, usual * find_distance(one, then)):
                raise ReplayDiffers(
                    f"{name} differs by {distance:.3g}, where two uncaptured runs differ by {noise:.3g}"
                )
        return len(copies) - len(others), [name for name, *_ in others]

    def has_bits_of(self, found: StateCopy, other: StateCopy) -> bool:
        """True if a run leaves the bits of another one, gradients and loss included."""
        pairs = zip((*found.tensors, found.loss), (*other.tensors, other.loss), strict=False)
        return len(found.tensors) == len(other.tensors) and all(have_same_bits(*pair) for pair in pairs)

    def compare_gradients(self, found: StateCopy, runs: Sequence[StateCopy]) -> None:
        """Raise ReplayDiffers if the gradients of a run and of the first of two others, or what forward writes, differ
        by more than rounding and the noise between those two.

        Weights are not compared: Adam divides by the size of a gradient, and so makes updates of rounding errors where
        the true gradient is zero, as of a bias in front of a norm."""
        first, second = runs
        rounding, num = ROUNDINGS * find_eps(self.step), len(self.names)
        own, one, other = (copy.tensors[num:] for copy in (found, first, second))
        if [tensor.shape for tensor in own] != [tensor.shape for tensor in one]:
            raise ReplayDiffers("different parameters get a gradient")
        size = math.hypot(*(float(tensor.double().norm()) for tensor in one))
        distance, noise = (math.hypot(*map(find_distance, *pair)) for pair in ((own, one), (one, other)))
        if not distance <= rounding * size + NOISE * noise:
            raise ReplayDiffers(f"gradients differ by {distance / size:.2g} of their norm")
        pairs = list(zip(self.names, found.tensors, first.tensors, strict=False))
        for name, value, then in (*pairs, ("the loss", found.loss, first.loss)):
            if name in (*self.buffers, "the loss") and value.is_floating_point():
                far = find_distance(value, then)
                if not far <= rounding * float(then.norm()):
                    raise ReplayDiffers(f"{name} differs by {far:.3g}")


def subtract(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [one - other for one, other in zip(some, others, strict=True)]


def find_eps(step: GuardedStep) -> float:
    """Return the relative rounding error of the format that a step computes in."""
    dtype = get_autocast_dtype(step.plan.granted) or torch.float32
    return 2.0**-10 if step.plan.compute == "tf32" else torch.finfo(dtype).eps


@dataclass(frozen=True)
class StateCopy:
    tensors: Sequence[Tensor]
    committed: Tensor
    rng: dict[str, Tensor]
    attempted: int
    spikes: dict[str, Tensor]
    loss: Tensor


def list_tensors(step: GuardedStep) -> list[tuple[str, Tensor]]:
    """Return weights, buffers, optimizer state, average, loss scale and counters of a step, by name."""
    slots = step.writes.slots
    slots.refresh()
    named = [(slots.find_full_name(s), s.held) for s in (*slots.parameters, *slots.buffers)]
    names = {id(tensor): name for name, tensor in named}
    for optimizer in step.optimizers:
        for parameter, own in optimizer.state.items():
            named += [(f"{key} of {names.get(id(parameter), 'a parameter')}", value) for key, value in own.items()]
    named += [("a trained parameter", p) for p in step.find_trained_parameters()]
    named += [("committed steps", step.committed), ("the recent losses", step.spikes.ring)]
    named += [("the number of losses", step.spikes.count), ("the loss scale", step.scaler.value)]
    named += [("the growth of the loss scale", step.scaler.growth_tracker)]
    if step.ema is not None:
        named += [("the average", shadow) for shadow in step.ema.shadows]
    if step.rates is not None:
        named += [("the learning rate", step.rates.now)]
    return [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor)]


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare memory, not values: NaN differs from itself, and -0.0 equals 0.0."""
    flat = [view_flat(t) if is_dense(t) else t.reshape(-1) for t in (one, other)]
    return torch.equal(*(t.view(torch.uint8) for t in flat))


def find_distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two tensors."""
    one, other = (t if t.is_complex() else t.double() for t in (one, other))
    return float((one - other).norm())


def find_usual_noise(runs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Return how far two runs are apart, relative to what a step changes, for tensors where they differ: the 90th
    percentile. By chance they agree on some tensors that a third run leaves with other bits. At most MOST_NOISE: a
    value that was frozen changes far more."""
    noises = [(find_distance(one, other), find_distance(one, start)) for one, other, start in runs]
    shares = sorted(noise / size for noise, size in noises if noise > 0 and size > 0)
    return min(shares[int(0.9 * len(shares))], MOST_NOISE) if shares else 0.0
