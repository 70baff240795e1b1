"""The update of a recorded training: its optimizers with their settings, and clipping.

The recorder writes the settings into the capsule, without the optimizers' state (moments are as large as the weights).
Replay rebuilds the optimizers with fresh state, to test whether the changed step and the steps after it stay finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.step.clip import Clip
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from halfstep.step.optim.by_name import OPTIMIZERS
from halfstep.step.schedule import make_groups_plain
from halfstep.step.step import GuardedStep

KNOWN: dict[str, Any] = {kind.__name__: kind for kind in (*OPTIMIZERS.values(), AdamW8bit, AdamWBf16)}
FORMS = ("fused", "foreach", "capturable", "differentiable")
"""Settings of how an optimizer runs, which depend on the device: torch chooses them again."""


def record_update(step: GuardedStep, model: nn.Module) -> dict[str, Any]:
    """Return the update for capsule.json; parameters outside of the model are left out."""
    names = {id(p): name for name, p in model.named_parameters()}
    optimizers = []
    for optimizer in step.optimizers:
        kind = type(optimizer)
        # With its module if replay cannot build it.
        name = kind.__name__ if KNOWN.get(kind.__name__) is kind else f"{kind.__module__}.{kind.__qualname__}"
        groups = []
        for group in make_groups_plain(optimizer.param_groups):
            kept = {key: _to_plain(group[key]) for key in optimizer.defaults if key in group and key not in FORMS}
            groups.append({**kept, "params": [names[id(p)] for p in group["params"] if id(p) in names]})
        optimizers.append({"name": name, "groups": groups})
    return {"clip": {"limit": step.clip.limit, "kind": step.clip.kind}, "optimizers": optimizers}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """How weights are updated after a backward pass."""

    optimizers: Sequence[Mapping[str, Any]]
    clip: Clip

    @classmethod
    def parse(cls, recorded: Mapping[str, Any] | None) -> Update | None:
        """Return the recorded update; None if an optimizer cannot be built again by its name."""
        if recorded is None or any(one["name"] not in KNOWN for one in recorded["optimizers"]):
            return None
        return cls(optimizers=recorded["optimizers"], clip=Clip(**recorded["clip"]))

    @property
    def names(self) -> str:
        return ", ".join(one["name"] for one in self.optimizers)

    def build(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers with fresh state, for the weights of this model."""
        weights = dict(model.named_parameters())
        found = []
        for one in self.optimizers:
            groups = [{**group, "params": [weights[name] for name in group["params"]]} for group in one["groups"]]
            if any(group["params"] for group in groups):
                found.append(KNOWN[one["name"]]([group for group in groups if group["params"]]))
        return found

    @torch.no_grad()
    def step(self, optimizers: Sequence[Optimizer], scale: float) -> None:
        """Unscale and clip the gradients, and let the optimizers step."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        # The factor unscales and clips at once; None where clipping by value has changed the gradients already.
        _, factor = self.clip.measure(gradients, torch.tensor(1 / scale, device=gradients[0].device))
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        for optimizer in optimizers:
            optimizer.step()

    @property
    def memory(self) -> int:
        """Return over how many steps momentum averages."""
        momenta = [momentum for momentum in self.list_settings("momentum") if momentum is not None]
        momenta += [betas[0] for betas in self.list_settings("betas") if betas]
        # An exponential average with factor β covers about 1 / (1 - β) steps.
        return round(1 / (1 - max((m for m in momenta if m < 1), default=0.0)))

    def list_settings(self, key: str) -> list[Any]:
        """Return this setting of all groups."""
        return [group[key] for one in self.optimizers for group in one["groups"] if key in group]

    def change_setting(self, key: str, change: Any) -> Update:
        """Return the update with change(value) in every group that has this setting."""
        return replace(self, optimizers=[
            {**one, "groups": [{**g, key: change(g[key])} if key in g else g for g in one["groups"]]}
            for one in self.optimizers
        ])  # fmt: skip

    def replace_rate(self, rate: float) -> Update:
        """Return the update with this learning rate for the first group, the others in proportion."""
        first = next(iter(self.list_settings("lr")), 0.0)
        return self.change_setting("lr", lambda lr: lr * rate / first if first else rate)

    def replace_clip(self, limit: float) -> Update:
        return replace(self, clip=Clip(limit=limit))
