"""Save what forward passes write when a window starts, and restore it if the step turns out bad.

    buffers      all of them: BatchNorm writes its statistics before any verdict exists
    parameters   those seen to be written, such as a VQ codebook, a momentum encoder, a weight that forward clamps; and
                 the small ones that no optimizer trains (SMALL_BYTES in all), such as a learned range

Frozen backbones are large: copying every parameter at every step would be too expensive. So in a parameter's first
window the host keeps a copy of it and compares all bits afterwards, because a write through `.data` leaves no trace:
one wait, and host memory for one window. From then on identity, version counter and address show writes.
A parameter that is first written in a later window has no copy: if that step is good it is saved from then on; if it is
bad the run ends with an error that names it, and if forward raises, a note on the exception names it.

Most modules write into a tensor. Some replace it (the old one still has the old bits), some give it other storage
(`.data = ...`), some register it when first used. On good steps bits, identity and version counters stay as forward
left them, so that an autograd graph kept for the next step, as between the networks of a GAN, stays valid.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from halfstep.errors import ConfigError, ModelError
from halfstep.step.flat import (
    Memory,
    Snapshot,
    are_same_objects,
    became_non_finite,
    can_be_non_finite,
    get_version,
    is_finite,
    is_writable_in_place,
    view_once,
)

Also = nn.Module | Tensor | Iterable[nn.Module | Tensor]  # what else a step guards: one of them, or several
Mark = tuple[Tensor | None, int, int]
Change = tuple["TensorSlot", Tensor | None, Tensor | None]  # a slot, and what it held before and after forward

SMALL_BYTES = 1 << 20


class ForwardWrites:
    before: list[Tensor | None]  # what the saved slots held when the window started
    storages: list[Tensor | None]  # the memory of those, which `.data = ...` would exchange
    snapshots: list[Snapshot]
    marks: Marks  # what the watched slots held, with versions and addresses
    copies: dict[Name, Tensor]  # on the host: parameters in their first window
    untrained: list[tuple[TensorSlot, Mark]]  # without a gradient: watched until the commit is over, for `on_commit`
    unsaved: list[TensorSlot]  # written in this window, without a copy from before it
    replaced: list[Change]
    moved: list[tuple[Tensor, Tensor]]
    returned: list[Tensor]  # what traced code returns in place of buffers, whose Python code has already replaced them

    def __init__(self, model: nn.Module, also: Also = (), *, commits: bool = False) -> None:
        """Guard the model and the modules of `also`; `commits` is true if `on_commit` writes after the optimizers."""
        modules, tensors = _split_also(also)
        self.commits = commits
        self.loose = nn.Module()
        """Holds tensors that no module here does: those of `also` as buffers, trained ones as parameters."""
        self.slots = TensorSlots([model, *modules, self.loose])
        refuse_uninitialised(self.slots)
        asked = {id(t) for t in (*tensors, *(p for m in modules if commits for p in m.parameters()))}
        self.written: set[Name] = {p.name for p in self.slots.parameters if id(p.owner[p.key]) in asked}
        """Parameters that every window saves."""
        inside = {id(p.owner[p.key]) for p in (*self.slots.parameters, *self.slots.buffers)}
        for number, tensor in enumerate(t for t in tensors if id(t) not in inside):
            self.loose._buffers[f"also_{number}"] = tensor
        self.compared: set[Name] = set()  # parameters whose first window is over
        self.trained: list[Tensor] = []
        self.saved: list[TensorSlot] = []
        self.watched: list[TensorSlot] = []
        self.held: list[Tensor | None] = []
        self.aliases: list[Tensor | None] = []
        self.held_watched: list[Tensor | None] = []
        self.entries: list[Any] = []  # of all modules at the last window: as long as they stay, so do the slots
        self.memory: Memory | None = None  # of what the saved slots held at the last window; None: look it up
        self.views = Snapshot(())  # of the same
        self.sparse = SparseTensors()
        self.has_new_ones = True
        self.exchanges = False  # whether the last window made new tensors instead of writing into the old ones
        self._close()

    # --- a window ---

    def save(self, trained: Sequence[Tensor]) -> None:
        """Save buffers and written parameters before the window's first forward pass."""
        entries = self.slots.list_entries()
        if not (are_same_objects(entries, self.entries) and are_same_objects(trained, self.trained)):
            self._look_again(trained)
        self._update_views()
        self.before, self.storages, self.snapshots = list(self.held), list(self.aliases), [self.views]
        self.views.save()
        self.marks = Marks(self.held_watched)
        self.copies = self._copy_new_ones() if self.has_new_ones else {}
        self.sparse.save()
        self.is_open, self.returned = True, []

    def _look_again(self, trained: Sequence[Tensor]) -> None:
        """Find out what the slots hold: modules, tensors or groups have changed since the last window."""
        held = _read_slots(self.saved)
        has_become_sparse = not are_same_objects(held, self.held) and any(map(_is_sparse, held))
        if self.slots.refresh() or not are_same_objects(trained, self.trained) or has_become_sparse:
            self._sort_anew(trained)
            self.trained = list(trained)
            held = _read_slots(self.saved)
        if not are_same_objects(held, self.held):
            self.held, self.memory = held, None
        self.held_watched, self.entries = _read_slots(self.watched), self.slots.list_entries()

    def _update_views(self) -> None:
        """Look up the memory of the saved tensors, unless it is as in the last window: it is most of `save`."""
        if self.memory is not None and not self.memory.has_changed():
            return
        self.aliases = [_alias_storage(tensor) for tensor in self.held]
        self.memory = Memory(t for t, alias in zip(self.held, self.aliases, strict=True) if alias is not None)
        self.views = Snapshot(filter(is_writable_in_place, (view_once(s) for s in self.aliases if s is not None)))

    def find_writes(self) -> None:
        """Find the parameters that the window wrote although they were not saved. Called after its last backward."""
        self.exchanges = False
        if not (self.commits or self.copies or self._has_changed()):
            self.marks = NO_MARKS
            return
        marked = list(zip(self.watched, self.marks, strict=False)) if self.commits else []
        self._find_written()
        self.compared.update(self.copies)
        self.has_new_ones = False
        if self.commits:
            still = {slot.name for slot in self.watched}
            self.untrained = [(p, m) for p, m in marked if p.name in still and m[0] is not None and m[0].grad is None]
        else:
            self.copies = {}
        self._find_exchanged()
        self._refuse_replaced_weights()

    def _has_changed(self) -> bool:
        """True if the window wrote something that is not saved, or exchanged or registered a tensor."""
        if self.marks.has_changed() or self.memory is None or self.memory.has_changed():
            return True
        return not are_same_objects(self.slots.list_entries(), self.entries) or bool(self.sparse.find_changed())

    def find_commit_writes(self) -> None:
        """Find what `on_commit` wrote besides what the optimizers did."""
        self._find_written()
        self._find_exchanged()

    def _find_exchanged(self) -> None:
        self.replaced, self.moved = self._find_replaced(), self._find_moved()
        self.has_grown = self.slots.have_grown
        self.exchanges = bool(self.replaced or self.moved or self.has_grown or self.sparse.find_changed())

    def became_non_finite(self, device: torch.device) -> Tensor | None:
        """Return on the device whether forward wrote a non-finite number over a finite one; None if it wrote nothing
        that could be non-finite."""
        found = [became_non_finite(saved, now) for snapshot in self.snapshots for saved, now in snapshot.pair_floats()]
        exchanged = [(before, now) for _, before, now in self.replaced]
        moved = [(storage, held.data) for held, storage in self.moved]
        for then, new in (*exchanged, *moved):
            if new is not None and can_be_non_finite(new):
                found.append(became_non_finite(torch.zeros((), device=new.device) if then is None else then, new))
        found += self.sparse.find_non_finite()
        found += [~is_finite(tensor).all() for tensor in self.returned if can_be_non_finite(tensor)]
        flags = [flag.to(device) for flag in found]
        return reduce(operator.or_, flags) if flags else None

    def restore_where(self, bad: Tensor) -> None:
        """Undo the writes of the window if `bad` is set, bit-exactly, with `torch.where` on the device.

        The host reads `bad`, and so waits for it, only if the window added, removed or resized a tensor, or wrote a
        sparse one: `torch.where` cannot undo that.
        """
        for snapshot in self.snapshots:
            snapshot.restore_where(bad)
        for slot, before, now in self.replaced:
            if before is None or now is None or not _are_alike(before, now):
                if bool(bad):
                    slot.owner[slot.key] = before
            elif isinstance(now, nn.Parameter):
                now.data = torch.where(bad, before, now)  # the same object: others may hold it, too
            else:
                slot.owner[slot.key] = torch.where(bad, before, now)  # another one: that may be the user's batch
        for held, storage in self.moved:
            if _are_alike(storage, held):
                held.data = torch.where(bad, storage, held.data)
            elif bool(bad):
                held.data = storage
        if self.sparse.find_changed() and bool(bad):
            self.sparse.restore()
        if self.has_grown and bool(bad):
            self.slots.remove_new_entries()
        self._close()

    def put_back(self) -> str:
        """Undo a window that is not judged, such as one that raised. Return a sentence on what cannot be undone: a
        large or trained parameter that forward wrote for the first time."""
        self._find_written()
        self._undo_exchanges()
        for snapshot in self.snapshots:
            snapshot.restore()
        unsaved = self._name_unsaved()
        self._close()
        if not unsaved:
            return ""
        return (
            f"halfstep: forward wrote {unsaved} for the first time, so there is no copy of it: it stays as written, "
            "everything else is as before the step. List it when you create the step, also=[model.part.weight], and "
            "load your last checkpoint"
        )

    def forget(self) -> None:
        """Undo exchanges and drop copies around a capture, which ran no kernels: the copies are the graph's memory."""
        self._undo_exchanges()
        self.views.forget()
        self._close()

    def _close(self) -> None:
        self.is_open = self.has_grown = False
        self.before, self.storages, self.snapshots, self.marks, self.copies = [], [], [], NO_MARKS, {}
        self.unsaved, self.replaced, self.moved, self.untrained, self.returned = [], [], [], [], []

    # --- questions of the step ---

    @property
    def why_not_captured(self) -> str:
        """Return what a CUDA graph could not repeat of the last window; empty if nothing."""
        if self.exchanges:
            return "the model replaces or registers a tensor in its forward pass instead of writing into it"
        return f"forward wrote {self._name_unsaved()} for the first time" if self.unsaved else ""

    def refuse_unsaved(self, bad: Tensor) -> None:
        """Refuse a bad step that wrote a parameter for the first time: no copy of it exists."""
        if self.unsaved and bool(bad):
            raise ModelError(
                f"a bad step wrote {self._name_unsaved()} in its forward pass, for the first time in this run",
                why="parameters are saved only after their first write, so these cannot be restored; everything "
                "else is as it was before the step",
                fix="load your last checkpoint, and list them when you create the step: "
                "also=[model.part.weight], or also=[*model.part.parameters()]",
            )

    def find_tensors_outside_model(self, trained: Sequence[Tensor]) -> list[TensorSlot]:
        """Return guarded tensors outside of the model that no other step trains: a teacher, a recurrent state."""
        self._hold_loose(trained)
        others = self.slots.roots[1:]
        found = TensorSlots(
            [root for root in others if root is self.loose or not any(map(_is_trained, root.parameters()))]
        )
        found.refresh()
        parameters = (slot for slot in found.parameters if slot.name in self.written or slot.module is self.loose)
        return [*parameters, *(slot for slot in found.buffers if not _is_trained(slot.held))]

    def restart_comparison(self) -> None:
        """Treat the next window as a first one again, after state was loaded."""
        self.compared.clear()
        self.trained = []
        self._close()

    # --- inside ---

    def _sort_anew(self, trained: Sequence[Tensor]) -> None:
        """Sort tensors into saved and watched ones again: modules or groups have changed since the last window."""
        self._hold_loose(trained)
        refuse_uninitialised(self.slots)
        self._sort_parameters(trained)

    def _hold_loose(self, trained: Sequence[Tensor]) -> None:
        inside = {id(owner[key]) for _, owner, key in self.slots.parameters}
        for tensor in trained:
            if id(tensor) not in inside:  # such as a loss function's own
                self.loose._parameters[f"trained_{len(self.loose._parameters)}"] = tensor  # type: ignore[assignment]
        self.slots.refresh()

    def _sort_parameters(self, trained: Sequence[Tensor]) -> None:
        small = self._find_small_untrained({id(p) for p in trained})
        saved = [p for p in self.slots.parameters if p.name in self.written | small or p.owner[p.key] is None]
        self.sparse.slots = [p for p in (*self.slots.buffers, *saved) if _is_sparse(p.held)]
        self.saved = [p for p in (*self.slots.buffers, *saved) if not _is_sparse(p.held)]
        names = {slot.name for slot in saved}
        rest = (slot for slot in self.slots.parameters if slot.name not in names)
        self.watched = [slot for slot in rest if _has_plain_storage(slot.owner[slot.key])]
        self.has_new_ones = any(slot.name not in self.compared for slot in self.watched)

    def _find_small_untrained(self, trained: set[int]) -> set[Name]:
        """Return parameters that no optimizer holds, smallest first, up to SMALL_BYTES: cheap to save every time."""
        held = [(p.name, p.held) for p in self.slots.parameters if p.held is not None and id(p.held) not in trained]
        sizes = sorted(((t.numel() * t.element_size(), name) for name, t in held), key=lambda pair: pair[0])
        totals = itertools.accumulate(size for size, _ in sizes)
        return {name for (_, name), total in zip(sizes, totals, strict=True) if total <= SMALL_BYTES}

    def _copy_new_ones(self) -> dict[Name, Tensor]:
        new = (slot for slot in self.watched if slot.name not in self.compared)
        return {p.name: held.data.to("cpu", copy=True) for p in new if (held := p.owner.get(p.key)) is not None}

    def _find_written(self) -> None:
        """Find written parameters among the watched ones; after backward only those without a gradient are left."""
        found: list[TensorSlot] = []
        for slot, (held, version, address) in (*zip(self.watched, self.marks, strict=False), *self.untrained):
            in_place = held is not None and (held._version != version or held.data_ptr() != address)
            if slot.owner.get(slot.key) is not held or in_place or self._differs_from_copy(slot, held):
                self._begin_saving(slot, held, in_place=in_place)
                found.append(slot)
        self.marks, self.untrained = NO_MARKS, []
        if found:
            self.entries = []  # the next window sorts the slots anew
            self.written.update(slot.name for slot in found)
            self.watched = [slot for slot in self.watched if slot.name not in self.written]

    def _differs_from_copy(self, slot: TensorSlot, held: Tensor | None) -> bool:
        copy = self.copies.get(slot.name)
        return copy is not None and held is not None and not _have_same_bits(copy, held.data.cpu())

    def _begin_saving(self, slot: TensorSlot, held: Tensor | None, *, in_place: bool) -> None:
        """Save a slot from now on; in this window restore it from the host's copy, if there is one."""
        self.saved.append(slot)
        self.before.append(held)
        self.storages.append(_alias_storage(held))
        copy = self.copies.get(slot.name)
        if held is not None and copy is not None:
            snapshot = Snapshot([held.data])
            snapshot.take([copy])
            self.snapshots.append(snapshot)
        elif in_place:
            self.unsaved.append(slot)

    def _name_unsaved(self) -> str:
        return ", ".join(self.slots.find_full_name(slot) for slot in self.unsaved)

    def _find_replaced(self) -> list[Change]:
        pairs = zip(self.saved, self.before, strict=False)
        return [(p, before, now) for p, before in pairs if (now := p.owner.get(p.key)) is not before]

    def _find_moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return tensors whose storage was exchanged, with the old storage."""
        pairs = zip(self.before, self.storages, strict=True)
        held = [(tensor, storage) for tensor, storage in pairs if tensor is not None and storage is not None]
        # Other memory, or resized in place, as observers of quantised training are.
        return [(t, s) for t, s in held if t.data_ptr() != s.data_ptr() or t.numel() != s.numel()]

    def _undo_exchanges(self) -> None:
        if self.is_open:
            for slot, before, _ in self._find_replaced():
                slot.owner[slot.key] = before
            for held, storage in self._find_moved():
                held.data = storage
            self.sparse.restore()
            self.slots.remove_new_entries()

    def _refuse_replaced_weights(self) -> None:
        for slot, before, now in self.replaced:
            has_gradient = any(t is not None and t.grad is not None for t in (before, now))
            if has_gradient and any(before is p for p in self.trained):
                name = self.slots.find_full_name(slot)
                raise ModelError(
                    f"the forward pass replaces the parameter {name}, which an optimizer trains, with a new one",
                    why="the optimizer would keep training the old one, without effect",
                    fix=f"write into it: with torch.no_grad(): self.{slot.key}.copy_(...)",
                )


class SparseTensors:
    """Sparse buffers, such as a graph's adjacency: copied once, and again only after forward has written into them.

    Their number of entries may change, so the host decides: one wait in windows that write one, none in others."""

    def __init__(self) -> None:
        self.slots: list[TensorSlot] = []
        self.saved: dict[Name, tuple[Tensor, int, Tensor]] = {}  # the tensor, its version, and a copy

    def save(self) -> None:
        held = [(slot.name, slot.held) for slot in self.slots]
        for name, tensor in held:
            then = self.saved.get(name)
            if tensor is not None and (then is None or then[0] is not tensor or then[1] != tensor._version):
                self.saved[name] = (tensor, tensor._version, tensor.detach().clone())

    def find_changed(self) -> list[TensorSlot]:
        """Return the slots that were written or replaced since `save`."""
        if not self.slots:
            return []
        saved = ((slot, self.saved.get(slot.name)) for slot in self.slots)
        return [p for p, then in saved if then is not None and (p.held is not then[0] or then[0]._version != then[1])]

    def find_non_finite(self) -> list[Tensor]:
        """Return a flag on the device for each changed tensor: whether it is no longer finite."""
        changed = [slot.held for slot in self.find_changed()]
        return [~is_finite(now).all() for now in changed if now is not None and can_be_non_finite(now)]

    @torch.no_grad()
    def restore(self) -> None:
        for slot in self.find_changed():
            tensor, version, copy = self.saved[slot.name]
            if tensor._version != version:
                tensor.copy_(copy)
                self.saved[slot.name] = (tensor, tensor._version, copy)
            slot.owner[slot.key] = tensor


class Marks(Memory):
    """Versions and addresses of the tensors in slots, to see which were written."""

    def __init__(self, held: Sequence[Tensor | None]) -> None:
        super().__init__(held)
        self.held = held

    def _read(self) -> tuple[list[int], list[int]]:
        return list(map(get_version, self.tensors)), list(map(Tensor.data_ptr, self.tensors))

    def __iter__(self) -> Iterator[Mark]:
        numbers = zip(*self.then, strict=True)
        return ((None, 0, 0) if held is None else (held, *next(numbers)) for held in self.held)


NO_MARKS = Marks(())


def _is_sparse(tensor: Tensor | None) -> bool:
    """True for sparse tensors, and for quantised ones, which `torch.where` does not take either."""
    return tensor is not None and (tensor.layout is not torch.strided or tensor.is_quantized)


def _split_also(also: Also) -> tuple[list[nn.Module], list[Tensor]]:
    is_one = isinstance(also, (nn.Module, Tensor, str)) or not isinstance(also, Iterable)
    given: list[Any] = [also] if is_one else list(cast("Iterable[Any]", also))
    for one in given:
        if not isinstance(one, (nn.Module, Tensor)):
            raise ConfigError(
                f"also= {'is' if is_one else 'contains'} a {type(one).__name__}",
                why="it takes modules and parameters that a bad step must leave unchanged",
                fix="also=[discriminator], or also=[*encoder.parameters()]",
            )
    return [m for m in given if isinstance(m, nn.Module)], [t for t in given if isinstance(t, Tensor)]


def refuse_uninitialised(slots: TensorSlots) -> None:
    slots.refresh()
    for slot in (*slots.parameters, *slots.buffers):
        if isinstance(slot.owner[slot.key], (UninitializedBuffer, UninitializedParameter)):
            raise ModelError(
                f"{slots.find_full_name(slot)} has no shape yet: its module is lazy",
                why="a bad step could not be undone for a parameter that did not exist before it",
                fix="run the model once on a batch before you create the optimizer and the step",
            )


def _is_trained(tensor: Tensor | None) -> bool:
    """True if the tensor has a gradient: an average may require one and never get it."""
    return tensor is not None and tensor.is_leaf and tensor.grad is not None


def _has_plain_storage(tensor: Tensor | None) -> bool:
    """False for tensor subclasses such as quantised weights: only their modules know how they are written."""
    if tensor is None or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_inference():
        return False
    return type(tensor.data) is Tensor


def _alias_storage(tensor: Tensor | None) -> Tensor | None:
    """Return an alias with a separate version counter; None for a sparse tensor, which has no memory to alias."""
    return tensor.data if tensor is not None and tensor.layout is torch.strided else None


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    if not _are_alike(one, other):
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


# --- where modules hold buffers and parameters ---


Owner = dict[str, Any]
Name = tuple[nn.Module, str]


class TensorSlot(NamedTuple):
    """An entry of a module's `_buffers` or `_parameters`: what it holds may be replaced."""

    module: nn.Module
    owner: Owner
    key: str

    @property
    def held(self) -> Tensor | None:
        return self.owner.get(self.key)

    @property
    def name(self) -> Name:
        """Return the slot's name, which stays the same when the tensor is replaced."""
        return self.module, self.key


