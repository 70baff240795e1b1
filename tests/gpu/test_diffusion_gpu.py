"""Diffusion on a real GPU: captured steps learn as eager ones do, the VAE's format is measured, seeds are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffusion_tiny import pictures, settings, vae_folder
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.train import train
from halfstep_train.use.predict import predict
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.diffusion.build import build
from whole_runs import events, stored_lines

pytestmark = pytest.mark.gpu

ON_GPU = {"device": "cuda", "train__epochs": 8, "train__validate_every": 8, "model__channels": [32, 64]}


def last(run: Path) -> dict[str, Any]:
    return [line for line in stored_lines(run) if line["kind"] == "val"][-1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_captured_steps_learn_as_eager_fp32_ones(tmp_path: Path, kind: str, precision: str) -> None:
    data = pictures(tmp_path / "data")
    wish: dict[str, Any] = dict(ON_GPU)
    if kind == "latents":
        wish["model__vae"] = str(vae_folder(tmp_path / "vae"))
    exact = train(settings("diffusion", data, train__fast="off", **wish), out=tmp_path / "fp32")
    found = train(
        settings("diffusion", data, train__fast="graph", precision__default=precision, **wish), out=tmp_path / "half"
    )
    assert last(found)["mse"] == pytest.approx(last(exact)["mse"], rel=0.05)
    assert not [event for event in events(found, "skipped") if precision == "bf16"]


def test_the_vae_trains_captured_and_in_two_phases(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    wish = {**ON_GPU, "precision__default": "bf16", "data__image_size": 32}
    alone = last(train(settings("vae", data, train__fast="graph", **wish), out=tmp_path / "alone"))
    gan = {"model__gan_weight": 0.5, "model__gan_from_step": 2}
    both = last(train(settings("vae", data, train__fast="compile", **wish, **gan), out=tmp_path / "both"))
    assert np.isfinite(alone["loss"])
    assert np.isfinite(both["train_loss/discriminator"])


def test_auto_measures_both_half_formats_on_the_gpu(tmp_path: Path) -> None:
    wish = {"device": "cuda", "precision__default": "bf16", "model__vae": str(vae_folder(tmp_path / "vae"))}
    built = build(settings("diffusion", pictures(tmp_path / "data", num=8), **wish).config)  # type: ignore[arg-type]
    line = dict(built.about)["VAE's format"]
    assert "fp16" in line
    assert "bf16" in line


def test_a_seed_gives_the_same_pictures_on_gpu_and_cpu_within_a_few_steps(tmp_path: Path) -> None:
    run = train(settings("diffusion", pictures(tmp_path / "data"), **ON_GPU), out=tmp_path / "run")
    made = []
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        request = PredictRequest(out=out, options={"num": 3})
        predict(run, [], report=RunReport(run), request=request, device=device, precision="fp32")
        made.append(np.stack([np.asarray(Image.open(path)) for path in sorted(out.glob("0*.png"))]).astype(int))
    assert np.abs(made[0] - made[1]).max() <= 2
