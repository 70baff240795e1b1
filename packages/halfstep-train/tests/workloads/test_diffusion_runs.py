"""Whole runs of diffusion models learn in every format, resume bit-exactly, skip bad steps and open in diffusers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DiffusionPipeline, LDMPipeline, StableDiffusionPipeline
from PIL import Image
from torch import Tensor

from data.latents import replace_latents
from diffusion_tiny import pictures, settings, text_folder, vae_folder
from halfstep.errors import CheckpointError, ConfigError, DataError, Interrupted
from halfstep_train.cli.train import load_config
from halfstep_train.config.dump import to_yaml
from halfstep_train.data.cache_file import open_cache
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.frozen_vae import LATENTS
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.diffusion import build as building
from halfstep_train.workloads.diffusion.diffusers_nets import open_net
from halfstep_train.workloads.diffusion.evaluate import DiffusionEvaluation
from tiny_runs import press_ctrl_c
from tiny_training import assert_same_bits
from whole_runs import newest, resume, stored_lines


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("diffusion") / "pictures")


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vae_folder(tmp_path_factory.mktemp("diffusion") / "vae"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(text_folder(tmp_path_factory.mktemp("diffusion") / "text"))


def last(run: Path) -> dict[str, Any]:
    return [line for line in stored_lines(run) if line["kind"] == "val"][-1]


# --- learning ---

LONGER = {
    "train__epochs": 12,
    "train__validate_every": 12,
    "train__checkpoint_every": 12,
    "train__batch_size": 18,
    "optimizer__lr": 1e-2,
    "ema__decay": 0.8,
    "model__channels": [16],
    "model__attention": [],
}
"""One step an epoch: enough for a network of one level on eighteen pictures."""


def test_a_model_learns_and_bf16_learns_as_well(data: Path, tmp_path: Path) -> None:
    exact = last(train(settings("diffusion", data, **LONGER), out=tmp_path / "fp32"))
    assert exact["mse"] < 0.65  # nothing learned: 1
    assert {"mse/0-4", "mse/15-19", "raw_mse", "raw_mse/0-4"} <= set(exact)
    half = {"precision__default": "bf16", "precision__simulate": True}
    found = last(train(settings("diffusion", data, **LONGER, **half), out=tmp_path / "bf16"))
    assert found["mse"] == pytest.approx(exact["mse"], rel=0.05)


def test_a_vae_computes_in_tf32_where_the_run_does(data: Path, vae: str, tmp_path: Path) -> None:
    """TF32 is one switch: no part of such a run can stay in fp32."""
    wish = {"precision__default": "tf32", "precision__simulate": True, "model__vae": vae, "train__max_steps": 1}
    run = train(settings("diffusion", data, **wish), out=tmp_path / "run")
    assert load(str(run / "config.yaml")).config.precision.modules == {"vae": "tf32"}
    resume(run, "train.max_steps=2")
    auto = wish | {"precision__simulate": False, "precision__modules": {"vae": "auto"}}
    found = building.build(settings("diffusion", data, **auto).config)  # type: ignore[arg-type]
    assert found.settled["precision.modules"] == {"vae": "tf32"}


@pytest.mark.parametrize("kind", ["class", "text"])
def test_conditions_reach_the_network(data: Path, vae: str, text: str, tmp_path: Path, kind: str) -> None:
    wish: dict[str, Any] = {"model__conditioning": kind, "model__target": "v", "model__min_snr_gamma": 5}
    if kind == "text":
        wish |= {
            "model__text_encoder": text,
            "model__attention": [0],
            "model__attention_head_dim": 2,
            "model__vae": vae,
        }
    run = train(settings("diffusion", data, train__max_steps=2, **wish), out=tmp_path / "run")
    option = {"class": "disc"} if kind == "class" else {"prompt": "a red disc"}
    one, other = (
        predicted(run, tmp_path / str(k), num=2, guidance=5.0, **given) for k, given in enumerate(({}, option))
    )
    assert not np.array_equal(one, other)
    wrong = {"class": "wolf"} if kind == "class" else {"class": "disc"}
    with pytest.raises(ConfigError, match="--class"):
        predicted(run, tmp_path / "wrong", num=1, **wrong)


# --- going on ---


@pytest.mark.parametrize("kind", ["pixels", "latents from disk"])
def test_a_run_goes_on_to_the_bit(data: Path, vae: str, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "latents.safetensors"
    wish: dict[str, Any] = {"schedule__name": "constant", "model__dropout": 0.1}
    if kind != "pixels":
        wish |= {"model__vae": vae, "data__cache": "latents", "data__cache_file": str(cache)}
    whole = train(settings("diffusion", data, **wish), out=tmp_path / "whole")
    part = train(settings("diffusion", data, train__max_steps=2, **wish), out=tmp_path / "part")
    resume(part, "train.max_steps=0")
    assert_same_bits(newest(whole).model, newest(part).model)
    assert_same_bits(newest(whole).ema, newest(part).ema)
    if kind != "pixels":
        opened = open_cache(cache, LATENTS)
        assert newest(whole).state["store"]["latents_sha256"] == opened.checksum
        assert opened.index["shape"] == [24, 2, 4, 4, 4]


def test_other_latents_at_resume_are_refused_and_lost_ones_made_again(data: Path, vae: str, tmp_path: Path) -> None:
    file = tmp_path / "latents.safetensors"
    wish = {"model__vae": vae, "data__cache": "latents", "data__cache_file": str(file), "train__max_steps": 1}
    run = train(settings("diffusion", data, **wish), out=tmp_path / "run")
    own = file.read_bytes()
    replace_latents(file)
    with pytest.raises(DataError, match="different latents from those the run was trained on"):
        resume(run, "train.max_steps=2")
    file.unlink()
    resume(run, "train.max_steps=2")
    assert file.read_bytes() == own


@pytest.mark.parametrize(("asked", "cache"), [("auto", "off"), ("bf16", "latents")])
def test_a_run_goes_on_by_the_file_that_left_it_the_format_of_its_vae(
    data: Path, vae: str, tmp_path: Path, asked: str, cache: str
) -> None:
    loaded = settings("diffusion", data, model__vae=vae, data__cache=cache, train__max_steps=2)
    written = tmp_path / "mine.yaml"
    written.write_text(to_yaml(loaded.config.replace(precision={"modules": {"vae": asked}})))
    run = train(load(str(written)), out=tmp_path / "run")
    stored = (run / "config.yaml").read_text()
    train(load_config([str(written), "train.max_steps=3"], {}, run), resume=run)
    assert (run / "config.yaml").read_text() == stored.replace("max_steps: 2", "max_steps: 3")
    with pytest.raises(CheckpointError, match=r"precision\.modules"):
        train(load_config([str(written), "precision.modules.vae=fp16"], {}, run), resume=run)


def test_training_on_latents_from_disk_places_no_vae(data: Path, vae: str, tmp_path: Path) -> None:
    wish = {"model__vae": vae, "data__cache": "latents", "data__cache_file": str(tmp_path / "latents.safetensors")}
    config = settings("diffusion", data, **wish).config
    built = building.build(config)  # type: ignore[arg-type]
    assert not built.frozen
    assert any("with flips" in value for _, value in built.about)
    plain = building.build(settings("diffusion", data, model__vae=vae).config)  # type: ignore[arg-type]
    assert set(plain.frozen) == {"vae"}


# --- samples ---


def predicted(run: Path, out: Path, **options: Any) -> Any:
    predict(run, [], report=RunReport(run), request=PredictRequest(out=out, options=options))
    return np.stack([np.asarray(Image.open(path)) for path in sorted(out.glob("0*.png"))])


def test_a_seed_gives_the_same_samples_in_batches_of_any_size(data: Path, tmp_path: Path) -> None:
    wish = {"train__max_steps": 2, "train__sample_every": 1}
    small, large = (train(settings("diffusion", data, **wish), out=tmp_path / name) for name in ("one", "other"))
    config = large / "config.yaml"
    config.write_text(config.read_text().replace("batch_size: 6", "batch_size: 4"))
    for sampler in ("ddim", "dpm"):
        one, other = (predicted(run, tmp_path / f"{run.name}{k}{sampler}", num=5, steps=4, seed=3, sampler=sampler)
                      for k, run in enumerate((small, large)))  # fmt: skip
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1
        assert len(one) == 5
    written = sorted(str(path.relative_to(small)) for path in (small / "report" / "samples").rglob("*.png"))
    assert written == [f"report/samples/0000000{k}/{name}.png" for k in (1, 2) for name in ("path", "samples")]


def test_ctrl_c_keeps_the_samples_that_are_drawn(data: Path, tmp_path: Path) -> None:
    run, out = train(settings("diffusion", data, train__max_steps=1), out=tmp_path / "run"), tmp_path / "out"
    with press_ctrl_c(after=2), pytest.raises(Interrupted, match="2 of 4 predictions are written"):
        predicted(run, out, num=4, steps=2, seed=3)
    assert {path.name for path in out.iterdir()} == {"0000.png", "0001.png", "predictions.json"}


def test_evaluation_scores_both_weights_and_measures_distances(data: Path, tmp_path: Path) -> None:
    from test_diffusion_parts import Means

    torch.jit.script(Means()).save(str(tmp_path / "features.pt"))
    run = train(settings("diffusion", data, train__max_steps=2), out=tmp_path / "run")
    found = evaluate(run, report=RunReport(run), options={"features": str(tmp_path / "features.pt"), "num": 6})
    assert {"mse", "raw_mse", "fid", "kid"} <= set(found.metrics)
    assert found.metrics["mse"] == pytest.approx(last(run)["mse"], rel=1e-6)
    assert found.metrics["raw_mse"] == pytest.approx(last(run)["raw_mse"], rel=1e-6)
    assert [row["timesteps"] for row in found.classes] == ["0-4", "5-9", "10-14", "15-19"]
    assert {Path(file).name for file in found.files} == {"samples.png", "path.png", "evaluation.json"}


# --- folders of diffusers ---


def test_other_pictures_are_evaluated_all_and_nothing_is_written_beside_them(
    data: Path, vae: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    run = train(
        settings("diffusion", data, model__vae=vae, data__cache="latents", train__epochs=1), out=tmp_path / "run"
    )
    others = pictures(tmp_path / "others", num=5)
    before = {path.name for path in others.rglob("*")}
    for k in range(2):
        found = evaluate(run, data=others, out=tmp_path / str(k), report=RunReport(run, quiet=True))
        assert found.samples == 5
    assert {path.name for path in others.rglob("*")} == before
    assert all(path.name.startswith("halfstep-latents-") for path in scratch.iterdir())
    config = DiffusionEvaluation.change_data_folder(load(str(run / "config.yaml")).config, others)
    assert config.data.flip == 0, "mirror images of pictures that nobody trains on were encoded"  # type: ignore[attr-defined]


def test_exported_pixels_open_in_a_pipeline_and_here(data: Path, vae: str, tmp_path: Path) -> None:
    run = train(settings("diffusion", data, train__max_steps=2), out=tmp_path / "run")
    pipeline = DDPMPipeline.from_pretrained(run / "model", low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=1, num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 3)
    assert_same_bits(pipeline.unet.state_dict(), newest(run).ema)
    wish = {"model__weights": str(run / "model"), "train__max_steps": 1, "optimizer__lr": 1e-12}
    again = train(settings("diffusion", data, **wish), out=tmp_path / "again")
    torch.testing.assert_close(newest(again).model["conv_in.weight"], newest(run).ema["conv_in.weight"])
    refused("in_channels=3, not 2", data, model__weights=str(run / "model"), model__vae=vae)


def test_exported_latent_and_text_models_open_in_pipelines(data: Path, vae: str, text: str, tmp_path: Path) -> None:
    plain = train(settings("diffusion", data, train__max_steps=1, model__vae=vae), out=tmp_path / "plain")
    pipeline = LDMPipeline.from_pretrained(plain / "model", low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=1, num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 3)
    ours = str(plain / "model")
    building.build(settings("diffusion", data, model__weights=ours, model__vae=ours).config)  # type: ignore[arg-type]
    wish = {"model__conditioning": "text", "model__text_encoder": text, "model__attention": [0], "model__vae": vae,
            "model__attention_head_dim": 2}  # fmt: skip
    told = train(settings("diffusion", data, train__max_steps=1, **wish), out=tmp_path / "told")
    spoken = StableDiffusionPipeline.from_pretrained(told / "model", low_cpu_mem_usage=False)
    assert_same_bits(spoken.unet.state_dict(), newest(told).ema)
    assert open_net(told / "model" / "vae", ["AutoencoderKL"]).config.latent_channels == 2


@pytest.mark.parametrize("of", ["pixels", "latents"])
def test_exported_models_that_are_told_classes_open_as_a_pipeline_with_its_code(
    data: Path, vae: str, tmp_path: Path, of: str
) -> None:
    wish = {"model__vae": vae} if of == "latents" else {}
    run = train(settings("diffusion", data, train__max_steps=1, model__conditioning="class", **wish), out=tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(run / "model", trust_remote_code=True, low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(["disc", "cross"], num_inference_steps=2, output_type="np").images
    assert images.shape == (2, 8, 8, 3)
    assert_same_bits(pipeline.unet.state_dict(), newest(run).ema)


def test_a_vae_with_a_shift_is_exported_with_a_pipeline_that_knows_it(data: Path, vae: str, tmp_path: Path) -> None:
    shifted = open_net(Path(vae), ["AutoencoderKL"])
    shifted.register_to_config(shift_factor=0.5)
    shifted.save_pretrained(tmp_path / "vae")
    wish = {"model__vae": str(tmp_path / "vae"), "train__max_steps": 1}
    run = train(settings("diffusion", data, **wish), out=tmp_path / "run")
    pipeline = DiffusionPipeline.from_pretrained(run / "model", trust_remote_code=True, low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    seen: list[Tensor] = []
    pipeline.vae.post_quant_conv.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for shift in (0.5, None):
        pipeline.vae.register_to_config(shift_factor=shift)
        pipeline([""], num_inference_steps=2, generator=torch.manual_seed(0), output_type="np")
    torch.testing.assert_close(seen[0] - seen[1], torch.full_like(seen[0], 0.5))


def test_the_header_says_what_the_unet_is_told(data: Path, text: str, tmp_path: Path) -> None:
    plain = building.build(settings("diffusion", data, model__conditioning="class").config)  # type: ignore[arg-type]
    condition = dict(plain.about)["condition"]
    assert condition.startswith("one of 3 classes: cross, disc, square; 10% of samples train without it")
    for k in range(3):
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / f"{k}.png")
    rows = [{"file_name": f"{k}.png", "text": "a red disc" if k else "red " * 20} for k in range(3)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wish = {"model__conditioning": "text", "model__text_encoder": text, "model__attention_head_dim": 2}
    told = building.build(settings("diffusion", tmp_path, **wish).config)  # type: ignore[arg-type]
    assert "caption" in dict(told.about)["condition"]


# --- bad input ---


def refused(match: str, data: Path, kind: type[Exception] = ConfigError, **wish: Any) -> None:
    with pytest.raises(kind, match=match):
        building.build(settings("diffusion", data, **wish).config)  # type: ignore[arg-type]


def test_bad_settings_are_refused_before_the_first_step(data: Path, vae: str) -> None:
    levels = {"model__vae": vae, "model__channels": [8, 8, 8, 8]}
    refused(r"8 pixels: the side must be a multiple of 16[\s\S]*data.image_size=16", data, **levels)
    refused(r"beta_start=0\.6 is above noise\.beta_end=0\.5", data, noise__beta_start=0.6)
    refused("belong together", data, model__conditioning="text")
    refused("needs a VAE: model.vae=DIR", data, data__cache="latents")
    refused("30 sampling steps", data, sample__steps=30)
