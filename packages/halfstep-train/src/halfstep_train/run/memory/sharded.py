"""Memory of one rank among several: what DDP adds to a step, and what FSDP2 divides, gathers and reduces.

DDP keeps all gradients in its buckets from its first step on; a new gradient is copied into its bucket and freed.

FSDP2 shards the first dimension of each parameter; an uneven one is padded to whole rows. Parameters, gradients,
optimizer state and average are divided by the number of ranks. Units (some blocks, and one for the rest) are gathered:

    forward    a unit's buffer is filled by all ranks, then copied out into its parameters, which are freed after the
               unit. The buffer is freed when the next unit has been gathered. The rest stays whole until its backward
    backward   the same, but the next unit is gathered ahead, while the current one computes
    reduce     after a unit's backward: its gradients are copied into one buffer, freed, and reduced to this rank's
               shard. The buffer is freed when the next unit reduces

One rank alone gathers without a buffer. Autocast's half copies of weights are cast again in eager backward, because
those of a whole model would take more than its shard; compiled blocks keep them.

The events are inserted into the timeline of the unsharded step, from the operations that read a unit's parameters or
make its gradients (torch/distributed/fsdp/_fully_shard).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from halfstep_train.run.memory.step_trace import BLOCK_BYTES, Life, StepTrace, Timeline

if TYPE_CHECKING:
    from halfstep_train.run.memory.planner import Cell


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Parameters that are gathered and reduced together: those of some blocks, or of all modules outside of blocks."""

    parameters: Mapping[str, Tensor]
    is_root: bool = False
    is_frozen: bool = False
    """Whether it is a block of a frozen network; what such a network has outside of blocks is not sharded."""

    def count_shard_bytes(self, num_ranks: int, *, trained: bool = False, itemsize: int = 0) -> int:
        """Return the bytes of the largest shard, padded to whole rows; `itemsize` is that of another format."""
        return sum(
            math.ceil(len(p) / num_ranks) * (p.numel() // max(len(p), 1)) * (itemsize or p.element_size())
            for p in self.parameters.values()
            if p.ndim and (p.requires_grad or not trained)
        )


def name_parameters(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters of the model and of frozen networks by unique names."""
    return {f"{index}.{name}": p for index, module in enumerate(modules) for name, p in module.named_parameters()}


def list_units(modules: Sequence[nn.Module], groups: Sequence[Sequence[Sequence[str]]]) -> list[ShardUnit]:
    """Return the units of the model, which is the first module, and those of the frozen networks after it; each group
    of blocks is one."""
    left, found = name_parameters(modules), []
    for index, own in enumerate(groups):
        for names in own:
            prefixes = tuple(f"{index}.{name}." for name in names)
            unit = {key: left.pop(key) for key in list(left) if key.startswith(prefixes)}
            found.append(ShardUnit(unit, is_frozen=index > 0))
    found.append(ShardUnit({key: p for key, p in left.items() if key.startswith("0.")}, is_root=True))
    return [unit for unit in found if unit.parameters]


def replicate_timeline(timeline: Timeline) -> Timeline:
    """Return a rank's timeline in DDP; the peak is found with `accumulates`, because buckets hold all gradients."""
    new = (
        Life(life.num_bytes, life.first, life.first, "reductions")
        for life in timeline.lives
        if life.kind == "gradients"
    )
    return Timeline((*timeline.lives, *new), timeline.workspaces)


def shard_timeline(timeline: Timeline, trace: StepTrace, units: Sequence[ShardUnit], cell: Cell) -> Timeline:
    """Return the timeline of this cell on one rank with FSDP2.

    Each operation gets two positions: 2n while it runs, and 2n + 1 for what FSDP2 does before the next one. While
    gradients accumulate, their shards exist from the start. If only the last micro-batch is reduced, whole gradients
    exist instead, each until its unit is reduced.
    """
    kept = timeline.lives if cell.mode != "eager" else _cast_again(timeline, trace)
    lives = [
        dataclasses.replace(life, first=2 * life.first, last=2 * life.last)
        for life in kept
        # Weights that are gathered in half precision are not cast.
        if life.kind != "gradients" and not (cell.gathers_half and life.kind == "half copies")
    ]
    end = 2 * len(timeline.workspaces) - 1
    lives += _gather_and_reduce(trace, units, cell, end)
    if cell.accumulate > 1 and not cell.reduces_last:
        shards = sum(unit.count_shard_bytes(cell.ranks, trained=True) for unit in units)
        lives.append(Life(shards, 0, end, "gradients"))
    workspaces = [size for workspace in timeline.workspaces for size in (workspace, 0)]
    rounded = (
        dataclasses.replace(life, num_bytes=-(-life.num_bytes // BLOCK_BYTES) * BLOCK_BYTES, last=min(life.last, end))
        for life in lives
        if life.num_bytes
    )
    return Timeline(tuple(rounded), tuple(workspaces))


def _cast_again(timeline: Timeline, trace: StepTrace) -> Iterator[Life]:
    """Yield the lives of an eager step, with half copies of weights only while an operation uses them."""
    yield from (life for life in timeline.lives if life.kind != "half copies")
    for number, op in enumerate(trace.ops):
        for value in {*op.reads, *op.makes}:
            if trace.values[value].owner == "half copies":
                yield Life(trace.values[value].num_bytes, number, number, "half copies")


def _gather_and_reduce(trace: StepTrace, units: Sequence[ShardUnit], cell: Cell, end: int) -> Iterator[Life]:
    num_ranks = cell.ranks
    # The rest (embeddings, heads, last norm) is gathered in fp32 in any case.
    sizes = [2 if cell.gathers_half and not unit.is_root else 0 for unit in units]
    gathered = [num_ranks * u.count_shard_bytes(num_ranks, itemsize=size) for u, size in zip(units, sizes, strict=True)]
    buffers = gathered if num_ranks > 1 else [0] * len(units)  # a single rank copies its shard
    shards = [unit.count_shard_bytes(num_ranks, trained=True) for unit in units]
    owners = {name: number for number, unit in enumerate(units) for name in unit.parameters}
    owned = {value: owners[name] for value, name in trace.names.items() if name in owners}
    forward, backward = (_find_uses(trace, owned, in_backward=is_back) for is_back in (False, True))
    order = sorted(forward, key=lambda unit: forward[unit][0])
    for unit, following in zip(order, [*order[1:], None], strict=True):
        first, last = forward[unit]
        begin = max(2 * first - 1, 0)
        stays = units[unit].is_root and unit in backward
        yield Life(gathered[unit], begin, 2 * backward[unit][1] if stays else 2 * last, "gathered")
        next_begin = 2 * last if following is None else max(2 * forward[following][0] - 2, begin)
        yield Life(buffers[unit], begin, next_begin, "gathered")
    order = sorted(backward, key=lambda unit: backward[unit][0])
    regathered = [unit for unit in order if not units[unit].is_root and unit in forward]
    for before, unit in zip([None, *regathered], regathered, strict=False):
        first, last = backward[unit]
        yield Life(gathered[unit], 2 * first - 1, 2 * last, "gathered")
        ahead = 2 * first - 1 if before is None else 2 * backward[before][0]
        yield Life(buffers[unit], ahead, 2 * first - 1, "gathered")
    # A gradient exists in full until its unit is reduced.
    for number, value in enumerate(trace.values):
        if value.owner == "gradients" and number in owned:
            unit = owned[number]
            size = value.num_bytes // 2 if cell.gathers_half and not units[unit].is_root else value.num_bytes
            yield Life(size, 2 * value.made_by, 2 * backward[unit][1] + 1, "gradients")
    order.sort(key=lambda unit: backward[unit][1])
    for unit, following in zip(order, [*order[1:], None], strict=True):
        reduced_at = 2 * backward[unit][1] + 1
        freed_at = end if following is None else max(2 * backward[following][1], reduced_at)
        yield Life(num_ranks * shards[unit], reduced_at, freed_at, "reductions")
        if cell.reduces_last:
            yield Life(num_ranks * shards[unit], 0, reduced_at, "gradients")
        yield Life(shards[unit], reduced_at, end, "gradients")


def _find_uses(trace: StepTrace, owned: Mapping[int, int], *, in_backward: bool) -> dict[int, tuple[int, int]]:
    """Return the first and the last operation of each unit; in backward also those that make its gradients."""
    found: dict[int, tuple[int, int]] = {}
    for number, op in enumerate(trace.ops):
        if op.in_backward != in_backward:
            continue
        for value in (*op.reads, *(op.makes if in_backward else ())):
            if (unit := owned.get(value)) is not None:
                found[unit] = (found.get(unit, (number, 0))[0], number)
    return found
