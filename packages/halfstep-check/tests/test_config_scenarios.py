"""Configs as people have them, each with exactly the findings and the effective values it must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from halfstep_check.check import Report, check
from halfstep_check.hardware_gap import Device
from halfstep_check.shared.gpus import look_up_gpu

SCENARIOS = yaml.safe_load((Path(__file__).parent / "scenarios.yaml").read_text())


def checked(scenario: dict[str, Any], folder: Path) -> Report:
    for name, content in scenario.get("files", {}).items():
        (folder / name).write_text(content)
    device = None
    if "gpu" in scenario:
        gpu = look_up_gpu(scenario["gpu"])
        device = Device(name=gpu.name, has=gpu.has)
    commands = [scenario["command"]] if "command" in scenario else []
    paths = [folder / name for name in scenario.get("named", scenario.get("files", {}))]
    return check(paths, variables=scenario.get("env"), commands=commands, device=device)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[s["name"] for s in SCENARIOS])
def test_scenario_gives_exactly_its_findings_and_effective_values(scenario: dict[str, Any], tmp_path: Path) -> None:
    report = checked(scenario, tmp_path)
    assert not report.unreadable
    found = {f"{f.rule}@{Path(f.place.path).name}:{f.place.line}" for f in report.findings}
    assert found == set(scenario["findings"])
    runs = {row.topic: row.value for row in report.effective}
    assert runs | scenario.get("runs", {}) == runs


def test_every_config_rule_has_a_scenario() -> None:
    from halfstep_check.rules import RULES

    shown = {finding.split("@")[0] for scenario in SCENARIOS for finding in scenario["findings"]}
    assert shown >= {rule.name for rule in RULES.values() if rule.group == "Configs"}
