"""wandb offline and MLflow with a sqlite store, as `make trackers` installs them: nothing of them is replaced."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import HalfstepError
from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import load

wandb = pytest.importorskip("wandb", reason="needs the extra trackers (make trackers): this was NOT tested")
mlflow = pytest.importorskip("mlflow", reason="needs the extra trackers (make trackers): this was NOT tested")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TINY = {"data.dir": "anywhere", "data.num_workers": 0, "device": "cpu", "train.batch_size": 4, "precision": "fp32",
        "train.epochs": 2, "train.report_every": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def _local_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)


def run(out: Path, *, resume: bool = False, **more: object) -> Path:
    if resume:
        overrides = [f"{key}={json.dumps(value)}" for key, value in more.items()]
        return train(load(str(out / "config.yaml"), overrides=overrides), resume=out)
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**TINY, **more}.items()]
    return train(load("tiny_workload:build", overrides=overrides), out=out)


def scan_offline(file: Path) -> Iterator[Any]:
    """Each record of an offline run: a LevelDB log of blocks of 32 KiB, with records that may span several."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too small for a header: padding
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The history rows that `wandb sync` would send, and everything else as text."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, rest = [], ""
    for record in scan_offline(file):
        if record.HasField("history"):
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        else:
            rest += str(record)
    return rows, rest


def test_both_get_every_number_the_config_the_plan_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", **{"log.track": ["wandb", "mlflow"]})
    said = capsys.readouterr().out
    records = [record for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]
    losses = [(record["step"], record["loss"]) for record in records]
    ids = json.loads((folder / "tracking.json").read_text())

    client = mlflow.MlflowClient()
    found = client.get_run(ids["mlflow"])
    assert found.info.status == "FINISHED"
    assert found.data.params["train.epochs"] == "2"
    assert found.data.params["plan.granted"] == "fp32"
    assert [(m.step, m.value) for m in client.get_metric_history(ids["mlflow"], "train/loss")] == losses
    names = {file.path for file in client.list_artifacts(ids["mlflow"])}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "report"} <= names
    reports = {file.path for file in client.list_artifacts(ids["mlflow"], "report")}
    assert {"report/report.html", "report/summary.json"} <= reports

    rows, rest = read_wandb(folder)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == losses
    assert any("val/loss" in row for row in rows)
    (offline,) = folder.glob("wandb/offline-run-*")
    assert offline.name.endswith(ids["wandb"])
    assert f"wandb: wandb sync {offline}\n" in said
    assert f"mlflow: run {ids['mlflow']} in sqlite:///" in said
    assert "report/report.html" in rest
    assert "early_stopping_patience" in rest
    assert "strict fp32: TF32 off" in rest
    assert "<svg" in (folder / "report" / "report.html").read_text()


def test_a_resumed_run_continues_the_same_runs(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", **{"log.track": ["wandb", "mlflow"], "train.epochs": 1})
    ids = json.loads((folder / "tracking.json").read_text())
    run(folder, resume=True, **{"train.epochs": 2})
    assert json.loads((folder / "tracking.json").read_text()) == ids
    history = mlflow.MlflowClient().get_metric_history(ids["mlflow"], "train/loss")
    assert [m.step for m in history] == [r["step"] for r in read(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert {path.name[-len(ids["wandb"]) :] for path in folder.glob("wandb/offline-run-*")} == {ids["wandb"]}


def test_a_store_that_does_not_answer_is_one_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    with pytest.raises(HalfstepError, match="cannot start tracking with mlflow") as caught:
        run(tmp_path / "run", **{"log.track": ["mlflow"]})
    assert "MLFLOW_TRACKING_URI" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_stops_is_marked_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stop_here.py").write_text("def fn(event):\n    if event['step'] == 3: raise RuntimeError('enough')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HalfstepError, match="enough"):
        run(tmp_path / "run", **{"log.track": ["mlflow"], "train.callbacks": ["stop_here:fn"]})
    ids = json.loads((tmp_path / "run" / "tracking.json").read_text())
    assert mlflow.MlflowClient().get_run(ids["mlflow"]).info.status == "FAILED"
