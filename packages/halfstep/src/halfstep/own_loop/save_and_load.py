"""`hs.save` and `hs.load`: a custom loop's whole state in one safetensors file, or a folder for a sharded model.

Tensors are stored by name, and everything else as JSON in the file's metadata, so nothing is unpickled. The JSON part
has a checksum of itself and of every tensor. The file is written under a hidden name, flushed to the disk and
renamed: if the process is killed at any moment, the path has either the old state or the new one.

distributed/sharded_files.py describes the folder of a sharded model, which the ranks write while they train on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from halfstep import __version__
from halfstep.disk import explain_unwritten, read_sealed, refuse_special_file
from halfstep.distributed.sharding import find_sharding, is_dtensor
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, format_count, summarise_error
from halfstep.own_loop.step import Step
from halfstep.state_files import DOCUMENT, LAYOUT_VERSION, MALFORMED, pack, unpack, write_file
from halfstep.step.optim.recut_shards import recut_optimizer_states
from halfstep.step.randomness import read_generators
from halfstep.step.snapshots import find_loose_buffers, resize_buffers, restore_buffers
from halfstep.step.user_warnings import warn_user
from halfstep.tensor_files import LazyTensors, describe, make_header, take, view_bytes, write_tensors

NUM_SHOWN = 3
Given = TypeVar("Given")


def save(
    path: str | os.PathLike[str], step: Step | Sequence[Step], model: nn.Module | Sequence[nn.Module], /, **extra: Any
) -> None:
    """Store model, step, generators, position in the data and `extra` in one file, atomically; waits for the device.

    With a sharded model (fully_shard) every rank calls it, and the path is a folder on a disk that all ranks share. It
    returns when the state is copied to host memory; the files are written during the next steps. The next hs.save,
    `step.finish()` and the end of `step.windows` wait for them, and raise if they could not be written.

    `extra` takes numbers, strings, None, tensors, arrays, and lists, tuples and dicts of them. A loop with several
    steps or models passes lists. Call it after the step of a window, not before. ::

        hs.save("last.safetensors", step, model, best=best)
    """
    path, steps, model, num_models, is_sharded = _take_arguments(path, step, model)
    state = {
        "model": dict(model.state_dict()),
        "num_models": num_models,
        "buffers": find_loose_buffers(model),
        "steps": [one.state_dict() for one in steps],
        "extra": extra,
        "threads": torch.get_num_threads(),
    }
    try:
        if is_sharded and (ranks := steps[0]._step.ranks) is not None:
            from halfstep.distributed.sharded_files import start_save

            steps[0]._saving = start_save(path, state, ranks.world, step=steps[0].attempted)
        else:
            _save_file(path, state)
    except TypeError as error:
        raise CheckpointError(
            f"hs.save cannot store {error}",
            why="the file contains tensors and JSON, so that loading it never runs code",
            fix="store numbers, strings, tensors, and lists, tuples and dicts of them, even in the state_dict() of a "
            "model or loader; convert a NumPy number with float(x); for an object, store x.state_dict()",
        ) from error


def _save_file(path: Path, state: Mapping[str, Any]) -> None:
    packed, tensors = pack(state)
    stored = {name: tensor.cpu().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    checksums = {name: _compute_checksum(tensor) for name, tensor in stored.items()}
    document = {"layout": LAYOUT_VERSION, "halfstep": __version__, "state": packed, "checksums": checksums}
    try:
        write_file(Path(os.path.realpath(path)), document, stored)
    except OSError as error:
        raise explain_unwritten(path, summarise_error(error)) from error


def load(
    path: str | os.PathLike[str], step: Step | Sequence[Step], model: nn.Module | Sequence[nn.Module], /, *,
    reshard: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Continue where `hs.save` was called: load model, step, generators and position in the data; return `extra`.

    Create model, optimizer and step as before, then call it. A state that does not fit is refused and changes nothing.
    `reshard=True` loads the folder of a sharded model into a different number of shards, or an unsharded model: the
    loop continues, but not bit-exactly. ::

        best = hs.load("last.safetensors", step, model)["best"] if os.path.exists("last.safetensors") else 0.0
    """
    path, steps, model, num_models, is_sharded = _take_arguments(path, step, model)
    if is_sharded or path.is_dir():
        state = _read_shards(path, steps, model, reshard=reshard)
    else:
        state = _read(path)
    found, given = (state["num_models"], len(state["steps"])), (num_models, len(steps))
    if found != given:
        raise CheckpointError(
            f"{path} contains {_describe_numbers(*found)}, but hs.load was given {_describe_numbers(*given)}",
            why="weights and steps are stored by their position in the list, or without a list by their names alone",
            fix="hs.load(path, step, ...) with the same steps and models as hs.save, in the same order",
        )
    _refuse_different_model(path, model, state["model"])
    for one, its_state in zip(steps, state["steps"], strict=True):
        one.refuse_unfit(its_state)
    if resized := resize_buffers(model, state["model"]):
        warn_user(
            f"{', '.join(resized[:NUM_SHOWN])}{_count_more(resized)} got the shape that {path} contains: right for "
            "buffers that grow or shrink in training, but not if the model has different settings"
        )
    model.load_state_dict(state["model"])
    restore_buffers(model, state["buffers"])
    for one, its_state in zip(steps, state["steps"], strict=True):
        one.load_state_dict(its_state)
    threads = torch.get_num_threads()
    if threads != state["threads"] and any(one._step.device.type == "cpu" for one in steps):
        warn_user(
            f"torch used {state['threads']} CPU threads when {path} was stored and uses {threads} now: sums can differ "
            f"in the last bit; torch.set_num_threads({state['threads']}) makes the resumed loop bit-exact"
        )
    is_first = steps[0]._step.is_first_rank
    if is_first and all(own["position"]["pass"] is None and own["attempted"] for own in state["steps"]):
        warn_user(
            f"{path} holds no position in the data, because no batch came from step.windows(loader): a loop over a "
            "loader starts at its first batch again; a loop that draws its batches itself continues"
        )
    extra: dict[str, Any] = state["extra"]
    return extra


