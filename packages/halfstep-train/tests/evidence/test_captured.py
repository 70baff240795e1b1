"""The ledger of a captured step has the rows of the captured code and the kernels of a replay."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.evidence.precision_ledger import Ledger, LedgerRow, make_captured_ledger, split_replays

CODE = Ledger(
    mode="compiled",
    rows=(LedgerRow(module="0", planned="bf16", forward="bf16"),),
    findings=(),
    summary="all as planned",
)


def test_a_recorded_step_of_a_unet_is_listed_whole() -> None:
    """A replay on an H200."""
    recorded = json.loads(gzip.decompress((Path(__file__).parent / "recorded_unet.json.gz").read_bytes()))
    (replay,) = split_replays(recorded["replay"])
    seen = make_captured_ledger(CODE, replay, "captured")
    assert sum(kernel.calls for kernel in seen.kernels) == len(replay) == 275
    assert "_update" in {kernel.name for kernel in seen.kernels}  # of the commit
    assert sum(kernel.time_share for kernel in seen.kernels) == pytest.approx(1)


def test_only_kernels_of_graph_launches_are_of_the_replay() -> None:
    events = [
        _call("cudaGraphLaunch", 5, correlation=7), _call("cudaLaunchKernel", 1, correlation=3),
        _device("augment", 3, correlation=3), _device("conv", 10, correlation=7), _device("adamw", 12, correlation=7),
    ]  # fmt: skip
    assert [[event["name"] for event in replay] for replay in split_replays(events)] == [["conv", "adamw"]]


def test_the_ledger_shows_the_rows_of_the_code_and_the_longest_kernels_first() -> None:
    replay = [_device("relu", 0, correlation=1), *(_device("gemm", start, correlation=1) for start in (1, 2, 3))]
    seen = make_captured_ledger(CODE, replay, "captured, critic")
    assert (seen.mode, seen.rows) == ("captured, critic", CODE.rows)
    assert [(kernel.name, kernel.calls, kernel.time_share) for kernel in seen.kernels] == [
        ("gemm", 3, 0.75),
        ("relu", 1, 0.25),
    ]
    assert seen.summary == "4 kernels; as compiled: all as planned"
    assert "gemm    3      75%" in str(seen)


def _call(name: str, ts: float, *, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1.0, "args": {"correlation": correlation}}


def _device(name: str, ts: float, *, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": 1.0, "args": {"correlation": correlation}}
