"""What prediction asks of a kind of workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from halfstep.errors import DataError
from halfstep.precision.plan import Plan
from halfstep.report.prediction_view import Answer, Failure
from halfstep.report.progress import Bar
from halfstep.report.run_report import RunReport
from halfstep.use.inputs import Input
from halfstep.use.open_run import OpenedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user may ask for beside the files; None where nothing was said."""

    out: Path | None = None
    tile: int | None = None
    top_k: int | None = None


class Predictor(Protocol):
    """One kind of workload in use."""

    def __init__(self, run: OpenedRun) -> None: ...

    @property
    def model(self) -> nn.Module:
        """As built; its weights come later."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """Files of a folder that count."""
        ...

    @property
    def takes(self) -> frozenset[str]:
        """The wishes it can fulfil; one that takes `out` writes files and always needs a folder."""
        ...

    def answers(
        self, inputs: list[Input], model: nn.Module, plan: Plan, wishes: Wishes, report: RunReport, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """One for each input, in order; the bar counts inputs, and may show how far one of them is."""
        ...


def failure_of(item: Input, error: DataError) -> Failure:
    """What is wrong with a file, in words that stand behind its name; reasons about training mean nothing here."""
    about_the_file = error.what.removeprefix(f"{item.path} ")
    is_said = about_the_file != error.what or not error.why
    return Failure(file=str(item.path), why=about_the_file if is_said else error.why)
