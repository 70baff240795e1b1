"""Measurements cached on disk: one small JSON file per device, driver and torch version."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfstep.disk import parse_json, write_atomically
from halfstep.errors import CheckpointError
from halfstep.hardware.device_facts import Hardware, Measurement

VERSION = 4
"""Increased when the measurements or their notes change: older files are then ignored."""


def make_cache_key(hardware: Hardware) -> str:
    """Return the file name: the device kind and a hash of everything a measurement depends on."""
    # A new driver or torch brings other kernels, and two cards of one model may differ in cooling and power limit.
    identity = (VERSION, hardware.kind, hardware.name, hardware.uuid, hardware.driver, hardware.torch_version)
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return f"{hardware.kind}-{digest}.json"


def measure_once(
    hardware: Hardware, directory: Path, measure: Callable[[Hardware], Hardware], *, fresh: bool = False
) -> Hardware:
    """Return the stored measurement of this device, or measure and store it; `fresh` always measures."""
    path = directory / make_cache_key(hardware)
    # A damaged file counts as none.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        if not fresh:
            stored = read_json(path)
            # With the current free memory, device index and table facts.
            notes = tuple(dict.fromkeys((*hardware.notes, *stored["notes"])))
            speeds = {"bandwidth_gb_s": stored["bandwidth_gb_s"]}
            speeds["measurements"] = tuple(Measurement(**m) for m in stored["measurements"])
            return dataclasses.replace(hardware, source="measured", notes=notes, **speeds)
    result = measure(hardware)
    # A device that others use was not measured: store nothing, so that the next call tries again.
    problem = write_json(path, result.to_dict()) if result.source == "measured" else ""
    return dataclasses.replace(result, notes=(*result.notes, problem)) if problem else result


def read_json(path: Path) -> Any:
    return parse_json(path.read_text())


def write_json(path: Path, values: Mapping[str, Any]) -> str:
    """Write a cache file; return a note instead of raising if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, indent=1))
    except (OSError, CheckpointError) as error:
        return f"the measurement could not be stored under {path.parent} ({getattr(error, 'strerror', '') or error})"
    return ""
