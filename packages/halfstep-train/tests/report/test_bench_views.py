"""The bench's table and profiles."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from halfstep_train.report.bench_view import format_digits, show_bench

NOTHING: dict[str, Any] = {
    "reason": "",
    "remarks": [],
    "window_ms": [],
    "joules_per_sample": None,
    "cache": "",
}


def measured(variant: str, precision: str, ms: float, name: str = "halfstep", **others: Any) -> dict[str, Any]:
    return {
        **NOTHING,
        "name": name,
        "variant": variant,
        "precision": precision,
        "window_ms": [ms] * 5,
        "ms": ms,
        "ms_min": 0.99 * ms,
        "ms_max": 1.03 * ms,
        "samples_per_s": 8e3 / ms,
        "peak_bytes": 6_290_000_000,
        "reserved_bytes": 7_000_000_000,
        "floor_share": 11.7 / ms,
        "loss": 1.234567,
        "start_s": 12.34,
        "speedup_fp32": 246.6 / ms,
        "speedup_tf32": 91.0 / ms,
        **others,
    }


RECORD: dict[str, Any] = {
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "unit": {"name": "sample", "per_sample": 1},
    "sample_size": "512 pixels",
    "problem": {
        "workload": "unet",
        "parameters": 31_037_698,
        "batch_size": 8,
        "image_size": 512,
        "optimizer": "adamw",
        "clip_norm": 1.0,
    },
    "window_steps": 20,
    "steps": 112,
    "loss_reference": "halfstep eager fp32",
    "loss_bound": 0.1,
    "speedup_bases": {"fp32": "halfstep eager fp32", "tf32": "plain tuned tf32"},
    "warnings": ["the GPU is in use by others"],
    "rows": [
        measured("eager", "fp32", 246.6),
        measured("graph", "bf16", 25.1, cache="warm", remarks=["graph: the fastest"]),
        measured("tuned", "bf16", 26.0, name="lightning", cache="cold"),
        measured("eager", "fp8", 900.0, speedup_fp32=None),
        {**NOTHING, "name": "halfstep", "variant": "graph", "precision": "fp8", "reason": "out of memory: no"},
    ],
}


def shown(record: dict[str, Any], width: int = 200) -> str:
    out = io.StringIO()
    show_bench(record, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_has_every_number_of_a_row() -> None:
    line = next(line for line in shown(RECORD).splitlines() if line.startswith("halfstep   graph") and "25.1" in line)
    words = ["25.10", "24.85–25.85", "318.7", "9.82", "3.63", "6.29", "7.00", "47%", "1.235", "12.3 warm"]
    assert all(word in line for word in words), line


def test_title_reasons_remarks_and_warnings_stand_around_the_table() -> None:
    said = shown(RECORD)
    assert said.startswith("unet, 31.0M parameters, batch 8, 512 pixels, adamw, clip 1: NVIDIA H200, torch 2.11.0")
    assert "not measured: halfstep graph fp8: out of memory: no" in said
    assert "halfstep graph bf16: graph: the fastest" in said
    assert "warning: the GPU is in use by others" in said
    assert "compared with halfstep eager fp32 within 10%" in said


def test_a_reduced_network_is_not_shown_under_the_bare_name() -> None:
    problem = {**RECORD["problem"], "parameters": 438_456, "reduced": {"model.width": 16, "model.blocks": [1, 1]}}
    said = shown({**RECORD, "problem": problem})
    assert said.startswith("unet reduced to 438,456 parameters, batch 8")
    assert "reduced: this is the demo's small network (model.width=16, model.blocks=[1, 1])" in said
    assert "reduced" not in shown(RECORD)


@pytest.mark.parametrize(
    ("value", "text"),
    [(246.63, "247"), (25.1, "25.1"), (1.0, "1.00"), (0.09934, "0.0993"), (5526.4, "5526"), (0, "0"), (None, "-")],
)
def test_numbers_have_three_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert format_digits(value) == text
