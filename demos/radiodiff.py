"""RadioDiff's demo: both stages on a generated RadioMapSeer. About three minutes on two cores.

    python demos/radiodiff.py [--out DIR]

Asserted on maps of held-out cities: five-step samples have a smaller NMSE than the mean of all training maps, and than
a regression of the gain on the distance to the antenna, which knows no buildings.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import load
from halfstep_train.workloads.radio.maps import RadioMaps
from halfstep_train.workloads.radio.scores import score_maps

CPU = ["precision=fp32", "device=cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of both runs; default: a new one in the temporary files")
    out, began = parser.parse_args().out or Path(tempfile.mkdtemp()), time.monotonic()
    vae = train(load("radiodiff_vae", overrides=CPU), out=out / "vae")
    run = train(load("radiodiff", overrides=[*CPU, f"model.vae={vae}", "data.cache=latents"]), out=out / "radiodiff")
    seconds = time.monotonic() - began
    reconstructed = [row for row in read(vae / "metrics.jsonl") if row["kind"] == "val"][-1]["nmse"]
    found = evaluate(run, report=RunReport(run, quiet=True), options={"steps": 5}).metrics["nmse"]
    baselines = baseline_scores(run)
    print(f"NMSE of reconstructions {reconstructed:.3f}, of 5-step samples {found:.3f}; both stages in {seconds:.0f} s")
    for name, score in baselines.items():
        print(f"NMSE of {name}: {score:.3f}")
        assert found < score, f"samples have an NMSE of {found:.3f}, {name} {score:.3f}"


def baseline_scores(run: Path) -> dict[str, float]:
    workload = build_workload(load(str(run / "config.yaml"), overrides=["data.cache=off"]).config)
    train_samples, val_samples = workload.train_samples, workload.val_samples
    assert isinstance(train_samples, RadioMaps)
    assert isinstance(val_samples, RadioMaps)
    known, (truth, distance) = gains_and_distances(train_samples), gains_and_distances(val_samples)
    design = np.stack([np.ones(known[1].size), np.log1p(known[1].ravel())], axis=1)
    fitted, *_ = np.linalg.lstsq(design, known[0].ravel(), rcond=None)
    guesses = {
        "the mean map": np.broadcast_to(known[0].mean(axis=0), truth.shape),
        "a regression on antenna distance": fitted[0] + fitted[1] * np.log1p(distance),
    }
    return {name: nmse(guess, truth) for name, guess in guesses.items()}


def gains_and_distances(maps: RadioMaps) -> tuple[np.ndarray, np.ndarray]:
    """(N, H, W) both."""
    gains, distances = [], []
    for index in range(len(maps)):
        sample = maps.sample(index, key=(0, 0, index))
        antenna = np.argwhere(sample["condition"][1].numpy())[0]
        grid = np.mgrid[: maps.size[0], : maps.size[1]]
        gains.append(sample["gain"][0].numpy() / 255)
        distances.append(np.hypot(*(grid - antenna[:, None, None])))
    return np.stack(gains), np.stack(distances)


def nmse(guess: np.ndarray, truth: np.ndarray) -> float:
    one, other = (torch.from_numpy(np.ascontiguousarray(values))[:, None] for values in (guess, truth))
    return float(score_maps(one, other)["nmse"].mean())


if __name__ == "__main__":
    main()
