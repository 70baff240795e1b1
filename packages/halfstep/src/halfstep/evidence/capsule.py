"""A capsule: everything needed to run one step again, in its own folder.

    capsules/STEP/capsule.json         what happened, where, with which versions and settings; checksums of the rest
                  batches.safetensors  the window's batches as loaded, and the generators before forward
                  state.safetensors    parameters and buffers; absent if too large: then a checkpoint is named
                  config.yaml          of a run

When the host learns of a bad step, later ones may have committed: `commits_after` counts them, and replay reports it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import __version__
from halfstep.disk import open_atomic_folder, parse_json
from halfstep.errors import CheckpointError, format_count
from halfstep.evidence.capsule_folder import ABOUT, CONFIG, find_capsule
from halfstep.evidence.capsule_folder import list_capsules as list_capsules  # part of this module's interface
from halfstep.state_files import MALFORMED, measure_file, pack, unpack, write_files
from halfstep.tensor_files import TensorFile

VERSION = 2
BATCHES, STATE = "batches.safetensors", "state.safetensors"
MOST_BYTES = 4 << 30
"""Weights above this are not copied into a capsule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capsule:
    """One step, in memory; tensors on the CPU."""

    path: Path
    about: Mapping[str, Any]
    window: list[Any]
    rng: dict[str, Tensor]
    """Generator states before forward; empty if the step was made before the run was resumed."""
    state: dict[str, Tensor]
    """Parameters and buffers by name; empty if they were too large."""

    @property
    def step(self) -> int:
        return int(self.about["step"])

    @property
    def is_from_run(self) -> bool:
        return bool(self.about.get("workload"))

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def inexact(self) -> str:
        """Return what differs from the original step; empty if nothing does."""
        commits = int(self.about["commits_after"])
        later = f"the weights are those of {format_count(commits, 'committed step')} later, so this step may differ"
        differences = [later] if commits else []
        differences += [] if self.rng else ["the state of the random generators at that step is unknown"]
        differences += [] if self.state else [f"weights of {self.about['weights']}"]
        return "; ".join(differences)


def collect_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, including those that state_dict leaves out.

    Sparse ones are excluded, since safetensors cannot hold them: replay takes those of the model it is given.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in held.items() if value.layout is torch.strided}


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the current state on the host."""
    return {name: value.detach().cpu().clone() for name, value in collect_state(model).items()}


def count_state_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in collect_state(model).values())


def write_capsule(
    path: Path,
    about: Mapping[str, Any],
    *,
    window: Sequence[Any],
    rng: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    config: str = "",
) -> None:
    """Write the capsule atomically; only that of a run, which has a config, replaces another one."""
    versions = {"halfstep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        packed, tensors = pack({"window": list(window), "rng": dict(rng)})
        contents: dict[str, Any] = {BATCHES: tensors, STATE: state, CONFIG: config}
        with open_atomic_folder(path, replaces=bool(config)) as hidden:
            files = write_files(hidden, {name: held for name, held in contents.items() if held or name == BATCHES})
            document = {"version": VERSION, **about, "versions": versions, "files": files, "packed": packed}
            (hidden / ABOUT).write_text(json.dumps(to_strict_json(document), indent=1), encoding="utf-8")
    except (OSError, TypeError) as error:
        why = "its batches have values that JSON cannot store" if isinstance(error, TypeError) else "training continues"
        fix = "free disk space, or turn capsules off: capsules=0"
        raise CheckpointError(f"cannot write the capsule {path}: {error}", why=why, fix=fix) from error


def read_capsule(path: Path) -> Capsule:
    """Read a capsule and check its files; raise CheckpointError if it is missing or damaged."""
    path = find_capsule(path)
    try:
        about = parse_json((path / ABOUT).read_text(encoding="utf-8"))
        version, files, packed = about["version"], about["files"], about.pop("packed")
    except MALFORMED as error:
        raise _make_damaged_error(path, f"{ABOUT}: {error}") from error
    if version != VERSION:
        raise CheckpointError(
            f"the capsule {path} has version {version}, but this version of halfstep reads {VERSION}",
            fix=f"replay it with halfstep {about.get('versions', {}).get('halfstep', 'of the version that wrote it')}",
        )
    try:
        for name, expected in files.items():
            found = measure_file(path / name) if (path / name).exists() else {"bytes": 0}
            if found["bytes"] != expected["bytes"]:
                raise ValueError(f"{name} has {found['bytes']:,} bytes, but {expected['bytes']:,} were written")
            if found != expected:
                raise ValueError(f"{name} was changed after it was written")
        content = unpack(packed, TensorFile(path / BATCHES))
        state = dict(TensorFile(path / STATE)) if STATE in files else {}
    except MALFORMED as error:
        raise _make_damaged_error(path, str(error)) from error
    return Capsule(path=path, about=about, window=content["window"], rng=content["rng"], state=state)


def to_strict_json(tree: Any) -> Any:
    """Convert to strict JSON: infinities and NaN become strings."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else str(tree)
    if isinstance(tree, Mapping):
        return {str(key): to_strict_json(value) for key, value in tree.items()}
    return [to_strict_json(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def _make_damaged_error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the capsule {path} is damaged: {what}", fix="replay another one, or copy it again")