def save_weights(path: str | os.PathLike[str], model: nn.Module, /, *, dtype: torch.dtype | None = None) -> None:
    """Write weights and buffers as one safetensors file with the names of `model.state_dict()`, atomically.

    With a sharded model (fully_shard) every rank calls it: the ranks gather one tensor at a time, and rank 0 writes it,
    so that no rank holds the whole model. `dtype` converts floating-point tensors. Inside `with step.averaged():` it
    writes the average. ::

        hs.save_weights("model.safetensors", model, dtype=torch.bfloat16)
    """
    refuse_special_file(Path(path))
    path, tensors = Path(os.path.realpath(path)), dict(model.state_dict())
    world = World(limit_name="") if find_sharding(model) is not None else None

    def gather(name: str) -> Tensor:
        left.remove(name)
        if world is None or not is_dtensor(tensors[name]):
            return tensors[name]
        with world.translate_losses():
            whole: Tensor = tensors[name].full_tensor()
            return whole

    converted = take(LazyTensors(describe(tensors), gather), dtype=dtype)
    left = make_header(converted.described, {})[1]
    error: CheckpointError | None = None
    if world is None or world.is_first:
        try:
            write_tensors(path, converted)
        except OSError as cause:
            error = explain_unwritten(path, summarise_error(cause))
    for name in list(left):  # on other ranks all of them, on rank 0 those after a failed write: every rank gathers
        gather(name)
    found = [error] if world is None else world.gather(error)
    if found[0] is not None:
        raise found[0]


# --- arguments ---


def _take_arguments(
    path: str | os.PathLike[str], step: object, model: object
) -> tuple[Path, list[Step], nn.Module, int | None, bool]:
    """Return path, steps, model, the length of a list of models, and if they are sharded; wait for the last save."""
    steps = _list_given(step, Step, "an hs.Step", "steps")
    models = _list_given(model, nn.Module, "a torch module", "models")
    refuse_special_file(Path(path))
    num_models = len(models) if isinstance(model, (list, tuple)) else None
    whole = models[0] if num_models is None else nn.ModuleList(models)
    is_sharded = find_sharding(whole) is not None
    _refuse_untrained_model(steps, whole)
    for one in steps:
        if one._saving is not None:
            one._saving.wait()
    return Path(path), steps, whole, num_models, is_sharded


def _list_given(given: object, kind: type[Given], what: str, several: str) -> list[Given]:
    listed = given if isinstance(given, (list, tuple)) else [given]
    found = [one for one in listed if isinstance(one, kind)]
    if len(found) == len(listed):
        return found
    raise CheckpointError(
        f"hs.save and hs.load take {what}, not a {type(given).__name__}",
        fix=f"hs.save(path, step, model), in this order; pass several {several} as a list",
    )


def _refuse_untrained_model(steps: Sequence[Step], model: nn.Module) -> None:
    """Refuse models that hold nothing of what a step trains, and warn if they lack a part of it."""
    held = set(map(id, model.parameters()))
    for step in steps:
        trained = [one for optimizer in step.optimizers for group in optimizer.param_groups for one in group["params"]]
        num_missing = sum(id(one) not in held for one in trained)
        if trained and num_missing == len(trained):
            raise CheckpointError(
                f"the given model has none of the {format_count(num_missing, 'parameter')} that the step trains",
                why="the file would contain the state of the optimizers, and the weights of another model",
                fix="hs.save(path, step, model) with the model that you gave hs.Step; several models as a list",
            )
        if num_missing:
            warn_user(
                f"{num_missing} of the {len(trained)} parameters that the step trains are not in the given "
                "models, so the file does not contain them: hs.save(path, step, [model, criterion]), and the same for "
                "hs.load; a tensor outside of any module can be stored as a keyword argument of hs.save"
            )


