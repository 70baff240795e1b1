"""Show that a captured step equals an uncaptured one, before it is used.

From one state, kept aside, the same window runs twice uncaptured and once as a replay. A tensor that both uncaptured
runs leave with the same bits must have them after the replay, too. One that differs between them (atomic additions)
may differ by at most `NOISE` times as much. The first window of a step is also compared with the eager step of the
user's Python code, in the same way, except that it may differ by `ROUNDINGS`.

This cannot see a Python value that was frozen while the certificate was made: guards prevent that (traced.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.precision.contexts import get_autocast_dtype
from halfstep.step.facts import read_rng_state, restore_rng
from halfstep.step.flat import get_gradient, is_dense, is_writable_in_place, view_flat
from halfstep.step.step import Step

NOISE = 3.0
"""How much further a replay may be from an uncaptured run than two of those are from each other."""
ROUNDINGS = 8.0
"""How far the traced code may be from the eager step: so many roundings, in the format of the computation, of what the
step changed, and in fp32 of the tensor itself. It runs the same kernels, but autograd may add up gradients in another
order."""
ROOM = 6
"""Copies of the state stay on the device while it has room for this many; otherwise they go to host memory."""


@dataclass
class Certificate:
    """What a captured step was compared with, and what came out."""

    exact: int = 0
    """Tensors of weights, buffers and state that are bit-equal."""
    noisy: list[str] = field(default_factory=list)
    """Tensors that differ between uncaptured runs as well, by name."""
    against: list[str] = field(default_factory=list)
    num_checks: int = 0
    """How often replays were compared with uncaptured code again, while training went on."""

    def add(self, compared_with: str) -> None:
        if compared_with not in self.against:
            self.against.append(compared_with)

    def __str__(self) -> str:
        with_noise = f", {len(self.noisy)} within the noise of uncaptured runs" if self.noisy else ""
        if not self.against:
            return "nothing is captured"
        checked = f", checked {self.num_checks} more times" if self.num_checks else ""
        return f"{self.exact} tensors bit-equal to {' and '.join(self.against)}{with_noise}{checked}"


class ReplayDiffers(Exception):
    """Raised if a CUDA graph's replay and an uncaptured step give different results; the message names the tensor."""


class StepState:
    """Everything a step writes, as tensors that keep their addresses."""

    def __init__(self, step: Step, others: Iterable[Tensor] = ()) -> None:
        self.step = step
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (*list_tensors(step), *(("a tensor outside of the model", t) for t in others)):
            if is_writable_in_place(tensor):
                found.setdefault(id(tensor), (name, tensor.detach()))
        self.names = [name for name, _ in found.values()]
        self.tensors = [tensor for _, tensor in found.values()]
        num_bytes = sum(t.numel() * t.element_size() for t in self.tensors)
        self.has_gradients = False
        """True to compare gradients as well: where a graph holds no optimizer."""
        self.on_host = step.device.type == "cuda" and ROOM * num_bytes > torch.cuda.mem_get_info(step.device)[0]

    @torch.no_grad()
    def copy(self) -> StateCopy:
        where = torch.device("cpu") if self.on_host else None
        gradients = map(get_gradient, self.step.find_trained_parameters()) if self.has_gradients else ()
        held = [*self.tensors, *(gradient for gradient in gradients if gradient is not None)]
        copies = [tensor.to(where or tensor.device, copy=True) for tensor in held]
        spikes = self.step.spikes.state_dict()  # the host may keep the losses
        return StateCopy(
            copies, self.step.committed.clone(), read_rng_state(self.step.device), self.step.attempted, spikes
        )

    @torch.no_grad()
    def restore(self, copy: StateCopy) -> None:
        for tensor, then in zip(self.tensors, copy.tensors, strict=False):  # gradients are not restored
            tensor.copy_(then)
        restore_rng(copy.rng, self.step.device)
        self.step.attempted = copy.attempted
        self.step.spikes.load_state_dict(copy.spikes)
        if self.step.rates is not None:
            self.step.rates.version = self.step.rates.now._version  # not a write by the user's code

    @contextlib.contextmanager
    def protect(self, copy: StateCopy) -> Iterator[None]:
        """Restore a state if something inside raises: an interrupt, an error of the device."""
        try:
            yield
        except BaseException:
            self.step.forget_capture()
            self.restore(copy)
            raise

    def run_from(self, copy: StateCopy, run: Callable[[], object]) -> StateCopy:
        """Run something from a state, and return the state that it leaves."""
        self.restore(copy)
        run()
        return self.copy()

    def compare(
        self, found: StateCopy, first: StateCopy, second: StateCopy, *, start: StateCopy | None = None
    ) -> tuple[int, list[str]]:
        """Return how many tensors are bit-equal, and the names of the others. Raise ReplayDiffers for one that differs
        by more than the noise of two uncaptured runs; with `start`, the state that a step began from, it may also
        differ by the rounding of the computation."""
        exact, noisy = 0, []
        num, num_gradients = len(self.names), len(found.tensors) - len(self.names)
        if not len(found.tensors) == len(first.tensors) == len(second.tensors):
            raise ReplayDiffers("not the same parameters get a gradient")
        names = [*self.names, *["a gradient"] * num_gradients]
        starts: list[Tensor | None] = [None] * len(names)
        if start is not None:
            starts = [*start.tensors[:num], *map(torch.zeros_like, found.tensors[num:])]
        runs = zip(names, found.tensors, first.tensors, second.tensors, starts, strict=True)
        for name, value, one, other, then in runs:
            if have_same_bits(value, one):
                exact += 1
                continue
            noise, distance = find_distance(one, other), min(find_distance(value, one), find_distance(value, other))
            if not distance <= NOISE * noise and (then is None or not self._is_rounding(value, one, then)):
                raise ReplayDiffers(
                    f"{name} differs by {distance:.3g}, where two uncaptured runs differ by {noise:.3g}"
                )
            noisy.append(name)
        return exact, noisy

    def _is_rounding(self, value: Tensor, other: Tensor, start: Tensor) -> bool:
        """True if two results of one step differ by no more than sums in another order do."""
        value, other, start = (one.double() if not one.is_complex() else one for one in (value, other, start))
        dtype = get_autocast_dtype(self.step.plan.granted) or torch.float32
        eps = 2.0**-10 if self.step.plan.compute == "tf32" else torch.finfo(dtype).eps
        allowed = eps * (other - start).norm() + torch.finfo(torch.float32).eps * other.norm()
        return bool((value - other).norm() <= ROUNDINGS * allowed)


@dataclass(frozen=True)
class StateCopy:
    tensors: Sequence[Tensor]
    committed: Tensor
    rng: dict[str, Tensor]
    attempted: int
    spikes: dict[str, Tensor]


def list_tensors(step: Step) -> list[tuple[str, Tensor]]:
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
    if one.numel() == 0:
        return 0.0
    distance = (one.double() - other.double()).abs().max() if not one.is_complex() else (one - other).abs().max()
    return float(distance)
