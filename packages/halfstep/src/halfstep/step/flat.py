"""Treat many tensors as a few flat ones, so that saving, restoring and averaging them takes a handful of kernels.

A skipped step must leave every tensor bit-identical. Multiplying by a flag cannot do that (0 * NaN is NaN, and
x + 0 loses -0.0), so everything here *selects* with `torch.where`. There is no `_foreach_where`, and one `where`
per tensor would be hundreds of launches. Concatenating per dtype, selecting once and copying back is about four.
Of sharded tensors this rank's shard is treated, in place: no rank needs another's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from halfstep.distributed.sharding import get_locals


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill their memory without gaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def is_writable_in_place(tensor: Tensor) -> bool:
    """True if elements have separate memory that may be written: false for expanded or sparse tensors and for those
    made in inference mode."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
        return False
    return all(stride > 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def view_once(tensor: Tensor) -> Tensor:
    """View each element of an expanded tensor once, so that it can be written; return other tensors as they are."""
    if 0 not in tensor.stride() or not tensor.numel():
        return tensor
    sizes = [size if stride else 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def view_flat(tensor: Tensor) -> Tensor:
    """View a dense tensor's memory as one dimension, in physical order (channels_last is not contiguous)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def view_like(piece: Tensor, tensor: Tensor) -> Tensor:
    """View a slice of a gathered copy in the shape of the tensor it came from."""
    if is_dense(tensor):
        return piece.as_strided(tensor.size(), tensor.stride(), piece.storage_offset())
    return piece.view(tensor.shape)


def group_by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype, in order of first appearance."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def view_all_flat(tensors: Iterable[Tensor]) -> list[Tensor]:
    """View tensors as one dimension, except those with gaps in their memory."""
    return [view_flat(tensor) if is_dense(tensor) else tensor for tensor in get_locals(tensors)]


def gather(tensors: Sequence[Tensor]) -> Tensor:
    return _join(view_all_flat(tensors))


def scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    views = view_all_flat(tensors)
    _copy_all(views, flat.split([view.numel() for view in views]), list(map(_is_line, views)))


def _join(views: Sequence[Tensor]) -> Tensor:
    return torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views])


def _copy_all(views: Sequence[Tensor], pieces: Sequence[Tensor], are_lines: Sequence[bool]) -> None:
    if any(are_lines):
        torch._foreach_copy_(list(compress(views, are_lines)), list(compress(pieces, are_lines)))
    for view, piece, is_line in zip(views, pieces, are_lines, strict=True):
        if not is_line:
            view.copy_(piece.view(view.shape))


def _is_line(view: Tensor) -> bool:
    """True if `_foreach_copy_` and views as other dtypes take it: one dimension, no gaps, and neither conjugated nor
    negated lazily."""
    return view.ndim == 1 and view.stride(0) == 1 and not (view.is_conj() or view.is_neg())


class Snapshot:
    """A copy of some tensors, restored where a device flag is set. Each copy uses the memory of the one before it."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # The widest dtype first: in a joined copy each then begins at a multiple of its size.
        kinds = sorted(group_by_kind(view_all_flat(tensors)), key=lambda own: -own[0].element_size())
        joined: dict[torch.device, list[list[Tensor]]] = {}
        self.groups: list[_SavedGroup] = []
        for own in kinds:
            if len(kinds) > 1 and own[0].element_size() % 4 == 0 and all(map(_is_line, own)):
                joined.setdefault(own[0].device, []).append(own)
            else:
                self.groups.append(_SavedGroup([own]))
        self.groups += map(_SavedGroup, joined.values())

    @torch.no_grad()
    def save(self) -> None:
        for group in self.groups:
            group.save()

    @torch.no_grad()
    def take(self, copies: Iterable[Tensor]) -> None:
        """Treat copies of the tensors, made elsewhere, as what was saved."""
        for group, theirs in zip(self.groups, Snapshot(copies).groups, strict=True):
            group.take(theirs.gather())

    def pair_floats(self) -> list[tuple[Tensor, Tensor]]:
        """Return saved and current values that can be non-finite, flat, one pair per device and dtype."""
        return [pair for group in self.groups if group.is_saved for pair in group.pair_floats()]

    def restore_where(self, flag: Tensor) -> None:
        """Restore every tensor's saved bits where `flag` is true; otherwise keep the current ones."""
        for group in self.groups:
            if group.is_saved:  # nothing saved, nothing to put back
                group.restore_where(flag)
                group.is_saved = False

    @torch.no_grad()
    def restore(self) -> None:
        for group in self.groups:
            if group.is_saved:
                group.put_back()
                group.is_saved = False

    def forget(self) -> None:
        """Drop the copy and its memory, which may be that of a CUDA graph."""
        for group in self.groups:
            group.forget()


class _SavedGroup:
    """Tensors of one device that are copied together. Several dtypes are copied as integers of 4 bytes: that takes one
    kernel, not one for each dtype."""

    def __init__(self, kinds: Sequence[Sequence[Tensor]]) -> None:
        self.kinds = kinds  # by dtype
        words = [view.view(torch.int32) for own in kinds for view in own] if len(kinds) > 1 else list(kinds[0])
        self.words: list[Tensor] = words
        self.have_gaps = any(word.ndim != 1 for word in words)
        self.forget()

    def forget(self) -> None:
        self.saved: Tensor | None = None
        self.is_saved = False
        # Looked up when a copy is first compared or restored, and kept as long as its memory:
        self._pieces: tuple[Sequence[Tensor], list[bool]] | None = None
        self._floats: list[tuple[Tensor, Sequence[Tensor]]] = []

    def gather(self, out: Tensor | None = None) -> Tensor:
        return torch.cat([word.reshape(-1) for word in self.words] if self.have_gaps else self.words, out=out)

    def save(self) -> None:
        if self.saved is None:
            self.take(self.gather())
        else:
            self.gather(out=self.saved)
        self.is_saved = True

    def take(self, flat: Tensor) -> None:
        self.forget()
        self.saved, self.is_saved = flat.view(self.words[0].dtype).to(self.words[0].device), True

    def pair_floats(self) -> list[tuple[Tensor, Tensor]]:
        assert self.saved is not None
        if not self._floats:
            sizes = [
                sum(map(Tensor.numel, own)) * own[0].element_size() // self.saved.element_size() for own in self.kinds
            ]
            for piece, own in zip(self.saved.split(sizes), self.kinds, strict=True):
                if can_be_non_finite(own[0]):
                    self._floats.append((piece.view(own[0].dtype), own))
        return [(saved, _join(own)) for saved, own in self._floats]

    def restore_where(self, flag: Tensor) -> None:
        assert self.saved is not None
        if self.saved.is_cuda:
            self.select(flag)
        elif bool(flag):  # a CPU flag: no wait
            self.put_back()

    def select(self, flag: Tensor) -> None:
        assert self.saved is not None
        torch.where(flag, self.saved, self.gather(), out=self.saved)
        _copy_all(self.words, *self._split())

    def put_back(self) -> None:
        """Write the saved values. On the CPU only those that differ: a buffer may be a read-only mapped file."""
        assert self.saved is not None
        pieces, are_lines = self._split()
        if self.saved.is_cuda:
            return _copy_all(self.words, pieces, are_lines)
        for word, piece, is_line in zip(self.words, pieces, are_lines, strict=True):
            now = word if is_line else _join([word])
            if not torch.equal(now.view(torch.uint8), piece.view(torch.uint8)):
                word.copy_(piece.view(word.shape))
        return None

    def _split(self) -> tuple[Sequence[Tensor], list[bool]]:
        """Return the saved values of each tensor, and whether it is a line."""
        assert self.saved is not None
        if self._pieces is None:
            sizes = list(map(Tensor.numel, self.words))
            self._pieces = self.saved.split(sizes), list(map(_is_line, self.words))
        return self._pieces


class Memory:
    """Addresses and sizes of tensors, to see whether one got other memory or was resized in place.

    Compared as lists: a loop would dominate a small model's step.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self.tensors = [t for t in tensors if t is not None]
        self.then = self._read()

    def _read(self) -> tuple[list[int], list[int]]:
        return list(map(Tensor.data_ptr, self.tensors)), list(map(Tensor.numel, self.tensors))

    def has_changed(self) -> bool:
        return self._read() != self.then


def became_non_finite(before: Tensor, now: Tensor) -> Tensor:
    """Return whether a number that was finite no longer is. A mask that holds -inf on purpose does not count."""
    lost = _subtract_itself(now).nan_to_num_(nan=1.0)  # 1 where a number is not finite, else 0
    is_alike = (before.shape, before.layout, before.is_complex()) == (now.shape, torch.strided, now.is_complex())
    # Nothing is greater than NaN, so what was not finite before does not count: fewer kernels than two masks.
    return (lost > _subtract_itself(before) if is_alike else lost != 0).any()


def can_be_non_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_finite(values: Tensor) -> Tensor:
    """Return torch.isfinite(values) in half as many kernels."""
    return _subtract_itself(values) == 0


def _subtract_itself(values: Tensor) -> Tensor:
    """Return x - x, which is 0 for a finite x, else NaN."""
    if values.layout is not torch.strided:
        values = values._values() if values.layout is torch.sparse_coo else values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.float() if values.element_size() == 1 else values  # fp8 has no arithmetic
    return values - values


# --- looks at many tensors without a Python loop ---

get_dtype, get_version = operator.attrgetter("dtype"), operator.attrgetter("_version")
get_gradient, get_is_sparse = operator.attrgetter("grad"), operator.attrgetter("is_sparse")


def are_same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
