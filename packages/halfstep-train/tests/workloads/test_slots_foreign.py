"""SlotContrast's config files: every key is honoured or named."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfstep.errors import ConfigError
from halfstep_train.config.foreign import Foreign, resolve_document
from halfstep_train.config.load import Loaded
from halfstep_train.workloads import build, load
from halfstep_train.workloads.slots.config import SlotContrastConfig
from halfstep_train.workloads.slots.demo import write_demo
from halfstep_train.workloads.slots.foreign import translate_config

THEIRS = textwrap.dedent("""\
    experiment_name: mine
    seed: 3
    globals:
      NUM_SLOTS: 5
      SLOT_DIM: 16
      FEAT_DIM: 24
      SIDE: 28
      GPUS: 1
      PER_GPU: 2
      TOTAL: "${mul: ${.GPUS}, ${.PER_GPU}}"
    trainer: {max_steps: 1100, log_every_n_steps: 50, val_check_interval: 500, gradient_clip_val: 0.05}
    optimizer:
      name: Adam
      lr: 0.0004
      lr_scheduler: {name: exp_decay_with_warmup, warmup_steps: 100, decay_steps: "${trainer.max_steps}"}
    model:
      input_type: video
      visualize: true
      visualize_every_n_steps: 200
      losses:
        loss_featrec: {name: MSELoss, pred_dims: [0, "${globals.FEAT_DIM}"]}
        loss_ss: {name: Slot_Slot_Contrastive_Loss, pred_key: processor.state, temperature: 0.1, batch_contrast: true}
      loss_weights: {loss_featrec: 1.0, loss_ss: 0.25}
      initializer: {name: FixedLearnedInit, n_slots: "${globals.NUM_SLOTS}", dim: "${globals.SLOT_DIM}"}
      encoder:
        backbone:
          name: TimmExtractor
          model: vit_small_patch14_dinov2
          features: [vit_block2, vit_block_keys2]
          frozen: true
          pretrained: false
          model_kwargs: {dynamic_img_size: true, embed_dim: 24, num_heads: 2}
        main_features_key: vit_block2
        output_transform:
          name: networks.two_layer_mlp
          inp_dim: ${globals.FEAT_DIM}
          outp_dim: ${globals.SLOT_DIM}
          hidden_dim: "${mul: ${globals.FEAT_DIM}, 2}"
          layer_norm: true
      grouper: {name: SlotAttention, inp_dim: "${globals.SLOT_DIM}", slot_dim: "${globals.SLOT_DIM}", n_iters: 2}
      latent_processor: {first_step_corrector_args: {n_iters: 3}}
      decoder: {name: MLPDecoder, hidden_dims: [32, 32], n_patches: "${mul: 2, 2}"}
      predictor: {name: networks.TransformerEncoder, dim: "${globals.SLOT_DIM}", n_blocks: 1, n_heads: 4}
    val_metrics:
      ari: {name: VideoARI, ignore_background: true, pred_key: decoder_masks_hard, true_key: segmentations}
    dataset:
      train_shards: "demo-train-{000000..000001}.tar"
      val_shards: "demo-validation-{000000..000000}.tar"
      batch_size: ${globals.PER_GPU}
      val_batch_size: 3
      val_size: 2
      num_workers: 0
      train_pipeline:
        video_size: 5
        chunk_size: 3
        sample_one_chunk_per_video: true
        keys: [video]
        transforms: {name: movi_train, type: video, input_size: "${globals.SIDE}", h_flip_prob: 0.5}
      val_pipeline:
        use_chunks: false
        keys: [video, segmentations]
        transforms: {name: movi_val, type: video, input_size: "${globals.SIDE}", num_classes: 11}
    """)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(THEIRS)
    return path


def config_of(loaded: Loaded) -> SlotContrastConfig:
    assert isinstance(loaded.config, SlotContrastConfig)
    return loaded.config


def test_a_file_of_theirs_is_our_run(written: Path) -> None:
    loaded = load(str(written), overrides=["globals.PER_GPU=4"], flags={"bf16": True, "use_optimizations": True})
    config = config_of(loaded)
    expected: dict[str, Any] = {
        "workload": "slotcontrast", "precision.default": "bf16", "train.seed": 3, "train.batch_size": 4,
        "train.max_steps": 1100, "train.validate_every_steps": 500, "train.report_every": 50, "train.clip_norm": 0.05,
        "train.checkpoint_every": 1000, "train.val_batch_size": 3, "train.sample_every": 200, "optimizer.name": "adam",
        "optimizer.lr": 4e-4, "schedule.name": "exponential", "schedule.warmup_steps": 100,
        "schedule.half_life_steps": 1000, "model.backbone": "vit_small_patch14_dinov2",
        "model.backbone_size": (2, 2, 24), "model.backbone_weights": "random", "model.slots": 5,
        "model.slot_dim": 16, "model.iterations": 2, "model.decoder_hidden": (32, 32),
        "model.contrast_weight": 0.25, "data.image_size": 28, "data.chunk_size": 3, "data.chunks": "one",
        "data.flip": 0.5, "data.val_chunk_size": 0, "data.crop": "none",
    }  # fmt: skip
    for path, value in expected.items():
        found: Any = config
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path
    said = "\n".join(loaded.notes)
    for key in ("experiment_name", "dataset.train_pipeline.video_size", "dataset.val_pipeline.transforms.num_classes"):
        assert any(key in note and "not used: " in note for note in loaded.notes)
    assert "not a key of such files" not in said
    assert "--use-optimizations: bf16 is requested, so TF32 stays off" in said


def test_without_a_data_folder_the_shards_are_not_read(written: Path, tmp_path: Path) -> None:
    written.write_text(THEIRS.replace("demo-", "movi_e/movi_e-"))
    loaded = load(str(written))
    assert config_of(loaded).data.train_shards == ""
    said = next(line for line in loaded.warnings if "data.train_shards" in line)
    assert "data.val_shards" in said
    assert "--data-dir" in said
    told = load(str(written), flags={"data_dir": str(tmp_path / "data")})
    assert config_of(told).data.train_shards == "movi_e/movi_e-train-{000000..000001}.tar"
    assert not any("data.train_shards" in line for line in told.warnings)


def test_a_key_nobody_knows_is_named(written: Path) -> None:
    written.write_text(THEIRS.replace("  input_type: video\n", "  input_type: video\n  brand_new: 3\n"))
    assert any("model.brand_new is not used" in note for note in load(str(written)).notes)
    written.write_text(THEIRS.replace("pred_key: decoder_masks_hard", "pred_key: grouping_masks_hard"))
    assert any("val_metrics.ari.pred_key" in note and "not used" in note for note in load(str(written)).notes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("input_type: video", "input_type: image", "model.input_type is image"),
        ("name: SlotAttention", "name: Other", "model.grouper.name is Other"),
        ("frozen: true", "frozen: false", "backbone.frozen is False"),
        ('[0, "${globals.FEAT_DIM}"]', "[0, 2]", r"featrec.pred_dims is \[0, 2\]"),
        ("name: MSELoss", "name: MSELoss, target_transform: {name: x}", "featrec.target_transform is"),
        ("pred_key: processor.state", "pred_key: processor.state_predicted", "ss.pred_key is processor.state_pred"),
        ("name: exp_decay_with_warmup", "name: zigzag", "lr_scheduler.name=zigzag"),
        ("ari: {name: VideoARI,", "psnr: 3\n  ari: {name: VideoARI,", "val_metrics.psnr is not a mapping"),
        ("${mul: 2, 2}", "${mul: 3, 3}", "n_patches is 9"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(written: Path, old: str, new: str, said: str) -> None:
    assert old in THEIRS
    written.write_text(THEIRS.replace(old, new))
    with pytest.raises(ConfigError, match=said):
        load(str(written))


def test_a_run_that_ends_within_its_warmup_needs_no_decay(written: Path) -> None:
    """As upstream, where a few steps of a long run's file are tried."""
    config = config_of(load(str(written), overrides=["trainer.max_steps=6"]))
    assert (config.train.max_steps, config.schedule.warmup_steps) == (6, 100)
    with pytest.raises(ConfigError, match="150 decay_steps, 200 warmup_steps"):
        load(
            str(written),
            overrides=["optimizer.lr_scheduler.warmup_steps=200", "optimizer.lr_scheduler.decay_steps=150"],
        )


