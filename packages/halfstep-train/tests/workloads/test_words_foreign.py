"""A config that joins SlotContrast and STEVE: every key of the words' half is honoured, or an error says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from halfstep.errors import ConfigError
from halfstep_train.workloads.slots.foreign import translate_config

THEIRS: dict[str, Any] = {
    "trainer": {"max_steps": 1000, "precision": "bf16-mixed"},
    "optimizer": {"name": "Adam", "lr": 1e-4},
    "model": {
        "input_type": "video",
        "use_dvae": True,
        "use_steve_decoder": True,
        "gumbel_start_temp": 0.9,
        "gumbel_final_temp": 0.2,
        "gumbel_anneal_steps": 777,
        "losses": {
            "features": {"name": "MSELoss"},
            "pixels": {"name": "DVAEReconstructionLoss", "normalize": True, "reduction": "sum"},
            "words": {"name": "STEVECrossEntropyLoss", "reduction": "mean"},
        },
        "loss_weights": {"features": 1.0, "pixels": 0.5, "words": 2.0},
        "initializer": {"name": "FixedLearnedInit", "n_slots": 15, "dim": 128},
        "encoder": {"backbone": {"name": "TimmExtractor", "model": "vit_base_patch14_dinov2", "pretrained": True}},
        "grouper": {"name": "SlotAttention", "slot_dim": 128, "n_iters": 2},
        "latent_processor": {"first_step_corrector_args": {"n_iters": 3}},
        "predictor": {"name": "networks.TransformerEncoder", "n_blocks": 1, "n_heads": 4},
        "decoder": {"name": "MLPDecoder", "hidden_dims": [1024]},
        "dvae": {"vocab_size": 512, "img_channels": 3, "use_checkpoint": True},
        "steve_decoder": {
            "vocab_size": 512, "d_model": 64, "num_decoder_blocks": 3, "num_decoder_heads": 4, "dropout": 0.2,
            "image_size": 336,
        },
    },
    "dataset": {"batch_size": 4, "train_pipeline": {"chunk_size": 2, "transforms": {"input_size": 336}}},
}  # fmt: skip


def with_change(path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(THEIRS)
    *parents, name = path.split(".")
    section = changed
    for parent in parents:
        section = section[parent]
    section[name] = value
    return changed


def test_sizes_temperatures_and_losses_become_our_settings() -> None:
    found = translate_config(THEIRS, "lowmem.yaml")
    assert found is not None
    assert found.workload == "slotcontrast_steve"
    expected = {
        "vocabulary": 512, "dvae_checkpointing": True, "words_dim": 64, "words_blocks": 3,
        "words_dropout": 0.2, "tau": [0.9, 0.2, 777], "dvae_weight": 0.5,
        "dvae_loss": "sum", "words_weight": 2.0, "words_loss": "mean", "contrast_weight": 0.0,
    }  # fmt: skip
    assert {key: found.values[f"model.{key}"] for key in expected} == expected
    without = translate_config(with_change("model.use_steve_decoder", False), "vae.yaml")
    assert without is not None
    assert without.values["model.words_blocks"] == 0
    assert not [key for key in found.unused if key.startswith(("model.dvae", "model.steve", "model.gumbel"))]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.use_dvae", False, "use_steve_decoder is on"),
        ("model.steve_decoder.vocab_size", 4096, "the VAE has 512 tokens"),
        ("model.steve_decoder.image_size", 224, "frames have 336 pixels"),
        ("model.dvae.img_channels", 1, "img_channels is 1"),
        ("model.losses.pixels.normalize", False, "model.losses.pixels"),
        ("model.losses.words.reduction", "none", "model.losses.words"),
    ],
)
def test_what_would_train_another_model_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        translate_config(with_change(path, value), "wrong.yaml")
