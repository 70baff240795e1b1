"""The bench on a real GPU: device time, a graph's memory, energy, and rows that cannot run."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from halfstep.hardware.probe import probe
from halfstep_train.bench.bench import LOSS_BOUND, BenchRequest, HalfstepRunner, bench
from halfstep_train.bench.measure_row import Row, Schedule, StepTimer, find_other_users, measure_row, read_clock_limits
from halfstep_train.bench.problem import Problem, build_problem, count_step_flops, load_bench_config

pytestmark = pytest.mark.gpu

SHORT = Schedule(warm_up=6, ramp=2, window=5)


def unet(batch_size: int) -> Problem:
    size = {"batch_size": batch_size, "image_size": 128}
    config = load_bench_config("unet", ["model.base_channels=16", "model.depth=2"], size, small=False)
    return build_problem(config, torch.device("cuda:0"))


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    problem = unet(8)
    modes = ("eager", "compile", "graph")
    request = BenchRequest(precisions=("fp32", "bf16"), modes=modes, schedule=SHORT)
    found = bench(problem, request, probe("cuda"), count_step_flops(problem), tell=print)
    return {row.label: row for row in found.rows}


def test_every_mode_is_measured_with_a_spread_and_a_speedup(rows: dict[str, Row]) -> None:
    assert [row.reason for row in rows.values()] == [""] * 6
    for row in rows.values():
        assert len(row.window_ms) == 5
        assert 0 < min(row.window_ms) <= row.ms <= max(row.window_ms)
        assert row.speedup_fp32 is not None


def test_every_mode_trains_to_the_loss_of_eager_fp32(rows: dict[str, Row]) -> None:
    expected = rows["halfstep eager fp32"].loss
    for row in rows.values():
        assert row.loss == pytest.approx(expected, rel=LOSS_BOUND), row.label


def test_a_graphs_memory_is_counted(rows: dict[str, Row]) -> None:
    compiled, graph = rows["halfstep compile bf16"], rows["halfstep graph bf16"]
    assert compiled.peak_bytes
    assert graph.peak_bytes
    # The same activations, in the graph's own pool.
    assert graph.peak_bytes > 0.8 * compiled.peak_bytes
    assert graph.reserved_bytes
    assert graph.reserved_bytes >= graph.peak_bytes


def test_energy_is_counted_where_the_gpu_counts(rows: dict[str, Row]) -> None:
    joules = rows["halfstep eager fp32"].joules_per_sample
    if joules is None:
        pytest.skip("this GPU's energy counter cannot be read: this was NOT tested")
    assert 0 <= joules < 100


def test_a_compiled_row_says_how_its_start_found_the_cache(rows: dict[str, Row]) -> None:
    assert rows["halfstep eager bf16"].cache == ""
    assert rows["halfstep compile bf16"].cache in ("cold", "warm")


def test_windows_are_the_devices_time() -> None:
    device = torch.device("cuda:0")
    a = torch.randn(4096, 4096, device=device)
    timer = StepTimer(SHORT, device, samples=1)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(SHORT.steps):
        for _ in range(10):
            a = (a @ a).clamp(-1, 1)
        timer()
    by_the_clock = (time.perf_counter() - began) / SHORT.steps
    by_the_device = sum(timer.measured["window_ms"]) / 5e3
    # The clock sees the first, slow steps, too.
    assert 0.3 * by_the_clock < by_the_device < 1.3 * by_the_clock


@pytest.fixture
def one_gigabyte() -> Iterator[None]:
    """A hard limit on what torch may take: an allocation beyond it is a real OutOfMemoryError."""
    gc.collect()  # earlier tests' graphs and models
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1e9) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("one_gigabyte")
def test_out_of_memory_costs_one_row_and_gives_its_memory_back() -> None:
    small, huge, hardware = unet(2), unet(256), probe("cuda")  # of the huge one's maps the first four take 1.1 GB
    held = torch.cuda.memory_reserved()
    lost = measure_row(HalfstepRunner(huge, "fp32", "eager", hardware), huge, SHORT)
    assert lost.reason.startswith("out of memory")
    assert torch.cuda.memory_reserved() <= held + 2**26
    row = measure_row(HalfstepRunner(small, "fp32", "eager", hardware), small, SHORT)
    assert row.is_measured, row.reason


def test_conditions_can_be_asked_for() -> None:
    device = torch.device("cuda:0")
    assert isinstance(read_clock_limits(device), tuple)
    assert isinstance(find_other_users(device), str)
