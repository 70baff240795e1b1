"""Rows are measured apart: errors, memory and switches of one never reach the next."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.utils import clear_caches, fresh_cache

from halfstep.backend_flags import read_effective_leaves
from halfstep.errors import ConfigError, HardwareError, MemoryLimitError
from halfstep.hardware.device_facts import Hardware, Measurement
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.probe import probe
from halfstep_train.bench.bench import (
    BenchRequest,
    HalfstepRunner,
    bench,
    check_clocks,
    check_drift,
    check_losses,
    conclude,
    list_runners,
    summarise_results,
)
from halfstep_train.bench.measure_row import (
    NUM_WINDOWS,
    CacheWatch,
    Row,
    Schedule,
    StepTimer,
    describe_failure,
    isolate_row,
    make_schedule,
    measure_row,
)
from halfstep_train.bench.problem import AfterStep, Problem, build_problem, load_bench_config, refuse_too_large
from halfstep_train.cli.options import refuse_to_overwrite
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.memory.sizing import StepCost, predict_step_cost

CPU = torch.device("cpu")
SHORT = Schedule(warm_up=1, ramp=0, window=1)
TINY = ("data.image_size=16", "model.base_channels=2", "model.depth=1")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(load_bench_config("unet", TINY, {"batch_size": 2}, small=True), CPU)


@dataclass(kw_only=True)
class Somebody:
    """A runner that does what a test wants at each step."""

    each_step: Callable[[], None]
    name: str = "somebody"
    variant: str = "alone"
    precision: str = "fp32"
    trained: list[int] = field(default_factory=list)

    def train(self, steps: int, after_step: AfterStep) -> float:
        self.trained.append(steps)
        for _ in range(steps):
            self.each_step()
            after_step()
        return 1.5


def test_a_row_has_time_spread_and_loss(problem: Problem) -> None:
    row = measure_row(Somebody(each_step=lambda: time.sleep(0.004)), problem, SHORT)
    assert row.is_measured
    assert 4 <= row.ms < 12
    assert min(row.window_ms) <= row.ms <= max(row.window_ms)
    assert row.loss == 1.5
    assert row.samples_per_s == pytest.approx(2 / (row.ms / 1e3))


def test_a_window_in_which_the_machine_was_busy_changes_neither_the_time_nor_the_samples_a_second(
    problem: Problem,
) -> None:
    waits = iter((0.0, 0.01, 0.01, 0.2, 0.01, 0.01))
    row = measure_row(Somebody(each_step=lambda: time.sleep(next(waits))), problem, SHORT)
    assert row.samples_per_s == pytest.approx(2e3 / row.ms)
    assert row.ms < 100 < max(row.window_ms)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore"), "out of memory: CUDA out"),
        (
            HardwareError("fp8 was requested, but this has none", fix="bf16"),
            "fp8 was requested, but this has none (bf16)",
        ),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_whatever_stops_a_row_is_its_reason(problem: Problem, error: Exception, reason: str) -> None:
    def stop() -> None:
        raise error

    row = measure_row(Somebody(each_step=stop), problem, SHORT)
    assert not row.is_measured
    assert row.reason.startswith(reason)
    assert "\n" not in describe_failure(error)


def test_ctrl_c_while_a_row_is_measured_ends_the_bench(problem: Problem) -> None:
    ends: list[float] = []

    def step_for_long() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for _ in range(1000):
                time.sleep(0.01)
        finally:
            ends.append(time.monotonic())

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        measure_row(Somebody(each_step=step_for_long), problem, SHORT)
    assert ends[0] - began < 5


def test_each_row_trains_in_a_thread_of_its_own_with_backward_and_without_the_last_ones_modes(problem: Problem) -> None:
    threads: list[threading.Thread] = []
    backwards: list[threading.Thread] = []
    seen: list[tuple[bool, bool]] = []

    def step() -> None:
        if threading.current_thread() not in threads:
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        threads.append(threading.current_thread())
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(lambda grad: backwards.append(threading.current_thread()))
        weight.sum().backward()
        torch.set_autocast_enabled("cpu", True)

    for _ in range(2):
        measure_row(Somebody(each_step=step), problem, SHORT)
    assert len(set(threads)) == 2
    assert threading.current_thread() not in threads
    assert backwards == threads
    assert seen == [(True, False)] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_switches_that_a_runner_turns_are_turned_back(problem: Problem) -> None:
    before = read_effective_leaves(), torch.backends.cudnn.benchmark

    def meddle() -> None:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = not before[1]
        torch.set_grad_enabled(False)

    measure_row(Somebody(each_step=meddle), problem, SHORT)
    assert (read_effective_leaves(), torch.backends.cudnn.benchmark) == before
    assert torch.is_grad_enabled()


def test_halfstep_trains_the_problem_and_repeats_itself(problem: Problem) -> None:
    runner = HalfstepRunner(problem, "fp32", "eager", probe("cpu"))
    losses = [runner.train(4, lambda: None) for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0] < runner.train(1, lambda: None)


def test_a_row_with_less_memory_says_what_was_tried_for_it() -> None:
    problem = build_problem(load_bench_config("unet", (*TINY, "train.memory=low"), {"batch_size": 2}, small=True), CPU)
    runner = HalfstepRunner(problem, "fp32", "eager", probe("cpu"))
    runner.train(1, lambda: None)
    chosen, normal, *others = runner.remarks
    assert chosen.partition(":")[0] in {"normal", *(line.partition(":")[0] for line in others)}
    assert normal.startswith("normal: ")
    assert normal.endswith(" ms")
    assert others[0].startswith("recompute pointwise: ")


def test_a_bench_has_a_row_for_each_precision_and_mode_and_says_why_one_is_missing(problem: Problem) -> None:
    told: list[str] = []
    request = BenchRequest(precisions=("fp32", "fp8"), modes=("eager", "graph"), schedule=SHORT)
    hardware = probe("cpu")
    found = bench(problem, request, hardware, flops=10**9, tell=told.append)
    rows = {row.label: row for row in found.rows}
    assert list(rows) == ["halfstep eager fp32", "halfstep graph fp32", "halfstep eager fp8", "halfstep graph fp8"]
    assert rows["halfstep graph fp32"].reason == "needs CUDA"
    assert rows["halfstep eager fp32"].speedup_fp32 == 1.0
    assert "no fp8_e4m3" in rows["halfstep eager fp8"].reason
    assert found.repeated is not None
    assert told == ["halfstep eager fp32", "halfstep eager fp32 again"]


def test_a_mode_that_could_not_run_is_no_row_of_that_mode(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Callable[[object], object]:
        def refuse(batch: object) -> object:
            raise TorchDynamoException("no compiler here")

        return refuse

    monkeypatch.setattr(torch, "compile", broken)
    row = measure_row(HalfstepRunner(problem, "fp32", "compile", probe("cpu")), problem, SHORT)
    assert row.reason.startswith("could not run as compile: not compiled, running eager: no compiler here")


def test_auto_says_which_mode_it_took(problem: Problem) -> None:
    request = BenchRequest(precisions=("fp32",), modes=("auto",), schedule=SHORT)
    [row] = bench(problem, request, probe("cpu"), flops=1, tell=lambda _: None).rows
    assert row.remarks[0].startswith("eager: trials are for CUDA")


def test_the_floor_is_the_arithmetic_at_the_measured_rate(problem: Problem) -> None:
    rate = Measurement(op="matmul", format="fp32", tflops=2.0, error=0.0, speedup=1.0)
    hardware = dataclasses.replace(probe("cpu"), measurements=(rate,))
    request = BenchRequest(precisions=("fp32",), modes=("eager",), schedule=SHORT)
    [row] = bench(problem, request, hardware, flops=4 * 10**9, tell=lambda _: None).rows
    assert row.floor_ms == pytest.approx(2.0)
    assert row.floor_share == pytest.approx(2.0 / row.ms)


def test_a_precision_that_peers_lack_costs_their_rows_only(problem: Problem) -> None:
    against = ("plain:graphs",)
    request = BenchRequest(precisions=("bf16-true",), modes=("eager",), against=against, schedule=SHORT)
    hardware = dataclasses.replace(probe("cpu"), support={"bf16": "native"})
    ours, peer = list_runners(problem, request, hardware)
    assert isinstance(ours, HalfstepRunner)
    assert isinstance(peer, Row)
    assert (peer.label, peer.is_measured) == ("plain graphs bf16-true", False)
    assert "bf16-true" in peer.reason


@pytest.mark.slow
def test_a_start_knows_whether_the_compilers_cache_was_filled() -> None:
    def start() -> str:
        watch = CacheWatch()
        torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # a library's kernel: no C++ compiler is called
        found = watch.get_state()
        torch.compiler.reset()
        clear_caches()
        return found

    with fresh_cache():
        assert [start(), start()] == ["cold", "warm"]
    assert CacheWatch().get_state() == ""


def test_rows_begin_without_kernels_of_our_own_that_were_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    from halfstep.step.optim import adamw_triton

    kernel = jit.JITFunction(adamw_triton._count.fn)  # as it is outside of Triton's interpreter
    monkeypatch.setattr(adamw_triton, "_count", kernel)
    kernel.device_caches[0] = "as after a call"
    with isolate_row(CPU):
        assert not kernel.device_caches


def test_a_workload_that_cannot_hold_its_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        build_problem(load_bench_config("unet", ["model.depth=5"], {"image_size": 16}, small=True), CPU)


def test_a_format_that_the_device_lacks_is_not_timed_and_the_row_gives_the_reason(problem: Problem) -> None:
    request = BenchRequest(precisions=("tf32",), modes=("eager",), schedule=SHORT)
    [row] = bench(problem, request, probe("cpu"), flops=1, tell=lambda _: None).rows
    assert not row.is_measured
    assert "no tf32" in row.reason
    with pytest.raises(ConfigError, match="precision.simulate=true cannot be timed"):
        load_bench_config("unet", (*TINY, "precision.simulate=true"), {"batch_size": 2}, small=True)


# --- what cannot fit a CPU's memory is refused, and nothing that can ---

STORE = {"channels": 3, "num_classes": 2, "image_size": 32}


def config(*words: str) -> RunConfig:
    return load_bench_config("unet", words, {"batch_size": 2, "image_size": 32}, small=True)


def cpu(free_bytes: int) -> Hardware:
    return Hardware(kind="cpu", device="cpu", name="CPU", vendor="Arm", memory_free_bytes=free_bytes)


@functools.cache
def cost(*words: str) -> StepCost:
    return predict_step_cost(config(*words), STORE, cpu(0), "fp32")


def test_what_fits_to_the_byte_is_not_refused_and_a_byte_less_is_with_what_would_fit() -> None:
    found = cost()
    refuse_too_large(config(), ("fp32", "bf16"), ("eager",), cpu(found.predict_bytes(2)))
    with pytest.raises(MemoryLimitError, match="unet at batch size 2 needs") as refused:
        refuse_too_large(config(), ("bf16", "fp32"), ("eager",), cpu(found.predict_bytes(2) - 1))
    assert refused.value.fix.startswith("--batch-size 1 or less")
    with pytest.raises(MemoryLimitError) as refused:
        refuse_too_large(config(), ("fp32",), ("eager",), cpu(found.fixed_bytes - 1))
    assert refused.value.fix.startswith("a smaller model")


def test_activations_count_only_where_all_of_them_are_kept() -> None:
    refuse_too_large(config(), ("fp32",), ("compile",), cpu(cost().fixed_bytes))
    refuse_too_large(config("train.memory=low"), ("fp32",), ("eager",), cpu(cost().fixed_bytes))


# --- the timer leaves out the warm-up ---


def test_the_windows_see_the_timed_steps_and_not_the_warm_up() -> None:
    schedule = Schedule(warm_up=2, ramp=1, window=2)
    timer = StepTimer(schedule, CPU, samples=2)
    for step in range(schedule.steps):
        time.sleep(0.05 if step < 3 else 0.002)
        timer()
    found = timer.measured
    assert len(found["window_ms"]) == NUM_WINDOWS
    assert all(2 <= ms < 30 for ms in found["window_ms"])
    assert 0.05 <= found["start_s"] < 0.1


def test_steps_are_spread_over_equal_windows() -> None:
    assert make_schedule(23, CPU).window == 4
    assert make_schedule(100, torch.device("cuda")).window == 20


# --- speedups between rows, and output paths ---


def row(variant: str, precision: str, ms: float, *, spread: float = 0.2, **others: Any) -> Row:
    windows = tuple(ms + spread * offset for offset in (-0.5, -0.1, 0.0, 0.1, 0.5))
    known = {"name": "halfstep", "loss": 1.0, "peak_bytes": 6_000_000_000, **others}
    return Row(variant=variant, precision=precision, window_ms=windows, **known)


def test_speedups_refer_to_eager_fp32_and_tf32() -> None:
    rows = [row("compile", "fp32", 50.0), row("eager", "fp32", 100.0), row("eager", "tf32", 60.0)]
    rows.append(row("graph", "bf16", 10.0))
    found = {r.label: r for r in conclude(rows, flops=1, hardware=look_up_gpu("h200")).rows}
    fast = found["halfstep graph bf16"]
    assert (fast.speedup_fp32, fast.speedup_tf32) == (10.0, 6.0)
    assert found["halfstep compile fp32"].speedup_fp32 == 2.0


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
        refuse_to_overwrite(tmp_path / name, force=True)
    assert (tmp_path / "file").read_text() == "mine"
