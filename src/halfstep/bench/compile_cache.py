"""Whether a start found its kernels in the compilers' caches, and caches that are empty on purpose.

Two compilers are looked at: torch's, and Triton where our own kernels go to it directly. The kernels that torch's
compiler writes go to Triton as well; they are counted with the graph they belong to.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from halfstep.kernels.fast_forms import has_triton

Found = Literal["", "cold", "warm"]
"""Empty: nothing was compiled."""

OURS = "halfstep."
_our_kernels: Counter[str] = Counter()
"""Found by Triton on disk (`hit`), and compiled (`miss`), in this process."""


class CacheWatch:
    """What the compilers found since the watch was made."""

    def __init__(self) -> None:
        _count_our_kernels()
        self._before = _counts()

    def found(self) -> Found:
        hits, misses = (now - before for now, before in zip(_counts(), self._before, strict=True))
        return "cold" if misses else "warm" if hits else ""


def _counts() -> tuple[int, int]:
    """Those found in the caches on disk, and those compiled because they were not, or because they cannot be kept."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    compiled = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return inductor["fxgraph_cache_hit"] + _our_kernels["hit"], compiled + _our_kernels["miss"]


@functools.cache
def _count_our_kernels() -> None:
    """From now on, whoever else listens to Triton."""
    if not has_triton():
        return
    from triton import knobs

    others = knobs.compilation.listener

    def count(**told: Any) -> None:
        kernel = getattr(told["src"], "fn", None)
        if (getattr(kernel, "module", None) or "").startswith(OURS):
            _our_kernels["hit" if told["cache_hit"] else "miss"] += 1
        if others is not None:
            others(**told)

    knobs.compilation.listener = count


@contextmanager
def empty_cache() -> Iterator[None]:
    """Compilers start with nothing on disk; what they compile inside is found by later starts inside."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():  # Triton's folder too
        forget_our_kernels()
        yield


def forget_in_memory() -> None:
    """As after a restart of the process: only what is on disk is found again."""
    from torch._inductor.utils import clear_caches

    from halfstep.tune.compiler_threads import forget_compiled

    forget_compiled()
    clear_caches()
    forget_our_kernels()


def forget_our_kernels() -> None:
    """Those of Triton that this process has loaded: the next call looks for them on disk."""
    if "triton" not in sys.modules:
        return
    import torch
    from triton.runtime.jit import JITFunction

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # Triton 3.9 takes them off the device
    ours = [module for name, module in list(sys.modules.items()) if name.startswith(OURS)]
    for kernel in (value for module in ours for value in vars(module).values() if isinstance(value, JITFunction)):
        kernel.device_caches.clear()
