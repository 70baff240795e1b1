"""An average of the weights, in fp32, moved once per committed step, buffers included.

A bf16 average with decay 0.9999 never moves (the update is below its spacing), an average moved on skipped steps
drifts, and averaged weights with the raw model's BatchNorm statistics are a model nobody trained. So: fp32 always,
selection by the step's flag, floating buffers averaged with the same decay, integer buffers copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from halfstep.errors import CheckpointError
from halfstep.train.flat import by_kind, gather, is_writable_in_place, scatter


class Ema:
    """Shadow copies of a model's parameters and buffers."""

    def __init__(
        self, model: nn.Module, *, decay: float = 0.9999, warmup_power: float = 2 / 3, inv_gamma: float = 1.0
    ) -> None:
        self.decay, self.warmup_power, self.inv_gamma = decay, warmup_power, inv_gamma
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.named = {name: tensor for name, tensor in named.items() if is_writable_in_place(tensor)}
        self.groups = by_kind(self.named.values())
        self.shadows = [self._start(group) for group in self.groups]

    @torch.no_grad()
    def _start(self, group: list[Tensor]) -> Tensor:
        flat = gather(group)
        return flat.float() if flat.is_floating_point() else flat

    @torch.no_grad()
    def update(self, committed: Tensor, bad: Tensor) -> None:
        """Move towards the model, unless the step was bad. `committed` counts the step that just committed."""
        keep = self._decay_at(committed)
        for position, group in enumerate(self.groups):
            shadow, now = self.shadows[position], gather(group)
            if shadow.is_floating_point():
                now = torch.lerp(now.float(), shadow, keep)
            self.shadows[position] = torch.where(bad, shadow, now)

    def _decay_at(self, committed: Tensor) -> Tensor:
        """Rises with the steps up to `decay`: an early average must not hold on to the random start."""
        rising = 1 - (1 + (committed - 1) / self.inv_gamma) ** -self.warmup_power
        return rising.clamp(max=self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the averaged values inside; its own bits come back afterwards."""
        with torch.no_grad():
            own = [gather(group) for group in self.groups]
            self._write(self.shadows)
        try:
            yield
        finally:
            with torch.no_grad():
                self._write(own)

    def _write(self, flats: list[Tensor]) -> None:
        for group, flat in zip(self.groups, flats, strict=True):
            scatter(flat.to(group[0].dtype), group)

    def state_dict(self) -> dict[str, Tensor]:
        """Averaged values by the model's names, in fp32 and the model's shapes."""
        by_tensor = {id(tensor): name for name, tensor in self.named.items()}
        state: dict[str, Tensor] = {}
        for group, shadow in zip(self.groups, self.shadows, strict=True):
            for tensor, piece in zip(group, shadow.split([t.numel() for t in group]), strict=True):
                state[by_tensor[id(tensor)]] = piece.as_strided(tensor.size(), tensor.stride(), piece.storage_offset())
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        if own.keys() != state.keys():
            differing = sorted(own.keys() ^ state.keys())
            raise CheckpointError(
                f"the stored average has other names than the model: {', '.join(differing[:5])}",
                fix="resume with the model the run was started with",
            )
        for name, shadow in own.items():
            shadow.copy_(state[name])
