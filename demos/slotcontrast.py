"""SlotContrast's demo: trains on generated clips and asserts that its slots find objects better than k-means does.

    python demos/slotcontrast.py [--out DIR] [--json FILE] [KEY=VALUE ...]

k-means clusters each validation clip over all its frames, k = slots, the best of three starts by its own error, on the
very features that slots see and on colours of pixels, with and without coordinates. Compared is the last validation,
not the best. Also asserted: FG-ARI is at least five times that of the untrained model, and the validation loss fell.
KEY=VALUE words go to `halfstep train`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from halfstep_train.report.metrics_file import read
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.slots.clusters import On, score_k_means, score_untrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the run's folder; default: a new one in the temporary files")
    parser.add_argument("--json", type=Path, help="write the scores to this file, too")
    parser.add_argument("words", nargs="*", help="settings of halfstep train")
    arguments = parser.parse_intermixed_args()
    out = arguments.out or Path(tempfile.mkdtemp()) / "slotcontrast"
    found = scores(train(load("slotcontrast", overrides=["precision=fp32", *arguments.words]), out=out))
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n")
    first, last = found["loss"]
    print(f"slots: FG-ARI {found['slots']:.3f}, untrained {found['untrained']:.3f}; loss {first:.3f} -> {last:.3f}")
    for name, score in found["k_means"].items():
        print(f"k-means on {name}: FG-ARI {score:.3f}")
    best = max(found["k_means"].values())
    assert found["slots"] > best, f"slots find objects worse than k-means: {found['slots']:.3f} against {best:.3f}"
    assert found["slots"] >= 5 * max(found["untrained"], 0.0), "FG-ARI is not five times the untrained model's"
    assert last < first, "the validation loss did not fall"


def scores(run: Path) -> dict[str, Any]:
    """FG-ARI of the trained slots, of untrained ones and of k-means, and the first and last validation loss."""
    config = load(str(run / "config.yaml")).config
    workload = build_workload(config)
    records = [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"]
    on: list[On] = ["features", "pixels"]
    k_means = {
        f"{what} {'with' if with_it else 'without'} coordinates": score_k_means(
            workload, config.model.slots, on=what, coordinates=with_it
        )["fg_ari"]
        for what in on
        for with_it in (False, True)
    }
    return {
        "slots": records[-1]["fg_ari"],
        "untrained": score_untrained(workload)["fg_ari"],
        "loss": [records[0]["loss"], records[-1]["loss"]],
        "k_means": k_means,
    }


if __name__ == "__main__":
    main()
