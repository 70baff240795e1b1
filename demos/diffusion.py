"""The diffusion demo: VAE, pixel diffusion and latent diffusion on generated pictures. About four minutes on two cores.

    python demos/diffusion.py [--out DIR]

What is asserted follows from the data, not from earlier runs. The VAE must reconstruct better than the mean picture, by
1 dB. A denoiser must know more than each value's own mean and variance: from these alone the best guess of the noise
(Wiener's) leaves the share a² v / (a² v + s²) of its variance, for a signal a, noise s and variance v. The averaged
weights must be below that in every quarter of the timesteps, and a tenth below it over all of them. Samples must be
pictures: brightness and contrast within a factor of two of the data's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from halfstep.report.metrics_file import read
from halfstep.report.run_report import RunReport
from halfstep.run.assemble import build_workload
from halfstep.run.train import train
from halfstep.use.predict import predict
from halfstep.workloads import load
from halfstep.workloads.diffusion.build import Forward
from halfstep.workloads.diffusion.noising import bucket_names, bucket_starts, schedule_of
from halfstep.workloads.using import Wishes

COMMON = ["precision=fp32", "device=cpu", "log.quiet=true"]
FACTOR = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs; default: a new one in the temporary files")
    out = parser.parse_args().out or Path(tempfile.mkdtemp())
    vae = trained("vae", out / "vae")
    assert_that("the VAE's PSNR in dB", last(vae)["psnr"], at_least=psnr_of_mean(vae / "data") + 1)
    pixels = trained("diffusion", out / "pixels", "train.sample_every=100")
    assert_denoises(pixels)
    latents = trained(
        "diffusion", out / "latents", f"model.vae={vae / 'model'}", "data.cache=latents", "data.image_size=16"
    )
    assert_denoises(latents)
    predict(pixels, [], report=RunReport(pixels), wishes=Wishes(out=out / "samples", options={"num": 16}))
    assert_like_the_data(out / "samples", pixels / "data")


def trained(workload: str, out: Path, *words: str) -> Path:
    return train(load(workload, overrides=[*COMMON, *words]), out=out)


def last(run: Path) -> dict[str, Any]:
    return [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]


def assert_denoises(run: Path) -> None:
    found, guessed = last(run), wiener_errors(run)
    for bucket, error in guessed.items():
        assert_that(f"{run.name}: held-out error at timesteps {bucket}", found[f"mse/{bucket}"], at_most=error)
    whole = float(np.mean(list(guessed.values())))
    assert_that(f"{run.name}: held-out error", found["mse"], at_most=0.9 * whole)


def wiener_errors(run: Path) -> dict[str, float]:
    """What the best guess of the noise from each value alone leaves of it, by quarter of the timesteps."""
    config: Any = load(str(run / "config.yaml")).config
    variance = values_of(run).double().var(dim=0, unbiased=False)
    signal, sigma = (part.double() for part in schedule_of(config).coefficients())
    power = signal.square().view(-1, 1) * variance.flatten()
    left = (power / (power + sigma.square().view(-1, 1))).mean(dim=1)
    starts = bucket_starts(config.noise.steps)
    return {
        name: float(left[start:end].mean())
        for name, start, end in zip(bucket_names(config.noise.steps), starts[:-1], starts[1:], strict=True)
    }


def values_of(run: Path) -> torch.Tensor:
    """What is diffused: all training pictures, or their latents."""
    workload = build_workload(load(str(run / "config.yaml")).config)
    samples, forward = workload.train_samples, workload.forward
    assert isinstance(forward, Forward)
    loaded = [samples.sample(index, key=(0, 0, index)) for index in range(len(samples))]
    batch = {name: torch.stack([one[name] for one in loaded]) for name in loaded[0]}
    prepared = workload.prepared(batch, key=(0, 0), training=True)
    return prepared["image"] if forward.encoder is None else forward.encoder(prepared)


def assert_like_the_data(made: Path, data: Path) -> None:
    ours, theirs = (pictures(folder) for folder in (made, data))
    for name, statistic in (("brightness", np.mean), ("contrast", np.std)):
        expected = float(statistic(theirs))
        assert_that(f"{name} of samples", float(statistic(ours)), at_least=expected / FACTOR, at_most=expected * FACTOR)


def psnr_of_mean(folder: Path) -> float:
    images = pictures(folder)
    return float(-10 * np.log10(np.square(images - images.mean(0)).mean()))


def pictures(folder: Path) -> np.ndarray:
    """(N, H, W, 3) in 0..1; sheets of several pictures and steps have other names."""
    return np.stack([np.asarray(Image.open(path)) / 255 for path in sorted(folder.rglob("0*.png"))])


def assert_that(what: str, found: float, *, at_least: float = -np.inf, at_most: float = np.inf) -> None:
    print(f"{what}: {found:.3f} (from {at_least:.3f} to {at_most:.3f})")
    assert at_least <= found <= at_most, f"{what} is {found:.4f}"


if __name__ == "__main__":
    main()
