"""The monitor, with NVML's answers put in at the one door to it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfstep_train.cli.top import GPU
from halfstep_train.run.journal import Waiting, format_gpu_use
from halfstep_train.run.monitor import MOST_SHARE, Monitor, monitor_device


class NvmlError(Exception):
    pass


class Nvml:
    """A GPU at 640 W that does not tell its temperature."""

    NVMLError, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = NvmlError, 1, 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=5_000_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 640_000

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: Any, kind: int) -> int:
        raise NvmlError

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 0x04 | 0x01


def here(device: Any, question: Any) -> Any:
    return question(Nvml(), "handle")


def monitor(file: Path, **more: Any) -> Monitor:
    return Monitor(torch.device("cuda"), file, ask=here, **more)


def test_records_have_the_names_that_the_page_reads_and_unknown_values_are_null(tmp_path: Path) -> None:
    watch = monitor(tmp_path / "monitor.jsonl", interval_s=0.01)
    watch.mark_steady()
    watch.start()
    deadline = time.monotonic() + 10
    while watch.num_samples < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.stop()
    records = [json.loads(line) for line in watch.file.read_text().splitlines()]
    assert len(records) == watch.num_samples >= 3
    assert {**records[0], "elapsed_s": 0} == {
        "elapsed_s": 0,
        "steady": True,
        "utilization": 97,
        "memory_bytes": 5_000_000_000,
        "power_w": 640.0,
        "clock_mhz": 1980,
        "temperature_c": None,
        "throttled": "power cap",
    }
    assert set(GPU) <= set(records[0])
    assert [r["elapsed_s"] for r in records] == sorted(r["elapsed_s"] for r in records)
    assert watch.summarise() == "97%, 640 W"
    assert watch.utilization == 97


def test_slow_answers_make_it_ask_more_seldom(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    watch = monitor(tmp_path / "monitor.jsonl", clock=lambda: next(ticks) * 0.05)
    watch.record_sample()
    asked_s = watch.spent_s / watch.num_samples
    assert asked_s > 0
    assert asked_s / watch._choose_pause_s() <= MOST_SHARE * (1 + 1e-9)


def test_a_resumed_run_goes_on_counting_even_after_a_cut_line(tmp_path: Path) -> None:
    file = tmp_path / "monitor.jsonl"
    file.write_text('{"elapsed_s": 40.5, "utilization": 90}\n{"elapsed_s": 41.')
    assert monitor(file).record_sample()["elapsed_s"] >= 40.5


def test_a_device_without_nvml_has_no_file(tmp_path: Path) -> None:
    with monitor_device(torch.device("cpu"), tmp_path / "monitor.jsonl") as watch:
        assert not watch.is_able
        assert watch.summarise() == ""
    assert not (tmp_path / "monitor.jsonl").exists()


def test_a_folder_that_is_gone_ends_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    watch = monitor(tmp_path / "gone" / "monitor.jsonl", interval_s=0.01)
    watch.start()
    time.sleep(0.05)
    watch.stop()
    assert "monitor.jsonl" in watch.trouble


WAITS = {
    "waited for data": Waiting(trained_s=90, waited_s=50),
    "validation": Waiting(trained_s=40, waited_s=5),
    "the host": Waiting(trained_s=95, waited_s=2),
}


@pytest.mark.parametrize("reason", WAITS)
def test_a_gpu_that_rests_is_said_with_what_it_waited_for(reason: str) -> None:
    line = format_gpu_use(45, WAITS[reason], 100, "eager")
    assert line.startswith("45% busy, under 80%")
    assert reason in line
    assert ("train.fast=graph" in line) == (reason == "the host")
    assert "train.fast=graph" not in format_gpu_use(45, WAITS[reason], 100, "graph")
    assert format_gpu_use(93.4, WAITS[reason], 100, "eager") == "93% busy"


def test_a_start_that_compiles_is_no_part_of_how_busy_the_gpu_was(tmp_path: Path) -> None:
    watch = monitor(tmp_path / "monitor.jsonl")
    assert not watch.record_sample()["steady"]
    assert watch.utilization is None
    watch.mark_steady()
    assert watch.record_sample()["steady"]
    assert (watch.num_samples, watch.utilization) == (2, 97)
    compiled = Waiting(trained_s=195, waited_s=42, start_s=100, start_waited_s=40)
    assert format_gpu_use(97, compiled, 200, "graph") == "97% busy after a start of 100 s"
    assert "43% of the time it waited for the host" in format_gpu_use(50, compiled, 200, "graph")
    assert "not measurable" in format_gpu_use(50, compiled, 105, "graph")
