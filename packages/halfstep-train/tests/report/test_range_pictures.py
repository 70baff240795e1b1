"""Ranges along a network: the module at fault is on the page, however many there are."""

from __future__ import annotations

from pathlib import Path

from halfstep_train.report.curves import MOST, choose_modules, draw_ranges


def test_of_many_modules_the_one_at_fault_and_the_largest_are_shown_in_order(tmp_path: Path) -> None:
    forward = [(f"layer.{k}", 1e-6, float(k + 1)) for k in range(2 * MOST)]
    rows = {"forward": forward, "backward": [("layer.3", 1e-9, 1e-3)]}
    names = choose_modules(rows, "layer.3")
    assert names == ["layer.3", *(f"layer.{k}" for k in range(MOST + 1, 2 * MOST))]
    draw_ranges(rows, "fp16", tmp_path / "ranges.png", at="layer.3")
    assert (tmp_path / "ranges.png").stat().st_size > 10_000
