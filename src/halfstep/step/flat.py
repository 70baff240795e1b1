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
    _spread(flat, view_all_flat(tensors))


def _join(views: Sequence[Tensor]) -> Tensor:
    return torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views])


def _spread(flat: Tensor, views: Sequence[Tensor]) -> None:
    pieces = flat.split([view.numel() for view in views])
    are_lines = [_is_line(view) for view in views]
    if any(are_lines):
        torch._foreach_copy_(list(compress(views, are_lines)), list(compress(pieces, are_lines)))
    for view, piece, is_line in zip(views, pieces, are_lines, strict=True):
        if not is_line:
            view.copy_(piece.view(view.shape))


def _is_line(view: Tensor) -> bool:
    """True if `_foreach_copy_` takes the view: one dimension, neither conjugated nor negated lazily."""
    return view.ndim == 1 and not (view.is_conj() or view.is_neg())


class Snapshot:
    """A copy of some tensors, restored where a device flag is set."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.groups = group_by_kind(view_all_flat(tensors))
        self.saved: list[Tensor] = []

    def save(self) -> None:
        self.saved = [_join(group) for group in self.groups]

    def pair_floats(self) -> list[tuple[Tensor, Tensor]]:
        """Return saved and current values that can be non-finite, flat, one pair per device and dtype."""
        pairs = zip(self.groups, self.saved, strict=True)
        return [(saved, _join(group)) for group, saved in pairs if can_be_non_finite(saved)]

    def restore_where(self, flag: Tensor) -> None:
        """Restore every tensor's saved bits where `flag` is true; otherwise keep the current ones."""
        for group, saved in zip(self.groups, self.saved, strict=False):  # nothing saved, nothing to put back
            if saved.is_cuda:
                _spread(torch.where(flag, saved, _join(group)), group)
            elif bool(flag):  # a CPU flag: no wait
                _put_back(saved, group)
        self.saved = []

    @torch.no_grad()
    def restore(self) -> None:
        for group, saved in zip(self.groups, self.saved, strict=False):  # nothing saved, nothing to put back
            _put_back(saved, group)
        self.saved = []


def _put_back(saved: Tensor, views: Sequence[Tensor]) -> None:
    """Write what differs. On the CPU nothing else is touched: a buffer may be a read-only memory-mapped file."""
    if saved.is_cuda:
        return _spread(saved, views)
    for view, piece in zip(views, saved.split([view.numel() for view in views]), strict=True):
        if not (_is_line(view) and torch.equal(view.view(torch.uint8), piece.view(torch.uint8))):
            view.copy_(piece.view(view.shape))
    return None


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
