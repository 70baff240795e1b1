"""Our own kernels count as compiled code too: really compiled, for a GPU that need not be here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.bench.apart import CacheWatch, apart
from halfstep.bench.measure_row import Schedule, StepTimer

pytest.importorskip("triton")
from torch._inductor.utils import fresh_cache  # Triton's folder too
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from halfstep.step import adamw_triton

H200 = GPUTarget("cuda", 90, 32)
CONSTANTS = {"COUNTER": 4, "LENGTH": 5, "COUNTED": 256}
SIGNATURE = {"table": "*i64", "counts": "*fp32", "bad": "*fp32", "columns": "i32"}

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of AdamW's as it is where a GPU is: without one, tests have it in Triton's interpreter."""
    made = JITFunction(adamw_triton._count.fn)
    monkeypatch.setattr(adamw_triton, "_count", made)
    return made


def start(kernel: Any) -> str:
    watch = CacheWatch()
    compile(ASTSource(kernel, SIGNATURE | dict.fromkeys(CONSTANTS, "constexpr"), CONSTANTS), target=H200)
    return watch.found()


def test_a_kernel_of_ours_is_found_cold_and_then_warm(kernel: Any) -> None:
    with fresh_cache():
        assert [start(kernel), start(kernel)] == ["cold", "warm"]
    with fresh_cache():
        assert start(kernel) == "cold"


@pytest.mark.parametrize("module", ["torch._inductor.runtime.compile_tasks.somewhere", None])
def test_a_kernel_of_somebody_else_is_not_counted_beside_the_graph_it_belongs_to(
    module: str | None, kernel: Any
) -> None:
    """None: of a module that was run, not imported."""
    kernel.module = module
    with fresh_cache():
        assert start(kernel) == ""


def test_a_start_is_not_called_cold_for_a_kernel_that_the_first_step_does_not_need(kernel: Any) -> None:
    with fresh_cache():
        timer = StepTimer(Schedule(warm_up=1, ramp=0, window=1), torch.device("cpu"))
        for number in range(timer.schedule.steps):
            if number == 3:
                assert start(kernel) == "cold"
            timer()
    assert timer.found().cache == ""


def test_whoever_listened_to_triton_before_still_hears(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from halfstep.bench import apart as compile_cache

    heard: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: heard.append(told["cache_hit"]))
    compile_cache._count_our_kernels.__wrapped__()
    with fresh_cache():
        assert start(kernel) == "cold"
    assert heard == [False]


def test_rows_begin_without_kernels_that_were_loaded_before(kernel: Any) -> None:
    def loaded() -> bool:
        kernel.device_caches[0] = "as after a call"
        return bool(kernel.device_caches)

    assert loaded()
    with apart(torch.device("cpu")):
        assert not kernel.device_caches
