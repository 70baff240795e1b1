"""bf16 on a GPU without it: the run goes on in fp16 and says so once, or refuses under strict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fake_driver import T4, FakeDriver
from halfstep.errors import HardwareError
from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import load

WARNING = "bf16 asked for, running fp16 with loss scaling: Tesla T4 only emulates bf16"
TINY = {"data.dir": "anywhere", "data.num_workers": 0, "train.batch_size": 4, "train.max_steps": 4, "precision": "bf16",
        "train.report_every": 1}  # fmt: skip


@pytest.fixture
def turing_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Tesla T4 as the driver reports one, but for its address: torch must find something to compute on."""
    monkeypatch.setattr("halfstep.hardware.probe.Driver", lambda: FakeDriver(dataclasses.replace(T4, device="cpu")))


def run(out: Path, **more: object) -> Path:
    settings = {**TINY, **more}
    return train(load("tiny_workload:build", overrides=[f"{k}={json.dumps(v)}" for k, v in settings.items()]), out=out)


@pytest.mark.usefixtures("turing_is_here")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_falls_back_warns_once_and_trains_with_loss_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    folder = run(tmp_path / "run", **{"log.quiet": quiet})
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(f"warning: {WARNING}") == 1
    stored = json.loads((folder / "plan.json").read_text())
    assert (stored["asked"], stored["granted"], stored["warnings"]) == ("bf16", "fp16", [WARNING])
    scales = [record["scale"] for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert min(scales) > 1


@pytest.mark.usefixtures("turing_is_here")
def test_a_strict_run_refuses_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="bf16 asked for, but Tesla T4 only emulates bf16"):
        run(tmp_path / "run", **{"precision.strict": True})
    assert not (tmp_path / "run").exists()
