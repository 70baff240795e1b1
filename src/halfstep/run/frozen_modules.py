"""Frozen parts of a run: placed by the plan, known by a checksum, stored only where they came from no file.

A checkpoint holds no weights of theirs, but their checksum and file: `resume`, `evaluate` and `predict` load them from
there and refuse others. A part that was made here (random, by a demo) is stored once, in RUN/frozen/NAME.safetensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfstep.config.schema import RunConfig
from halfstep.disk import atomic_file
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.precision.apply import apply_frozen_
from halfstep.precision.plan import Plan
from halfstep.precision.swapped import find_original_class
from halfstep.tune.channels_last import to_channels_last_, wants_channels_last
from halfstep.workloads.base.workload import FrozenPart, Workload

Parts = Mapping[str, FrozenPart]
Stored = Mapping[str, Mapping[str, str]]  # checksum and source by name, as a checkpoint holds them


def modules_of(parts: Parts) -> dict[str, nn.Module]:
    return {name: part.module for name, part in parts.items()}


def place_frozen_(config: RunConfig, parts: Parts, plan: Plan) -> None:
    """On the run's device, in the plan's storage, compute and layout; in place: forward holds these very modules."""
    for part in parts.values():
        part.module.to(torch.device(plan.device))
    apply_frozen_(plan, modules_of(parts))
    for part in parts.values():
        if wants_channels_last(config, plan, part.module):
            to_channels_last_(part.module)


# --- identity ---


def identified(workload: Workload) -> Workload:
    """The workload with the checksums of its parts as they were built; casting changes them."""
    parts = {name: dataclasses.replace(part, checksum=checksum(part.module)) for name, part in workload.frozen.items()}
    return dataclasses.replace(workload, frozen=parts) if parts else workload


def checksum(module: nn.Module) -> str:
    """Of names, shapes, formats and bytes of what its state_dict holds, whatever file it came in."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {tuple(plain.shape)} {plain.dtype}\n".encode())
        found.update(memoryview(plain.view(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def identities(parts: Parts) -> dict[str, dict[str, str]]:
    return {name: {"checksum": part.checksum, "source": part.source} for name, part in parts.items()}


def as_stored(parts: Parts, stored: Stored, folder: Path) -> dict[str, FrozenPart]:
    """The run's own parts: those made here are read from its folder, all others have to be the ones it trained with."""
    if parts.keys() != stored.keys():
        raise CheckpointError(
            f"the run has the frozen parts {', '.join(stored) or 'none'}, not {', '.join(parts) or 'none'}",
            fix="use the workload the run was started with",
        )
    found = {}
    for name, part in parts.items():
        if not part.source and not stored[name]["source"]:
            _load_(name, part.module, folder)
        now = checksum(part.module)
        if now != stored[name]["checksum"]:
            where = part.source or stored[name]["source"] or str(_file(folder, name))
            raise CheckpointError(
                f"{where} is not the frozen part {name!r} that this run was trained with",
                why=f"its checksum is {now[:12]}, that of the run's {stored[name]['checksum'][:12]}",
                fix="put the file back that the run was started with, or start a new run with this one",
            )
        found[name] = dataclasses.replace(part, checksum=now)
    return found


@contextmanager
def naming_lost_files(stored: Stored) -> Iterator[None]:
    """Around the building of a stored run: where a part's file is gone, that is said, not what followed from it."""
    try:
        yield
    except (HalfstepError, OSError, SafetensorError) as error:
        for name, known in stored.items():
            if known["source"] and not Path(known["source"]).exists():
                raise CheckpointError(
                    f"the frozen part {name!r} of this run is not in {known['source']} any more",
                    why="a run keeps its checksum, not its weights",
                    fix="put the file back, or write its new place into the run's config.yaml",
                ) from error
        raise


# --- the files of parts that were made here ---


def made_here(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Copies of what came from no file, taken before it is cast."""
    return {
        name: {key: value.detach().cpu().contiguous().clone() for key, value in part.module.state_dict().items()}
        for name, part in parts.items()
        if not part.source
    }


def store(made: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write them once, each whole or not at all."""
    for name, tensors in made.items():
        path = _file(folder, name)
        try:
            path.parent.mkdir(exist_ok=True)
            with atomic_file(path) as hidden:
                save_file(dict(tensors), hidden)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write {path}: {error}", fix="make room, or choose another --out") from error


def _load_(name: str, module: nn.Module, folder: Path) -> None:
    path = _file(folder, name)
    try:
        module.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot read the frozen part {name!r} of this run from {path}",
            why=" ".join(str(error).split())[:300],
            fix="put the file back: it came from nowhere else",
        ) from error


def _file(folder: Path, name: str) -> Path:
    return folder / "frozen" / f"{name}.safetensors"


def described(parts: Parts, plan: Plan) -> list[tuple[str, str]]:
    precisions = {row.module: row.precision for row in plan.frozen}
    lines = []
    for name, part in parts.items():
        kind, size = find_original_class(part.module).__name__, sum(p.numel() for p in part.module.parameters())
        source = f", from {part.source}" if part.source else ""
        lines.append(("frozen part", f"{name}: {kind}, {size:,} parameters, {precisions[name]}{source}"))
    return lines
