"""Frozen modules of a run: place them as planned, identify them by checksum, store those that came from no file.

A checkpoint holds the checksum and file of each frozen module, not its weights: `resume`, `evaluate` and `predict` load
the file and refuse one with another checksum. A module that the run made itself (random, for a demo) is stored once, in
RUN/frozen/NAME.safetensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import CheckpointError, HalfstepError
from halfstep.precision.apply import apply_frozen_
from halfstep.precision.plan import Plan
from halfstep.precision.swapped import find_original_class
from halfstep.tensor_files import view_bytes, write_tensors
from halfstep_train.tune.channels_last import LayoutWish, to_channels_last_, wants_channels_last
from halfstep_train.workloads.base.workload import FrozenPart, Workload

Parts = Mapping[str, FrozenPart]
Stored = Mapping[str, Mapping[str, str]]  # checksum and source by name, as a checkpoint holds them


def get_modules(parts: Parts) -> dict[str, nn.Module]:
    return {name: part.module for name, part in parts.items()}


def place_frozen_(layout: LayoutWish, workload: str, parts: Parts, plan: Plan) -> None:
    """Move frozen modules to the run's device, storage, compute format and layout, in place: forward refers to them."""
    for part in parts.values():
        part.module.to(torch.device(plan.device))
    apply_frozen_(plan, get_modules(parts))
    for part in parts.values():
        if wants_channels_last(layout, workload, plan, part.module):
            to_channels_last_(part.module)


# --- identity ---


def add_checksums(workload: Workload) -> Workload:
    """Return the workload with checksums of its frozen modules, taken before casting changes them."""
    parts = {
        name: dataclasses.replace(part, checksum=compute_checksum(part.module))
        for name, part in workload.frozen.items()
    }
    return dataclasses.replace(workload, frozen=parts) if parts else workload


def compute_checksum(module: nn.Module) -> str:
    """Return a checksum of the names, shapes, formats and bytes in a module's state_dict."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {tuple(plain.shape)} {plain.dtype}\n".encode())
        # Bytes, not values: NaN differs from itself, and -0.0 equals 0.0.
        found.update(view_bytes(plain))
    return found.hexdigest()


def list_identities(parts: Parts) -> dict[str, dict[str, str]]:
    return {name: {"checksum": part.checksum, "source": part.source} for name, part in parts.items()}


def match_stored(parts: Parts, stored: Stored, folder: Path) -> dict[str, FrozenPart]:
    """Load modules that the run made from its folder, and check that all others are the ones it was trained with."""
    if parts.keys() != stored.keys():
        raise CheckpointError(
            f"this run has different frozen parts: {', '.join(stored) or 'none'}, not {', '.join(parts) or 'none'}",
            fix="use the workload the run was started with",
        )
    found = {}
    for name, part in parts.items():
        # Made by the run, so the only copy is in its folder.
        if not part.source and not stored[name]["source"]:
            _load_(name, part.module, folder)
        now = compute_checksum(part.module)
        if now != stored[name]["checksum"]:
            where = part.source or stored[name]["source"] or str(_get_path(folder, name))
            raise CheckpointError(
                f"{where} is not the frozen part {name!r} that this run was trained with",
                why=f"its checksum is {now[:12]}, and the run used {stored[name]['checksum'][:12]}",
                fix="restore the file that the run was started with, or start a new run with this one",
            )
        found[name] = dataclasses.replace(part, checksum=now)
    return found


@contextmanager
def name_lost_files(stored: Stored) -> Iterator[None]:
    """While a stored run is built, replace an error caused by a frozen module's missing file by one that names it."""
    try:
        yield
    except (HalfstepError, OSError, SafetensorError) as error:
        for name, known in stored.items():
            if known["source"] and not Path(known["source"]).exists():
                raise CheckpointError(
                    f"the frozen part {name!r} of this run is no longer in {known['source']}",
                    why="a run stores its checksum, not its weights",
                    fix="restore the file, or write its new path into the run's config.yaml",
                ) from error
        raise


# --- files of modules that the run made ---


def copy_made_here(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Return copies of the modules that came from no file, before they are cast."""
    return {
        name: {key: value.detach().cpu().contiguous().clone() for key, value in part.module.state_dict().items()}
        for name, part in parts.items()
        if not part.source
    }


def write_made_here(made: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write these modules once, each atomically."""
    for name, tensors in made.items():
        write_tensors(_get_path(folder, name), tensors)


def _load_(name: str, module: nn.Module, folder: Path) -> None:
    path = _get_path(folder, name)
    try:
        module.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot read the frozen part {name!r} of this run from {path}",
            why=" ".join(str(error).split())[:300],
            fix="restore the file: there is no other copy",
        ) from error


def _get_path(folder: Path, name: str) -> Path:
    return folder / "frozen" / f"{name}.safetensors"


def describe_frozen(parts: Parts, plan: Plan) -> list[tuple[str, str]]:
    precisions = {row.module: row.precision for row in plan.frozen}
    lines = []
    for name, part in parts.items():
        kind, size = find_original_class(part.module).__name__, sum(p.numel() for p in part.module.parameters())
        source = f", from {part.source}" if part.source else ""
        lines.append(("frozen part", f"{name}: {kind}, {size:,} parameters, {precisions[name]}{source}"))
    return lines
