"""Our STEVE against numbers of the public original, in fp32 with the original's weights and draws.

Names are the original's own. Left out on purpose: its mask parameters, which are a flag of our attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from golden import assert_golden, assert_golden_gradients, golden, group
from halfstep_train.workloads.slots.config import SteveModelConfig
from halfstep_train.workloads.slots.steve import Steve

SIZE = SteveModelConfig(vocabulary=32, slots=4, slot_dim=32, cnn_channels=16, dim=32, decoder_blocks=2)
Case = tuple[Steve, dict[str, Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def case() -> Case:
    tensors, facts = golden("steve_tiny")
    model = Steve(SIZE, 32).eval()
    state = group(tensors, "state/")
    model.load_state_dict({name: value for name, value in state.items() if not name.endswith("self_attn_mask")})
    return model, tensors, facts


def inputs(tensors: dict[str, Tensor]) -> dict[str, Any]:
    def by_position(noise: Tensor) -> Tensor:
        return noise.flatten(2).transpose(1, 2)

    return {
        "video": tensors["in/video"],
        "tau": 0.7,
        "soft_noise": by_position(tensors["noise/gumbel_soft"]),
        "word_noise": by_position(tensors["noise/gumbel_hard"]),
        "slot_draw": tensors["noise/slot_init"],
    }


def test_losses_slots_attention_and_reconstruction_are_the_originals(case: Case) -> None:
    model, tensors, facts = case
    seen = model(**inputs(tensors))
    assert seen.mse.item() == pytest.approx(facts["scalars"]["mse"], rel=1e-6)
    assert seen.cross_entropy.item() == pytest.approx(facts["scalars"]["cross_entropy"], rel=1e-6)
    assert_golden(seen.slots, tensors["out/slots"])
    assert_golden(seen.reconstruction, tensors["out/recon_raw"])
    assert_golden(seen.attention.flatten(3).transpose(2, 3), tensors["out/attn"])
    masks = seen.attention.unsqueeze(3).repeat_interleave(2, -2).repeat_interleave(2, -1)
    assert_golden(masks, tensors["out/attn_upsampled"])


def test_with_one_word_each_position_the_reconstruction_is_the_originals(case: Case) -> None:
    model, tensors, facts = case
    seen = model(**inputs(tensors), hard=True)
    assert seen.mse.item() == pytest.approx(facts["scalars"]["mse_hard"], rel=1e-6)


def test_words_are_exactly_the_originals(case: Case) -> None:
    model, tensors, _ = case
    given = inputs(tensors)
    coded = model.dvae(given["video"].flatten(0, 1), 0.7, given["soft_noise"], given["word_noise"])
    assert torch.equal(coded.words, tensors["out/tokens"])


def test_every_gradient_is_the_originals(case: Case) -> None:
    model, tensors, facts = case
    model.zero_grad()
    seen = model(**inputs(tensors))
    (seen.mse + seen.cross_entropy).backward()
    assert {name for name, _ in model.named_parameters()} == set(group(tensors, "grad/"))
    assert_golden_gradients(model, tensors, facts)


def test_gradients_are_the_originals_when_the_vocabulary_goes_by_chunks(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfstep_train.workloads.slots.dvae.CHUNK_BYTES", 2 * 64 * 32 * 4)  # two frames
    test_every_gradient_is_the_originals(case)


def test_a_changed_word_moves_later_logits_only_and_all_are_the_originals(case: Case) -> None:
    model, tensors, facts = case
    decoder, slots = model.steve_decoder, tensors["causal/slots_projected"]
    logits = decoder.head(decoder(tensors["causal/tokens"], slots))
    changed = decoder.head(decoder(tensors["causal/tokens_changed"], slots))
    assert_golden(logits, tensors["causal/logits"])
    assert_golden(changed, tensors["causal/logits_changed"])
    last_equal = facts["causal"]["changed_position"]
    assert torch.equal(logits[:, : last_equal + 1], changed[:, : last_equal + 1])
    assert not torch.equal(logits[:, last_equal + 1 :], changed[:, last_equal + 1 :])


def test_greedy_decoding_and_its_image_are_the_originals(case: Case) -> None:
    model, tensors, _ = case
    slots = tensors["greedy/slots"]
    assert torch.equal(
        model.steve_decoder.decode_greedily(model.steve_encoder.slot_proj(slots)), tensors["greedy/tokens"]
    )
    assert_golden(model.decode_slots(slots), tensors["greedy/image"])
