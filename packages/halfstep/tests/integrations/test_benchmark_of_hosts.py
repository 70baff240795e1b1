"""benchmarks/integrations.py with tiny models: its variants train in turns, and its numbers are put together."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

import integrations  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@pytest.mark.parametrize(("case", "variant"), [("trainer-bert", "host eager"), ("trainer-gpt2", "captured")])
def test_a_variant_trains_in_turns(
    case: str, variant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n2\n"))
    turns = integrations.Turns(tiny=True)
    integrations.CASES[case][variant](turns, True)
    answers = [json.loads(line[5:]) for line in capsys.readouterr().out.splitlines() if line.startswith("TURN ")]
    assert [sorted(answer) for answer in answers] == [["gb", "ready", "warmup_s"], *[["mode", "seconds"]] * 2]
    assert turns.count == turns.warmup + 3 + 2


def test_numbers_have_a_spread() -> None:
    assert integrations.summarise("ms", [3.0, 1.0, 2.0]) == {"ms": 2.0, "ms_min": 1.0, "ms_max": 3.0}
    assert {"transformers", "accelerate"} <= integrations.list_versions().keys()


@pytest.mark.soak
def test_the_whole_script(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "integrations.py"), "--tiny", "--rounds", "2", "--only",
               "trainer-bert", "--out", str(tmp_path)]  # fmt: skip
    subprocess.run(command, check=True)
    found = json.loads((tmp_path / "integrations_tiny.json").read_text())["cases"]["trainer-bert"]
    assert all(one["ms_min"] <= one["ms"] <= one["ms_max"] for one in found.values())
    assert found["host"]["ratio"] == 1
