"""Synthetic steps with round numbers: gaps and shares can be done in the head."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from halfstep_train.bench.explain import StepFacts, explain_profile
from halfstep_train.bench.step_profile import ProfileEvent, StepProfile, compute_covered_us

RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>"
CONV = "sm90_xmma_fprop_implicit_gemm_bf16"
GEMM = "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN"


def event(name: str, start_us: float, end_us: float) -> ProfileEvent:
    return ProfileEvent(name=name, start_us=start_us, end_us=end_us, self_us=end_us - start_us)


def facts(**changes: Any) -> StepFacts:
    """A step with everything on."""
    tuned = StepFacts(channels_last=True, device=torch.device("cuda"), device_name="a GPU")
    return dataclasses.replace(tuned, **changes)


def step(*kernels: tuple[str, float], gap_ms: float = 0.0) -> StepProfile:
    """One that runs these for so many milliseconds, with a gap in the midst of the last."""
    ends = list(itertools.accumulate(ms for _, ms in kernels))
    events = [event(name, 1e3 * (end - ms), 1e3 * end) for (name, ms), end in zip(kernels, ends, strict=True)]
    last = events.pop()
    middle = (last.start_us + last.end_us) / 2
    events += [
        event(last.name, last.start_us, middle),
        event(last.name, middle + 1e3 * gap_ms, last.end_us + 1e3 * gap_ms),
    ]
    return StepProfile(events=tuple(events), num_steps=1, step_ms=ends[-1] + gap_ms)


def test_overlapping_streams_count_once_and_gaps_not_at_all() -> None:
    events = [event("a", 0, 10), event("b", 5, 12), event("c", 6, 7), event("d", 20, 25)]
    assert compute_covered_us(events) == 17


def test_idle_time_is_what_no_stream_fills_inside_the_span() -> None:
    events = (event(CONV, 1000, 5000), event(RELU, 4000, 6000), event(CONV, 9000, 11000))
    seen = StepProfile(events=events, num_steps=2, step_ms=100.0)
    assert (seen.span_ms, seen.busy_ms, seen.launch_gap_ms) == (5.0, 3.5, 1.5)


def test_idle_time_that_the_profiler_made_is_not_blamed_on_the_step() -> None:
    events = (event(CONV, 0, 4000), event(CONV, 8000, 10000))
    assert StepProfile(events=events, num_steps=1, step_ms=7.0).launch_gap_ms == 1.0
    assert StepProfile(events=events, num_steps=1, step_ms=5.0).launch_gap_ms == 0.0


def test_a_cpu_that_recording_slowed_is_scaled_to_the_clock() -> None:
    events = (event("aten::relu", 0, 4000), event("aten::mm", 6000, 10000))
    seen = StepProfile(events=events, num_steps=1, step_ms=5.0, is_host=True)
    assert (seen.span_ms, seen.busy_ms, seen.launch_gap_ms) == (5.0, 4.0, 1.0)
    assert explain_profile(seen, facts(device=torch.device("cpu")), title="").kernel_ms == 4.0


def test_kernels_add_up_by_name_and_kind_a_step() -> None:
    events = (event(CONV, 0, 4000), event(RELU, 4000, 5000), event(RELU, 5000, 8000), event(CONV, 8000, 10000))
    parts = explain_profile(StepProfile(events=events, num_steps=2, step_ms=5.0), facts(), title="")
    assert [(k.name, k.ms, k.launches) for k in parts.top_kernels] == [(CONV, 3.0, 1.0), (RELU, 2.0, 1.0)]
    assert (parts.kernel_ms, parts.launches, parts.memory_bound_share) == (5.0, 2.0, 0.4)


@pytest.mark.parametrize(("gap_ms", "num_notes"), [(1.0, 0), (8.0, 1)])
def test_a_host_that_sets_the_pace_is_noted_and_a_step_without_fault_has_no_note(gap_ms: float, num_notes: int) -> None:
    notes = explain_profile(step((GEMM, 12), gap_ms=gap_ms), facts(), title="").notes
    assert len([note for note in notes if "limited by the host" in note]) == len(notes) == num_notes


def test_layout_copies_that_remain_under_channels_last_are_named() -> None:
    turned = "gpu_kernel_impl_nocast<direct_copy_kernel_cuda>"
    explanation = explain_profile(step((CONV, 20), (turned, 1.2)), facts(), title="")
    assert any("1.20 ms" in note and turned in note for note in explanation.notes)
