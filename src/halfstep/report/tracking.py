"""TensorBoard, for those who ask for it: every number of metrics.jsonl as a scalar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError

NOT_CURVES = {"step", "epoch"}


class Tracker:
    """Writes scalars into a folder that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path, *, after_step: int | None = None) -> None:
        """`after_step`: the last step that a resumed run has on record; TensorBoard then hides all that came later."""
        writer_class = _summary_writer()
        self._writer = writer_class(str(folder), purge_step=None if after_step is None else after_step + 1)

    def add(self, record: Mapping[str, object]) -> None:
        for name, value in record.items():
            if name not in NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise HalfstepError(
            "--tensorboard asked for, but tensorboard cannot be imported",
            why=f"it is an optional extra of halfstep ({error})",
            fix="pip install 'halfstep[track]'",
        ) from error
    return SummaryWriter
