"""The plan as data: frozen, printed as a table with equal rows folded, to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from halfstep.errors import PrecisionError
from halfstep.precision.plan import Plan, PlanRow


def sample_plan() -> Plan:
    layers = [PlanRow(module=f"down.{i}", storage="fp32", compute="bf16", reason="the default") for i in range(30)]
    head = PlanRow(
        module="head", storage="fp32", compute="fp32", reason="asked for fp32", kind="module", precision="fp32"
    )
    island = PlanRow(module="loss", storage="-", compute="fp32", reason="Dice sums", kind="island")
    return Plan(
        asked="auto",
        granted="bf16",
        reason="native on H200, measured 12x fp32",
        device="cuda:0",
        device_name="H200",
        rows=(*layers[:15], head, *layers[15:], island),
        warnings=("something to see",),
    )


def test_json_gives_the_same_plan_back() -> None:
    assert Plan.from_json(sample_plan().to_json()) == sample_plan()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{"colour": "red"}]}'])
def test_what_is_not_a_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(PrecisionError, match="not a stored plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("row", [{"module": 5}, {"storage": None}, {"reason": ["x"]}])
def test_a_row_that_is_not_text_is_refused(row: dict[str, Any]) -> None:
    stored = json.loads(sample_plan().to_json())
    stored["rows"][0] |= row
    with pytest.raises(PrecisionError, match="not a stored plan: a row contains .*, which is not text"):
        Plan.from_json(json.dumps(stored))


def test_the_table_says_asked_granted_why_rows_and_warnings() -> None:
    lines = str(sample_plan()).splitlines()
    assert lines[0] == "precision  asked auto, granted bf16"
    assert "cuda:0" in lines[1]
    assert "measured 12x" in lines[2]
    assert lines[4].split() == ["module", "storage", "compute", "why"]
    assert lines[5].startswith("30 modules: down.0, down.1")
    assert lines[6].split() == ["head", "fp32", "fp32", "asked", "for", "fp32"]
    assert lines[-1] == "warning: something to see"
    assert max(map(len, lines)) < 100


def test_a_plan_for_hardware_that_is_not_here_prints_but_does_not_run() -> None:
    plan = dataclasses.replace(sample_plan(), device="")
    assert "not on this machine" in str(plan)
    with pytest.raises(PrecisionError, match="not on this machine"), plan.forward():
        pass


def test_deciding_and_printing_need_no_torch() -> None:
    program = (
        "import sys; from halfstep.precision.decide import decide\n"
        "from halfstep.hardware.device_facts import Hardware\n"
        "hw = Hardware(kind='cuda', device='', name='X', vendor='x', support={'bf16': 'native'})\n"
        "print(decide('bf16', hw)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
