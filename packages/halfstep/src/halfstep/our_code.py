"""Which files are halfstep's own: messages name the user's lines instead, or those of a workload's model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent
_application = find_spec("halfstep_train")
PACKAGES = (
    LIBRARY,
    *(Path(folder) for folder in (_application.submodule_search_locations or () if _application else ())),
)
"""The library, and the application where it is installed."""
OURS = tuple(f"{folder}/" for folder in PACKAGES)
MACHINERY = tuple(
    str(room) for folder in PACKAGES for room in folder.iterdir() if room.name not in ("workloads", "models")
)
"""Without workloads and their models."""
