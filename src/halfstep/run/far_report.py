"""The voice of a process whose screen and files are another's: warnings go there with its rank, nothing else does."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

from halfstep.report.progress import Bar
from halfstep.report.run_report import Level, Rows, RunReport
from halfstep.step.world import World


@contextlib.contextmanager
def posted_warnings(world: World) -> Iterator[None]:
    """Python's own warnings inside go where the report's go."""

    def post(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        world.post(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = post
        yield


class FarReport(RunReport):
    """Writes nothing by itself."""

    def __init__(self, world: World) -> None:
        self.world = world

    def header(self, title: str, rows: Rows, *, plan: str = "", warnings: Sequence[str] = ()) -> None:
        """The first process shows it."""

    @contextlib.contextmanager
    def phase(self, label: str, total: int) -> Iterator[Bar]:
        yield Bar(label, total)

    def notice(self, text: str, level: Level = "info") -> None:
        if level != "info":
            self.world.post(text)

    def epoch_summary(self, epoch: int, epochs: int, rows: Sequence[tuple[str, str, str]]) -> None:
        """The first process shows it."""

    def log(self, record: Mapping[str, object]) -> None:
        """The first process writes it."""

    def finish(self, title: str, rows: Rows) -> None:
        """The first process shows it."""

    def close(self) -> None:
        """Nothing is open."""