def test_references_that_multiply_end(written: Path) -> None:
    bomb = "".join(f'  X{k}: "' + f"${{.X{k - 1}}} " * 10 + '"\n' for k in range(1, 12))
    written.write_text(THEIRS.replace("globals:\n", "globals:\n  X0: lol\n" + bomb))
    with pytest.raises(ConfigError, match="references"):
        load(str(written))


def test_parameter_groups_are_ours(written: Path, tmp_path: Path) -> None:
    groups = """\
      param_groups:
        - {modules: encoder, lr: 0.001}
        - modules: [processor, decoder]
          lr_scheduler: {name: constant}
    """
    written.write_text(
        THEIRS.replace("  name: Adam\n", "  name: Adam\n" + textwrap.indent(textwrap.dedent(groups), "  "))
    )
    loaded = load(str(written))
    write_demo(tmp_path / "data", num_train=4, num_val=2, frames=6, side=16, per_shard=2)
    built = build(load(str(written), flags={"data_dir": str(tmp_path / "data")}).config)
    assert (len(built.train_samples), len(built.val_samples), built.metric) == (4, 2, "fg_ari")
    assert [group.modules for group in built.groups] == [("encoder",), ("processor", "decoder")]
    assert built.groups[0].lr == 0.001
    assert built.groups[1].schedule["name"] == "constant"
    from halfstep_train.config.dump import to_yaml

    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(loaded.config))
    assert config_of(load(str(again))).optimizer.groups == config_of(loaded).optimizer.groups
    written.write_text(written.read_text().replace("modules: encoder,", "modules: head,"))
    with pytest.raises(ConfigError, match="head"):
        load(str(written))


