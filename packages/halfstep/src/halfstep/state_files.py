"""State on the disk: a tree of tensors and plain values as safetensors and JSON, with checksums and without pickle.

    one file    the tensors, and the rest as JSON in the metadata: hs.save, and each rank of a sharded save
    a folder    files of tensors, and the rest as JSON with the size and checksum of each file: runs and capsules

JSON knows no tuples, no integer keys and no tensors; these become small tagged objects and come back as they were.
Floats survive exactly: Python writes the shortest text that reads back to the same bits.

A file that is read whole is mapped, so that ranks on one machine share its memory; TensorFile reads parts of one.
distributed/sharded_files.py makes one save of the files of all ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from halfstep.disk import seal
from halfstep.tensor_files import CHUNK_BYTES, write_tensors

LAYOUT_VERSION = 2
"""Version of what hs.save and the checkpoints of runs hold, sharded or not."""
DOCUMENT = "halfstep"
"""Key of the document in a file's metadata."""
MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)
"""Exceptions raised by files that are damaged, or that have the recorded checksums but not the expected structure."""

# --- trees ---

PLAIN = (bool, int, float, str, type(None))
TENSOR, TUPLE, ITEMS, ARRAY = "__tensor__", "__tuple__", "__items__", "__array__"


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into what JSON can hold and the tensors, which the JSON part refers to by name.

    Raise TypeError, which names the entry, if it holds anything else.
    """
    tensors: dict[str, Tensor] = {}

    def visit(node: Any, path: str) -> Any:
        if isinstance(node, Tensor) and (node.layout is not torch.strided or node.is_quantized or node.is_meta):
            raise TypeError(f"{path}, a tensor of layout {node.layout} on {node.device}")
        if isinstance(node, np.ndarray) and node.dtype.kind not in "biufc":
            raise TypeError(f"{path}, an array of dtype {node.dtype}")
        if isinstance(node, (Tensor, np.ndarray)):
            while path in tensors:  # {"a": {"b": tensor}, "a.b": tensor} gives two of them one path
                path += "'"
            tensors[path] = node.detach() if isinstance(node, Tensor) else torch.from_numpy(node.copy())
            return {TENSOR if isinstance(node, Tensor) else ARRAY: path}
        if isinstance(node, dict):
            if all(isinstance(key, str) for key in node):
                return {key: visit(value, f"{path}.{key}") for key, value in node.items()}
            if strange := [key for key in node if not isinstance(key, PLAIN)]:
                raise TypeError(f"the key {strange[0]!r} of {path}")
            return {ITEMS: [[key, visit(value, f"{path}.{key}")] for key, value in node.items()]}
        if isinstance(node, tuple):
            return {TUPLE: [visit(value, f"{path}.{k}") for k, value in enumerate(node)]}
        if isinstance(node, list):
            return [visit(value, f"{path}.{k}") for k, value in enumerate(node)]
        if not isinstance(node, PLAIN):
            raise TypeError(f"{path}, a {type(node).__name__}")
        return node

    return visit(tree, "state"), tensors


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree of which `pack` made the JSON part and the tensors."""
    if isinstance(packed, list):
        return [unpack(value, tensors) for value in packed]
    if not isinstance(packed, dict):
        return packed
    if TENSOR in packed:
        return tensors[packed[TENSOR]]
    if ARRAY in packed:
        return tensors[packed[ARRAY]].numpy()
    if TUPLE in packed:
        return tuple(unpack(value, tensors) for value in packed[TUPLE])
    if ITEMS in packed:
        return {key: unpack(value, tensors) for key, value in packed[ITEMS]}
    return {key: unpack(value, tensors) for key, value in packed.items()}


# --- files ---


def write_file(path: Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors and a sealed document as one file, atomically; return its size and SHA-256."""
    return write_tensors(path, tensors, {DOCUMENT: json.dumps(seal(document))})


def write_files(folder: Path, contents: Mapping[str, Mapping[str, Tensor] | str]) -> dict[str, dict[str, int]]:
    """Write tensors or a text into each file of a folder; return the size and checksum of each."""
    for name, content in contents.items():
        if isinstance(content, str):
            (folder / name).write_text(content, encoding="utf-8")
        else:
            write_tensors(folder / name, content)
    return {name: measure_file(folder / name) for name in sorted(contents)}


def measure_file(path: Path) -> dict[str, int]:
    """Return the size and checksum of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        # In chunks: a checkpoint may be larger than the free memory.
        while piece := file.read(CHUNK_BYTES):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return {"bytes": size, "crc32": checksum}
