"""Decoupled diffusion: noising and sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.radio.ddm import add_noise, ddm_loss, list_times, recover_x0, sample_latents


def test_the_truth_has_no_loss_and_gives_back_the_latent() -> None:
    torch.manual_seed(0)
    x0, noise, time = torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4), torch.tensor([1e-4, 0.1, 0.7, 1.0])
    x_t = add_noise(x0, time, noise)
    torch.testing.assert_close(recover_x0(x_t, time, -x0, noise), x0, rtol=1e-5, atol=1e-5)
    assert torch.equal(ddm_loss(-x0, noise, x0, noise, time, weighted=True, with_l1=True), torch.zeros(4))


def test_noising_is_fp32_under_half_autocast() -> None:
    """In bf16 a time below 1/256 would change nothing in 1 - t."""
    x0, noise, time = torch.randn(2, 1, 2, 2).bfloat16(), torch.randn(2, 1, 2, 2).bfloat16(), torch.full((2,), 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = add_noise(x0, time, noise)
    assert found.dtype == torch.float32
    assert torch.equal(found, add_noise(x0.float(), time, noise.float()))


def test_steps_are_calls_or_one_call_more() -> None:
    assert list_times(1) == (1.0, 1e-4)
    assert list_times(1, split_last=False) == (1.0,)
    assert list_times(5, split_last=False) == pytest.approx((1.0, 0.8, 0.6, 0.4, 0.2))
    assert len(list_times(5)) == 6


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("split_last", [True, False])
def test_a_perfect_network_samples_the_truth_whatever_the_draws(steps: int, split_last: bool) -> None:
    """It knows x0, so it can tell the noise in x_t."""
    x0 = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    times = list_times(steps, split_last=split_last)

    def predict(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        t = time.view(-1, 1, 1, 1)
        return -x0, (x - x0 * (1 - t)) / t.sqrt()

    draws = [torch.randn_like(x0) for _ in times]
    torch.testing.assert_close(sample_latents(predict, torch.randn_like(x0), draws, times), x0, rtol=1e-4, atol=1e-4)
