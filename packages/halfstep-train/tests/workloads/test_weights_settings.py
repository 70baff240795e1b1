"""A U-Net from a folder goes on by the schedule, target and size it was trained with, unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import DDPMPipeline, DDPMScheduler
from PIL import Image

from diffusion_tiny import TINY, pictures, vae_folder
from halfstep.errors import ConfigError
from halfstep_train.config.load import Loaded
from halfstep_train.run.train import train
from halfstep_train.workloads import build, load
from halfstep_train.workloads.diffusion.config import DiffusionModelConfig
from halfstep_train.workloads.diffusion.diffusers_nets import build_net, make_unet_config
from halfstep_train.workloads.diffusion.networks import adopt_settings

THEIRS: dict[str, Any] = {
    "num_train_timesteps": 40,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.001,
    "beta_end": 0.3,
    "prediction_type": "v_prediction",
}

UNET = DiffusionModelConfig(channels=(8, 8), layers=1, attention=())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("weights") / "pictures")


def pipeline(folder: Path, channels: int = 3, **scheduler: Any) -> Path:
    unet = build_net(make_unet_config(UNET, (channels, 8, 8)))
    DDPMPipeline(unet, DDPMScheduler(**THEIRS | scheduler)).save_pretrained(folder)
    return folder


def asked(data: Path, weights: Path, **said: Any) -> Loaded:
    values = {name: value for name, value in TINY.items() if name != "data.image_size"} | {
        "data.dir": str(data),
        "model.weights": str(weights),
        "sample.steps": 2,
        "sample.num": 1,
        "train.max_steps": 1,
        **{name.replace("__", "."): value for name, value in said.items()},
    }
    return load("diffusion", overrides=[f"{name}={json.dumps(value)}" for name, value in values.items()])


def test_a_pipelines_schedule_target_and_size_are_taken_and_kept(data: Path, tmp_path: Path) -> None:
    run = train(asked(data, pipeline(tmp_path / "theirs")), out=tmp_path / "run")
    back = DDPMPipeline.from_pretrained(run / "model", low_cpu_mem_usage=False)
    assert {name: back.scheduler.config[name] for name in THEIRS} == THEIRS
    assert back.unet.config.sample_size == 8
    stored = load(str(run / "config.yaml")).config
    assert (stored.noise.schedule, stored.model.target, stored.data.image_size) == ("scaled_linear", "v", 8)  # type: ignore[attr-defined]


def test_what_the_user_set_holds_and_is_named(data: Path, tmp_path: Path) -> None:
    weights = pipeline(tmp_path / "theirs")
    config = asked(data, weights, noise__schedule="linear", model__target="v", data__image_size=16).config
    found, _, notes = adopt_settings(config)  # type: ignore[arg-type]
    assert (found.noise.schedule, found.noise.steps, found.data.image_size) == ("linear", 40, 16)
    assert [note.split(":")[0] for note in notes] == ["noise.schedule=linear", "data.image_size=16"]


def test_pictures_of_another_size_are_what_a_pipeline_then_draws(data: Path, tmp_path: Path) -> None:
    run = train(asked(data, pipeline(tmp_path / "theirs"), data__image_size=12), out=tmp_path / "run")
    back = DDPMPipeline.from_pretrained(run / "model", low_cpu_mem_usage=False)
    back.set_progress_bar_config(disable=True)
    (image,) = back(num_inference_steps=1).images
    assert isinstance(image, Image.Image)
    assert image.size == (12, 12)


def test_the_size_of_a_latent_model_is_that_of_its_images(data: Path, tmp_path: Path) -> None:
    weights = pipeline(tmp_path / "theirs")
    vae_folder(weights / "vqvae")
    with_its_vae = asked(data, weights, model__vae=str(weights)).config
    assert adopt_settings(with_its_vae)[0].data.image_size == 16  # type: ignore[arg-type]


def test_a_unet_alone_leaves_the_settings_alone(data: Path, tmp_path: Path) -> None:
    weights = pipeline(tmp_path / "theirs")
    (weights / "unet").rename(tmp_path / "unet")
    _, settled, _ = adopt_settings(asked(data, tmp_path / "unet").config)  # type: ignore[arg-type]
    assert settled == {"data.image_size": 8}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"beta_schedule": "sigmoid"}, "'sigmoid'"),
        ({"trained_betas": [0.1] * 40}, "trained_betas"),
        ({"beta_end": "much"}, "beta_end.*'much'"),
        ({"prediction_type": "epsilon", "rescale_betas_zero_snr": True}, "the last timestep is pure noise"),
    ],
)
def test_a_process_that_is_not_supported_is_refused_unless_the_unet_is_named(
    data: Path, tmp_path: Path, theirs: dict[str, Any], said: str
) -> None:
    weights = pipeline(tmp_path / "theirs")
    path = weights / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | theirs))
    with pytest.raises(ConfigError, match=said):
        adopt_settings(asked(data, weights).config)  # type: ignore[arg-type]
    if "prediction_type" not in theirs:
        _, settled, notes = adopt_settings(asked(data, weights / "unet").config)  # type: ignore[arg-type]
        assert settled == {"data.image_size": 8}
        assert any(str(path) in note and "noise.* and model.target are used" in note for note in notes)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"out_channels": 6}, "out_channels=6, not 3"),
        ({"class_embed_type": "timestep"}, "class_embed_type=timestep"),
        ({"in_channels": 7}, r"in_channels=7, not 3[\s\S]*model\.vae"),
    ],
)
def test_a_unet_that_learns_or_is_told_more_is_refused(
    data: Path, tmp_path: Path, form: dict[str, Any], said: str
) -> None:
    build_net(make_unet_config(UNET, (3, 8, 8)) | form).save_pretrained(tmp_path / "unet")
    with pytest.raises(ConfigError, match=said):
        build(asked(data, tmp_path / "unet").config)
