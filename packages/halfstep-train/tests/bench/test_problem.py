"""Problems on random data are the workloads' own models, losses and preparations."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halfstep_train.bench.problem import (
    Problem,
    build_problem,
    build_random_workload,
    count_step_flops,
    load_bench_config,
)

CPU = torch.device("cpu")
SMALL = {"unet": ("data.image_size=32",), "resnet18": ("data.image_size=32",), "vit_s_16": ("data.image_size=48",)}


def small_problem(workload: str, *words: str) -> Problem:
    return build_problem(load_bench_config(workload, [*SMALL[workload], *words], {"batch_size": 2}, small=True), CPU)


@pytest.mark.parametrize("workload", SMALL)
def test_a_loaders_bytes_become_a_loss_with_gradients(workload: str) -> None:
    problem = small_problem(workload)
    assert problem.host_batch["image"].dtype == torch.uint8
    model = problem.make_model()
    loss = problem.loss(model, problem.prepare(problem.host_batch))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("workload", SMALL)
def test_everybody_gets_the_same_weights_and_trains_a_copy(workload: str) -> None:
    problem = small_problem(workload)
    first = problem.make_model()
    before = [parameter.clone() for parameter in first.parameters()]
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    assert all(map(torch.equal, before, problem.make_model().parameters()))


@pytest.mark.parametrize("workload", SMALL)
def test_peers_see_the_numbers_that_halfstep_sees_in_a_contiguous_layout(workload: str) -> None:
    problem = small_problem(workload)
    own = build_random_workload(problem.config)
    expected = own.prepare(problem.host_batch, key=(0, 0), training=True)["image"]
    image = problem.prepare(problem.host_batch)["image"]
    torch.testing.assert_close(image, expected, rtol=0, atol=0)
    assert image.is_contiguous()


@pytest.mark.parametrize("workload", SMALL)
def test_counted_arithmetic_is_what_forward_and_backward_need(workload: str) -> None:
    problem = small_problem(workload)
    own = build_random_workload(problem.config)
    batch = own.prepare(problem.host_batch, key=(0, 0), training=True)
    # The FLOP counter does not know the CPU's fused attention: use the unfused one.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        own.forward(own.model, batch)
    expected = 3 * counter.get_total_flops()  # backward: one product for the input's gradient, one for the weight's
    # The estimate also counts a gradient of the image, which is not computed.
    assert 0.8 * expected < count_step_flops(problem) <= 1.001 * expected
