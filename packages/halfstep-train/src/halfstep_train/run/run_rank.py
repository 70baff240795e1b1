"""The role of a rank in a run: what only rank 0 does and writes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import CheckpointError
from halfstep_train.report.run_report import Bar, Level, RunReport
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.launch import Launch

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class RunRank:
    """This rank of a run; without a world it is the only one."""

    launch: Launch | None
    world: World | None

    @property
    def writes(self) -> bool:
        return self.world is None or self.world.is_first

    def run_on_first(self, make: Callable[[], Made]) -> Made:
        """Run on rank 0 and broadcast the result."""
        return make() if self.world is None else self.world.broadcast_from_first(make)

    def find_restarted_run(self, out: Path | None) -> Path | None:
        """Return the run to resume after torchrun has restarted its processes."""
        if self.launch is None or not self.launch.restarts:
            return None
        if out is None:
            raise mark_agreed(
                CheckpointError(
                    "torchrun has restarted the ranks, and the run was started without --out",
                    why="the default folder name contains the start time, so it cannot be found again",
                    fix="name it with --out DIR",
                )
            )
        return self.run_on_first(lambda: out if RunFolder(out).open_checkpoints().list_all() else None)


# --- reports of ranks that do not write ---


@contextlib.contextmanager
def post_warnings(world: World) -> Iterator[None]:
    """Send Python's warnings to rank 0, like those of the report."""

    def post(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        world.post(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = post
        yield


class FarReport(RunReport):
    """The report of a rank that does not write: its warnings go to rank 0."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _do_nothing(self, *_: object, **__: object) -> None: ...

    show_header = show_epoch = log = finish = close = add_files = _do_nothing
    failure = None

    @contextlib.contextmanager
    def show_phase(self, label: str, total: int, **_: object) -> Iterator[Bar]:
        yield Bar(label, total)

    def notice(self, text: str, level: Level = "info") -> None:
        if level != "info":
            self.world.post(text)
