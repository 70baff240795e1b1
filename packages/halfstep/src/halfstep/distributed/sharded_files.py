"""Sharded checkpoints: each rank writes its pieces, and a manifest states which files form one save.

    FOLDER/rank-00000.safetensors    rank 0's pieces of the sharded tensors, and every tensor that all ranks hold alike
           rank-00001.safetensors    rank 1's pieces, and tensors that differ between ranks (BatchNorm statistics)
           manifest.json             mesh, step, size and SHA-256 of each file, shape and pieces of each tensor

Each file also holds the rank's JSON document, the part of the state that is not tensors. Nothing is unpickled.

Saving: the ranks copy their tensors to host memory and train on, while a thread per rank writes and flushes its file.
The threads use the rendezvous store, no collectives, which would mix with those of training. When every file is on the
disk, rank 0 writes the manifest and calls `publish`, which renames the folder or moves `latest`: until then the save
does not exist for a reader. With replicas (HSDP), only the first replica writes.

Loading: manifest and files are checked before any tensor is read: every file there with its size and checksum, no other
one, and every tensor covered once. A rank reads only its slices, so another number of ranks can load the save as well.

torch.distributed.checkpoint was not used: its safetensors storage loads a save with a missing file silently, merges
older files in the folder, and stores no checksums.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from halfstep import __version__
from halfstep.disk import explain_unwritten, flush, name_hidden, read_sealed, remove_leftovers, seal, write_atomically
from halfstep.distributed.sharding import get_local
from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import CheckpointError, HalfstepError, format_count, summarise_error
from halfstep.state_files import DOCUMENT, LAYOUT_VERSION, MALFORMED, pack, write_file
from halfstep.tensor_files import (
    BY_NAME,
    DTYPES,
    LazyTensors,
    TensorFile,
    describe_entries,
    refuse_unknown_dtypes,
    view_bytes,
)

MANIFEST = "manifest.json"
LATEST = "latest"
SAVE_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{8}")
NUM_SHOWN = 3


# --- how tensors are cut ---


def find_mesh(tensors: Iterable[object]) -> DeviceMesh | None:
    """Return the mesh of the sharded tensors; None if none is sharded. Its last dimension shards, others replicate."""
    mesh: DeviceMesh | None = None
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            continue
        mesh = mesh or tensor.device_mesh
        *others, last = tensor.placements
        is_plain = type(last) in (Shard, Replicate) and all(type(placement) is Replicate for placement in others)
        if not is_plain or tensor.device_mesh != mesh:
            raise CheckpointError(
                f"a tensor is sharded as {tensor.placements} on {tensor.device_mesh}",
                why="sharded checkpoints support one mesh, sharded over its last dimension, replicated over the others",
                fix="apply fully_shard to the whole model with one mesh (1D, or 2D for HSDP)",
            )
    return mesh


def _find_range(mesh: DeviceMesh, length: int) -> tuple[int, int]:
    """Return start and length of this rank's piece of a dimension: cut as by torch.chunk, the last may be empty."""
    each = -(-length // mesh.size(mesh.ndim - 1))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * each, length)
    return start, min(each, length - start)


def _describe_pieces(tensor: DTensor) -> dict[str, Any]:
    """Return the manifest's entry of a tensor, with its pieces [rank, start, length]: the first replica writes them."""
    mesh, last, shape = tensor.device_mesh, tensor.placements[-1], list(tensor.shape)
    writers = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))[0].tolist()
    dim, pieces = None, [[writers[0], 0, 1]]  # a tensor that is not cut is one piece of length 1
    if isinstance(last, Shard):
        dim = last.dim % tensor.ndim
        each = max(-(-shape[dim] // len(writers)), 1)
        starts = range(0, shape[dim], each)
        pieces = [[rank, start, min(each, shape[dim] - start)] for rank, start in zip(writers, starts, strict=False)]
    return {"dtype": DTYPES[tensor.dtype], "shape": shape, "dim": dim, "pieces": pieces if tensor.numel() else []}


def _wrap(local: Tensor, mesh: DeviceMesh, shape: Iterable[int], dim: int | None) -> DTensor:
    """Return this rank's piece as a DTensor. Unlike that of DTensor.from_local, it stays in host memory."""
    whole = torch.empty(torch.Size(shape), dtype=local.dtype, device="meta")
    placements = (*[Replicate()] * (mesh.ndim - 1), Replicate() if dim is None else Shard(dim))
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory; waits for the device once."""
    copies = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().resolve_conj().resolve_neg()
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return copies


# --- saving ---


class BackgroundSave:
    """A save under way. `wait` returns when all ranks' files are on the disk and published, or raises why not."""

    def __init__(
        self, make_folder: Callable[[], Path], state: Any, world: World, *, step: int, publish: Callable[[Path], None]
    ) -> None:
        """Copy the state's tensors and start to write; every rank calls it.

        Rank 0 calls `make_folder`, which returns a new folder, and, when the save is complete and flushed, `publish`.
        """
        self._world, self._publish, self._step = world, publish, step
        self._error: HalfstepError | None = None
        packed, tensors = pack(state)
        self._mesh = find_mesh(tensors.values())
        refuse_unknown_dtypes(tensors)
        self._sharded = {name: _describe_pieces(t) for name, t in tensors.items() if isinstance(t, DTensor)}
        own = {
            name: get_local(tensor)
            for name, tensor in tensors.items()
            if name not in self._sharded or any(world.rank == rank for rank, *_ in self._sharded[name]["pieces"])
        }
        # Now: training changes the state while the thread runs.
        text = json.dumps({"layout": LAYOUT_VERSION, "state": packed})
        self.folder, self._save = world.broadcast_from_first(lambda: (make_folder(), secrets.token_hex(8)))
        # Not a daemon: the interpreter ends when the files are written.
        self._thread = threading.Thread(target=self._run, args=(copy_to_host(own), text), name="halfstep save")
        atexit.register(self._report_unseen)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        atexit.unregister(self._report_unseen)
        error, self._error = self._error, None  # raised once, so that the next save can be tried
        if error is not None:
            raise error

    def _report_unseen(self) -> None:
        """Show the error of the last save of a program that ended without waiting for it."""
        self._thread.join()
        if self._error is not None:
            print(f"error: {self._error}", file=sys.stderr)

    # --- in the thread ---

    def _run(self, staged: dict[str, Tensor], document: str) -> None:
        try:
            problem = self._write_and_report(staged, document)
            if self._world.is_first:
                problem = problem or self._finish()
                self._world.post_text(f"{self._save}/end", problem)
                with suppress(HalfstepError):
                    for rank in range(1, self._world.size):  # the store may end with this rank
                        self._world.await_text(f"{self._save}/seen/{rank}", rank)
                    self._world.drop_texts([f"{self._save}/{key}" for key in ("whole", *range(self._world.size))])
            else:
                problem = self._world.await_text(f"{self._save}/end", 0)
                self._world.post_text(f"{self._save}/seen/{self._world.rank}", "")
        except HalfstepError as error:  # a rank is gone
            problem = f"{error.what}: {error.why}"
        except Exception as error:
            problem = summarise_error(error)
        if problem:
            self._error = mark_agreed(explain_unwritten(self.folder, problem))

    def _write_and_report(self, staged: dict[str, Tensor], document: str) -> str:
        """Write this rank's file and post its size, checksum and tensors that are not sharded, or why it failed."""
        rank = self._world.rank
        try:
            whole = self._drop_what_first_writes(staged)
            own = {"save": self._save, "rank": rank, "state": json.loads(document)}
            written = write_file(self.folder / name_file(rank), own, staged)
            report = ["", written, whole]
        except Exception as error:
            # Of any kind: a rank that does not report would leave the others waiting.
            report = [f"rank {rank}: {summarise_error(error)}", {}, {}]
        self._world.post_text(f"{self._save}/{rank}", json.dumps(report))
        return str(report[0])

    def _drop_what_first_writes(self, staged: dict[str, Tensor]) -> dict[str, Any]:
        """Drop tensors that are not sharded and equal those of rank 0, which writes them; describe the others."""
        whole = {
            name: [DTYPES[tensor.dtype], list(tensor.shape), hashlib.sha256(view_bytes(tensor)).hexdigest()]
            for name, tensor in staged.items()
            if name not in self._sharded
        }
        if self._world.is_first:
            self._world.post_text(f"{self._save}/whole", json.dumps(whole))
        else:
            first = json.loads(self._world.await_text(f"{self._save}/whole", 0))
            for name in [name for name in whole if whole[name] == first.get(name)]:
                del staged[name], whole[name]
        return {name: described for name, (*described, _) in whole.items()}

    def _finish(self) -> str:
        """On rank 0: wait for all files, write the manifest, check and publish the save; return why that failed."""
        files: dict[str, Any] = {}
        whole: dict[str, dict[str, Any]] = {}
        for rank in range(self._world.size):
            problem, files[name_file(rank)], own = json.loads(self._world.await_text(f"{self._save}/{rank}", rank))
            if problem:
                return str(problem)
            for name, described in own.items():
                whole.setdefault(name, {})[str(rank)] = described
        manifest = {
            "layout": LAYOUT_VERSION, "halfstep": __version__, "save": self._save, "step": self._step,
            "ranks": self._world.size, "mesh": _list_ranks(self._mesh), "files": files, "sharded": self._sharded,
            "whole": whole,
        }  # fmt: skip
        try:
            write_atomically(self.folder / MANIFEST, json.dumps(seal(manifest)))
            StoredShards(self.folder, None, reads_tensors=False)
            flush(self.folder.parent)
            self._publish(self.folder)
        except CheckpointError as error:
            return error.what
        except OSError as error:
            return summarise_error(error)
        return ""


# --- a folder with one save, and `latest`, which names it ---


def start_save(path: Path, state: Any, world: World, *, step: int) -> BackgroundSave:
    """Save into a new folder below `path`; once it is complete, `latest` names it and older saves are removed.

    `path` itself appears with the first complete save: where it exists, it can be loaded.
    """
    path = Path(os.path.realpath(path))

    def make_folder() -> Path:
        if path.is_file():
            raise explain_unwritten(path, "it is a file, and a sharded model is saved as a folder")
        remove_leftovers(path)
        try:
            folder = (path if path.is_dir() else name_hidden(path)) / f"step-{step:08d}-{secrets.token_hex(4)}"
            folder.mkdir(parents=True)
        except OSError as error:
            raise explain_unwritten(path, summarise_error(error)) from error
        return folder

    def publish(folder: Path) -> None:
        write_atomically(folder.parent / LATEST, json.dumps(seal({"save": folder.name})))
        if folder.parent != path:
            folder.parent.rename(path)
            flush(path.parent)
        for old in path.glob("step-*"):
            if SAVE_NAME.fullmatch(old.name) and old.name != folder.name:
                shutil.rmtree(old, ignore_errors=True)

    return BackgroundSave(make_folder, state, world, step=step, publish=publish)


def find_latest(path: Path) -> Path:
    """Return the folder of the save that `latest` names."""
    try:
        name = read_sealed((path / LATEST).read_bytes())["save"]
        if SAVE_NAME.fullmatch(name):
            return path / name
        raise ValueError(f"{name!r} is not the name of a save")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no sharded save in {path}",
            why="it is a file, which was saved without fully_shard" if path.is_file() else "none was completed there",
            fix=f'if os.path.exists("{path}"): hs.load(...), so that the first start begins from scratch',
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path / LATEST} cannot be read: {summarise_error(error)}") from error


def _list_ranks(mesh: DeviceMesh | None) -> Any:
    """Return the ranks of a mesh as nested lists, which the manifest stores."""
    return None if mesh is None else mesh.mesh.tolist()


def name_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


# --- loading ---


def check_coverage(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raise CheckpointError unless every rank has a file, and pieces cover every sharded tensor once; return dtype and
    shape of what each file holds."""
    # Counted from the files that are listed: a hostile manifest may claim a billion ranks.
    num_ranks = len(manifest["files"])
    expected = [name_file(rank) for rank in range(num_ranks)]
    if manifest["ranks"] != num_ranks or sorted(manifest["files"]) != expected:
        named = ", ".join(sorted(set(manifest["files"]) ^ set(expected))[:NUM_SHOWN]) or f"it lists {num_ranks}"
        raise CheckpointError(f"the manifest does not list one file for each of {manifest['ranks']} ranks: {named}")
    held: list[dict[str, Any]] = [
        {name: ranks[str(rank)] for name, ranks in manifest["whole"].items() if str(rank) in ranks}
        for rank in range(num_ranks)
    ]
    for name, entry in manifest["sharded"].items():
        dtype, shape, dim = entry["dtype"], entry["shape"], entry["dim"]
        end = 1 if dim is None else shape[dim]
        covered = end if 0 in shape else 0
        for rank, start, length in sorted(entry["pieces"], key=lambda piece: piece[1]):
            if start != covered or length <= 0:
                what = f"a gap at {covered}" if start > covered else f"an overlap at {start}"
                raise CheckpointError(f"the slices of {name} leave {what} of {end} (rank {rank})")
            held[rank][name] = [dtype, [length if d == dim else size for d, size in enumerate(shape)]]
            covered += length
        if covered != end:
            raise CheckpointError(f"the slices of {name} end at {covered} of {end}")
    return held


class StoredShards:
    """A complete sharded save on the disk, whose tensors are read by slices."""

    def __init__(self, folder: Path, world: World | None, *, reads_tensors: bool = True) -> None:
        """Check manifest and files; every rank calls it. All ranks raise the error that one of them met.

        Without `reads_tensors` the files are not hashed, which takes as long as reading them.
        """
        self.folder, self._world, self._reads_tensors = folder, world, reads_tensors
        self.manifest: dict[str, Any] = {}
        self._files: list[TensorFile] = []
        self._heads: list[dict[str, Any]] = []
        problem = ""
        try:
            self._check()
        except CheckpointError as error:
            problem = error.what
        except MALFORMED as error:
            problem = f"{type(error).__name__}: {error}"
        problems = world.gather(problem) if world is not None else [problem]
        if found := next(filter(None, problems), ""):
            why = "a file is missing, was edited, belongs to another save, or was damaged by the disk or by copying"
            fix = "load an older save, or copy it again"
            raise mark_agreed(CheckpointError(f"checkpoint {folder.name} is damaged: {found}", why=why, fix=fix))

    def _check(self) -> None:
        try:
            self.manifest = manifest = read_sealed((self.folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{MANIFEST} is missing: the save was not completed, or this is not a save") from None
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST}: {error}") from None
        if manifest["layout"] != LAYOUT_VERSION:
            raise CheckpointError(f"it has layout {manifest['layout']}, but this halfstep reads {LAYOUT_VERSION}; "
                                  f"halfstep {manifest['halfstep']} wrote it")  # fmt: skip
        _describe_mesh(manifest["mesh"])  # raises if it is not one
        held, files = check_coverage(manifest), manifest["files"]
        if foreign := sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in files):
            raise CheckpointError(f"{', '.join(foreign[:NUM_SHOWN])} does not belong to this save")
        for rank, (name, expected) in enumerate(sorted(files.items())):
            self._check_file(rank, self.folder / name, expected, held[rank])

    def _check_file(self, rank: int, path: Path, expected: Mapping[str, Any], held: Mapping[str, Any]) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise CheckpointError(f"{path.name} has {size} bytes, but {expected['bytes']} were written")
        self._files.append(file := TensorFile(path))
        self._heads.append(head := read_sealed(file.metadata[DOCUMENT]))
        if head["save"] != self.manifest["save"] or head["rank"] != rank:
            raise CheckpointError(f"{path.name} belongs to another save or rank")
        found = {name: [DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in file.described.items()}
        if differing := sorted(n for n in found.keys() | held.keys() if found.get(n) != held.get(n)):
            raise CheckpointError(f"manifest and {path.name} differ in {', '.join(differing[:NUM_SHOWN])}")
        # Each file is hashed by one rank: with the same number of ranks, by the one that reads it.
        num_hashing, own = (self._world.size, self._world.rank) if self._world is not None else (1, 0)
        if self._reads_tensors and rank % num_hashing == own:
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest != expected["sha256"]:
                raise CheckpointError(f"{path.name} was changed after it was written: its SHA-256 differs")

    def refuse_other_mesh(self, mesh: DeviceMesh | None, *, reshard: bool, fix: str) -> str:
        """Refuse another mesh than that of the save unless `reshard`; return one line if they differ."""
        own, stored = _list_ranks(mesh), self.manifest["mesh"]
        if own == stored:
            return ""
        then, now = _describe_mesh(stored), _describe_mesh(own)
        what = f"checkpoint {self.folder.name} was saved with {then}, but this is {now}"
        if reshard:
            return f"{what}: it cannot continue bit-exactly"
        why = "a different mesh sums in a different order, so training would not continue exactly"
        fix = f"start {format_count(self.manifest['ranks'], 'rank')}, or {fix}"
        raise mark_agreed(CheckpointError(what, why=why, fix=fix))

    def open(self, mesh: DeviceMesh | None = None, rank: int | None = None) -> tuple[Any, LazyTensors]:
        """Return this rank's document and tensors: of sharded ones its pieces; whole without a mesh.

        `rank` asks for those of another rank. Another number of ranks takes what is not sharded from rank 0.
        """
        if rank is None:
            rank = self._world.rank if self._world is not None and self._world.size == self.manifest["ranks"] else 0
        sharded = self.manifest["sharded"]
        # A tensor that is not sharded is in the rank's own file, or in rank 0's if all had the same.
        holders = {
            name: self._files[rank if str(rank) in held else 0]
            for name, held in self.manifest["whole"].items()
            if held.keys() & {"0", str(rank)}
        }
        described = describe_entries(sharded) | {name: file.described[name] for name, file in holders.items()}

        def read(name: str) -> Tensor:
            return self._read_sharded(name, mesh) if name in sharded else holders[name].read(name)

        return self._heads[rank]["state"], LazyTensors(described, read)

    @staticmethod
    def find_start(entry: Mapping[str, Any], tensor: Tensor) -> int:
        """Return where this rank's piece of a tensor begins in the dimension in which the stored one is cut."""
        return _find_range(tensor.device_mesh, entry["shape"][entry["dim"]])[0] if isinstance(tensor, DTensor) else 0

    def _read_sharded(self, name: str, mesh: DeviceMesh | None) -> Tensor:
        entry = self.manifest["sharded"][name]
        shape, dim, dtype = list(entry["shape"]), entry["dim"], BY_NAME[entry["dtype"]]
        if dim is None:
            holder = next((rank for rank, *_ in entry["pieces"]), None)
            whole = torch.empty(shape, dtype=dtype) if holder is None else self._files[holder].read(name)
            return whole if mesh is None else _wrap(whole, mesh, shape, None)
        start, length = (0, shape[dim]) if mesh is None else _find_range(mesh, shape[dim])
        local = torch.empty([*shape[:dim], length, *shape[dim + 1 :]], dtype=dtype)
        for holder, first, count in entry["pieces"]:
            low, high = max(first, start), min(first + count, start + length)
            if low < high:
                piece = self._files[holder].read(name, dim, low - first, high - low)
                local.narrow(dim, low - start, high - low).copy_(piece)
        return local if mesh is None else _wrap(local, mesh, shape, dim)


def _describe_mesh(ranks: Any) -> str:
    if ranks is None:
        return "an unsharded model"
    *others, num_shards = torch.tensor(ranks).shape
    shards, replicas = format_count(num_shards, "shard"), math.prod(others)
    return f"{shards} in {replicas} replicas" if replicas > 1 else shards