_get_owner, _get_key = operator.itemgetter(1), operator.itemgetter(2)


def _read_slots(slots: Sequence[TensorSlot]) -> list[Tensor | None]:
    """Return what slots hold, without a loop in Python: three reads per step are a good part of its cost."""
    return list(map(dict.get, map(_get_owner, slots), map(_get_key, slots)))


class TensorSlots:
    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots = list(roots)
        self.modules: list[nn.Module] = []
        self.owners: list[dict[str, Any]] = []  # where these modules hold children, parameters and buffers
        self.children: list[nn.Module | None] = []
        self.sizes: list[int] = []
        self.buffers: list[TensorSlot] = []
        self.parameters: list[TensorSlot] = []

    def refresh(self) -> bool:
        """Find what was registered, removed or exchanged since the last call; return whether anything was."""
        # The same children of the same modules, in the same order: then a walk would find the same modules.
        if self.modules and self._list_children() == self.children and not self.have_grown:
            return False
        modules = walk_modules(self.roots)
        if modules == self.modules and not self.have_grown:
            return False
        self.modules = modules
        self.owners = list(itertools.chain.from_iterable((m._modules, m._parameters, m._buffers) for m in modules))
        self.sizes, self.children = list(map(len, self.owners)), self._list_children()
        self.buffers = [TensorSlot(m, m._buffers, key) for m in modules for key in m._buffers]
        self.parameters = [TensorSlot(m, m._parameters, key) for m in modules for key in m._parameters]
        return True

    @property
    def have_grown(self) -> bool:
        """True if a module has registered something since `refresh`, in its forward pass."""
        return list(map(len, self.owners)) != self.sizes

    def list_entries(self) -> list[Any]:
        """Return all children, parameters and buffers. In one go: every window compares them twice."""
        return list(itertools.chain.from_iterable(map(dict.values, self.owners)))

    def _list_children(self) -> list[nn.Module | None]:
        return list(itertools.chain.from_iterable(map(dict.values, self.owners[::3])))

    def remove_new_entries(self) -> None:
        """Remove the children, parameters and buffers that modules have registered since `refresh`."""
        modules = [module for module in self.modules for _ in range(3)]  # as in `owners`
        for module, owner, size in zip(modules, self.owners, self.sizes, strict=True):
            for key in list(owner)[size:]:  # dicts keep the order of insertion, so new entries are last
                del owner[key]
                module._non_persistent_buffers_set.discard(key)

    def find_full_name(self, slot: TensorSlot) -> str:
        """Return the slot's name as in `named_parameters`, under the root that holds it."""
        for root in self.roots:
            for prefix, module in root.named_modules():
                if module is slot.module:
                    return f"{prefix}.{slot.key}".removeprefix(".").replace("_orig_mod.", "")
        return slot.key


def walk_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return all modules, like `nn.Module.modules` in a third of its time: without nested generators."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = list(roots)
    while stack:
        module = stack.pop()
        if module is not None and module not in found:
            found[module] = None
            stack.extend(module._modules.values())
    return list(found)
