"""The diffusion demo: VAE, pixel and latent diffusion on generated pictures. About three minutes on two cores.

    python demos/diffusion.py [--out DIR]

The results are compared with guesses from the data themselves. The VAE must reconstruct better than the mean
picture, by 1 dB. A denoiser must know more than each value's own mean and variance: on the same held-out pictures,
timesteps and noise the averaged weights must err less than the best guess from these alone (Wiener's), over all
timesteps, and by a fifth in their first quarter, where there is most of a picture to know. Samples are drawn and kept;
so few steps leave them noisy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from halfstep_train.data.loader import Key, Samples
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.diffusion.build import DiffusionForward
from halfstep_train.workloads.diffusion.noise_schedule import list_bucket_names

COMMON = ["precision=fp32", "device=cpu", "log.quiet=true"]


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
    predict(pixels, [], report=RunReport(pixels), request=PredictRequest(out=out / "samples", options={"num": 16}))


def trained(workload: str, out: Path, *words: str) -> Path:
    return train(load(workload, overrides=[*COMMON, *words]), out=out)


def last(run: Path) -> dict[str, Any]:
    return [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]


def assert_denoises(run: Path) -> None:
    found, guessed = last(run), wiener_errors(run)
    first = next(iter(list_bucket_names(config_of(run).noise.steps)))
    assert_that(f"{run.name}: held-out error", found["mse"], at_most=guessed["mse"])
    name = f"mse/{first}"
    assert_that(f"{run.name}: held-out error at timesteps {first}", found[name], at_most=0.8 * guessed[name])


def wiener_errors(run: Path) -> dict[str, float]:
    """Validation's scores of the noise guessed by s (x_t - a m) / (a² v + s²), from each value's mean m and variance v
    over the training pictures."""
    workload = build_workload(config_of(run))
    known = diffused(workload, batch_of(workload.train_samples))
    held_out = prepared(workload, batch_of(workload.val_samples))
    signal, sigma = (held_out[name].view(-1, 1, 1, 1) for name in ("signal", "sigma"))
    noisy = signal * diffused(workload, held_out) + sigma * held_out["noise"]
    guess = sigma * (noisy - signal * known.mean(0)) / (signal.square() * known.var(0) + sigma.square())
    metrics = workload.metrics()
    metrics.update({"prediction": guess, "target": held_out["noise"]}, held_out)
    return metrics.compute()


def config_of(run: Path) -> Any:
    return load(str(run / "config.yaml")).config


def batch_of(samples: Samples) -> dict[str, Tensor]:
    loaded = [samples.sample(index, key=(0, 0, index)) for index in range(len(samples))]
    found = {name: torch.stack([one[name] for one in loaded]) for name in loaded[0]}
    return found | {"index": torch.arange(len(samples))}


def prepared(workload: Workload, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """As validation draws timesteps and noise."""
    return workload.prepare_batch(batch, key=Key.for_validation(), training=False)


def diffused(workload: Workload, batch: dict[str, Tensor]) -> Tensor:
    """Pixels or latents of a batch, prepared or not."""
    forward, ready = workload.forward, batch if "signal" in batch else prepared(workload, batch)
    assert isinstance(forward, DiffusionForward)
    return ready["image"] if forward.draw_latents is None else forward.draw_latents(ready)


def psnr_of_mean(folder: Path) -> float:
    images = pictures(folder)
    return float(-10 * np.log10(np.square(images - images.mean(0)).mean()))


def pictures(folder: Path) -> np.ndarray:
    """(N, H, W, 3) in 0..1."""
    return np.stack([np.asarray(Image.open(path)) / 255 for path in sorted(folder.rglob("*.png"))])


def assert_that(what: str, found: float, *, at_least: float = -np.inf, at_most: float = np.inf) -> None:
    print(f"{what}: {found:.3f} (from {at_least:.3f} to {at_most:.3f})")
    assert at_least <= found <= at_most, f"{what} is {found:.4f}"


if __name__ == "__main__":
    main()
