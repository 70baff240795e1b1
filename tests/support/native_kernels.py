"""torch's own half-precision CPU kernels as a reference, and how far apart two half-precision results are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """torch's own kernels, which sum in fp32.

    oneDNN's fp16 kernels sum in fp16 on an ARM CPU, and torch switches oneDNN off for the rest of the process once a
    bf16 product of its fails there: what "native" means would depend on which test ran first.
    """
    # torch.backends.mkldnn.flags would touch TF32 as well, and warn of it.
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def share_off(ours: Tensor, native: Tensor) -> float:
    """Of elements that are not bit-equal."""
    return (ours != native).double().mean().item()


def ulps_apart(ours: Tensor, native: Tensor, spacing: float, *, terms: float) -> float:
    """Largest distance in gaps of the format; what cancelled to near zero carries the error of its terms."""
    gap = spacing * 2.0 ** native.double().abs().clamp(min=terms).log2().floor()
    return ((ours.double() - native.double()).abs() / gap).max().item()
