"""`train.memory=low` on the slot models: less is alive at the worst moment of a step, results are the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import recompute
from halfstep.hardware.memory import LiveBytes
from halfstep.recompute import Recompute, set_recompute
from halfstep_train.workloads.slots import dvae, slot_decoder
from halfstep_train.workloads.slots.config import SlotContrastModelConfig, SteveModelConfig, WordsModelConfig
from halfstep_train.workloads.slots.slot_decoder import SlotContrast, SlotContrastWords
from halfstep_train.workloads.slots.steve import Steve

SLOTS: dict[str, Any] = {"slots": 4, "slot_dim": 8, "decoder_hidden": (32, 32)}
DIM, POSITIONS = 12, 16
WORDS = WordsModelConfig(**SLOTS, word_side=4, vocabulary=24, words_dim=16, words_blocks=8, words_dropout=0.0)
STEVE = SteveModelConfig(vocabulary=24, slots=3, slot_dim=16, cnn_channels=8, dim=16, decoder_blocks=8, dropout=0.0)
Case = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def keys(num: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + 2 * num).view(num, 2)


def slotcontrast() -> Case:
    features = torch.randn(4, 4, 16, 12)
    return SlotContrast(SlotContrastModelConfig(**SLOTS), DIM, POSITIONS), lambda model: model(features)["error"]


def slotcontrast_words() -> Case:
    features, video = torch.randn(2, 2, 16, 12), torch.rand(2, 2, 3, 16, 16)
    noise = {"soft_noise": keys(4), "word_noise": keys(4, 1000)}

    def loss(model: nn.Module) -> Tensor:
        assert isinstance(model, SlotContrastWords)
        seen = model(features)
        words = model.compute_word_losses(seen["slots"], video, 0.5, **noise, hard=False)
        return torch.stack([seen["error"], words["mse"], words["cross_entropy"]]).sum()

    return SlotContrastWords(WORDS, DIM, POSITIONS, 16), loss


def steve() -> Case:
    video = torch.rand(4, 3, 3, 16, 16)
    draw = torch.linspace(-1, 1, 4 * 3 * 16).view(4, 3, 16)

    def loss(model: nn.Module) -> Tensor:
        seen = model(video, torch.tensor(0.5), soft_noise=keys(12), word_noise=keys(12, 1000), slot_draw=draw)
        return torch.stack([seen.mse, seen.cross_entropy]).sum()

    return Steve(STEVE, 16), loss


def results(case: Callable[[], Case], how: Recompute, *, compiled: bool = False) -> list[Tensor]:
    """The loss and all gradients."""
    torch.manual_seed(0)
    model, loss_of = case()
    assert set_recompute(model, how)
    loss = (torch.compile(loss_of, backend="aot_eager") if compiled else loss_of)(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def measured(case: Callable[[], Case], how: Recompute) -> tuple[int, list[Tensor]]:
    """Bytes at the worst moment of a step, and its results."""
    gc.collect()
    with LiveBytes() as live:
        found = results(case, how)
    return live.peak, found


@pytest.fixture(autouse=True)
def chunks_of_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many chunks as at MOVi-E's size."""
    by_frames = {"none": 8, "pointwise": 2, "blocks": 1}
    a_frame = 4 * POSITIONS * 32 * 4
    monkeypatch.setattr(slot_decoder, "HIDDEN_BYTES", {how: n * a_frame for how, n in by_frames.items()})
    monkeypatch.setattr(dvae, "CHUNK_BYTES", 2 * 16 * 24 * 4)


@pytest.mark.parametrize(("case", "share"), [(slotcontrast, 0.6), (slotcontrast_words, 0.9), (steve, 0.8)])
def test_less_is_alive_and_the_results_are_the_same(case: Callable[[], Case], share: float) -> None:
    (normal, expected), (low, found) = (measured(case, how) for how in ("none", "blocks"))
    torch.testing.assert_close(found, expected)
    assert low < share * normal


@pytest.mark.soak
@pytest.mark.parametrize("case", [slotcontrast, slotcontrast_words, steve])
def test_compiled_code_that_recomputes_has_the_same_results(
    case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[object] = []

    def compiled_turn(function: Callable[..., object]) -> object:
        turns.append(function)
        return torch.compile(function, backend="aot_eager", dynamic=False)

    monkeypatch.setattr(recompute, "_compile", compiled_turn)  # inductor would take far longer
    torch.testing.assert_close(results(case, "blocks", compiled=True), results(case, "none"))
    assert turns
