"""Stage 2 of RadioDiff: it learns from a frozen first stage, resumes exactly, is sampled, evaluated and used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from halfstep.errors import ConfigError, DataError, ModelError, TrainingStopped
from halfstep_train.data.loader import Key
from halfstep_train.models.weights import load_weights_file_
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import build
from halfstep_train.workloads.base.frozen_vae import (
    compute_adaptive_weight,
    hinge_discriminator_loss,
    hinge_generator_loss,
)
from halfstep_train.workloads.base.sheets import CELL, GAP
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.radio.build import Guide, build_unet, select_pyramid_weights, select_unet_weights
from halfstep_train.workloads.radio.config import FirstStageConfig
from halfstep_train.workloads.radio.first_stage import sum_errors
from halfstep_train.workloads.radio.maps import read_gray
from halfstep_train.workloads.radio.vae import RadioVAE
from tiny_radio import (
    DIFFUSION,
    SIDE,
    SIZES,
    VAE,
    settings,
    train_diffusion,
    train_vae,
    write_tiny_demo,
    write_tiny_vae,
)
from tiny_training import assert_same_bits
from whole_runs import final_state, resume


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_demo(tmp_path_factory.mktemp("radio") / "RadioMapSeer")


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vae(tmp_path_factory.mktemp("vae") / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path, vae: Path) -> Path:
    return train_diffusion(
        tmp_path_factory.mktemp("trained") / "run", data, vae, train__max_steps=2, train__sample_every=2
    )


def untrained_loss(data: Path, vae: Path) -> float:
    """On the maps and with the noise of validation."""
    workload = build(settings("radiodiff", data, DIFFUSION, model__vae=str(vae)).config)
    samples = [workload.val_samples.sample(index, key=(0, 0, index)) for index in range(len(workload.val_samples))]
    loaded = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch = workload.prepare_batch(loaded, key=Key.for_validation(), training=False)
    with torch.no_grad():
        return float(workload.compute_loss(workload.forward(workload.model.eval(), batch), batch)[0])


def test_the_loss_falls_in_simulated_bf16(tmp_path: Path, data: Path, vae: Path) -> None:
    """The public model stops here: there is no FFT of bf16."""
    asked = {"precision__default": "bf16", "precision__simulate": True, "optimizer__lr": 1e-2}
    run = train_diffusion(tmp_path / "run", data, vae, **asked, train__max_steps=6)
    rows = read(run / "metrics.jsonl")
    assert [row["loss"] for row in rows if row["kind"] == "val"][-1] < 0.9 * untrained_loss(data, vae)
    assert [row["skipped"] for row in rows if row["kind"] == "train"][-1] == 0


def test_resume_is_exact_with_dropout_and_a_frozen_part(tmp_path: Path, data: Path, vae: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_diffusion(whole, data, vae, train__max_steps=3)
    train_diffusion(parts, data, vae, train__max_steps=2)
    resume(parts, "train.max_steps=3")
    assert_same_bits(final_state(whole)[0], final_state(parts)[0])


def test_training_on_latents_from_disk_is_training_on_maps(tmp_path: Path, data: Path, vae: Path) -> None:
    """The first stage has no dropout, so what it says of a map is the same in every step."""
    kept = tmp_path / "latents.safetensors"
    steady = {"data__cache_file": str(kept), "model__dropout": 0.0, "model__pyramid__stochastic_depth": 0.0}
    plain = train_diffusion(tmp_path / "plain", data, vae, **steady, train__max_steps=2)
    cached = train_diffusion(tmp_path / "cached", data, vae, **steady, data__cache="latents", train__max_steps=2)
    one, other = ([row["loss"] for row in read(run / "metrics.jsonl") if row["kind"] == "train"]
                  for run in (plain, cached))  # fmt: skip
    assert other == pytest.approx(one, rel=1e-4)
    resume(cached, "train.max_steps=3")


def test_an_evaluation_neither_makes_latents_of_training_maps_nor_writes_over_those_of_the_run(
    tmp_path: Path, data: Path, vae: Path
) -> None:
    kept, run = tmp_path / "latents.safetensors", tmp_path / "run"
    train_diffusion(run, data, vae, data__cache="latents", data__cache_file=str(kept), train__max_steps=1)
    made = kept.read_bytes()
    other = write_tiny_demo(tmp_path / "other")
    evaluate(run, report=RunReport(run, quiet=True), data=other)
    assert kept.read_bytes() == made
    kept.unlink()
    evaluate(run, report=RunReport(run, quiet=True))
    assert not kept.exists()


def test_validation_samples_every_map_and_pictures_are_drawn(trained: Path) -> None:
    last = [row for row in read(trained / "metrics.jsonl") if row["kind"] == "val"][-1]
    assert {"nmse", "rmse", "ssim", "psnr", "nmse_variance", "c", "noise"} <= set(last)
    with Image.open(trained / "report" / "samples" / "00000002" / "maps.png") as sheet:
        assert sheet.width > 700


def test_a_run_is_evaluated_at_any_steps_and_on_test_maps(trained: Path) -> None:
    plain = evaluate(trained, report=RunReport(trained, quiet=True))
    assert any(file.endswith("contact_sheet.png") for file in plain.files)
    more = evaluate(trained, report=RunReport(trained, quiet=True), options={"steps": 3, "part": "test"})
    assert more.metrics["nmse"] != plain.metrics["nmse"]
    assert (more.samples, more.scored_at) == (4, "3 steps, 4 calls of the network, test maps")
    assert plain.scored_at.endswith("validation maps")
    with pytest.raises(ConfigError, match="--part nowhere"):
        evaluate(trained, report=RunReport(trained, quiet=True), options={"part": "nowhere"})


def test_predictions_are_drawn_beside_buildings_truth_and_error(trained: Path, data: Path, tmp_path: Path) -> None:
    antennas = sorted((data / "png" / "antennas").iterdir())[:2]
    made = predict(
        trained, [*antennas, data / "png" / "cars"], report=RunReport(trained, quiet=True),
        request=PredictRequest(out=tmp_path / "out"),
    )  # fmt: skip
    assert len(made.answers) == 2
    with Image.open(tmp_path / "out" / "maps" / antennas[0].name) as gain:
        assert gain.size == (16, 16)
    with Image.open(tmp_path / "out" / "pictures" / antennas[0].name) as picture:
        assert picture.width == GAP + 4 * (CELL + GAP)
    alone = antennas[1:]
    again = predict(
        trained, alone, report=RunReport(trained, quiet=True), request=PredictRequest(out=tmp_path / "again")
    )
    assert not again.failed
    one, other = (np.asarray(Image.open(tmp_path / name / "maps" / antennas[1].name)) for name in ("out", "again"))
    assert np.abs(one.astype(int) - other).max() <= 1


def test_predictions_are_scored_by_gains_above_the_threshold_as_they_were_learned(
    data: Path, vae: Path, tmp_path: Path
) -> None:
    run = train_diffusion(tmp_path / "run", data, vae, train__max_steps=1, data__threshold=0.5)
    antenna = sorted((data / "png" / "antennas").iterdir())[0]
    made = predict(run, [antenna], report=RunReport(run, quiet=True), request=PredictRequest(out=tmp_path / "out"))
    gain = read_gray(data / "gain" / "DPM" / antenna.name, (16, 16)) / 255
    learned = np.clip((gain - 0.5) / 0.5, 0, None)
    found = np.asarray(Image.open(tmp_path / "out" / "maps" / antenna.name)) / 255
    assert made.answers[0].found["nmse"] == pytest.approx(
        ((found - learned) ** 2).mean() / (learned**2).mean(), rel=0.05
    )


def test_an_antenna_without_truth_is_predicted_and_one_without_buildings_is_named(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "RadioMapSeer" / "png"
    for part in ("antennas", "buildings_complete"):
        (folder / part).mkdir(parents=True)
    name = sorted((data / "png" / "antennas").iterdir())[0].name
    number = name.partition("_")[0]
    for path in (f"antennas/{name}", f"buildings_complete/{number}.png"):
        (folder / path).write_bytes((data / "png" / path).read_bytes())
    (folder / "antennas" / "700_0.png").write_bytes((data / "png" / "antennas" / name).read_bytes())
    made = predict(
        trained,
        [folder / "antennas"],
        report=RunReport(trained, quiet=True),
        request=PredictRequest(out=tmp_path / "out"),
    )
    assert len(made.answers) == len(made.failed) == 1
    assert "700.png" in made.failed[0].why
    with Image.open(tmp_path / "out" / "pictures" / name) as picture:
        assert picture.width == GAP + 2 * (CELL + GAP)


def test_a_samples_noise_is_its_own_whatever_the_batch(data: Path, vae: Path) -> None:
    workload = build(settings("radiodiff", data, DIFFUSION, model__vae=str(vae)).config)
    loaded = [workload.val_samples.sample(index, key=(0, 0, index)) for index in range(3)]
    whole = {name: torch.stack([one[name] for one in loaded]) for name in loaded[0]}
    together = workload.prepare_batch(whole, key=Key.for_validation(), training=False)
    alone = workload.prepare_batch(
        {name: value[2:] for name, value in whole.items()}, key=Key.for_validation(2), training=False
    )
    for name in ("posterior_noise", "noise", "time", "start", "draws"):
        assert torch.equal(together[name][2:], alone[name]), name


def test_forward_leaves_the_global_generator_alone_in_evaluation(data: Path, vae: Path) -> None:
    workload = build(settings("radiodiff", data, DIFFUSION, model__vae=str(vae)).config)
    loaded = workload.val_samples.sample(0, key=(0, 0, 0))
    batch = workload.prepare_batch(
        {name: value[None] for name, value in loaded.items()}, key=Key.for_validation(), training=False
    )
    state = torch.get_rng_state()
    with torch.no_grad():
        found = workload.forward(workload.model.eval(), batch)["map"]
    assert torch.equal(state, torch.get_rng_state())
    assert found.shape == (1, 1, 16, 16)
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def overflowing(vae: RadioVAE) -> None:
    vae.encoder.conv_in.weight.mul_(1e7)


@pytest.mark.slow
def test_a_first_stage_that_overflows_in_fp16_stops_the_run_with_its_reason(tmp_path: Path, data: Path) -> None:
    broken = write_tiny_vae(tmp_path / "vae", overflowing)
    asked = {"precision__default": "fp16", "precision__simulate": True, "scaler__init_scale": 1.0}
    asked |= {"guard__max_consecutive": 2}
    with pytest.raises(TrainingStopped, match="nan|inf"):
        train_diffusion(tmp_path / "run", data, broken, **asked, train__max_steps=20)
    whole = train_diffusion(
        tmp_path / "fp32", data, broken, **asked, precision__modules={"vae": "fp32"}, train__max_steps=1
    )
    assert [row["skipped"] for row in read(whole / "metrics.jsonl") if row["kind"] == "train"] == [0]
    with pytest.raises(ConfigError, match=r"vae: fp16} overflows"):
        build(settings("radiodiff", data, DIFFUSION, model__vae=str(broken), precision__modules={"vae": "fp16"}).config)


def test_auto_measures_the_first_stages_round_trip_in_both_half_formats(data: Path, vae: Path) -> None:
    asked = {"precision__default": "bf16", "precision__simulate": True, "precision__modules": {"vae": "auto"}}
    workload = build(settings("radiodiff", data, DIFFUSION, model__vae=str(vae), **asked).config)
    said = dict(workload.about)["first stage's format"]
    assert re.search(r"fp16 [\d.]+%, bf16 [\d.]+%", said)
    assert workload.settled["precision.modules"]["vae"] == said.partition(":")[0]


def test_a_first_stage_that_is_not_there_is_named_with_the_way_to_one(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs its first stage") as refused:
        build(settings("radiodiff", data, DIFFUSION).config)
    assert "halfstep train radiodiff_vae" in refused.value.fix
    with pytest.raises(ModelError, match="no weights at"):
        build(settings("radiodiff", data, DIFFUSION, model__vae=str(tmp_path / "nowhere")).config)
    with pytest.raises(ModelError, match="no first stage in"):
        build(settings("radiodiff", data, DIFFUSION, model__vae=str(tmp_path)).config)


def test_levels_and_sizes_that_do_not_fit_are_refused(data: Path, vae: Path) -> None:
    with pytest.raises(ConfigError, match="windows has 2 entries"):
        settings("radiodiff", data, DIFFUSION, model__windows=[[2, 2], [1, 1]])
    with pytest.raises(ConfigError, match="17 pixels: the side must be a multiple of"):
        build(settings("radiodiff", data, DIFFUSION, model__vae=str(vae), data__image_size=17).config)


def test_public_checkpoints_and_torchvisions_swin_load_by_their_own_names(
    data: Path, vae: Path, tmp_path: Path
) -> None:
    config = settings("radiodiff", data, DIFFUSION, model__vae=str(vae)).config
    store = build(config).store
    model = build_unet(config, store)  # type: ignore[arg-type]
    swin = {
        name: value + 1 if value.is_floating_point() else value for name, value in model.condition.state_dict().items()
    }
    torch.save({**swin, "norm.weight": torch.ones(8), "head.weight": torch.ones(1000, 8)}, tmp_path / "swin.pth")
    load_weights_file_(model.condition, str(tmp_path / "swin.pth"), select_pyramid_weights)
    assert_same_bits(dict(model.condition.state_dict()), swin)
    other = build_unet(config, store)  # type: ignore[arg-type]
    torch.save({"model": {f"model.{name}": value for name, value in model.state_dict().items()}}, tmp_path / "ours.pt")
    load_weights_file_(other, str(tmp_path / "ours.pt"), select_unet_weights)
    assert_same_bits(dict(other.state_dict()), dict(model.state_dict()))


# --- stage 1: learns, resumes both networks bit-exactly, drops bad steps ---

CRITIC: dict[str, Any] = {
    "model__discriminator__enabled": True, "model__discriminator__start": 2, "data__image_size": 32,
}  # fmt: skip


def losses(run: Path, name: str = "loss") -> list[float]:
    return [row[name] for row in read(run / "metrics.jsonl") if row["kind"] == "train" and name in row]


def test_the_loss_falls_in_simulated_fp16(tmp_path: Path, data: Path) -> None:
    asked = {"precision__default": "fp16", "precision__simulate": True, "optimizer__lr": 1e-2}
    found = losses(train_vae(tmp_path / "run", data, **asked, train__max_steps=8))
    assert found[-1] < 0.8 * found[0]


@pytest.mark.slow
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
    vae = RadioVAE(FirstStageConfig(width=8, multipliers=(1, 2), num_blocks=1, latent_channels=2))
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
    with pytest.raises(ConfigError, match=r"(has no effect|needs data\.val_maps)[\s\S]*RadioUNet"):
        settings("radiodiff_vae", data, VAE, **said)


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
