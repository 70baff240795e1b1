"""The README's speed table says what the stored rows say, and the script that makes them stands on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.bench.row import Row
from halfstep.hardware.probe import probe

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def row(name: str, variant: str, ms: float, peak_gb: float, start_s: float) -> dict[str, Any]:
    windows = (ms, ms * 0.99, ms * 1.01)
    known = {"window_ms": windows, "peak_bytes": int(peak_gb * 1e9), "start_s": start_s}
    return Row(name=name, variant=variant, precision="bf16", **known).to_dict()


def test_the_fastest_of_each_kind_stand_in_a_row() -> None:
    from readme_tables import speed_table

    rows = [row("halfstep", "auto", 20.0, 4.0, 42.0), row("plain", "documented", 44.0, 6.0, 30.0)]
    rows += [row("lightning", "documented", 40.0, 5.9, 31.0), row("plain", "tuned", 26.0, 5.95, 33.0)]
    rows.append(Row(name="accelerate", variant="tuned", precision="bf16", reason="not installed").to_dict())
    problem = {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "title": "U-Net, 8", "rows": rows}
    alone = {**problem, "title": "U-Net, low", "rows": rows[:1], "repeated": None}
    said = speed_table({"unet": {**problem, "repeated": row("halfstep", "auto", 20.1, 4.0, 9.0)}, "low": alone})
    *_, table, low = said.splitlines()
    assert table == (
        "| U-Net, 8 | 20.0 ms (19.8 to 20.2), auto | 40.0 ms (39.6 to 40.4), lightning | 26.0 ms (25.7 to 26.3), plain "
        "| 2.00x, 1.30x | 4.00 / 5.90 / 5.95 GB | 42 s / 9 s |"
    )
    assert low.startswith("| U-Net, low | 20.0 ms (19.8 to 20.2), auto | not measured | not measured | -, - |")


def test_the_speed_script_names_its_cases_and_refuses_others() -> None:
    script = [sys.executable, str(BENCHMARKS / "speed.py")]
    done = subprocess.run([*script, "--only", "gpt9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unet, unet_low_memory, resnet50_64, resnet50_256, vit_l_64" in done.stderr


@pytest.mark.slow
def test_a_case_is_measured_and_its_row_is_written_even_where_peers_cannot_run() -> None:
    from readme_tables import speed_table
    from speed import Case, measured

    words = ("model.base_channels=2", "model.depth=1")
    tiny = Case(title="tiny", workload="unet", batch_size=2, image_size=16, words=words, against=("plain",))
    found = measured(tiny, ("eager",), probe("cpu"), deadline=None)
    assert [row["name"] for row in found["rows"]] == ["halfstep", "plain"]
    assert found["repeated"]["window_ms"]
    assert speed_table({"tiny": found}).splitlines()[-1].startswith("| tiny | ")
