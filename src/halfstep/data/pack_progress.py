"""A bar on standard error while a folder is packed; where the cache is there already, nothing is shown."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TaskID

from halfstep.errors import counted


class PackingBar:
    """Told how many images of how many are done; the first word of it draws the bar."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None

    @property
    def was_shown(self) -> bool:
        """Whether anything was packed."""
        return self._task is not None

    def __enter__(self) -> PackingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.was_shown:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._bar.start()
            self._bar.console.print(
                f"packing {counted(total, 'image')} into {self._path}", soft_wrap=True, markup=False
            )
            self._task = self._bar.add_task("packing", total=total)
        self._bar.update(self._task, completed=done)
