"""Backend flags: what fp32 matmuls, convolutions and RNNs really compute in.

torch stores this twice. The newer tree, `torch.backends.*.fp32_precision`, has a leaf per backend and operation; a leaf
set to "none" inherits from its parent (cuda, mkldnn), and that one from the root. The older switches
(`set_float32_matmul_precision`, `cudnn.allow_tf32`) exist in addition, and torch refuses to read them once the two
disagree. Inductor reads them, so compiling in an inconsistent state fails. We therefore set every leaf *and* both old
switches consistently, and restore all of them. Leaves are read without inheritance: restoring the resolved value
instead would pin a leaf that only followed its parent.

These flags belong to the whole process, not to a thread.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from itertools import starmap
from typing import Literal, NamedTuple

import torch

Fp32Mode = Literal["ieee", "tf32"]

PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
AGREEING_LEAVES = {
    ("cuda", "matmul"): ("ieee", "none"),
    ("mkldnn", "matmul"): ("ieee", "none"),
    ("cuda", "conv"): ("tf32",),
    ("cuda", "rnn"): ("tf32",),
}
"""Leaves under which torch will read any matmul switch, and cudnn's unless it is off; torch's defaults are among
them."""
LEAVES = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn"))
BACKENDS, OPERATIONS = zip(*LEAVES, strict=True)  # for `map`: every step reads and writes all leaves

_read = torch._C._get_fp32_precision_getter
_write = torch._C._set_fp32_precision_setter


class BackendFlags(NamedTuple):
    """The raw state: leaves without what they inherit, and the two old switches."""

    leaves: tuple[str, ...]
    matmul_precision: str  # of `set_float32_matmul_precision`: highest, high or medium
    cudnn_allow_tf32: bool


WANTED: dict[Fp32Mode, BackendFlags] = {
    "ieee": BackendFlags(leaves=("ieee",) * len(LEAVES), matmul_precision="highest", cudnn_allow_tf32=False),
    "tf32": BackendFlags(leaves=("tf32",) * len(LEAVES), matmul_precision="high", cudnn_allow_tf32=True),
}


def has_matmul_switch(mode: Fp32Mode) -> bool:
    """True if the old switch of fp32 matmuls is set for a mode, and their leaf on CUDA inherits nothing."""
    try:
        now = torch._C._get_float32_matmul_precision()
    except RuntimeError:  # torch's old and new flags disagree
        return False
    return bool(now == WANTED[mode].matmul_precision and _read("cuda", "all") == "none")


class MatmulLeaf:
    """A context that sets the leaf of fp32 matmuls on CUDA alone, which torch's compiler guards since 2.15. It is right
    where `has_matmul_switch` is true, and takes a microsecond where all flags take a small model's step."""

    def __init__(self, mode: Fp32Mode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.before = _read("cuda", "matmul")
        if self.before != self.mode:
            _write("cuda", "matmul", self.mode)

    def __exit__(self, *error: object) -> None:
        if self.before != self.mode:
            _write("cuda", "matmul", self.before)


class Fp32Context:
    """A context that runs every fp32 matmul, convolution and RNN in one mode; all flags are restored on exit.

    A class: every step enters one, and a generator takes twice the time."""

    def __init__(self, mode: Fp32Mode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.before = read_flags()
        try:
            write_flags(WANTED[self.mode])
        except BaseException:
            write_flags(self.before)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            write_flags(self.before)
        except BaseException:  # Ctrl-C in the middle of it
            write_flags(self.before)
            raise


def set_fp32_mode(mode: Fp32Mode) -> Fp32Context:
    return Fp32Context(mode)


def read_effective_leaves() -> dict[tuple[str, str], str]:
    """Return what each operation computes in right now, inherited values included."""
    return dict(zip(LEAVES, map(_read, BACKENDS, OPERATIONS), strict=True))


def read_flags() -> BackendFlags:
    """Read the raw flags. Parents and leaves are unset temporarily, because they hide the values below them."""
    changed: list[tuple[str, str, str]] = []
    try:
        for parent in PARENTS:  # from the root down: each is read once those above it are unset
            if (value := _read(*parent)) != "none":
                changed.append((*parent, value))
                _write(*parent, "none")
        leaves = tuple(map(_read, BACKENDS, OPERATIONS))
        for leaf, value in zip(LEAVES, leaves, strict=True):
            if leaf in AGREEING_LEAVES and value not in AGREEING_LEAVES[leaf]:
                changed.append((*leaf, value))
                _write(*leaf, AGREEING_LEAVES[leaf][0])
        _use_up_deprecation_notice()
        old = _read_old_switches()
    finally:
        deque(starmap(_write, changed), maxlen=0)  # in C, where Ctrl-C does not come in between
    return BackendFlags(leaves=leaves, matmul_precision=old[0], cudnn_allow_tf32=old[1])


def write_flags(flags: BackendFlags) -> None:
    """Set the old switches first, since they overwrite leaves, then the leaves."""
    torch._C._set_float32_matmul_precision(flags.matmul_precision)
    torch._C._set_cudnn_allow_tf32(flags.cudnn_allow_tf32)
    deque(map(_write, BACKENDS, OPERATIONS, flags.leaves), maxlen=0)


@functools.cache
def _use_up_deprecation_notice() -> None:
    """Trigger the deprecation warning of the old switches once, silenced; they must agree with the leaves (see above).

    Done once per process: catching warnings on every step would reset Python's record of warnings already shown.
    """
    leaves = tuple(map(_read, BACKENDS, OPERATIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch._C._set_float32_matmul_precision(_read_old_switches()[0])
    deque(map(_write, BACKENDS, OPERATIONS, leaves), maxlen=0)  # the switch has overwritten some


def _read_old_switches() -> tuple[str, bool]:
    """Read both old switches, with the leaves at AGREEING, where torch only raises if cudnn's switch is off."""
    try:
        cudnn_allow_tf32 = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        cudnn_allow_tf32 = False
    return torch._C._get_float32_matmul_precision(), cudnn_allow_tf32
