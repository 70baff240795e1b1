"""Copy the training state to host memory, so that a diverged run can roll back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.step.flat import is_writable_in_place
from halfstep.step.guard import LAG
from halfstep.step.phases import PhasedStep
from halfstep.step.step import GuardedStep


class Snapshots:
    """The last few states of a run, taken every `every` attempted steps, newest last.

    How far back a rollback goes is counted in committed steps. The host knows those only by waiting for the device,
    so they are read when a snapshot is taken, and attempted steps say when that is.
    """

    def __init__(self, *, every: int, margin: int, lag: int = LAG) -> None:
        self.every, self.margin, self.lag = every, margin, lag
        self.states: list[dict[str, Any]] = []
        self.start = 0
        """Committed steps of the first state, or of the one rolled back to, which is allowed inside the margin."""

    def is_due(self, attempted: int) -> bool:
        return not self.states or attempted % self.every == 0

    def take(self, model: nn.Module, step: GuardedStep | PhasedStep) -> None:
        """Copy the state; waits for the device. Skipped if few steps have committed since the last copy."""
        committed = int(step.committed)
        if self.states and committed - _read_committed(self.states[-1]) < max(self.every // 2, 1):
            return
        if not self.states:
            self.start = committed
        self.states.append(copy_to_host(self.collect(model, step)))
        # A fault that the guard has not acted on yet may be `lag` steps old; before that, one state is enough.
        while len(self.states) > 1 and _read_committed(self.states[1]) <= self._compute_limit(committed - self.lag):
            del self.states[0]

    def collect(self, model: nn.Module, step: Any) -> dict[str, Any]:
        """Return everything that a rollback restores."""
        return {"model": model.state_dict(), "buffers": find_loose_buffers(model), "step": step.state_dict()}

    def find_before(self, committed: int) -> dict[str, Any] | None:
        """Return the newest state at least `margin` committed steps before `committed`, or the first one; else None."""
        usable = [state for state in self.states if _read_committed(state) <= self._compute_limit(committed)]
        return usable[-1] if usable else None

    def go_back(self, state: Mapping[str, Any], model: nn.Module, step: GuardedStep | PhasedStep) -> None:
        """Restore `state` except the count of attempts, and drop later states: they belong to the abandoned path."""
        attempted = step.attempted
        resize_buffers(model, state["model"])
        model.load_state_dict(state["model"])
        restore_buffers(model, state["buffers"])
        step.load_state_dict(state["step"])
        step.attempted = attempted
        self.start = _read_committed(state)
        self.states = [other for other in self.states if _read_committed(other) <= self.start]

    def _compute_limit(self, committed: int) -> int:
        return max(committed - self.margin, min(self.start, committed))

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "states": self.states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start, self.states = int(state["start"]), list(state["states"])


def _read_committed(state: Mapping[str, Any]) -> int:
    return int(state["step"]["committed"])


def copy_to_host(tree: Any) -> Any:
    """Return a deep copy whose tensors are in host memory."""

    def copy_leaf(leaf: Any) -> Any:
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return tree_map(copy_leaf, tree)


def resize_buffers(model: nn.Module, stored: Mapping[str, Any]) -> list[str]:
    """Replace buffers that have another shape than stored, such as a queue that grows, which load_state_dict would
    refuse; return their names."""
    found = []
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if isinstance(value := stored.get(name), Tensor) and value.shape != buffer.shape:
            place, _, leaf = name.rpartition(".")
            model.get_submodule(place)._buffers[leaf] = buffer.new_empty(value.shape)
            found.append(name)
    return found


# --- buffers that state_dict leaves out ---
# They affect training, so they are stored as well.


def find_loose_buffers(model: nn.Module) -> dict[str, Tensor]:
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in stored}


@torch.no_grad()
def restore_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write into existing buffers; replace one that has another shape by now, or does not exist yet."""
    present = dict(model.named_buffers())
    device = next(model.parameters()).device
    for name, value in values.items():
        own = present.get(name)
        if own is not None and own.shape == value.shape and is_writable_in_place(own):
            own.copy_(value)
        else:
            place, _, leaf = name.rpartition(".")
            model.get_submodule(place).register_buffer(leaf, value.to(device, copy=True), persistent=False)
