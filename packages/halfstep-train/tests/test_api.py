"""`hs.train`: the command line's settings from Python."""

from __future__ import annotations

from pathlib import Path

import halfstep as hs
from halfstep_train.report.metrics_file import read

TINY = ("data.dir=anywhere", "data.num_workers=0", "device=cpu", "train.batch_size=4", "precision=fp32",
        "optimizer.lr=3e-4", "log.quiet=true")  # fmt: skip


def test_a_resumed_run_keeps_its_settings_and_takes_the_change(tmp_path: Path) -> None:
    run = hs.train("tiny_workload:build", *TINY, "train.epochs=1", out=tmp_path / "run")
    again = hs.train("tiny_workload:build", "train.epochs=2", "log.quiet=true", resume=run)
    assert again == run
    epochs = [record["epoch"] for record in read(run / "metrics.jsonl") if record["kind"] == "val"]
    assert epochs == [1, 2]
    assert "lr: 0.0003" in (run / "config.yaml").read_text()
