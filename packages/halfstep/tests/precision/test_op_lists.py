"""Simulation follows CUDA's autocast lists on the CPU, and leaves the CPU's own lists as they were."""

from __future__ import annotations

import threading

import pytest
import torch

from autocast_samples import FP32, FP32_BY_DTYPE, LOWER, PROMOTE, binary_cross_entropy, first, maker
from halfstep.precision import op_lists
from halfstep.precision.contexts import simulate

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning")


@pytest.mark.parametrize("name", ["LOWER", "FP32", "FP32_BY_DTYPE", "PROMOTE"])
def test_every_entry_of_the_lists_has_a_sample(name: str) -> None:
    assert set(getattr(op_lists, name)) == set(globals()[name])


@pytest.mark.parametrize("format", HALF)
@pytest.mark.parametrize("name", LOWER)
def test_fp32_inputs_of_lower_precision_ops_give_half(name: str, format: str) -> None:
    with simulate(format):
        assert first(LOWER[name](maker(torch.float32, "cpu"))).dtype == HALF[format]


@pytest.mark.parametrize("format", HALF)
@pytest.mark.parametrize("name", [*FP32, *FP32_BY_DTYPE])
def test_half_inputs_of_fp32_ops_give_fp32(name: str, format: str) -> None:
    sample = {**FP32, **FP32_BY_DTYPE}[name]
    with simulate(format):
        assert first(sample(maker(HALF[format], "cpu"))).dtype == torch.float32


@pytest.mark.parametrize("name", PROMOTE)
def test_promoting_ops_run_in_the_widest_input(name: str) -> None:
    half, full = maker(torch.bfloat16, "cpu"), maker(torch.float32, "cpu")
    with simulate("bf16"):
        assert PROMOTE[name](half, full).dtype == torch.float32
        assert PROMOTE[name](half, half).dtype == torch.bfloat16


def test_a_named_dtype_wins_over_the_list() -> None:
    x = torch.rand(2, 3).bfloat16()
    with simulate("bf16"):
        assert torch.sum(x, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.softmax(x, 1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.cumsum(x, 0, dtype=torch.float64).dtype == torch.float64


def test_fp64_is_left_alone() -> None:
    x = torch.rand(2, 3, dtype=torch.float64)
    with simulate("bf16"):
        assert torch.exp(x).dtype == torch.softmax(x, 1).dtype == torch.float64


def test_binary_cross_entropy_is_refused_as_cuda_does() -> None:
    with simulate("bf16"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        binary_cross_entropy(maker(torch.float32, "cpu"))


def test_an_fft_of_a_half_tensor_fails_as_it_does_on_cuda() -> None:
    with simulate("bf16"), pytest.raises(RuntimeError, match="[Uu]nsupported dtype"):
        torch.fft.rfft(torch.rand(8).bfloat16())


def test_casts_of_the_lists_have_gradients() -> None:
    x = torch.rand(4, dtype=torch.bfloat16, requires_grad=True)
    with simulate("bf16"):
        torch.log(x).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, 1 / x.detach())


def own_lists() -> dict[str, torch.dtype]:
    x = torch.rand(4, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = {"softmax": x.softmax(1), "log": x.log(), "sum": x.sum(), "prod": x.prod(), "fft": torch.fft.rfft(x)}
    return {name: output.dtype for name, output in outputs.items()}


def test_the_cpus_own_lists_are_back_after_the_outermost_exit() -> None:
    before = own_lists()
    assert before["log"] == torch.bfloat16
    with simulate("bf16"), simulate("fp16"):
        pass
    assert own_lists() == before
    with pytest.raises(ZeroDivisionError), simulate("bf16"):
        _ = 1 / 0
    assert own_lists() == before


@pytest.mark.skipif(torch.__version__ < "2.11", reason="turns torch's compiler off, for all tests that follow")
def test_two_threads_may_simulate_at_once() -> None:
    barrier, seen = threading.Barrier(2), []

    def work() -> None:
        with simulate("bf16"):
            barrier.wait()
            seen.append(torch.rand(3).bfloat16().log().dtype)
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [torch.float32, torch.float32]
