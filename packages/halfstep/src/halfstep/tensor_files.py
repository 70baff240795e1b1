"""Safetensors files, written and read tensor by tensor: at most one is copied to host memory at a time.

safetensors' own functions were not used: its writer copies all tensors of a file before it writes the first, and keeps
Python from other threads meanwhile; its reader maps the file, whose pages then count as memory of the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.disk import open_atomic_file, parse_json
from halfstep.errors import CheckpointError

CHUNK_BYTES = 1 << 22
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.complex64: "C64",
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
"""Names of dtypes in safetensors files, in the order in which safetensors itself sorts them."""
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
Recipe = Callable[[Mapping[str, Tensor]], Tensor]
"""Computes a tensor from a few of others by name: renamed, transposed, joined, converted."""


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read or computed each time they are looked up."""

    def __init__(self, described: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        """Take all tensors on the meta device, and a function that returns one of them by name."""
        self.described, self._read = described, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.described  # that of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


def describe(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors of the same dtypes and shapes on the meta device, without reading any."""
    if isinstance(tensors, LazyTensors):
        return tensors.described
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}


def describe_entries(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return tensors on the meta device with the dtypes and shapes that a file's header or a manifest states."""
    return {
        n: torch.empty(entry["shape"], dtype=BY_NAME[entry["dtype"]], device="meta") for n, entry in entries.items()
    }


def convert(tensors: Mapping[str, Tensor], recipes: Mapping[str, Recipe]) -> LazyTensors:
    """Return tensors by new names, each computed by its recipe when it is looked up.

    Recipes run on the meta device first, which tells the shapes, so that a file's header can be written before its
    tensors are read.
    """
    described = {name: recipe(describe(tensors)) for name, recipe in recipes.items()}
    return LazyTensors(described, lambda name: recipes[name](tensors))


def take(tensors: Mapping[str, Tensor], prefix: str = "", dtype: torch.dtype | None = None) -> LazyTensors:
    """Return the tensors whose names begin with `prefix`, without it; floating-point ones in `dtype`."""

    def change(name: str, source: Mapping[str, Tensor]) -> Tensor:
        tensor = source[name]
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    names = [name for name in tensors if name.startswith(prefix)]
    return convert(tensors, {name.removeprefix(prefix): partial(change, name) for name in names})


# --- files ---


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write a file atomically, with the bytes that safetensors' save_file writes; return its size and SHA-256."""
    head, names = make_header(describe(tensors), metadata or {})
    digest, size = hashlib.sha256(head), len(head)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic_file(path) as hidden, hidden.open("wb") as file:
        file.write(head)
        for name in names:
            tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            whole = view_bytes(tensor) if tensor.numel() else memoryview(b"")
            for start in range(0, len(whole), CHUNK_BYTES):
                digest.update(chunk := whole[start : start + CHUNK_BYTES])
                size += file.write(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def make_header(described: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the head of a safetensors file, and the names of the tensors in the order in which they follow."""
    refuse_unknown_dtypes(described)
    order = list(DTYPES)
    names = sorted(described, key=lambda name: (-order.index(described[name].dtype), name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = described[name].dtype, list(described[name].shape)
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def refuse_unknown_dtypes(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"safetensors cannot store {name}, which is {tensor.dtype}",
                why="its only complex format is complex64" if tensor.is_complex() else "the format has no such dtype",
                fix="convert it to another dtype",
            )


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, which stays alive as long as the result."""
    flat = tensor.detach().reshape(-1)
    if flat.nbytes and not flat.data_ptr():  # a subclass that wraps other tensors: reading at 0 would end the process
        raise TypeError(f"a {type(tensor).__name__}, which has no storage")
    # Not by .numpy(): torch refuses to resize a storage from then on, and modules resize their buffers.
    memory: Any = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    memory.owner = flat
    return memoryview(memory).cast("B")


class TensorFile(LazyTensors):
    """A safetensors file, whose tensors are read when they are looked up."""

    def __init__(self, path: Path) -> None:
        """Read the header; raise OSError, ValueError, LookupError or TypeError if the file is damaged."""
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(f"{path.name} is not a safetensors file")
            entries = parse_json(file.read(length))
        self.metadata: dict[str, str] = entries.pop("__metadata__", {})
        self.described = describe_entries(entries)
        self._starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """Return a tensor, or `length` entries of its dimension `dim` from `start` on."""
        whole = self.described[name]
        if dim and length is not None:  # its bytes are scattered
            return self.read(name).narrow(dim, start, length)
        cut = whole if length is None else whole.narrow(dim, start, length)
        found = torch.empty(cut.shape, dtype=cut.dtype)
        if not found.numel():
            return found
        with self._path.open("rb") as file:
            file.seek(self._starts[name] + cut.storage_offset() * cut.dtype.itemsize)
            if file.readinto(view_bytes(found)) != found.nbytes:
                raise ValueError(f"{self._path.name} ends within {name}")
        return found
