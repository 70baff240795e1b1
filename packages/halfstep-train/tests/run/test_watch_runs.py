"""`log.watch`: runs end with the same bits, and records, report, `top`, capsules and resumed runs have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep_train.cli.main import main
from halfstep_train.report.page.read_run import read_run
from halfstep_train.report.page.render import render_runs
from whole_runs import final_state, newest, records, resume, run


def train(out: Path, workload: str = "tiny_workload:build", **settings: Any) -> Path:
    return run(out, {"train.epochs": 9, "train.max_steps": 14, **settings}, workload)


def same_bits(left: Path, right: Path) -> bool:
    one, other = newest(left), newest(right)
    pairs = [(one.model[name], other.model[name]) for name in one.model]
    return one.model.keys() == other.model.keys() and all(torch.equal(a, b) for a, b in pairs)


def watched(out: Path) -> list[dict[str, Any]]:
    return [record for record in records(out) if record["kind"] == "watch"]


@pytest.mark.parametrize(
    "settings", [{}, {"train.accumulate": 2, "train.deterministic": True}, {"guard.hold": True, "ema.enabled": True}]
)
def test_an_eager_run_ends_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = train(tmp_path / "plain", **settings, **{"train.fast": "off"})
    seen = train(tmp_path / "seen", **settings, **{"train.fast": "off", "log.watch": 4})
    assert same_bits(plain, seen)
    found = watched(seen)
    assert [record["step"] for record in found] == [4, 8, 12]
    assert {"body.0", "body.2", "head"} <= found[-1]["headroom"].keys()
    assert found[-1]["lost"].keys() == {"body.0", "body.1", "head"}
    rows = json.loads((seen / "report" / "watch.json").read_text())["rows"]
    kinds = {row["kind"] for row in rows}
    assert kinds == {"activation", "activation gradient", "weight", "weight gradient", "update", "variance"}
    assert all(sum(row["counts"]) > 0 for row in rows if row["kind"] == "activation")


def test_a_compiled_run_is_observed_on_the_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: real(f, backend="aot_eager", dynamic=False))
    plain = train(tmp_path / "plain", **{"train.fast": "compile"})
    seen = train(tmp_path / "seen", **{"train.fast": "compile", "log.watch": 4})
    assert same_bits(plain, seen)
    assert {"body.0", "head"} <= watched(seen)[-1]["headroom"].keys()
    rows = json.loads((seen / "report" / "watch.json").read_text())["rows"]
    assert ("head", "activation gradient") in {(row["module"], row["kind"]) for row in rows}


def test_each_phase_has_its_own_rows(tmp_path: Path) -> None:
    settings = {"model.options.dropout": 0.0, "train.fast": "off"}
    plain = train(tmp_path / "plain", "phased_workload:build", **settings)
    seen = train(tmp_path / "seen", "phased_workload:build", **settings, **{"log.watch": 4})
    assert same_bits(plain, seen)
    assert len({record["phase"] for record in watched(seen)}) > 1


def test_a_resumed_run_has_the_records_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = {"log.watch": 3, "train.fast": "off", "train.checkpoint_every": 7, "schedule.name": "constant"}
    whole = train(tmp_path / "whole", **settings)
    part = train(tmp_path / "part", **{**settings, "train.max_steps": 7})
    resume(part, "train.max_steps=14", allow_changes=True)
    assert watched(part) == watched(whole)
    assert len(watched(whole)) == 4
    one, other = (final_state(out)[0] for out in (part, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_top_and_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = train(tmp_path / "seen", **{"log.watch": 4, "train.fast": "off"})
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["top", str(seen), "--once"])
    assert "bits below fp16" in " ".join(capsys.readouterr().out.split())
    page = render_runs([read_run(seen)])
    assert "<h2>Ranges</h2>" in page
    assert "body.2, step 12: " in page
    assert "No warnings." in page


def test_a_capsule_holds_the_last_observations(tmp_path: Path) -> None:
    seen = train(tmp_path / "seen", **{"log.watch": 2, "train.fast": "off", "model.options.poisoned": [9]})
    (file,) = (seen / "capsules").glob("*/capsule.json")
    watch = json.loads(file.read_text())["watch"]
    assert watch["steps"] == [2, 4, 6, 8]
    (row,) = (row for row in watch["rows"] if (row["module"], row["kind"]) == ("head", "weight"))
    assert len(row["high"]) == 4
