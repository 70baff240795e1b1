"""RadioDiff's own config files, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import ConfigError, ModelError
from halfstep_train.workloads import load
from halfstep_train.workloads.radio.first_stage import build_vae
from tiny_radio import write_tiny_demo

STAGE2 = """
model:
  model_type: const_sde
  model_name: cond_unet
  image_size: [320, 320]
  input_keys: ['image', 'cond']
  timesteps: 1000
  sampling_timesteps: 1
  loss_type: l2
  objective: pred_KC
  start_dist: normal
  perceptual_weight: 0
  scale_factor: 0.18215
  scale_by_std: True
  default_scale: True
  scale_by_softsign: False
  eps: !!float 1e-4
  weighting_loss: False
  use_disloss: True
  ckpt_path:
  first_stage:
    embed_dim: 3
    lossconfig: {disc_start: 50001, kl_weight: 0.000001, disc_weight: 0.5, disc_in_channels: 1}
    ddconfig: {double_z: True, z_channels: 3, resolution: [320, 320], in_channels: 1, out_ch: 1, ch: 128,
               ch_mult: [1, 2, 4], num_res_blocks: 2, attn_resolutions: [], dropout: 0.0}
    ckpt_path: 'radiodiff_Vae/model-30.pt'
  unet:
    dim: 128
    cond_net: swin
    fix_bb: False
    channels: 3
    dim_mults: [1, 2, 4, 4]
    cond_in_dim: 3
    window_sizes1: [[8, 8], [4, 4], [2, 2], [1, 1]]
    window_sizes2: [[8, 8], [4, 4], [2, 2], [1, 1]]
    fourier_scale: 16
    input_size: [80, 80]
    DPMCARK: False
finetune:
  ckpt_path:
data:
  name: radio
  batch_size: 32
trainer:
  gradient_accumulate_every: 1
  lr: !!float 1e-6
  min_lr: !!float 1e-6
  train_num_steps: 50000
  save_and_sample_every: 200
  enable_resume: True
  log_freq: 1000
  results_folder: "./radiodiff_LDM2"
  amp: True
  fp16: False
  resume_milestone: 0
  ema_update_after_step: 10000
  ema_update_every: 10
  a_key_of_mine: 3
"""
STAGE1 = """
model:
  embed_dim: 3
  lossconfig: {disc_start: 50001, kl_weight: 0.000001, disc_weight: 0.5, disc_in_channels: 1}
  ddconfig: {double_z: True, z_channels: 3, resolution: [320, 320], in_channels: 1, out_ch: 1, ch: 128,
             ch_mult: [1, 2, 4], num_res_blocks: 2, attn_resolutions: [], dropout: 0.0}
  ckpt_path:
data: {name: radio, batch_size: 2}
trainer: {gradient_accumulate_every: 1, lr: !!float 5e-6, min_lr: !!float 5e-7, train_num_steps: 150000,
          save_and_sample_every: 5000, log_freq: 100, results_folder: x, amp: False, fp16: False}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "theirs.yaml"
    path.write_text(text)
    return str(path)


def test_each_key_of_stage_2_means_something_or_is_named(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, STAGE2), flags={"data.dir": "RadioMapSeer"})
    config = loaded.config
    assert config.workload == "radiodiff"
    found = {
        "vae": config.model.vae, "scale": config.model.scale_factor, "weighted": config.model.weighted_loss,
        "steps": config.train.max_steps, "batch": config.train.batch_size, "lr": config.optimizer.lr,
        "floor": config.schedule.min_factor, "power": config.schedule.power, "samples": config.train.sample_every,
        "mults": config.model.multipliers, "precision": config.precision.default, "simulation": config.data.simulation,
    }  # fmt: skip
    assert found == {
        "vae": "radiodiff_Vae/model-30.pt", "scale": 0.18215, "weighted": False, "steps": 50000, "batch": 32,
        "lr": 1e-6, "floor": 1e-6, "power": 0.96, "samples": 200, "mults": (1, 2, 4, 4),
        "precision": "bf16", "simulation": "DPM",
    }  # fmt: skip
    notes = "\n".join(loaded.notes)
    assert "read as bf16; the public trainer computes it in fp16 without loss scaling" in notes
    assert "model.image_size, model.first_stage.ddconfig.resolution are not used: maps have data.image_size" in notes
    assert (
        "trainer.a_key_of_mine is not used: not a key of such files; settings of radiodiff can follow as KEY=VALUE"
        in notes
    )
    assert "model.unet.input_size is not used: the Fourier filter is sized from its map" in notes
    silent = [note for note in loaded.notes if "not a key of such files" in note]
    assert len(silent) == 1


def test_stage_1_is_translated_and_its_turns_are_explained(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, STAGE1), flags={"data.dir": "RadioMapSeer"})
    config = loaded.config
    assert config.workload == "radiodiff_vae"
    assert (config.model.discriminator.start, config.schedule.power, config.precision.default) == (50001, 0.95, "fp32")
    notes = "\n".join(loaded.notes)
    assert "never trains its discriminator" in notes
    assert "not a key of such files" not in notes


def test_weights_that_a_public_file_names_must_exist(tmp_path: Path) -> None:
    text = STAGE1.replace("ckpt_path:", "ckpt_path: theirs/model-7.pt").replace("ch: 128", "ch: 8")
    path, flags = written(tmp_path, text), {"data.dir": str(write_tiny_demo(tmp_path / "data"))}
    with pytest.raises(ModelError, match=r"no weights at .*theirs/model-7\.pt"):
        build_vae(load(path, overrides=["data.image_size=32"], flags=flags).config)  # type: ignore[arg-type]
    assert load(path, overrides=["model.weights=null"], flags=flags).config.model.weights is None


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("name: radio", "name: DPMK", "data.name: DPMK"),
        ("cond_net: swin", "cond_net: effnet", "model.unet.cond_net is effnet"),
        ("fix_bb: False", "fix_bb: True", "model.unet.fix_bb is True"),
        ("start_dist: normal", "start_dist: uniform", "model.start_dist is uniform"),
        ("attn_resolutions: []", "attn_resolutions: [16]", "attn_resolutions"),
    ],
)
def test_what_is_not_built_here_is_refused_not_dropped(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, STAGE2.replace(old, new)), flags={"data.dir": "RadioMapSeer"})


def test_words_of_their_keys_and_of_ours_change_it(tmp_path: Path) -> None:
    path = written(tmp_path, STAGE2)
    loaded = load(path, overrides=["trainer.lr=1e-4", "model.vae=runs/vae"], flags={"data.dir": "RadioMapSeer"})
    assert (loaded.config.optimizer.lr, loaded.config.model.vae) == (1e-4, "runs/vae")


def test_fp16_with_amp_is_fp16_and_cars_are_found_by_name(tmp_path: Path) -> None:
    text = STAGE2.replace("fp16: False", "fp16: True").replace("name: radio", "name: DPMCAR")
    config = load(written(tmp_path, text), flags={"data.dir": "RadioMapSeer"}).config
    assert (config.precision.default, config.data.cars) == ("fp16", True)


def test_without_data_the_files_own_model_is_trained_on_the_generated_tree(tmp_path: Path) -> None:
    there, here = (load(written(tmp_path, STAGE2), flags=flags).config for flags in ({"data.dir": "RadioMapSeer"}, {}))
    assert here.model == there.model
    assert (here.optimizer, here.train) == (there.optimizer, there.train)
