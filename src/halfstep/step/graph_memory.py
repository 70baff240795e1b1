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

_said_before: dict[str, str] = {}
"""The user's settings, by what we said when we put them back: the allocator has no word for "as if unsaid"."""


@contextlib.contextmanager
def growing_segments() -> Iterator[None]:
    """What is taken within lies in segments that grow; the allocator's settings are put back afterwards.

    Who has told the allocator whether it may, by PYTORCH_ALLOC_CONF or in the program, is not overruled.
    """
    settings = _settings()
    if settings is None or settings.get(SETTING):
        yield
        return
    found = str(settings.get(SAID, ""))
    said = _said_before.get(found, found)
    if SETTING in said:
        yield
        return
    _tell(said, is_on=True)
    try:
        yield
    finally:
        _said_before[_tell(said, is_on=False)] = said


def _settings() -> dict[str, object] | None:
    """The allocator's; None where it has no such segments."""
    if not sys.platform.startswith("linux") or torch.cuda.get_allocator_backend() != "native":
        return None
    found: dict[str, object] | None = torch.cuda.memory._snapshot().get("allocator_settings")
    return found


def _tell(said: str, *, is_on: bool) -> str:
    """All that was said before too: a setting that is not mentioned may fall back to its default."""
    words = ",".join(filter(None, [said, f"{SETTING}:{is_on}"]))
    torch._C._accelerator_setAllocatorSettings(words)
    return words
