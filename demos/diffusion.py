"""The diffusion demo: VAE, pixel diffusion and latent diffusion on generated pictures. About four minutes on two cores.

    python demos/diffusion.py [--out DIR]

Asserted: the VAE reconstructs 1 dB better than the mean picture would; the pixel model's held-out error falls below a
quarter of the 1.0 of a model that knows nothing; that of the latent model, on latents from disk, below a half.
Samples are drawn and kept; so few steps leave them noisy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from halfstep.report.metrics_file import read
from halfstep.report.run_report import RunReport
from halfstep.run.train import train
from halfstep.use.predict import predict
from halfstep.workloads import load
from halfstep.workloads.using import Wishes

COMMON = ["precision=fp32", "device=cpu", "log.quiet=true"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs; default: a new one in the temporary files")
    out = parser.parse_args().out or Path(tempfile.mkdtemp())
    vae = trained("vae", out / "vae")
    assert_that("the VAE's PSNR in dB", last(vae)["psnr"], at_least=psnr_of_mean(vae / "data") + 1)
    pixels = trained("diffusion", out / "pixels", "train.sample_every=100")
    assert_that("held-out error of pixels", last(pixels)["mse"], at_most=0.25)
    latents = trained(
        "diffusion", out / "latents", f"model.vae={vae / 'model'}", "data.cache=latents", "data.image_size=16"
    )
    assert_that("held-out error of latents", last(latents)["mse"], at_most=0.5)
    predict(pixels, [], report=RunReport(pixels), wishes=Wishes(out=out / "samples", options={"num": 16}))


def trained(workload: str, out: Path, *words: str) -> Path:
    return train(load(workload, overrides=[*COMMON, *words]), out=out)


def last(run: Path) -> dict[str, Any]:
    return [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]


def psnr_of_mean(folder: Path) -> float:
    images = np.stack([np.asarray(Image.open(path)) / 255 for path in sorted(folder.glob("*/*.png"))])
    return float(-10 * np.log10(np.square(images - images.mean(0)).mean()))


def assert_that(what: str, found: float, *, at_least: float = -np.inf, at_most: float = np.inf) -> None:
    print(f"{what}: {found:.3f} (from {at_least:g} to {at_most:g})")
    assert at_least <= found <= at_most, f"{what} is {found:.4f}"


if __name__ == "__main__":
    main()
