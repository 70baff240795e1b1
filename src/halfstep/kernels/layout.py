"""In which order a 4-dimensional tensor lies in memory."""

from __future__ import annotations

from torch import Tensor


def row_stride(x: Tensor) -> int:
    """Values between neighbouring pixels of a channels_last map, or of a slice of such a map's channels."""
    n, c, height, width = x.shape
    stride = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0) if n > 1 else c
    dense = (height * width * stride, 1, width * stride, stride)
    is_rows = all(size == 1 or have == want for size, have, want in zip(x.shape, x.stride(), dense, strict=True))
    assert is_rows, f"not rows of channels: shape {tuple(x.shape)}, strides {x.stride()}"
    return stride
