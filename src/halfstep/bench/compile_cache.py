"""Whether a start found its kernels in the compiler's cache, and a cache that is empty on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Found = Literal["", "cold", "warm"]
"""Empty: nothing was compiled."""


class CacheWatch:
    """What torch's compiler found since the watch was made."""

    def __init__(self) -> None:
        self._before = _counts()

    def found(self) -> Found:
        hits, misses = (now - before for now, before in zip(_counts(), self._before, strict=True))
        return "cold" if misses else "warm" if hits else ""


def _counts() -> tuple[int, int]:
    """Graphs found in the cache on disk, and those compiled because they were not, or because they cannot be kept."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


@contextmanager
def empty_cache() -> Iterator[None]:
    """The compiler starts with nothing on disk; what it compiles inside is found by later starts inside."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def forget_in_memory() -> None:
    """As after a restart of the process: only what is on disk is found again."""
    import torch
    from torch._inductor.utils import clear_caches

    torch.compiler.reset()
    clear_caches()
