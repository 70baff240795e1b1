"""Exponential moving average of weights and buffers, in fp32, moved once per committed step.

A bf16 average with decay 0.9999 never moves (the update is below its spacing), an average moved on skipped steps
drifts, and averaged weights with the raw model's BatchNorm statistics were never trained together. So: fp32 always,
selection by the step's flag, floating buffers averaged with the same decay, integer buffers copied.

The average of a buffer that changes its shape, such as a growing queue, starts again from the buffer's new value.

Of a sharded model each rank averages its shards, without communication.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from halfstep.distributed.sharding import find_sharded_modules, get_local, reshard, shard_like, wrap_local
from halfstep.errors import CheckpointError
from halfstep.step.flat import gather, is_dense, is_writable_in_place, scatter, view_like
from halfstep.step.optim.by_name import is_within
from halfstep.step.optim.single_pass import ALIGNMENT, make_chunks

CHUNK_ELEMENTS = 1 << 24  # 64 MB of fp32, and about three times that on the way
ALIGNED_ELEMENTS = 4
"""16 bytes of fp32. Tensors of other lengths come last, so that the others stay aligned for wide accesses."""


class Ema:
    def __init__(
        self,
        model: nn.Module,
        parts: tuple[str, ...] = (),
        *,
        decay: float = 0.9999,
        warmup_power: float = 2 / 3,
        inv_gamma: float = 1.0,
    ) -> None:
        self.decay, self.warmup_power, self.inv_gamma = decay, warmup_power, inv_gamma
        self._sharded_modules = find_sharded_modules(model)
        reshard(self._sharded_modules)
        self.slots = {name: slot for name, slot in _find_slots(model).items() if not parts or is_within(name, parts)}
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[str]] = {}
        live = self._find_live()
        for name in sorted(live, key=lambda name: live[name].numel() % ALIGNED_ELEMENTS != 0):
            owner, key = self.slots[name]
            tensor = live[name]
            kinds.setdefault((tensor.device, tensor.dtype, isinstance(owner[key], nn.Parameter)), []).append(name)
        chunks = [(chunk, kind[2]) for kind, names in kinds.items() for chunk in _cut_chunks(names, live)]
        self.groups = [chunk for chunk, _ in chunks]
        self._are_weights = [is_weight for _, is_weight in chunks]
        self._buffers = {name for group, is_weight in chunks if not is_weight for name in group}
        groups = [[live[name] for name in group] for group in self.groups]
        self.shadows = list(map(self._gather_fp32, groups))
        self._views = list(map(_split_like, self.shadows, groups))  # the averages, in the shapes of the tensors
        self._pass = EmaPass()

    def _find_live(self) -> dict[str, Tensor]:
        """Return the current tensors by name, of a sharded one its shard: a module may have replaced a buffer."""
        found = {name: get_local(tensor) for name, tensor in self._find_whole().items()}
        return {name: t for name, t in found.items() if is_writable_in_place(t)}

    def _find_whole(self) -> dict[str, Tensor]:
        found = {name: owner.get(key) for name, (owner, key) in self.slots.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _find_live_groups(self) -> list[list[Tensor]]:
        """Return the current tensors of each group, an empty one for a buffer that is None by now, and let averages
        follow those that changed their shape or memory format."""
        live = self._find_live()
        pairs = zip(self.groups, self.shadows, strict=True)
        groups = [[live.get(name, shadow[:0]) for name in names] for names, shadow in pairs]
        for number, group in enumerate(groups):
            if not all(map(_are_laid_out_alike, self._views[number], group)):
                self._lay_out(number, group)
        return groups

    @torch.no_grad()
    def _lay_out(self, number: int, group: list[Tensor]) -> None:
        """Make a group's average anew: a tensor of the same shape keeps its average, another starts from its value."""
        shadow = self._gather_fp32(group)
        views = _split_like(shadow, group)
        for view, average in zip(views, self._views[number], strict=True):
            if view.shape == average.shape:
                view.copy_(average)
        self.shadows[number], self._views[number] = shadow, views

    @torch.no_grad()
    def _gather_fp32(self, group: list[Tensor]) -> Tensor:
        flat = gather(group)
        return flat.float() if flat.is_floating_point() else flat

    @torch.no_grad()
    def update(self, committed: Tensor, bad: Tensor) -> None:
        """Move towards the model, unless the step was bad. `committed` counts the step that just committed."""
        keep, left = self._compute_decay(committed), []
        pairs: list[tuple[Tensor, Tensor]] = []
        groups = zip(self._find_live_groups(), self._are_weights, self.shadows, self._views, strict=True)
        for group, is_weight, shadow, views in groups:
            # Not buffers: a module may replace one in any step, and a table of addresses would be wrong.
            if is_weight and can_use_kernel(group):
                found = zip(group, views, strict=True)
                pairs += [pair for pair in found if pair[0].numel()]  # a shard may be empty
            else:
                left.append((group, shadow))
        if pairs:
            self._pass.move(pairs, keep, bad)
        for group, shadow in left:
            now = gather(group)
            if shadow.is_floating_point():
                now = torch.lerp(now.float(), shadow, keep)
            shadow.copy_(torch.where(bad, shadow, now))

    def _compute_decay(self, committed: Tensor) -> Tensor:
        """Return the decay, which rises with the steps up to `decay`: an early average must forget the random start."""
        rising = 1 - (1 + (committed - 1) / self.inv_gamma) ** -self.warmup_power
        return rising.clamp(max=self.decay)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Put the averaged values into the model inside, and restore its own bits afterwards."""
        # An evaluation leaves the parameters of a sharded model's root whole: it would be used in place of shards.
        reshard(self._sharded_modules)
        with torch.no_grad():
            own = [gather(group) for group in self._find_live_groups()]
            buffers = {name: t for name, t in self._find_whole().items() if name in self._buffers}
            memory = {name: tensor.data for name, tensor in buffers.items()}
            self._write(self.shadows)
        try:
            yield
        finally:
            reshard(self._sharded_modules)
            for name in self._buffers:  # an evaluation may have replaced or resized one
                owner, key = self.slots[name]
                if owner.get(key) is not buffers.get(name):
                    owner[key] = buffers.get(name)
                if name in buffers and buffers[name].shape != memory[name].shape:
                    buffers[name].data = memory[name]
            with torch.no_grad():
                self._write(own)

    def _write(self, flats: list[Tensor]) -> None:
        for group, flat in zip(self._find_live_groups(), flats, strict=True):
            scatter(flat.to(group[0].dtype), group)

    def state_dict(self) -> dict[str, Tensor]:
        """Return averaged values by the model's names, in fp32 and the model's shapes. Tensors are live, as those of
        torch's optimizers are: a checkpoint is written before the next step, snapshots copy. Those of a sharded model
        are DTensors as its parameters are."""
        reshard(self._sharded_modules)
        self._find_live_groups()
        live = self._find_live()
        return {name: average for name, average in self._name_averages().items() if name in live}

    def _name_averages(self) -> dict[str, Tensor]:
        whole = self._find_whole()
        pairs = zip(chain.from_iterable(self.groups), chain.from_iterable(self._views), strict=True)
        return {name: wrap_local(view, whole.get(name)) for name, view in pairs}

    @torch.no_grad()
    def restart(self) -> dict[str, Tensor]:
        """Start the average again from the current model, and return its state."""
        reshard(self._sharded_modules)
        for group, shadow in zip(self._find_live_groups(), self.shadows, strict=True):
            shadow.copy_(self._gather_fp32(group))
        return self.state_dict()

    def refuse_unfit(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        for name in sorted((own.keys() | state.keys()) - self._buffers):
            here, there = (f"shape {tuple(one[name].shape)}" if name in one else "missing" for one in (own, state))
            if here != there:
                raise CheckpointError(
                    f"the average of {name} does not fit: {there} in the checkpoint, {here} in the model",
                    fix="resume with the model the run was started with",
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.refuse_unfit(state)
        for number, group in enumerate(self._find_live_groups()):
            stored = [state.get(name, own) for name, own in zip(self.groups[number], group, strict=True)]
            if not self._are_weights[number] and [t.shape for t in stored] != [t.shape for t in group]:
                self._lay_out(number, [tensor.to(self.shadows[number].device) for tensor in stored])
        for name, shadow in self._name_averages().items():
            if name in state:
                get_local(shadow).copy_(get_local(shard_like(state[name], shadow)))


def _split_like(shadow: Tensor, group: list[Tensor]) -> list[Tensor]:
    """View the averages in a shadow in the shapes and memory formats of the group's tensors."""
    return list(map(view_like, shadow.split([tensor.numel() for tensor in group]), group))


