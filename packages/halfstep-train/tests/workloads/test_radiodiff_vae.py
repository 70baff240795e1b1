"""Stage 1 of RadioDiff: it learns, resumes exactly over both networks, and is safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from halfstep.errors import ConfigError, DataError
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.use.predict import predict
from halfstep_train.workloads import build
from halfstep_train.workloads.base.sheets import CELL, GAP
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.vae_trainer import (
    compute_adaptive_weight,
    hinge_discriminator_loss,
    hinge_generator_loss,
)
from halfstep_train.workloads.radio.build_vae import sum_errors
from halfstep_train.workloads.radio.guide import Guide
from halfstep_train.workloads.radio.vae import RadioVAE
from tiny_radio import SIDE, SIZES, VAE, settings, train_vae, write_tiny_demo
from tiny_training import assert_same_bits
from whole_runs import final_state, resume

CRITIC: dict[str, Any] = {
    "model__discriminator__enabled": True, "model__discriminator__start": 2, "data__image_size": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_demo(tmp_path_factory.mktemp("radio") / "RadioMapSeer")


def losses(run: Path, name: str = "loss") -> list[float]:
    return [row[name] for row in read(run / "metrics.jsonl") if row["kind"] == "train" and name in row]


def test_the_loss_falls_in_simulated_fp16(tmp_path: Path, data: Path) -> None:
    asked = {"precision__default": "fp16", "precision__simulate": True, "optimizer__lr": 1e-2}
    found = losses(train_vae(tmp_path / "run", data, **asked, train__max_steps=8))
    assert found[-1] < 0.8 * found[0]


def test_resume_is_exact_over_both_networks_and_the_average(tmp_path: Path, data: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steady = {**CRITIC, "schedule__name": "constant"}
    train_vae(whole, data, **steady, train__max_steps=5)
    train_vae(parts, data, **steady, train__max_steps=3)
    resume(parts, "train.max_steps=5")
    assert_same_bits(final_state(whole)[0], final_state(parts)[0])
    assert len(losses(whole, "loss/discriminator")) >= 2


def test_the_end_leaves_a_first_stage_with_the_scale_of_its_latents(tmp_path: Path, data: Path) -> None:
    run = train_vae(tmp_path / "run", data, train__max_steps=3)
    facts = json.loads((run / "model" / "vae.json").read_text())
    assert facts["sizes"] == SIZES
    vae = RadioVAE(width=8, multipliers=(1, 2), num_blocks=1, latent_channels=2)
    vae.load_state_dict(load_file(run / "model" / "vae.safetensors"))
    samples = build(settings("radiodiff_vae", data, VAE).config).train_samples
    maps = torch.stack([samples.sample(index, key=(0, 0, index))["gain"] for index in range(len(samples))])
    mean, log_variance = (part.detach().double() for part in vae.encode(maps.float() / 255 * 2 - 1))
    deviation = float((mean.var() + log_variance.exp().mean()).sqrt())
    assert facts["scale_factor"] == pytest.approx(1 / deviation, rel=1e-4)


def test_maps_are_reconstructed_and_drawn_beside_the_truth(tmp_path: Path, data: Path) -> None:
    run = train_vae(tmp_path / "run", data, train__max_steps=1)
    gains = sorted((data / "gain" / "DPM").iterdir())[:2]
    request = PredictRequest(out=tmp_path / "out")
    made = predict(run, [*gains, data / "png" / "nothing"], report=RunReport(run, quiet=True), request=request)
    assert [len(made.answers), len(made.failed)] == [2, 1]
    with Image.open(tmp_path / "out" / "maps" / gains[0].name) as gain:
        assert gain.size == (SIDE, SIDE)
    with Image.open(tmp_path / "out" / "pictures" / gains[0].name) as picture:
        assert picture.width == GAP + 3 * (CELL + GAP), "map, truth and error"


def test_the_guide_shows_cities_with_their_gains_and_takes_sides_that_can_be_halved(data: Path) -> None:
    config = settings("radiodiff_vae", data, VAE).config
    guide = Guide()
    opened = guide.open(config)  # type: ignore[arg-type]
    name, picture = guide.draw_sample(opened.train.sample(0, key=(0, 0, 0)), 0, opened.classes)
    assert (name, picture.size) == ("map 0", (2 * SIDE, SIDE))
    assert guide.suggest_for_side(config, 21) == {"data.image_size": 20}  # type: ignore[arg-type]
    second = settings("radiodiff", data, {}, data__image_size=32).config
    assert guide.suggest_for_side(second, 70) == {"data.image_size": 64}  # type: ignore[arg-type]  # three halvings after two


def test_sizes_that_cannot_be_halved_and_faulty_trees_are_refused_before_the_first_step(data: Path) -> None:
    with pytest.raises(ConfigError, match="15 pixels: the side must be a multiple of 2") as refused:
        build(settings("radiodiff_vae", data, VAE, data__image_size=15).config)
    assert refused.value.fix == "data.image_size=16"
    with pytest.raises(DataError, match="no map 9999"):
        build(settings("radiodiff_vae", data, VAE, data__val_maps=[9999]).config)


@pytest.mark.parametrize("said", [{"data__test_maps": [1]}, {"data__val_fraction": 0.5}])
def test_a_split_that_would_be_passed_over_is_refused(data: Path, said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(has no effect|needs data\.val_maps)[\s\S]*data\.split"):
        settings("radiodiff_vae", data, VAE, **said)


def test_radiodiffs_split_names_its_leaking_maps(data: Path) -> None:
    workload = build(settings("radiodiff_vae", data, VAE, data__split="radiodiff", data__simulation="IRT4").config)
    assert any("validation map" in note and "training maps too" in note for note in workload.notes)
    assert build(settings("radiodiff_vae", data, VAE).config).notes == ()


def test_the_sum_over_a_whole_map_is_finite_where_fp16_would_overflow() -> None:
    truth, found = torch.full((1, 1, 256, 256), -1.0).half(), torch.full((1, 1, 256, 256), 1.0).half()
    with torch.autocast("cpu", torch.bfloat16):
        errors = sum_errors(found, truth)
    assert float(errors) == 6 * 256**2 > torch.finfo(torch.float16).max


def test_hinge_losses_and_their_balance() -> None:
    assert float(hinge_discriminator_loss(torch.tensor([2.0, 0.5]), torch.tensor([-2.0]))) == pytest.approx(0.125)
    assert float(hinge_generator_loss(torch.tensor([1.0, 3.0]))) == -2.0
    weight = torch.ones(3, requires_grad=True)
    found = compute_adaptive_weight(6 * weight.sum(), 2 * weight.sum(), weight, scales=(0.5, 64.0))
    assert float(found) == pytest.approx(3.0, rel=1e-4)
    assert not found.requires_grad
    silent = compute_adaptive_weight(6 * weight.sum(), 0 * weight.sum(), weight, scales=(1.0, 1.0))
    assert float(silent) == 1e4
