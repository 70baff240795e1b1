"""SlotContrast's demo: trains on generated clips and asserts that its slots find objects better than k-means does.

    python demos/slotcontrast.py [--out DIR] [KEY=VALUE ...]

k-means clusters each validation clip over all its frames, k = slots, the best of three starts by its own error, on the
very features that slots see and on colours of pixels, with and without coordinates. Also asserted: FG-ARI is at least
five times that of the untrained model, and the validation loss fell. KEY=VALUE words go to `halfstep train`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from halfstep.report.metrics_file import read
from halfstep.run.assemble import build_workload
from halfstep.run.train import train
from halfstep.workloads import load
from halfstep.workloads.slots.clusters import On, clustered, untrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the run's folder; default: a new one in the temporary files")
    parser.add_argument("words", nargs="*", help="settings of halfstep train")
    arguments = parser.parse_intermixed_args()
    out = arguments.out or Path(tempfile.mkdtemp()) / "slotcontrast"
    run = train(load("slotcontrast", overrides=["precision=fp32", *arguments.words]), out=out)
    config = load(str(run / "config.yaml")).config
    workload = build_workload(config)
    records = [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"]
    best, before = max(record["fg_ari"] for record in records), untrained(workload, config)["fg_ari"]
    first, last = records[0]["loss"], records[-1]["loss"]
    print(f"slots: FG-ARI {before:.3f} untrained, {best:.3f} at best; validation loss {first:.3f} -> {last:.3f}")
    on: list[On] = ["features", "pixels"]
    for what, with_it in ((what, with_it) for what in on for with_it in (False, True)):
        score = clustered(workload, config.model.slots, on=what, coordinates=with_it)["fg_ari"]
        print(f"k-means on {what} {'with' if with_it else 'without'} coordinates: FG-ARI {score:.3f}")
        assert best > score, f"slots find objects worse than k-means: FG-ARI {best:.3f} against {score:.3f}"
    assert best >= 5 * max(before, 0.0), f"FG-ARI {best:.3f} is not five times the untrained model's {before:.3f}"
    assert last < first, "the validation loss did not fall"


if __name__ == "__main__":
    main()
