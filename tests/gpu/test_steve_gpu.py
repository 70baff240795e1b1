"""STEVE on a GPU: keyed noise, compiled code and the memory of a large vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.slots.config import SteveModelConfig
from halfstep_train.workloads.slots.dvae import DVae, hash_bits, make_gumbel_noise
from halfstep_train.workloads.slots.steve import Steve

pytestmark = pytest.mark.gpu

SIZE = SteveModelConfig(vocabulary=64, slots=4, slot_dim=32, cnn_channels=16, dim=32, decoder_blocks=2, dropout=0.0)


def keys(num: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + 2 * num, dtype=torch.int32).view(num, 2)


def test_keyed_noise_has_the_same_bits_on_the_gpu_and_compiled() -> None:
    expected = hash_bits(keys(3), 40, 300)
    assert torch.equal(hash_bits(keys(3).cuda(), 40, 300).cpu(), expected)
    compiled = torch.compile(hash_bits)(keys(3).cuda(), 40, 300)
    assert torch.equal(compiled.cpu(), expected)
    noise = torch.compile(make_gumbel_noise)(keys(3).cuda(), 40, 300)
    torch.testing.assert_close(noise.cpu(), make_gumbel_noise(keys(3), 40, 300))


def losses_and_gradients(model: Steve, *, compiled: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    video = torch.rand(2, 3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    draw = torch.linspace(-1, 1, 2 * 4 * 32).view(2, 4, 32).cuda()

    def losses(video: Tensor, tau: Tensor, soft: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        seen = model(video, tau, soft_noise=soft, word_noise=words, slot_draw=draw)
        return seen.mse, seen.cross_entropy

    run = torch.compile(losses) if compiled else losses
    model.zero_grad()
    mse, cross_entropy = run(video, torch.tensor(0.5).cuda(), keys(6).cuda(), keys(6, 99).cuda())
    (mse + cross_entropy).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return [mse.detach(), cross_entropy.detach()], gradients


def test_compiled_and_chunked_it_has_the_losses_and_gradients_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # eager's convolutions; the compiler's are matmuls
    torch.manual_seed(0)
    model = Steve(SIZE, 32).cuda()
    losses, gradients = losses_and_gradients(model, compiled=False)
    monkeypatch.setattr(
        "halfstep_train.workloads.slots.dvae.CHUNK_BYTES", 2 * 64 * 64 * 4
    )  # three chunks of two frames
    found_losses, found = losses_and_gradients(model, compiled=True)
    torch.testing.assert_close(found_losses, losses, rtol=1e-4, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_large_vocabulary_costs_a_chunk_and_not_the_whole(compiled: bool) -> None:
    """72 frames of 1024 positions and 4096 words: one fp32 tensor over the vocabulary would be 1.2 GB."""
    model = DVae(4096).cuda()
    run = torch.compile(model) if compiled else model
    images = torch.rand(72, 3, 128, 128).cuda()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            coded = run(images, torch.tensor(0.5).cuda(), keys(72).cuda(), keys(72, 999).cuda())
        coded.reconstruction.float().square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < 3e9
