"""STEVE's demo: trains on generated clips and asserts that it learned. About three minutes on two cores.

    python demos/steve.py [--out DIR]

Asserted: the squared error falls by at least 80 % and the words' cross-entropy by at least 15 % of what the untrained
model has. FG-ARI is reported: after so few steps it is near chance.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from halfstep_train.report.metrics_file import read
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.slots.clusters import score_untrained

FALLS = {"mse": 0.80, "cross_entropy": 0.15}
"""Shares of the untrained model's losses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the run's folder; default: a new one in the temporary files")
    out = parser.parse_args().out or Path(tempfile.mkdtemp()) / "steve"
    run = train(load("steve", overrides=["precision=fp32", "device=cpu"]), out=out)
    before = score_untrained(build_workload(load(str(run / "config.yaml")).config))
    after = [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]
    for name, share in FALLS.items():
        fell = 1 - after[name] / before[name]
        print(f"{name}: {before[name]:.1f} -> {after[name]:.1f}, {fell:.0%} less (at least {share:.0%})")
        assert fell >= share, f"{name} fell by {fell:.1%}, not by {share:.0%}"
    print(f"FG-ARI of a video: {before['fg_ari']:.3f} -> {after['fg_ari']:.3f}, of a frame {after['fg_ari_image']:.3f}")


if __name__ == "__main__":
    main()
