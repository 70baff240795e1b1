"""Copies of the training state in host memory, so that a diverged run can go back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from halfstep.train.step import Step


class Snapshots:
    """The last few states of a run, taken every `every` attempted steps, newest last."""

    def __init__(self, *, every: int, margin: int) -> None:
        self.every, self.margin = every, margin
        # Enough to reach back past the margin, plus one that a fault right after a snapshot makes useless.
        self.size = margin // every + 2
        self.states: list[dict[str, Any]] = []

    def due(self, attempted: int) -> bool:
        return attempted % self.every == 0

    def take(self, model: nn.Module, step: Step) -> None:
        """Copy everything a rollback puts back; waits for the device. Steps that were all skipped are not copied."""
        if self.states and self.states[-1]["step"]["committed"] == int(step.committed):
            return
        state = {"model": model.state_dict(), "step": step.state_dict()}
        self.states = [*self.states, _on_host(state)][-self.size :]

    def before(self, committed: int) -> dict[str, Any] | None:
        """The newest state at least `margin` committed steps before `committed`; the very start is far enough."""
        usable = [s for s in self.states if s["step"]["committed"] <= max(committed - self.margin, 0)]
        return usable[-1] if usable else None

    def forget_after(self, state: Mapping[str, Any]) -> None:
        """Once back at `state`, the later ones belong to the abandoned path."""
        limit = state["step"]["committed"]
        self.states = [s for s in self.states if s["step"]["committed"] <= limit]

    def state_dict(self) -> list[dict[str, Any]]:
        return self.states

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        self.states = list(states)


def _on_host(tree: Any) -> Any:
    """A deep copy whose tensors lie in host memory."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _on_host(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_host(value) for value in tree)
    return copy.deepcopy(tree)
