"""The memory a captured graph keeps for its replays, without gaps.

torch's allocator takes memory from the driver in pieces of fixed size. Outside of a graph a gap in one is used by the
next step, or given back; a graph's pieces are its own for as long as it lives. In an expandable segment, one range of
addresses that grows at its end, freed neighbours are joined and there is hardly a gap.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

SETTING = "expandable_segments"
SAID = "PYTORCH_CUDA_ALLOC_CONF"
"""Under which a snapshot of the allocator has the settings it was last given, whichever variable or call gave them."""


@contextlib.contextmanager
def growing_segments() -> Iterator[None]:
    """What is taken within lies in segments that grow; the allocator's settings are put back afterwards."""
    settings = _settings()
    if settings is None or settings.get(SETTING):
        yield
        return
    said = str(settings.get(SAID, ""))
    _tell(said, is_on=True)
    try:
        yield
    finally:
        _tell(said, is_on=False)


def _settings() -> dict[str, object] | None:
    """The allocator's; None where it has no such segments."""
    if not sys.platform.startswith("linux") or torch.cuda.get_allocator_backend() != "native":
        return None
    found: dict[str, object] | None = torch.cuda.memory._snapshot().get("allocator_settings")
    return found


def _tell(said: str, *, is_on: bool) -> None:
    """All that was said before too: a setting that is not mentioned may fall back to its default."""
    others = [word for word in said.split(",") if word and not word.strip().startswith(SETTING)]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{SETTING}:{is_on}"]))
