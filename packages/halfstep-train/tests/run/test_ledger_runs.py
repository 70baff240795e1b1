"""The ledger of runs, which leaves every bit of the training as it was, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from command_line import run_command
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.train import train
from halfstep_train.workloads import load

TINY = {
    "train.max_steps": 3,
    "train.batch_size": 8,
    "device": "cpu",
    "precision.default": "fp32",  # auto would be bf16 on CPUs that multiply faster in it
    "log.quiet": True,
}


def run(out: Path, workload: str = "tiny_workload:build", **more: Any) -> Path:
    return train(load(workload, flags={}, overrides=[f"{k}={v}" for k, v in {**TINY, **more}.items()]), out=out)


def weights(path: Path) -> dict[str, torch.Tensor]:
    newest = max((path / "checkpoints").iterdir())
    return {f"{file.stem}.{k}": v for file in sorted(newest.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_a_run_with_a_ledger_ends_with_the_same_bits(tmp_path: Path) -> None:
    simulated = {"precision.default": "bf16", "precision.simulate": True}
    plain = weights(run(tmp_path / "plain", **simulated))
    path = run(tmp_path / "seen", **simulated, **{"log.ledger": 2})
    seen = weights(path)
    assert plain.keys() == seen.keys()
    assert len(plain) > 4
    assert all(torch.equal(plain[name], seen[name]) for name in plain)
    ledger = read_run(path).ledger
    assert "100% of FLOPs in bf16; all as planned" in ledger["summary"]
    (observed,) = ledger["observed"]
    assert observed["step"] == 2  # the newest
    rows = {row["module"]: row for row in ledger["rows"]}
    assert rows["head"]["forward"] == rows["head"]["backward"] == "bf16"
    assert rows["head"]["optimizer_state"] == "fp32"


def test_compiled_steps_have_a_ledger_of_their_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end alone: inductor would take a C++ compiler half a minute, and its graphs are the same."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: real(f, **{"backend": "aot_eager", **_kept(more)}))
    plain = weights(run(tmp_path / "plain", **{"train.fast": "compile", "train.max_steps": 2}))
    path = run(tmp_path / "seen", **{"train.fast": "compile", "train.max_steps": 2, "log.ledger": True})
    seen = weights(path)
    assert all(torch.equal(plain[name], seen[name]) for name in plain)
    ledger = read_run(path).ledger
    assert [one["mode"] for one in ledger["observed"]] == ["eager", "compiled"]
    rows = {(row["mode"], row["module"]): row for row in ledger["rows"]}
    for module in ("body.0", "head"):
        eager, compiled = rows["eager", module], rows["compiled", module]
        assert compiled["forward"] == compiled["backward"] == "fp32"
        assert compiled["flops_share"] == pytest.approx(eager["flops_share"])


def _kept(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "options"}


def test_phases_have_a_ledger_each(tmp_path: Path) -> None:
    path = run(tmp_path / "run", "phased_workload:build", **{"log.ledger": True})
    modes = [one["mode"] for one in read_run(path).ledger["observed"]]
    assert sorted(modes) == ["eager, critic", "eager, generator"]


def ledger(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code, out, _ = run_command(capsys, "ledger", *words)
    return code, out


SMALL = ("--device", "cpu", "train.batch_size=8")


def test_the_command_answers_for_a_workload_and_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ledger(capsys, "tiny_workload:build", *SMALL, "--precision", "bf16", "--simulate", "--json")
    assert code == 0
    found = json.loads(text)
    assert {row["module"] for row in found["rows"]} >= {"body.0", "head"}
    path = run(tmp_path / "run")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    code, text = ledger(capsys, str(path), "--strict")
    assert code == 0
    assert "100% of FLOPs in fp32" in text
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_strict_is_an_error_where_something_differs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("differing_workload:build", *SMALL, "--precision", "bf16", "--simulate")
    assert ledger(capsys, *words)[0] == 0
    code, text = ledger(capsys, *words, "--strict")
    assert code == 1
    assert "body.1" in text
    assert "fp32_island" in text