def _are_laid_out_alike(view: Tensor, tensor: Tensor) -> bool:
    """True if the elements of a view of an average are in the order in which `gather` reads the tensor's."""
    if view.shape != tensor.shape or view.stride() == tensor.stride():
        return view.shape == tensor.shape
    return view.is_contiguous() and not is_dense(tensor)


def _cut_chunks(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Group tensors that are moved together: few launches, and temporary copies far smaller than the model."""
    chunk: list[str] = []
    size = 0
    for name in names:
        if chunk and size + tensors[name].numel() > CHUNK_ELEMENTS:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += tensors[name].numel()
    if chunk:
        yield chunk


def _find_slots(model: nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Return the dict and key that hold each parameter and buffer, by full name; a tied one once."""
    found: dict[str, tuple[dict[str, Tensor | None], str]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{key}" if prefix else key] = (owner, key)
    return found


# --- weights on a GPU: one kernel of our own (ema_triton.py) ---

Pairs = Sequence[tuple[Tensor, Tensor]]  # weights and their averages, which lie in memory in the same order


def can_use_kernel(weights: Sequence[Tensor]) -> bool:
    has_kernel = weights[0].is_cuda and _has_triton()
    is_known = all(weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
    return has_kernel and is_known and all(map(is_dense, weights))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class EmaPass:
    """Move all averages with one launch per kind of weight: mostly one.

    Graphs read the tables at every replay, so a table stays when weights were moved and another takes its place.
    """

    def __init__(self) -> None:
        self.launches: list[EmaLaunch] = []
        self.addresses: list[tuple[int, int]] = []
        self.old: list[EmaLaunch] = []

    def move(self, pairs: Pairs, decay: Tensor, bad: Tensor) -> None:
        """Move the averages. During a capture the table exists already: uncaptured steps came before it."""
        addresses = [(weight.data_ptr(), average.data_ptr()) for weight, average in pairs]
        if addresses != self.addresses:
            self.old += self.launches
            self.launches, self.addresses = [*_make_launches(pairs)], addresses
        for launch in self.launches:
            launch(decay, bad)


class EmaLaunch:
    """The table of weights of one dtype; either all or none of their addresses are 16-byte aligned."""

    def __init__(self, pairs: Pairs, *, aligned: bool) -> None:
        from halfstep.step import ema_triton

        self.dtype, self.aligned = pairs[0][0].dtype, aligned
        columns = [[weight.data_ptr(), average.data_ptr(), weight.numel()] for weight, average in pairs]
        device, size = pairs[0][0].device, ema_triton.BLOCK * ema_triton.TILES
        self.table = torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device)
        self.chunks = make_chunks([weight.numel() for weight, _ in pairs], size).to(device)

    def __call__(self, decay: Tensor, bad: Tensor) -> None:
        from halfstep.step import ema_triton

        ema_triton.move(self.table, self.chunks, decay, bad, dtype=self.dtype, aligned=self.aligned)


def _make_launches(pairs: Pairs) -> Iterator[EmaLaunch]:
    kinds: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in pair)
        kinds.setdefault((pair[0].dtype, aligned), []).append(pair)
    yield from (EmaLaunch(found, aligned=aligned) for (_, aligned), found in kinds.items())
