"""Measure magnitudes on the device: the largest value and a histogram of exponents for each row, sent without a wait.

A row is one kind of numbers of one module. The largest value is that of all elements. The histogram is that of at most
`SAMPLE` evenly spaced elements of each tensor: one scatter counts those of many tensors, and one copy sends everything.
The exponent field of fp32 is the bin, so zeros and magnitudes below 2^-126 are in bin 0, and inf and NaN in bin 255.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.step.facts import start_copy_to_host
from halfstep.step.flat import get_dtype, is_dense, view_flat
from halfstep.step.ranks import Ranks

SAMPLE = 8192
BINS = 256
BIAS = 127
"""Bin b holds the magnitudes from 2^(b - 127) to twice that."""
CHUNK = 256  # samples that are counted at once: their int64 indices take 16 MiB


class RowMeasures:
    """The measurements of one observation, as tensors on the device."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device
        self._samples: list[tuple[int, Tensor]] = []
        self._values: list[tuple[int, Tensor]] = []
        self._num_calls: dict[int, int] = {}

    @torch.no_grad()
    def add(self, row: int, tensor: Tensor) -> None:
        """Measure one tensor; a row that gets several holds their largest value, and all samples of the first few."""
        if not tensor.numel():
            return
        tensor = make_plain(tensor)
        # The maximum norm is one kernel and takes no memory, unlike abs().
        self.add_value(row, torch.linalg.vector_norm(tensor, float("inf")))
        self._num_calls[row] = self._num_calls.get(row, 0) + 1
        if self._num_calls[row] <= 8:  # a cell of a recurrent network runs hundreds of times
            self.add_sample(row, take_sample(tensor))

    def add_sample(self, row: int, sample: Tensor) -> None:
        self._samples.append((row, sample.float()))

    def add_value(self, row: int, value: Tensor) -> None:
        """Add a number that is largest for the row, or its only one."""
        self._values.append((row, value))

    @torch.no_grad()
    def pack(self, scalars: Sequence[Tensor | float]) -> Tensor:
        """Return counts, largest values and `scalars` as one int32 tensor, for `unpack`."""
        with _allow_atomics():
            counts = torch.zeros(self.num_rows * BINS, dtype=torch.int32, device=self.device)
            for first in range(0, len(self._samples), CHUNK):
                self._count(counts, self._samples[first : first + CHUNK])
            largest = torch.zeros(self.num_rows, device=self.device)
            for dtype in {value.dtype for _, value in self._values}:
                own = [(row, value) for row, value in self._values if value.dtype == dtype]
                rows = upload([row for row, _ in own], self.device)
                values = torch.stack([value for _, value in own]).float()
                largest.scatter_reduce_(0, rows, values, "amax")
        known = [s.detach().float().reshape(()) if isinstance(s, Tensor) else None for s in scalars]
        given = upload([0.0 if isinstance(s, Tensor) else float(s) for s in scalars], self.device, torch.float32)
        numbers = torch.stack([own if own is not None else given[k] for k, own in enumerate(known)])
        return torch.cat([counts, largest.view(torch.int32), numbers.view(torch.int32)])

    def _count(self, counts: Tensor, samples: Sequence[tuple[int, Tensor]]) -> None:
        flat = torch.cat([sample for _, sample in samples])
        rows = upload([row * BINS for row, _ in samples], self.device)
        lengths = upload([sample.numel() for _, sample in samples], self.device)
        index = torch.repeat_interleave(rows, lengths, output_size=flat.numel())  # the size given: no wait
        index += (flat.view(torch.int32) >> 23).bitwise_and_(BINS - 1)
        if flat.is_cuda:  # where bincount waits for the largest index
            counts.scatter_add_(0, index, torch.ones((), dtype=torch.int32, device=flat.device).expand(len(index)))
        else:
            counts += torch.bincount(index, minlength=len(counts)).int()


class SentMeasures:
    """Measurements on their way to the host; with several ranks those of all, combined."""

    @torch.no_grad()
    def __init__(self, packed: Tensor, num_rows: int, ranks: Ranks | None) -> None:
        self.num_rows = num_rows
        if ranks is not None and ranks.size > 1:
            packed = combine_ranks(packed, num_rows, ranks)
        self._host = start_copy_to_host(packed)
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[Any, Any, list[float]]:
        """Return counts by row, largest values by row, and the scalars; waits only for the copy."""
        if self._event is not None:
            self._event.synchronize()
        cut = self.num_rows * BINS
        counts = self._host[:cut].view(self.num_rows, BINS).numpy()
        numbers = self._host[cut:].view(torch.float32)
        return counts, numbers[: self.num_rows].numpy(), numbers[self.num_rows :].tolist()


def combine_ranks(packed: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    """Sum the counts and take the largest values over all ranks, by one collective."""
    gathered = [torch.empty_like(packed) for _ in range(ranks.size)]
    torch.distributed.all_gather(gathered, packed)
    together, cut = torch.stack(gathered), num_rows * BINS
    numbers = together[:, cut:].view(torch.float32).amax(0)
    return torch.cat([together[:, :cut].sum(0, dtype=torch.int32), numbers.view(torch.int32)])


def make_plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as real ones that torch has arithmetic for; of a shard those of this rank."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor  # fp8


def take_sample(tensor: Tensor) -> Tensor:
    """Return at most about SAMPLE elements at equal distances. An odd distance meets all columns of a matrix."""
    flat = view_flat(tensor) if is_dense(tensor) else tensor.reshape(-1)
    return flat[:: flat.numel() // SAMPLE | 1]


def measure_largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor, in few kernels."""
    found: list[Tensor] = [tensors[0]] * len(tensors)
    for dtype in set(map(get_dtype, tensors)):
        places = [k for k, tensor in enumerate(tensors) if tensor.dtype == dtype]
        norms = torch._foreach_norm([tensors[k] for k in places], float("inf"))
        for k, norm in zip(places, norms, strict=True):
            found[k] = norm
    return found


def upload(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers to the device without a wait: from pageable memory the host would wait for all queued work."""
    host = torch.tensor(numbers, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@contextlib.contextmanager
def _allow_atomics() -> Iterator[None]:
    """Allow atomic additions under `train.deterministic`: sums of integers and maxima do not depend on the order."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warned)
