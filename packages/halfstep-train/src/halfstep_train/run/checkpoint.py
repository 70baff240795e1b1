"""Checkpoints that stay intact if the process is killed at any moment.

    checkpoints/step-00000120/model.safetensors    weights and buffers
                              ema.safetensors      the averaged ones, where the run keeps them
                              state.safetensors    optimizer, RNG, snapshots: every other tensor
                              state.json           the rest, with size and checksum of the files above and its own
    checkpoints/best.json                          which checkpoint had the best metric

A run whose ranks divide the model writes one file per rank instead (distributed/sharded_files.py), in the background.

A checkpoint is written into a hidden folder, flushed to the disk and renamed, so it is either complete or absent.
On reading, sizes and checksums are compared; a damaged checkpoint is skipped with a message.
A resumed run renames it to `.damaged-…`, so that it does not count as one of the newest that are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from halfstep.disk import flush, open_atomic_folder, parse_json, read_sealed, seal, write_atomically
from halfstep.errors import CheckpointError, suggest_command
from halfstep.state_files import LAYOUT_VERSION, MALFORMED, measure_file, pack, unpack, write_files
from halfstep.tensor_files import LazyTensors, TensorFile, take

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from halfstep.distributed.sharded_files import BackgroundSave, StoredShards
    from halfstep.distributed.world import World

HIDDEN = ".writing-"
STATE = "state.json"
AVERAGE = "ema.safetensors"
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # `step-STEP`, and `step-STEP-1` while there is a first one


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The content of one checkpoint."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: written atomically, checked when read, old ones removed."""

    def __init__(self, folder: Path, *, keep: int = 0, writes: bool = True, world: World | None = None) -> None:
        """Use the checkpoints in `folder`; keep the newest `keep` (0: all). Ranks other than 0 do not write, unless
        the ranks of a `world` divide the model: then each writes its shards."""
        self.folder, self.keep, self.writes, self._world = folder, keep, writes, world
        self._saving: BackgroundSave | None = None

    def save(self, step: int, checkpoint: Checkpoint, *, on_saved: Callable[[Path], None] = lambda path: None) -> Path:
        """Write a checkpoint atomically, call `on_saved`, and remove the oldest beyond the limit (never the best one).

        Shards are written in the background: `wait` returns when they are complete.
        """
        if self._world is not None:
            return self._save_shards(step, checkpoint, on_saved, self._world)
        final = self._choose_name(step)
        if not self.writes:
            return final
        try:
            with open_atomic_folder(final) as hidden:
                _write(hidden, checkpoint)
        except OSError as error:
            raise self._explain_unwritten(final, error) from error
        return self._finish(final, on_saved)

    def _save_shards(self, step: int, checkpoint: Checkpoint, on_saved: Callable[[Path], None], world: World) -> Path:
        from halfstep.distributed.sharded_files import BackgroundSave

        self.wait()

        def make_folder() -> Path:
            hidden = self.folder / f"{HIDDEN}{self._choose_name(step).name}"
            try:
                hidden.mkdir(parents=True)
            except OSError as error:
                raise self._explain_unwritten(hidden, error) from error
            return hidden

        def publish(hidden: Path) -> None:
            final = _unhide(hidden)
            hidden.rename(final)
            flush(self.folder)
            self._finish(final, on_saved)

        state = {"model": checkpoint.model, "ema": checkpoint.ema, "state": checkpoint.state}
        self._saving = BackgroundSave(make_folder, state, world, step=step, publish=publish)
        return _unhide(self._saving.folder)

    def _finish(self, written: Path, on_saved: Callable[[Path], None]) -> Path:
        """Let a second checkpoint of a step take the place of the first, call `on_saved` and remove old ones."""
        plain = self._get_plain_name(_parse_name(written)[0])
        if written != plain and self.find_best() != plain:
            # It holds all of the first, and more. A kill in between leaves `written`, which is complete.
            shutil.rmtree(plain, ignore_errors=True)
            if not plain.exists():
                written.rename(plain)
                flush(self.folder)
                written = plain
        on_saved(written)
        self._drop_old(written)
        return written

    def wait(self) -> None:
        """Wait until the last save is complete; raise if it failed. Every rank of a sharded run calls it."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def mark_best(self, path: Path, metric: str, value: float) -> None:
        """Record that a checkpoint is the best one so far."""
        if not self.writes:
            return
        best = {"checkpoint": path.name, "metric": metric, "value": value}
        write_atomically(self.folder / "best.json", json.dumps(best))

    def find_best(self) -> Path | None:
        """Return the checkpoint with the best metric, if one was marked and is still there."""
        file = self.folder / "best.json"
        if not file.is_file():
            return None
        try:
            found = parse_json(file.read_bytes())
            name = str(found.get("checkpoint")) if isinstance(found, dict) else str(found)
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a checkpoint name")
        except (OSError, ValueError) as error:
            # Without it the best checkpoint would be dropped as an old one.
            raise CheckpointError(
                f"{file} cannot be read: {error or type(error).__name__}",
                why="it names the best checkpoint, which must not be deleted",
                fix='restore it, as in {"checkpoint": "step-00000100"}, or delete it to go without a best checkpoint',
            ) from error
        path = self.folder / name
        return path if path.is_dir() else None

    def list_all(self) -> list[Path]:
        """Return all checkpoints, oldest first; folders with other names, such as `step-00000005.bak`, are ignored."""
        return sorted((path for path in self._list_named() if path.is_dir()), key=_parse_name)

    def find_newest(self, *, on_damaged: Callable[[str], None]) -> Path:
        """Return the newest intact checkpoint; report damaged ones and move them aside."""
        damaged: list[Path] = []
        for path in reversed(self.list_all()):
            try:
                # Of a sharded one, which may not fit the host's memory, no tensor is read.
                open_shards(path) if is_sharded(path) else load(path)
            except CheckpointError as error:
                damaged.append(path)
                on_damaged(f"{error.what}; going back to the checkpoint before it")
                continue
            for one in damaged:
                one.rename(one.with_name(f".damaged-{one.name}-{os.getpid()}"))
            return path
        raise CheckpointError(
            f"no usable checkpoint in {self.folder}",
            why="all are damaged" if damaged else "the run ended before its first one",
            fix=f"start it again: {suggest_command('train', self.folder.parent / 'config.yaml', '--out', 'DIR')}",
        )

    def clean_up(self) -> None:
        """Remove the hidden folders of checkpoints that a killed run had begun."""
        for path in self.folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _explain_unwritten(self, path: Path, error: Exception) -> CheckpointError:
        """Return the error of a failed write, with a resume command if an earlier checkpoint exists."""
        why, again = "it would have been the run's first checkpoint", "start the run again"
        if self.list_all():
            why = "nothing was overwritten; earlier checkpoints are intact"
            again = suggest_command("train", "--resume", self.folder.parent)
        fix = f"free some space or fix the folder's permissions, then {again}"
        return CheckpointError(f"cannot write checkpoint {path}: {error}", why=why, fix=fix)

    def _list_named(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name)]

    def _choose_name(self, step: int) -> Path:
        """Return a new name; a step saved twice (by steps and at the end of an epoch) gets a second one."""
        # Numbered after all existing ones, so that the newest sorts last.
        last = max((number for other, number in map(_parse_name, self._list_named()) if other == step), default=None)
        plain = self._get_plain_name(step)
        return plain if last is None else plain.with_name(f"{plain.name}-{last + 1}")

    def _get_plain_name(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _drop_old(self, newest: Path) -> None:
        """Remove earlier checkpoints of the same step, and the oldest beyond the limit."""
        kept = (newest, self.find_best())
        others = [path for path in self.list_all() if path not in kept]
        # The second checkpoint of a step holds all of the first, and more (the validation at its end).
        same_step = [path for path in others if _parse_name(path)[0] == _parse_name(newest)[0]]
        # `newest` is one of the kept ones, so one fewer of the others stays.
        surplus = others[: max(len(others) - self.keep + 1, 0)] if self.keep else []
        for path in {*same_step, *surplus}:
            shutil.rmtree(path, ignore_errors=True)


def _parse_name(path: Path) -> tuple[int, int]:
    """Return step and number: (120, 2) for `step-00000120-2`."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)


