"""Step the shards of a sharded model's parameters in place of the parameters themselves.

torch's optimizers accept DTensors, but dispatch every operation on them in Python, which takes longer than the kernels
of a small shard, and fused SGD and Adagrad have no DTensor kernels at all. An optimizer that treats each number alone
computes the same from the local tensors. So a twin of the user's optimizer holds those, steps them, and shares its
state with the user's one, where each tensor appears as the DTensor that it is a shard of: checkpoints see the whole.

AdamW8bit cuts its blocks per shard. Its codes have no meaning in another shard, so they stay plain tensors.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.distributed.sharding import get_local, get_locals, is_dtensor, wrap_local
from halfstep.step.flat import are_same_objects
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16, JudgedAdamW
from halfstep.step.optim.by_name import OPTIMIZERS

ELEMENTWISE = {*OPTIMIZERS.values(), AdamW8bit, AdamWBf16} - {torch.optim.Adafactor, torch.optim.Muon}


class ShardTwin:
    """A copy of an optimizer that holds this rank's shards of its parameters, and the same state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = _list_parameters(optimizer)
        self.shards = get_locals(self.parameters)
        self.twin: Optimizer = object.__new__(type(optimizer))
        # Without a `step` that torch's schedulers have set on the instance: it would step the original.
        vars(self.twin).update({key: value for key, value in vars(optimizer).items() if key != "step"})
        by_parameter = dict(zip(self.parameters, self.shards, strict=True))
        self.twin.param_groups = [
            {**group, "params": [by_parameter[p] for p in group["params"]]} for group in optimizer.param_groups
        ]
        self.twin.state = defaultdict(dict)
        for parameter, own in optimizer.state.items():
            self.twin.state[by_parameter[parameter]] = _map_tensors(own, get_local)
        if isinstance(self.twin, JudgedAdamW):
            self.twin.numbers = {by_parameter[p]: number for p, number in self.twin.numbers.items()}

    def fits(self) -> bool:
        """True if the optimizer holds the same parameters, those the same memory, and no state was removed."""
        found = _list_parameters(self.optimizer)
        if not are_same_objects(found, self.parameters) or not are_same_objects(get_locals(found), self.shards):
            return False
        return len(self.optimizer.state) == len(self.twin.state)

    def take_gradients(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else get_local(parameter.grad)

    def drop_gradients(self) -> None:
        for shard in self.shards:  # or their memory would stay after the next zero_grad
            shard.grad = None

    def take_settings(self) -> None:
        """Take over the groups' settings: a schedule or the user may have written them."""
        for group, own in zip(self.optimizer.param_groups, self.twin.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})

    def share_state(self) -> None:
        """Show the user's optimizer the state that the twin has built."""
        vars(self.optimizer).update(_opt_called=True)  # torch's schedulers warn if their optimizer never stepped
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            own = self.twin.state.get(shard)
            if own and not self.optimizer.state.get(parameter):
                is_whole = is_dtensor(parameter) and not isinstance(self.twin, AdamW8bit)

                def wrap(value: Tensor, like: Tensor = parameter, size: torch.Size = shard.shape) -> Tensor:
                    return wrap_local(value, like) if value.shape == size else value

                self.optimizer.state[parameter] = _map_tensors(own, wrap) if is_whole else own


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _map_tensors(state: dict[str, Any], change: Any) -> dict[str, Any]:
    return {key: change(value) if isinstance(value, Tensor) else value for key, value in state.items()}
