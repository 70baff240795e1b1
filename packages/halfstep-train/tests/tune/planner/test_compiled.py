"""What a compiled step keeps, compared with trying every set of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.recompute import make_iteration
from halfstep_train.run.memory.compiled import _ForwardBackwardCut, derive_compiled_timeline
from halfstep_train.run.memory.step_trace import (
    AllocationRecorder,
    Convolution,
    Op,
    StepTrace,
    TracedValue,
    count_fft_bytes,
    count_tiled_fft_bytes,
    count_winograd_bytes,
    derive_eager_timeline,
    find_workspace_bytes,
)

KILO = 1000


def trace_of(forward: list[tuple[str, list[int], int]], needed: list[int]) -> StepTrace:
    """Value 0 is the input; each operation makes the next value. Backward reads `needed`, one by one, pointwise."""
    trace = StepTrace([TracedValue(KILO, -1)])
    for number, (name, reads, size) in enumerate(forward):
        trace.values.append(TracedValue(size, number, ended_at=len(forward) + len(needed) - 1))
        trace.ops.append(Op(name, tuple(reads), (number + 1,), is_view=False, in_backward=False))
    for value in needed:
        trace.values.append(TracedValue(1, len(trace.ops), ended_at=len(trace.ops)))
        made = (len(trace.values) - 1,)
        trace.ops.append(Op("mul", (value,), made, is_view=False, in_backward=True))
    return trace


def can_be_computed(value: int, kept: set[int], cut: _ForwardBackwardCut) -> bool:
    if value in kept or cut.nodes[value].maker is None:
        return True
    maker = cut.nodes[value].maker
    return maker is not None and cut.may_recompute[value] and all(can_be_computed(r, kept, cut) for r in maker.reads)


def size_of(kept: set[int], cut: _ForwardBackwardCut) -> int:
    return sum(cut.nodes[n].num_bytes for n in kept)


def test_no_set_of_values_that_backward_can_work_from_is_smaller_than_what_is_kept() -> None:
    draw = random.Random(0)
    for _ in range(40):
        forward = [
            (
                draw.choice(["add", "gelu", "mm", "mul"]),
                draw.sample(range(n + 1), min(n + 1, 2)),
                draw.randint(1, 9) * 512,
            )
            for n in range(7)
        ]
        needed = draw.sample(range(1, 8), 3)
        cut = _ForwardBackwardCut(trace_of(forward, needed), keeps_cheap=True)
        kept = cut.find_kept()
        assert all(can_be_computed(value, kept, cut) for value in needed)
        sets = (set(s) for k in range(8) for s in itertools.combinations(range(1, 8), k))
        least = min(size_of(s, cut) for s in sets if all(can_be_computed(v, s, cut) for v in needed))
        assert size_of(kept, cut) == least


def test_a_pointwise_chain_is_computed_again_from_its_product() -> None:
    forward = [("mm", [0], 4 * KILO), ("gelu", [1], 4 * KILO), ("add", [2], 8 * KILO)]
    kept = _ForwardBackwardCut(trace_of(forward, [2, 3]), keeps_cheap=True).find_kept()
    assert kept == {1}


def test_what_a_product_of_backward_reads_is_kept_unless_everything_cheap_is_computed_again() -> None:
    trace = trace_of([("mm", [0], 4 * KILO), ("gelu", [1], 4 * KILO)], [])
    trace.ops.append(Op("mm", (2,), (), is_view=False, in_backward=True))
    assert _ForwardBackwardCut(trace, keeps_cheap=True).find_kept() == {2}
    assert _ForwardBackwardCut(trace, keeps_cheap=False).find_kept() == {1}


def test_values_between_two_operations_that_fuse_take_no_memory() -> None:
    forward = [("mm", [0], 512), ("exp", [1], 512 * 100), ("mul", [2], 512 * 100), ("sum", [3], 512)]
    trace = trace_of(forward, [4])
    assert (
        derive_compiled_timeline(trace).find_peak().total()
        < 512 * 10
        < derive_eager_timeline(trace).find_peak().total()
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def left_alone(x: Tensor) -> Tensor:
    wide = x.repeat(1, 9).exp()
    return make_iteration(torch.sigmoid, is_compiled=False)(wide.sum())


def test_a_function_that_is_not_compiled_takes_its_eager_memory_forward_and_backward() -> None:
    x, weight = torch.randn(64, 8), torch.randn(8, 8, requires_grad=True)
    with AllocationRecorder([x, weight], [weight]) as recorder:
        hidden = (x @ weight).tanh()
        loss = left_alone(hidden)
        recorder.in_backward = True
        loss.backward()
    trace = recorder.settle([weight.grad] if weight.grad is not None else [])
    names = {True: set(), False: set()}  # type: dict[bool, set[str]]
    for op in trace.ops:
        names[op.as_written].add(op.name)
    assert {"repeat", "exp", "sum", "expand"} <= names[True]
    assert {"mm", "tanh", "tanh_backward", "sigmoid"} <= names[False]
    wide_bytes, given_bytes = 64 * 72 * 4, 64 * 8 * 4
    lives = derive_compiled_timeline(trace).lives
    last_forward = next(n for n, op in enumerate(trace.ops) if op.in_backward) - 1
    assert sum(life.num_bytes == wide_bytes and life.last > last_forward for life in lives) >= 1
    assert any(life.num_bytes == given_bytes and life.last >= last_forward for life in lives)


# --- workspaces of strict fp32 convolutions: the formulas against what an H200 took (cuDNN 9.19) ---


@pytest.mark.parametrize(
    ("count", "shape", "measured"),
    [
        (count_fft_bytes, Convolution(8, 1024, 1024, 32, 32, 3), 35_748_052_992),
        (count_fft_bytes, Convolution(16, 256, 128, 32, 32, 3), 1_246_887_936),
        (count_fft_bytes, Convolution(64, 128, 128, 28, 28, 3), 214_499_328),
        (count_tiled_fft_bytes, Convolution(8, 128, 128, 64, 64, 3), 89_128_960),
        (count_tiled_fft_bytes, Convolution(16, 128, 256, 96, 96, 3), 196_083_712),
        (count_winograd_bytes, Convolution(8, 64, 64, 256, 256, 3), 604_569_600),
        (count_winograd_bytes, Convolution(64, 512, 512, 7, 7, 3), 75_497_472),
        (count_winograd_bytes, Convolution(2, 128, 3, 256, 256, 3), 154_589_184),
    ],
)
def test_each_algorithm_takes_what_was_measured(
    count: Callable[[Convolution], int], shape: Convolution, measured: int
) -> None:
    assert count(shape) == pytest.approx(measured, rel=0.01)


def test_a_shape_between_two_that_were_asked_for_takes_the_algorithm_of_the_nearest() -> None:
    near, asked = Convolution(8, 64, 64, 250, 260, 3), Convolution(8, 64, 64, 256, 256, 3)
    assert find_workspace_bytes(asked, "weight gradient") == count_winograd_bytes(asked)
    assert find_workspace_bytes(near, "weight gradient") == count_winograd_bytes(near)
    assert find_workspace_bytes(asked._replace(taps=1), "weight gradient") == 0


@pytest.mark.parametrize(("stride", "is_strict", "is_large"), [(1, True, True), (2, True, False), (1, False, False)])
def test_only_strict_convolutions_of_stride_one_take_it(stride: int, is_strict: bool, is_large: bool) -> None:
    layer, x = nn.Conv2d(64, 64, 3, stride=stride, padding=1), torch.randn(2, 64, 16, 16)
    with AllocationRecorder([x, *layer.parameters()], layer.parameters(), is_strict=is_strict) as recorder:
        loss = layer(x).sum()
        recorder.in_backward = True
        loss.backward()
    [found] = [op.workspace_bytes for op in recorder.trace.ops if op.name == "convolution_backward"]
    assert (found == count_winograd_bytes(Convolution(2, 64, 64, 16, 16, 3))) == is_large
    assert bool(found) == is_large