def _unhide(hidden: Path) -> Path:
    return hidden.with_name(hidden.name.removeprefix(HIDDEN))


def is_sharded(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def load(path: Path, stored: StoredShards | None = None, mesh: DeviceMesh | None = None) -> Checkpoint:
    """Read one checkpoint, checking every file against its recorded size and checksum.

    Of a sharded one, `stored` and `mesh` give this rank's pieces; without them everything is read as if unsharded.
    """
    if is_sharded(path):
        return Checkpoint(**unpack(*(stored or open_shards(path)).open(mesh))["state"])
    document = _verify_files(path)
    try:
        model, tensors = (load_file(path / f"{name}.safetensors") for name in ("model", "state"))
        average = load_file(path / AVERAGE) if AVERAGE in document["files"] else {}
        return Checkpoint(model=model, ema=average, state=unpack(document["state"], tensors))
    except MALFORMED as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {type(error).__name__}: {error}") from error


def open_weights(path: Path, world: World | None = None) -> LazyTensors:
    """Return a checkpoint's weights as validation used them: averaged ones if the run keeps them.

    Each is read when it is looked up. Files are checked first: of a sharded checkpoint, by all ranks of the `world`.
    """
    if is_sharded(path):
        tensors = open_shards(path, world).open()[1]
        found: list[LazyTensors] = [take(tensors, f"state.{part}.") for part in ("model", "ema")]
    else:
        held = _verify_files(path)["files"]
        found = [TensorFile(path / name) for name in ("model.safetensors", AVERAGE) if name in held]
    model, *averages = found

    def read(name: str) -> Tensor:
        source = next((average for average in averages if name in average), model)
        return source[name].to(model.described[name].dtype)

    return LazyTensors(model.described, read)


def open_shards(path: Path, world: World | None = None, *, reads_tensors: bool = True) -> StoredShards:
    """Check a sharded checkpoint on all ranks of the `world`, or on this one alone."""
    from halfstep.distributed.sharded_files import StoredShards

    return StoredShards(path, world, reads_tensors=reads_tensors)


def read_document(path: Path) -> dict[str, Any]:
    """Read a checkpoint's state without its tensors, and the checksums of its files."""
    if is_sharded(path):
        return dict(open_shards(path, reads_tensors=False).open()[0]["state"])
    try:
        document = read_sealed((path / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {STATE}: {error}") from error
    if (version := document.get("layout")) != LAYOUT_VERSION:
        raise CheckpointError(
            f"checkpoint {path.name} has layout {version}",
            why=f"this version of halfstep reads layout {LAYOUT_VERSION}",
            fix="use the version of halfstep that wrote it",
        )
    return document


def _verify_files(path: Path) -> dict[str, Any]:
    """Return the document of an unsharded checkpoint; raise if a file does not have its recorded size and checksum."""
    document, name = read_document(path), ""
    try:
        for name, expected in document["files"].items():
            found = measure_file(path / name)
            if found != dict(expected):
                raise ValueError(
                    f"it has {found['bytes']} bytes and checksum {found['crc32']:08x}, not "
                    f"{expected['bytes']} bytes and {expected['crc32']:08x}"
                )
    except MALFORMED as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {name}: {error}") from error
    return document


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the tensors and state.json, with the size and checksum of every file."""
    packed, tensors = pack(checkpoint.state)
    average = {AVERAGE: checkpoint.ema} if checkpoint.ema else {}
    files = write_files(folder, {"model.safetensors": checkpoint.model, **average, "state.safetensors": tensors})
    document = {"layout": LAYOUT_VERSION, "files": files, "state": packed}
    (folder / STATE).write_text(json.dumps(seal(document)))
