"""STEVE's parts against brute-force twins, and what must hold of them in every mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ConfigError, ModelError
from halfstep.precision.contexts import simulate
from halfstep.recompute import set_recompute
from halfstep_train.workloads.slots import dvae as dvae_module
from halfstep_train.workloads.slots.config import SteveModelConfig
from halfstep_train.workloads.slots.dvae import DVae, to_matrix
from halfstep_train.workloads.slots.steve import RecurrentCell, Steve, SteveOutputs
from halfstep_train.workloads.slots.word_decoder import CrossAttention

TINY = SteveModelConfig(vocabulary=24, slots=3, slot_dim=16, cnn_channels=8, dim=16, decoder_blocks=2, dropout=0.0)


def keys(num: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + 2 * num).view(num, 2)


def see(model: Steve, video: Tensor, *, hard: bool = False) -> SteveOutputs:
    num, frames = video.shape[:2]
    seen: SteveOutputs = model(
        video, torch.tensor(0.5), soft_noise=keys(num * frames), word_noise=keys(num * frames, 1000),
        slot_draw=torch.linspace(-1, 1, num * 3 * 16).view(num, 3, 16), hard=hard,
    )  # fmt: skip
    return seen


@pytest.fixture
def model() -> Steve:
    torch.manual_seed(0)
    return Steve(TINY, 16)


@pytest.fixture
def video() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(2, 3, 3, 16, 16)


def public_way(model: DVae, images: Tensor, tau: float, soft: Tensor, hard: Tensor) -> tuple[Tensor, Tensor]:
    """As the public code computes it: log_softmax, dense tensors over the vocabulary, a dense one-hot."""
    logits = torch.log_softmax(model.encoder(images), dim=1)

    def as_map(noise: Tensor) -> Tensor:
        return noise.transpose(1, 2).reshape(logits.shape)

    z = torch.softmax((logits + as_map(soft)) / tau, dim=1)
    y_soft = torch.softmax((logits + as_map(hard)) / tau, dim=1)
    one_hot = torch.zeros_like(logits).scatter_(1, y_soft.argmax(dim=1, keepdim=True), 1.0)
    return model.decoder(z), one_hot.flatten(2).transpose(1, 2)


def test_the_dvae_and_its_words_equal_the_public_way_with_dense_tensors() -> None:
    torch.manual_seed(0)
    model, images = DVae(24), torch.rand(3, 3, 8, 8)
    soft, hard = (torch.randn(3, 4, 24) for _ in range(2))
    reconstruction, one_hot = public_way(model, images, 0.4, soft, hard)
    coded = model(images, 0.4, soft, hard)
    torch.testing.assert_close(coded.reconstruction, reconstruction)
    assert torch.equal(coded.words, one_hot.argmax(dim=-1))


def test_index_cross_entropy_equals_the_one_with_a_dense_one_hot(model: Steve, video: Tensor) -> None:
    seen = see(model, video)
    frames = video.flatten(0, 1)
    words = model.dvae(frames, 0.5, keys(6), keys(6, 1000)).words
    hidden = model.steve_decoder(words, model.steve_encoder.slot_proj(seen.slots).flatten(0, 1))
    one_hot = F.one_hot(words, 24).float()
    dense = -(one_hot * torch.log_softmax(model.steve_decoder.head(hidden), dim=-1)).sum() / 6
    torch.testing.assert_close(seen.cross_entropy, dense)


@pytest.mark.parametrize("hard", [False, True])
def test_chunks_over_frames_change_neither_losses_nor_gradients(
    model: Steve, video: Tensor, hard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses_and_gradients() -> tuple[list[Tensor], dict[str, Tensor]]:
        model.zero_grad()
        seen = see(model, video, hard=hard)
        (seen.mse + seen.cross_entropy).backward()
        return [seen.mse, seen.cross_entropy], {
            n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None
        }

    whole = losses_and_gradients()
    monkeypatch.setattr(dvae_module, "CHUNK_BYTES", 4 * 16 * 24 * 4)  # four frames, then two
    torch.testing.assert_close(losses_and_gradients(), whole)


def test_backward_keeps_nothing_as_wide_as_the_vocabulary(
    model: Steve, video: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = TINY.vocabulary
    kept: list[torch.Size] = []
    monkeypatch.setattr(dvae_module, "CHUNK_BYTES", 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):  # type: ignore[func-returns-value]
        model.dvae(video.flatten(0, 1), 0.5, keys(6), keys(6, 1000))
    assert kept
    assert not [shape for shape in kept if shape[-1:] == (widest,) and len(shape) == 3]


def test_greedily_decoded_words_are_the_likeliest_after_those_before_them(model: Steve) -> None:
    model.eval()
    slots, decoder = torch.randn(2, 3, 16), model.steve_decoder
    words = decoder.decode_greedily(slots)
    assert torch.equal(decoder.head(decoder(words, slots)).argmax(dim=-1), words)


def test_recomputing_blocks_with_dropout_gives_the_same_gradients(video: Tensor) -> None:
    def gradients(how: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Steve(TINY.model_copy(update={"dropout": 0.3}), 16)
        assert set_recompute(model, how)  # type: ignore[arg-type]
        torch.manual_seed(5)
        seen = see(model, video)
        (seen.mse + seen.cross_entropy).backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    plain = gradients("none")
    for how in ("blocks", "pointwise"):
        torch.testing.assert_close(gradients(how), plain)


def test_the_recurrent_cell_is_torchs_and_computes_in_fp32() -> None:
    torch.manual_seed(0)
    ours, theirs = RecurrentCell(8), nn.GRUCell(8, 8)
    theirs.load_state_dict(ours.state_dict())
    x, h = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(ours(x, h), theirs(x, h))
    assert ours.bfloat16()(x, h).dtype == torch.float32, "weights stored in bf16, a state in fp32"


def test_slots_stay_fp32_and_finite_in_half_formats(model: Steve, video: Tensor) -> None:
    for format in ("bf16", "fp16"):
        with simulate(format):
            seen = see(model, video)
        assert seen.slots.dtype == seen.attention.dtype == seen.mse.dtype == seen.cross_entropy.dtype == torch.float32
        assert all(part.isfinite().all() for part in seen)
        torch.testing.assert_close(seen.attention.sum(dim=2), torch.ones(2, 3, 8, 8))


def test_a_video_at_64_pixels_keeps_its_size_in_the_encoder() -> None:
    model = Steve(TINY, 64)
    assert see(model, torch.rand(1, 2, 3, 64, 64)).attention.shape == (1, 2, 3, 64, 64)


def test_sizes_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="30 pixels: the side must be a multiple of 4"):
        Steve(TINY, 30)
    with pytest.raises(ModelError, match="3 attention heads for 16"):
        CrossAttention(16, 3, dropout=0.0, gain=1.0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_of_a_kernel_lies_in_memory_as_the_kernel_does(layout: torch.memory_format) -> None:
    kernel = torch.randn(3, 4, 1, 1).to(memory_format=layout).requires_grad_()
    matrix = to_matrix(kernel)
    assert torch.equal(matrix, kernel.flatten(1))
    (gradient,) = torch.autograd.grad(matrix.square().sum(), kernel)
    assert gradient.stride() == kernel.stride()