def test_a_second_file_changes_the_first(written: Path, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("globals: {NUM_SLOTS: 9}\nmodel: {loss_weights: {loss_ss: 0.75}}\n")
    loaded = load(str(written), overrides_file=tmp_path / "more.yaml", overrides=["globals.PER_GPU=8"])
    config = config_of(loaded)
    assert (config.model.slots, config.model.contrast_weight, config.train.batch_size) == (9, 0.75, 8)


def test_a_word_may_add_a_key_that_their_reader_knows(written: Path) -> None:
    written.write_text(THEIRS.replace("    main_features_key: vit_block2\n", ""))
    assert "main_features_key" not in written.read_text()
    loaded = load(str(written), overrides=["model.encoder.main_features_key=vit_block2", "model.weights=a.ckpt"])
    assert config_of(loaded).model.weights == "a.ckpt", "ours stay ours"
    assert not any("main_features_key" in note and "not used" in note for note in loaded.notes)
    with pytest.raises(ConfigError, match="unknown key 'model.encoder.main_feature_key'"):
        load(str(written), overrides=["model.encoder.main_feature_key=vit_block2"])


def test_flags_of_theirs(written: Path, tmp_path: Path) -> None:
    from halfstep_train.cli.train import choose_new_folder, parse_timeout, refuse_lightning_checkpoint

    assert parse_timeout("00:11:30:00") == 41_400
    assert parse_timeout("01:02") == 62
    with pytest.raises(ConfigError, match="not a duration"):
        parse_timeout("soon")
    with pytest.raises(ConfigError, match="Lightning"):
        refuse_lightning_checkpoint(Path("a.ckpt"))
    with choose_new_folder(None, tmp_path / "logs", dry=False, name="slotcontrast") as place:
        assert place is not None
        assert place.parent == tmp_path / "logs"
    with choose_new_folder(None, None, dry=True, name="slotcontrast") as place:
        assert place is not None
        assert place.parent.is_dir()
    assert not place.parent.exists()
    with pytest.raises(ConfigError, match="--log-dir"), choose_new_folder(tmp_path, tmp_path, dry=False, name=""):
        pass


# --- the fork's words ---

WITH_WORDS: dict[str, Any] = {
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
    "dvae": {"vocab_size": 512, "img_channels": 3, "use_checkpoint": True},
    "steve_decoder": {
        "vocab_size": 512, "d_model": 64, "num_decoder_blocks": 3, "num_decoder_heads": 4, "dropout": 0.2,
        "image_size": 28,
    },
}  # fmt: skip


def translate_words(path: str = "", value: Any = None) -> Foreign:
    """Translate the file with words in its model; `path` below `model` gets another value."""
    document = resolve_document(yaml.safe_load(THEIRS))
    document["model"] |= copy.deepcopy(WITH_WORDS)
    section = document["model"]
    *parents, name = path.split(".")
    for parent in parents:
        section = section[parent]
    if name:
        section[name] = value
    found = translate_config(document)
    assert found is not None
    return found


def test_sizes_temperatures_and_losses_of_words_become_our_settings() -> None:
    found = translate_words()
    assert found.workload == "slotcontrast_steve"
    expected = {
        "vocabulary": 512, "dvae_checkpointing": True, "words_dim": 64, "words_blocks": 3,
        "words_dropout": 0.2, "tau": [0.9, 0.2, 777], "dvae_weight": 0.5,
        "dvae_loss": "sum", "words_weight": 2.0, "words_loss": "mean", "contrast_weight": 0.0,
    }  # fmt: skip
    assert {key: found.values[f"model.{key}"] for key in expected} == expected
    assert not [key for key in found.unused if key.startswith(("model.dvae", "model.steve", "model.gumbel"))]
    assert translate_words("use_steve_decoder", False).values["model.words_blocks"] == 0


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("use_dvae", False, "use_steve_decoder is on"),
        ("steve_decoder.vocab_size", 4096, "the VAE has 512 tokens"),
        ("steve_decoder.image_size", 224, "frames have 28 pixels"),
        ("dvae.img_channels", 1, "img_channels is 1"),
        ("losses.pixels.normalize", False, "model.losses.pixels"),
        ("losses.words.reduction", "none", "model.losses.words"),
    ],
)
def test_words_that_would_train_another_model_are_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        translate_words(path, value)