def _describe_numbers(num_models: int | None, num_steps: int) -> str:
    models = "one model" if num_models is None else f"a list of {format_count(num_models, 'model')}"
    return f"{models} and {format_count(num_steps, 'step')}"


# --- the folder of a sharded model ---


def _read_shards(path: Path, steps: Sequence[Step], model: nn.Module, *, reshard: bool) -> dict[str, Any]:
    """Read this rank's part of the newest complete save; a whole unsharded model's on one rank."""
    from halfstep.distributed.sharded_files import StoredShards, find_latest, find_mesh

    ranks = steps[0]._step.ranks
    world = ranks.world if ranks is not None else None
    folder = world.broadcast_from_first(lambda: find_latest(path)) if world is not None else find_latest(path)
    stored, mesh = StoredShards(folder, world), find_mesh(model.parameters())
    note = stored.refuse_other_mesh(mesh, reshard=reshard, fix="hs.load(..., reshard=True)")
    state: dict[str, Any] = unpack(*stored.open(mesh))["state"]
    if note:
        notes = [note]
        for number, (step, own) in enumerate(zip(steps, state["steps"], strict=False)):
            step.refuse_unfit(own)
            if list(own["position"]["ranks"]) != step._position.ranks:
                # The generators are of another number of ranks. The note says that exactness ends here.
                own["position"] |= {"ranks": step._position.ranks, "generators": read_generators()}
            path_to = ("state", "steps", number, "optimizers")
            notes += recut_optimizer_states(stored, model, step.optimizers, own["optimizers"], path_to)
        if world is None or world.is_first:
            for line in dict.fromkeys(notes):
                warn_user(line)
    return state


# --- the file ---


def _read(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            document = (file.metadata() or {}).get(DOCUMENT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
        if document is None:
            raise ValueError("it contains tensors without the state of a loop")
        found = read_sealed(document)
        if (layout := found["layout"]) != LAYOUT_VERSION:
            raise CheckpointError(
                f"{path} has layout {layout}, but this version of halfstep reads {LAYOUT_VERSION}",
                fix=f"load it with halfstep {found['halfstep']}",
            )
        checksums = {name: _compute_checksum(tensor) for name, tensor in tensors.items()}
        if checksums != found["checksums"]:
            differing = [n for n in found["checksums"] if checksums.get(n) != found["checksums"][n]]
            raise ValueError(f"{', '.join(differing[:NUM_SHOWN]) or 'a tensor'} was changed after it was written")
        state: dict[str, Any] = unpack(found["state"], tensors)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no file {path}",
            why="hs.save has not written it, or it was moved",
            fix=f'if os.path.exists("{path}"): hs.load(...), so that the first start begins from scratch',
        ) from None
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} cannot be read: {summarise_error(error)}",
            why="hs.save did not write it, or it was edited, or damaged by the disk or by copying",
            fix="load an older file, or copy it again; torch.load reads what torch.save wrote, and "
            "safetensors.torch.load_file weights without the state of a loop",
        ) from error
    return state


def _compute_checksum(tensor: Tensor) -> int:
    return zlib.crc32(view_bytes(tensor))


# --- what does not fit ---


def _refuse_different_model(path: Path, model: nn.Module, stored: Mapping[str, Any]) -> None:
    own, buffers = model.state_dict(), dict(model.named_buffers(remove_duplicate=False))
    missing, unknown = [name for name in own if name not in stored], [name for name in stored if name not in own]
    differing = [
        f"{name} is {_describe(stored[name])}, but here {_describe(value)}"
        for name, value in own.items()
        if name in stored
        and _describe(value) != _describe(stored[name])
        # The shape of a buffer may change while training, its number of dimensions and dtype do not.
        and not (name in buffers and (value.dtype, value.ndim) == (stored[name].dtype, stored[name].ndim))
    ]
    lists = {"it lacks": missing, "it also has": unknown, "with a different shape or dtype:": differing}
    found = [f"{text} {', '.join(names[:NUM_SHOWN])}{_count_more(names)}" for text, names in lists.items() if names]
    if found:
        raise CheckpointError(
            f"{path} was saved from a different model than this {type(model).__name__}",
            why="; ".join(found),
            fix="create the model with the same settings as when the file was stored; nothing was changed",
        )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _count_more(names: Sequence[str]) -> str:
    return f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
