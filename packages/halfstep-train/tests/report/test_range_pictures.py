"""Ranges along a network: the module at fault is on the page, however many there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.errors import CheckpointError
from halfstep_train.report.range_pictures import MOST, choose_modules, draw_ranges


def test_of_many_modules_the_one_at_fault_and_the_largest_are_shown_in_order(tmp_path: Path) -> None:
    forward = [(f"layer.{k}", 1e-6, float(k + 1)) for k in range(2 * MOST)]
    rows = {"forward": forward, "backward": [("layer.3", 1e-9, 1e-3)]}
    names = choose_modules(rows, "layer.3")
    assert names == ["layer.3", *(f"layer.{k}" for k in range(MOST + 1, 2 * MOST))]
    draw_ranges(rows, "fp16", tmp_path / "ranges.png", at="layer.3")
    assert (tmp_path / "ranges.png").stat().st_size > 10_000


def test_a_path_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot write"):
        draw_ranges({"forward": [("layer", 0.5, 1.0)]}, "fp16", tmp_path / "file" / "ranges.png")


def test_drawing_does_not_import_pyplot(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from halfstep_train.report.range_pictures import draw_heat_map
draw_heat_map([("layer", "weights", 0.5)], "title", Path({str(tmp_path / "heat.png")!r}))
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
