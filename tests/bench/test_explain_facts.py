"""Synthetic steps with round numbers: gaps, shares and gains can be done in the head."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from halfstep.bench.explain import explained
from halfstep.bench.explain_advice import POINTWISE_SAVED, Change, advise
from halfstep.bench.explain_facts import Breakdown, KernelTime, StepFacts, breakdown
from halfstep.bench.explain_kernels import Kind
from halfstep.bench.explain_trace import Event, Trace, covered_us

RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>"
CONV = "sm90_xmma_fprop_implicit_gemm_bf16"
GEMM = "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN"
COPY_IN = "Memcpy HtoD (Pinned -> Device)"


def event(name: str, start_us: float, end_us: float) -> Event:
    return Event(name=name, start_us=start_us, end_us=end_us, self_us=end_us - start_us)


def facts(**changes: Any) -> StepFacts:
    """A step with everything on."""
    tuned = StepFacts(
        precision="bf16",
        mode="graph",
        channels_last=True,
        fused_optimizer=True,
        prefetches=True,
        batch_size=8,
        device=torch.device("cuda"),
        device_name="a GPU",
    )
    return dataclasses.replace(tuned, **changes)


def kernel(kind: Kind, ms: float, *, launches: float = 10, name: str = "") -> KernelTime:
    return KernelTime(name=name or str(kind), kind=kind, ms=ms, launches=launches)


def step(
    *kernels: KernelTime, idle_ms: float = 0.0, data_wait_ms: float | None = None, exposed: float = 0.0
) -> Breakdown:
    busy_ms, wait_ms = sum(k.ms for k in kernels), data_wait_ms or 0.0
    return Breakdown(
        kernels=kernels,
        step_ms=busy_ms + idle_ms,
        busy_ms=busy_ms,
        launch_gap_ms=max(0.0, idle_ms - wait_ms),
        data_wait_ms=data_wait_ms,
        exposed_wait_ms=min(idle_ms, wait_ms),
        exposed_copy_ms=exposed,
    )


def only(changes: tuple[Change, ...]) -> Change:
    assert len(changes) == 1, [change.setting for change in changes]
    return changes[0]


def test_overlapping_streams_count_once_and_gaps_not_at_all() -> None:
    events = [event("a", 0, 10), event("b", 5, 12), event("c", 6, 7), event("d", 20, 25)]
    assert covered_us(events) == 17


def test_idle_time_is_what_no_stream_fills_inside_the_span() -> None:
    events = (event(CONV, 1000, 5000), event(RELU, 4000, 6000), event(CONV, 9000, 11000))
    seen = Trace(events=events, num_steps=2, step_ms=100.0)
    assert (seen.span_ms, seen.busy_ms, seen.launch_gap_ms) == (5.0, 3.5, 1.5)


def test_idle_time_that_the_profiler_made_is_not_blamed_on_the_step() -> None:
    events = (event(CONV, 0, 4000), event(CONV, 8000, 10000))
    assert Trace(events=events, num_steps=1, step_ms=7.0).launch_gap_ms == 1.0
    assert Trace(events=events, num_steps=1, step_ms=5.0).launch_gap_ms == 0.0


@pytest.mark.parametrize(("profiled_wait_us", "end_us"), [(0, 8000), (5000, 13000)])
def test_gaps_are_the_same_whether_the_profiled_steps_met_a_burst_of_data_or_not(
    profiled_wait_us: float, end_us: float
) -> None:
    events = (event(CONV, 0, 4000), event(CONV, end_us - 2000, end_us))
    seen = Trace(events=events, num_steps=1, step_ms=11.0, data_wait_ms=3.0, profiled_wait_us=profiled_wait_us)
    assert (seen.busy_ms, seen.launch_gap_ms, seen.exposed_wait_ms) == (6.0, 2.0, 3.0)


def test_a_wait_is_exposed_only_as_far_as_the_device_has_nothing_left_to_do() -> None:
    seen = Trace(events=(event(CONV, 0, 9000),), num_steps=1, step_ms=10.0, data_wait_ms=4.0)
    assert (seen.launch_gap_ms, seen.exposed_wait_ms) == (0.0, 1.0)


def test_a_cpu_that_recording_slowed_is_scaled_to_the_clock() -> None:
    events = (event("aten::relu", 0, 4000), event("aten::mm", 6000, 10000))
    seen = Trace(events=events, num_steps=1, step_ms=5.0, is_host=True)
    assert (seen.span_ms, seen.busy_ms, seen.launch_gap_ms) == (5.0, 4.0, 1.0)
    parts = breakdown(seen, facts(device=torch.device("cpu")))
    assert parts.kernel_ms == 4.0


def test_kernels_add_up_by_name_and_kind_a_step() -> None:
    events = (event(CONV, 0, 4000), event(RELU, 4000, 5000), event(RELU, 5000, 8000), event(CONV, 8000, 10000))
    parts = breakdown(Trace(events=events, num_steps=2, step_ms=5.0), facts())
    assert [(k.name, k.ms, k.launches) for k in parts.kernels] == [(CONV, 3.0, 1.0), (RELU, 2.0, 1.0)]
    assert (parts.kernel_ms, parts.launches, parts.memory_bound_share) == (5.0, 2.0, 0.4)


def test_a_copy_under_a_kernel_is_free_and_only_the_rest_is_exposed() -> None:
    events = (event(CONV, 0, 3000), event(COPY_IN, 2000, 5000))
    assert breakdown(Trace(events=events, num_steps=1, step_ms=5.0), facts()).exposed_copy_ms == 2.0


def test_eager_is_told_to_compile_for_its_elementwise_kernels_and_casts() -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 10), kernel(Kind.ELEMENTWISE, 5), kernel(Kind.CAST, 2))
    change = only(advise(parts, facts(mode="eager")))
    assert change.setting == "train.fast=compile"
    assert change.gain_ms == pytest.approx(POINTWISE_SAVED * 5 + 2)
    assert change.gain_share == pytest.approx(change.gain_ms / 17)
    assert "5.00 ms elementwise" in change.arithmetic


def test_gaps_are_what_a_graph_gains() -> None:
    change = only(advise(step(kernel(Kind.MATMUL, 12), idle_ms=8), facts(mode="compile")))
    assert (change.setting, change.gain_ms, change.gain_share) == ("train.fast=graph", 8, 0.4)


def test_idle_time_for_want_of_data_is_not_promised_to_a_graph() -> None:
    parts = step(kernel(Kind.MATMUL, 12), idle_ms=8, data_wait_ms=6)
    changes = advise(parts, facts(mode="compile", faster_data="data.num_workers=16"))
    assert [(c.setting, c.gain_ms) for c in changes] == [("data.num_workers=16", 6), ("train.fast=graph", 2)]


def test_a_wait_under_which_the_gpu_works_on_is_not_promised() -> None:
    parts = step(kernel(Kind.MATMUL, 12), idle_ms=4, data_wait_ms=6)
    change = only(advise(parts, facts(faster_data="data.num_workers=16")))
    assert change.gain_ms == 4
    assert "6.00 ms a step spent waiting" in change.arithmetic
    waiting_itself = only(advise(parts, facts(faster_data="data.num_workers=16", device=torch.device("cpu"))))
    assert waiting_itself.gain_ms == 6


def test_where_no_data_were_read_none_are_advised_to_be_read_faster() -> None:
    parts = step(kernel(Kind.MATMUL, 12), idle_ms=0.1, data_wait_ms=None)
    assert not advise(parts, facts())
    assert explained(parts, facts(), title="", num_steps=5).data_wait_ms is None


@pytest.mark.parametrize(("speedup", "gain_ms"), [(None, 3.0), (2.0, 7.5)])
def test_layout_copies_are_gained_by_channels_last_and_convolutions_at_their_measured_ratio(
    speedup: float | None, gain_ms: float
) -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 8), kernel(Kind.CONV_WEIGHT_GRADIENT, 4), kernel(Kind.LAYOUT, 3))
    change = only(advise(parts, facts(channels_last=False, channels_last_speedup=speedup)))
    assert (change.setting, change.gain_ms) == ("train.channels_last=true", pytest.approx(gain_ms))


def test_channels_last_is_not_advised_where_it_was_measured_slower() -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 8), kernel(Kind.LAYOUT, 3))
    assert not advise(parts, facts(channels_last=False, channels_last_speedup=0.7))


def test_fp32_is_told_the_gain_of_bf16_by_the_measured_rates() -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 60), kernel(Kind.MATMUL, 20), kernel(Kind.FUSED, 20))
    rates = {"fp32": 50.0, "tf32": 200.0, "bf16": 400.0, "fp16": 410.0}
    change = only(advise(parts, facts(precision="fp32", matmul_tflops=rates)))
    assert (change.setting, change.gain_ms) == ("--precision bf16", pytest.approx(80 * (1 - 50 / 400)))


def test_a_format_that_is_slower_here_is_not_advised() -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 60))
    assert not advise(parts, facts(precision="fp32", matmul_tflops={"fp32": 0.05, "bf16": 0.001}))


def test_an_unmeasured_rate_predicts_nothing() -> None:
    assert not advise(step(kernel(Kind.CONV_FORWARD, 60)), facts(precision="fp32", matmul_tflops={"bf16": 400.0}))


def test_an_optimizer_of_many_kernels_is_told_to_fuse_but_clipping_stays() -> None:
    update, norm = kernel(Kind.OPTIMIZER, 4, name="BinaryOpList"), kernel(Kind.OPTIMIZER, 1, name="LpNormFunctor")
    change = only(advise(step(kernel(Kind.MATMUL, 5), update, norm), facts(runner="plain", fused_optimizer=False)))
    assert (change.setting, change.gain_ms) == ("AdamW(..., fused=True)", pytest.approx(4 * 13 / 20))


def test_copies_that_nothing_hides_are_told_to_be_prefetched() -> None:
    change = only(advise(step(kernel(Kind.MATMUL, 8), kernel(Kind.COPY_IN, 2), exposed=2.0), facts(prefetches=False)))
    assert (change.gain_ms, change.gain_share) == (2.0, 0.2)
    assert "prefetch" in change.setting


def test_gaps_that_a_graph_leaves_are_shared_by_a_larger_batch() -> None:
    change = only(advise(step(kernel(Kind.MATMUL, 6), idle_ms=4), facts()))
    assert (change.setting, change.gain_of) == ("train.batch_size=16", "sample")
    # 16 samples take 16 ms instead of 20: of 1.25 ms each keeps 1.0.
    assert (change.gain_ms, change.gain_share) == (0.25, 0.2)


@pytest.mark.parametrize(
    ("runner", "precision"),
    [
        ("plain", "torch.autocast(..., torch.bfloat16)"),
        ("lightning", 'Trainer(precision="bf16-mixed")'),
        ("accelerate", 'Accelerator(mixed_precision="bf16")'),
    ],
)
def test_peers_are_advised_in_words_of_their_own_loop(runner: str, precision: str) -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 60), kernel(Kind.LAYOUT, 20), idle_ms=8)
    rates = {"fp32": 50.0, "bf16": 400.0}
    changes = advise(
        parts, facts(runner=runner, precision="fp32", mode="compile", channels_last=False, matmul_tflops=rates)
    )
    assert [change.setting for change in changes] == [
        precision,
        "model and images .to(memory_format=torch.channels_last)",
        'torch.compile(..., mode="reduce-overhead")',
    ]


def test_where_the_host_sets_the_pace_shorter_kernels_gain_nothing_and_fewer_launches_do() -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 4, launches=50), kernel(Kind.ELEMENTWISE, 1, launches=50), idle_ms=15)
    rates = {"fp32": 50.0, "bf16": 400.0}
    changes = advise(parts, facts(precision="fp32", mode="eager", matmul_tflops=rates))
    assert [c.setting for c in changes] == ["train.fast=graph", "train.fast=compile"]
    # 30 of 100 launches go, and the host needs the same time for each.
    assert [c.gain_ms for c in changes] == [15, pytest.approx(20 * 0.3)]


def test_nothing_that_is_on_is_advised_and_the_explanation_says_so() -> None:
    parts = step(kernel(Kind.CONV_FORWARD, 10), kernel(Kind.FUSED, 10), kernel(Kind.OPTIMIZER, 1))
    explanation = explained(parts, facts(), title="halfstep graph bf16", num_steps=5)
    assert explanation.changes == ()
    assert any("no setting gains" in note for note in explanation.notes)


def test_three_changes_at_most_the_largest_first() -> None:
    parts = step(
        kernel(Kind.CONV_FORWARD, 40),
        kernel(Kind.LAYOUT, 9),
        kernel(Kind.ELEMENTWISE, 20),
        kernel(Kind.OPTIMIZER, 8),
        kernel(Kind.COPY_IN, 3),
        exposed=3,
    )
    wasteful = facts(
        mode="eager",
        precision="fp32",
        channels_last=False,
        fused_optimizer=False,
        prefetches=False,
        matmul_tflops={"fp32": 50.0, "bf16": 400.0},
    )
    changes = advise(parts, wasteful)
    assert [c.setting for c in changes] == ["--precision bf16", "train.fast=compile", "train.channels_last=true"]
    assert [c.gain_ms for c in changes] == sorted((c.gain_ms for c in changes), reverse=True)
    assert not any("gain" in note for note in explained(parts, wasteful, title="", num_steps=5).notes)


def test_twice_the_time_is_twice_the_gain() -> None:
    def gains(scale: float) -> list[float]:
        parts = step(
            kernel(Kind.ELEMENTWISE, 5 * scale), kernel(Kind.LAYOUT, 2 * scale), kernel(Kind.CONV_FORWARD, scale)
        )
        return [c.gain_ms for c in advise(parts, facts(mode="eager", channels_last=False))]

    assert gains(2.0) == pytest.approx([2 * gain for gain in gains(1.0)])


def test_less_than_a_hundredth_of_the_step_is_not_worth_saying() -> None:
    assert not advise(step(kernel(Kind.MATMUL, 100), kernel(Kind.CAST, 0.9)), facts(mode="eager"))


def test_layout_copies_that_remain_under_channels_last_are_named() -> None:
    turned = kernel(Kind.LAYOUT, 1.2, name="gpu_kernel_impl_nocast<direct_copy_kernel_cuda>")
    explanation = explained(step(kernel(Kind.CONV_FORWARD, 20), turned), facts(), title="", num_steps=5)
    assert any("1.20 ms" in note and turned.name in note for note in explanation.notes)


def test_the_floor_is_the_counted_work_at_the_measured_rate_of_this_precision() -> None:
    # A U-Net of 31 million weights, 8 pictures of 512 x 512, on an H200.
    assert facts(flops=9.243e12, matmul_tflops={"bf16": 790.0}).floor_ms == pytest.approx(11.7)
    assert facts(flops=9.243e12, matmul_tflops={"fp32": 50.0}).floor_ms is None
