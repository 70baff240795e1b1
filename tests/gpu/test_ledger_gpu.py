"""The ledger on a GPU: eager, compiled and captured steps are seen, and none of it changes a bit of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep_train.run.train import train
from halfstep_train.workloads import load
from tiny_training import assert_same_bits
from whole_runs import newest

pytestmark = pytest.mark.gpu

SMALL: dict[str, dict[str, Any]] = {
    "unet": {"data.image_size": 64, "model.base_channels": 32, "model.depth": 2, "train.batch_size": 4},
    "resnet18": {"data.image_size": 64, "train.batch_size": 8},
    "gpt2": {"model.depth": 2, "model.dim": 128, "model.heads": 2, "model.context": 64, "train.batch_size": 8},
    "vit_b_16": {"data.image_size": 64, "model.depth": 2, "train.batch_size": 8},
    "diffusion": {"data.image_size": 32, "model.channels": [32, 64], "model.attention": [1], "train.batch_size": 8},
    "vae": {"data.image_size": 32, "model.channels": [32, 64], "train.batch_size": 4},
    "radiodiff_vae": {"train.batch_size": 4},
    "slotcontrast": {"train.batch_size": 4},
    "steve": {"train.batch_size": 4},
}
IN_BLOCKS = {"diffusion", "vae", "radiodiff_vae"}
"""Compiled block by block: what the compiler makes of the whole network is not asked."""
MODES = {"off": {"eager"}, "compile": {"eager", "compiled"}, "graph": {"eager", "compiled", "captured"}}


def trained(workload: str, out: Path, **settings: Any) -> Path:
    always = {
        "device": "cuda", "precision.default": "bf16", "log.quiet": True, "train.max_steps": 8,
        "data.num_workers": 0, "train.deterministic": True,
    }  # fmt: skip
    given = {**always, **SMALL[workload], **{key.replace("__", "."): value for key, value in settings.items()}}
    return train(load(workload, overrides=[f"{key}={json.dumps(value)}" for key, value in given.items()]), out=out)


def observed(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "report" / "ledger.json").read_text())
    return found


# Compilation takes most of the time: each family captured, one of them in the other modes as well.
@pytest.mark.parametrize(
    ("workload", "fast"),
    [*((name, "graph") for name in SMALL), ("unet", "compile"), ("gpt2", "off")],
)
def test_a_run_with_a_ledger_ends_with_the_same_weights_and_has_seen_every_mode(
    workload: str, fast: str, tmp_path: Path
) -> None:
    seen = trained(workload, tmp_path / "seen", train__fast=fast, log__ledger=True)
    plain = trained(workload, tmp_path / "plain", train__fast=fast)
    assert_same_bits(dict(newest(seen).model), dict(newest(plain).model))
    ledgers = {one["mode"]: one for one in observed(seen)["observed"]}
    assert set(ledgers) == MODES[fast] - ({"compiled"} if workload in IN_BLOCKS else set())
    if fast == "graph":
        document = observed(seen)
        rows = [row for row in document["rows"] if row["mode"] == "captured"]
        assert "bf16" in {row["forward"] for row in rows}
        assert sum(kernel["time_share"] for kernel in document["kernels"]) == pytest.approx(1)
