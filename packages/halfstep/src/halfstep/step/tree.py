"""Nested state as one safetensors file and one JSON file: no pickle, so a checkpoint can never run code.

JSON knows no tuples, no integer keys and no tensors; these become small tagged objects and come back as they were.
Floats survive exactly: Python writes the shortest text that reads back to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TENSOR, TUPLE, ITEMS, ARRAY = "__tensor__", "__tuple__", "__items__", "__array__"


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into what JSON can hold and the tensors, which the JSON part refers to by name."""
    tensors: dict[str, Tensor] = {}

    def visit(node: Any, path: str) -> Any:
        if isinstance(node, (Tensor, np.ndarray)):
            while path in tensors:  # {"a": {"b": tensor}, "a.b": tensor} gives two of them one path
                path += "'"
            tensors[path] = node.detach() if isinstance(node, Tensor) else torch.from_numpy(node.copy())
            return {TENSOR if isinstance(node, Tensor) else ARRAY: path}
        if isinstance(node, dict):
            if all(isinstance(key, str) for key in node):
                return {key: visit(value, f"{path}.{key}") for key, value in node.items()}
            return {ITEMS: [[key, visit(value, f"{path}.{key}")] for key, value in node.items()]}
        if isinstance(node, tuple):
            return {TUPLE: [visit(value, f"{path}.{k}") for k, value in enumerate(node)]}
        if isinstance(node, list):
            return [visit(value, f"{path}.{k}") for k, value in enumerate(node)]
        return node

    return visit(tree, "state"), tensors


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
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
