"""A run's folder: `config.yaml plan.json metrics.jsonl checkpoints/ report/ model/`; never overwritten or half-made."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from halfstep.disk import owned
from halfstep.errors import CheckpointError, printable, suggested
from halfstep.run.checkpoint import Checkpoints


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps its files."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The trained model in a form that others read, where the family has one."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def checkpoints(self, *, keep: int = 0, writes: bool = True) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", keep=keep, writes=writes)

    def locked(self) -> AbstractContextManager[None]:
        """This process alone trains here."""
        return owned(self.path)

    @classmethod
    def planned(cls, out: str | None, name: str) -> RunFolder:
        """Where a new run would be; nothing is made."""
        return cls(Path(out) if out else _unused_name(name))

    @classmethod
    def create(cls, out: str | None, name: str) -> RunFolder:
        """A new folder, made by this call alone: an existing one with content is an error."""
        path = cls.planned(out, name).path
        if printable(str(path)) != str(path):
            raise CheckpointError(
                f"the run's folder {path} is not UTF-8",
                why="safetensors could not read its checkpoints again",
                fix="choose another name with --out",
            )
        if path.is_dir() and any(path.iterdir()):
            raise _taken(cls(path))
        try:
            (path / "report").mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the run's folder {path}: {error.strerror}", fix="choose a writable place with --out"
            ) from error
        return cls(path)

    @classmethod
    def open(cls, path: str) -> RunFolder:
        """An existing run."""
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise CheckpointError(f"there is no run folder {path}", fix="give the folder that `halfstep train` named")
        if not folder.config.is_file():
            raise CheckpointError(
                f"{path} is not a run folder: it has no config.yaml", fix="give the folder that `halfstep train` named"
            )
        return folder


def _taken(folder: RunFolder) -> CheckpointError:
    """Only a run with a checkpoint can be continued; one that was killed before its first is of no use to anybody."""
    fix = "choose another --out"
    if folder.checkpoints().all():
        fix += f", or continue that run with: {suggested('train', '--resume', folder.path)}"
    elif folder.config.is_file():
        fix += f", or remove {folder.path}: that run ended before its first checkpoint"
    return CheckpointError(
        f"{folder.path} already exists and is not empty", why="a run never overwrites another one", fix=fix
    )


def _unused_name(name: str) -> Path:
    """`runs/NAME-TIME`; a second run of the same second gets a number."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (first.with_name(f"{first.name}-{k}") for k in itertools.count(2))
    return next(path for path in itertools.chain([first], numbered) if not path.exists())
