"""Load 8-bit optimizer state into another number of shards than it was saved with.

AdamW8bit cuts its blocks of 256 values per shard, so the codes of one shard mean nothing in another. Here each rank
decodes those stored shards that overlap its own, and quantises its part again. Everything else is read by slices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.distributed.sharding import get_local
from halfstep.state_files import ITEMS, unpack
from halfstep.step.optim.adamw8bit import AdamW8bit, recut_state

if TYPE_CHECKING:
    from halfstep.distributed.sharded_files import StoredShards

NOTE = "8-bit optimizer state is quantised again, because its blocks are cut per shard"


def recut_optimizer_states(
    stored: StoredShards,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    states: Sequence[dict[str, Any]],
    path: Sequence[str | int],
) -> list[str]:
    """Replace the 8-bit state in the loaded `states` of the optimizers; return a note if there is any.

    `path` leads to the list of the optimizers' states in the document of a stored rank.
    """
    names = {id(parameter): name for name, parameter in model.state_dict(keep_vars=True).items()}
    notes: list[str] = []
    for place, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        if not isinstance(optimizer, AdamW8bit):
            continue
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            entry = stored.manifest["sharded"].get(f"state.model.{names.get(id(parameter))}")
            if entry is None or entry["dim"] is None:
                continue
            pieces = list(_read_pieces(stored, entry, [*path, place, "state"], number))
            if pieces:
                start = stored.find_start(entry, parameter)
                state["state"][number] = recut_state(get_local(parameter).shape, entry["dim"], start, pieces)
                notes = [NOTE]
    return notes


def _read_pieces(
    stored: StoredShards, entry: Mapping[str, Any], path: Sequence[str | int], number: int
) -> Iterator[tuple[dict[str, Tensor], list[int], int]]:
    """Yield state, shape and begin of a parameter's stored shards."""
    for rank, first, length in entry["pieces"]:
        document, tensors = stored.open(rank=rank)
        packed = dict(functools.reduce(operator.getitem, path, document).get(ITEMS, ())).get(number)
        if packed is not None:
            shape = [*entry["shape"]]
            shape[entry["dim"]] = length
            yield unpack(packed, tensors), shape, first
