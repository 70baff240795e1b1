"""The wrong code that each rule shows breaks that rule and no other, and the right code breaks none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep_check.check import check
from halfstep_check.findings import Severity
from halfstep_check.hardware_gap import Device
from halfstep_check.rules import RULES, Rule, get_severity, split_example
from halfstep_check.shared.gpus import look_up_gpu


def rules_found(example: str, folder: Path) -> dict[str, Severity]:
    files = split_example(example)
    for name, content in files.items():
        (folder / name).write_text(content)
    gpu = re.search(r"# with --gpu (\w+)", example)
    device = Device(name=gpu[1], has=look_up_gpu(gpu[1]).has) if gpu else None
    report = check([folder / name for name in files], device=device)
    assert not report.unreadable
    return {finding.rule: get_severity(finding) for finding in report.findings}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_the_wrong_code_breaks_this_rule_alone_and_the_right_code_none(rule: Rule, tmp_path: Path) -> None:
    wrong, right = rules_found(rule.bad, tmp_path), rules_found(rule.good, tmp_path)
    assert wrong.pop(rule.name) is rule.severity
    assert rule.name not in right
    if rule.group == "Configs":  # a note that a value deserves besides is part of what a config says
        assert {*wrong.values(), *right.values()} <= {Severity.INFO}
    else:
        assert wrong == right == {}
