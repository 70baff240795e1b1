"""What evaluation asks of a kind of workload; one that is not listed has its metrics and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from halfstep.config.schema import RunConfig
from halfstep.report.evaluation_view import Cell
from halfstep.workloads.other_data import any_folder
from halfstep.workloads.workload import Batch, Metrics, Workload

Look: TypeAlias = Callable[[int], tuple[Batch, Any]]
"""One validation sample as the model saw it, in a batch of one, and what the model says."""


class Kind(Protocol):
    """One kind of workload under evaluation."""

    def __init__(self, workload: Workload) -> None: ...

    @property
    def ranking(self) -> str:
        """The column of `classes` that says how good a class is."""
        ...

    @property
    def scored_at(self) -> str:
        """The size at which outputs were compared, where that is a question."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Those of validation, which may note more on the way."""
        ...

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        """Settings for data that the run was not trained on."""
        ...

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        """The workload built with them, with everything to be evaluated as its validation samples."""
        ...

    def classes(self) -> tuple[dict[str, Cell], ...]: ...
    def draw(self, folder: Path, look: Look) -> list[Path]: ...


class PlainEvaluation:
    """Of a workload that nobody knows more about."""

    ranking = ""
    scored_at = ""

    def __init__(self, workload: Workload) -> None:
        self.metrics = workload.metrics()

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        return any_folder(config, folder)

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        return workload

    def classes(self) -> tuple[dict[str, Cell], ...]:
        return ()

    def draw(self, folder: Path, look: Look) -> list[Path]:
        return []
