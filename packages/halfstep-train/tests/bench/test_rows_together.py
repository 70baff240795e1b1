"""What rows say together, and where they may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import ConfigError
from halfstep.hardware.gpus import look_up_gpu
from halfstep_train.bench.bench import (
    add_speedups,
    check_clocks,
    check_drift,
    check_losses,
    conclude,
)
from halfstep_train.bench.measure_row import Row
from halfstep_train.bench.record import summarise_results
from halfstep_train.cli.options import refuse_to_overwrite


def row(variant: str, precision: str, ms: float, *, spread: float = 0.2, **others: Any) -> Row:
    windows = tuple(ms + spread * offset for offset in (-0.5, -0.1, 0.0, 0.1, 0.5))
    known = {"name": "halfstep", "loss": 1.0, "peak_bytes": 6_000_000_000, **others}
    return Row(variant=variant, precision=precision, window_ms=windows, **known)


def test_speedups_refer_to_eager_fp32_and_tf32() -> None:
    rows = [row("compile", "fp32", 50.0), row("eager", "fp32", 100.0), row("eager", "tf32", 60.0)]
    rows += [row("graph", "bf16", 10.0), row("eager", "fp8", 5.0, simulated=True)]
    found = {r.label: r for r in add_speedups(rows)}
    fast = found["halfstep graph bf16"]
    assert (fast.speedup_fp32, fast.speedup_tf32) == (10.0, 6.0)
    assert found["halfstep compile fp32"].speedup_fp32 == 2.0
    assert found["halfstep eager fp8"].speedup_fp32 is None


def test_the_rows_that_speedups_refer_to_are_named_whichever_they_are() -> None:
    rows = [row("auto", "fp32", 50.0), row("graph", "bf16", 10.0), row("tuned", "tf32", 20.0, name="plain")]
    found = conclude(rows, flops=1, hardware=look_up_gpu("h200"))
    assert found.bases == {"fp32": "halfstep auto fp32", "tf32": "plain tuned tf32"}
    assert summarise_results(found)["speedup_bases"] == found.bases
    assert conclude(rows[1:2], flops=1, hardware=look_up_gpu("h200")).bases == {}


def test_a_loss_far_from_eager_fp32_is_warned_of_and_a_near_one_is_not() -> None:
    rows = [row("compile", "bf16", 10.0, loss=1.2), row("eager", "fp32", 100.0), row("eager", "bf16", 20.0, loss=1.05)]
    [warning] = check_losses(rows, rows[1])
    assert warning.startswith("halfstep compile bf16: loss 1.2")
    assert "halfstep eager fp32 has 1" in warning


def test_drift_beyond_the_spread_is_warned_of() -> None:
    first = row("eager", "fp32", 100.0)
    assert check_drift([first], row("eager", "fp32", 101.5)) == ""
    assert "+10.0%" in check_drift([first], row("eager", "fp32", 110.0))
    assert check_drift([first], row("eager", "fp32", 110.0, spread=12.0)) == ""
    lost = Row(name="halfstep", variant="eager", precision="fp32", reason="out of memory")
    assert "out of memory" in check_drift([first], lost)


def test_clocks_that_were_held_down_are_warned_of_by_row() -> None:
    rows = [row("eager", "fp32", 100.0), row("graph", "bf16", 10.0, clock_limits=("power cap",))]
    assert check_clocks(rows) == "the device's clocks were throttled in halfstep graph bf16 (power cap)"
    assert check_clocks(rows[:1]) == ""


@pytest.mark.parametrize("name", [".", "no where/bench.json", "file/bench.json"])
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already|cannot be written"):
        refuse_to_overwrite({"--save": tmp_path / name}, force=True)
    assert (tmp_path / "file").read_text() == "mine"
