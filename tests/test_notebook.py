"""The notebook in examples/ runs in a real kernel: the bar, the lines, the panel and the curves are its outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from doc_pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells, executed; the run goes into a temporary folder."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")}
    shown: list[str] = []
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.on_cell_executed = lambda cell, cell_index, execute_reply: shown.append(str(cell_index))
    client.execute(env=environment)
    assert len(shown) == sum(cell.cell_type == "code" for cell in notebook.cells)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def collect(cell: Any, kind: str) -> list[str]:
    return ["".join(output.data[kind]) for output in cell.outputs if kind in output.get("data", {})]


def test_the_header_the_lines_and_the_summary_render_and_the_bars_leave_nothing(cells: list[Any]) -> None:
    text = "\n".join(collect(cells[0], "text/plain"))
    assert "halfstep unet" in text
    assert "mean loss" in text
    assert "best iou" in text
    assert "╭" in text, "panels"
    html = collect(cells[0], "text/html")
    assert any("best iou" in one for one in html)
    assert html.count("") >= 2, "a finished bar is replaced by its two lines"


def test_metrics_and_curves_are_shown(cells: list[Any]) -> None:
    assert collect(cells[1], "text/plain")[0].startswith("[(")
    assert collect(cells[2], "image/png")


def test_a_custom_loop_drops_its_bad_step(cells: list[Any]) -> None:
    assert collect(cells[3], "text/plain") == ["19"]


def test_the_stored_notebook_has_no_outputs() -> None:
    notebook = nbformat.read(Path(ROOT / "examples" / "notebook.ipynb"), as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
