"""The wrong code that each rule shows breaks that rule and no other, and the right code breaks none."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfstep_check.check import Report, check
from halfstep_check.findings import Severity
from halfstep_check.hardware_gap import Device
from halfstep_check.lint import lint_tree
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


# --- every lint rule on small scripts: `# <- rule` marks each expected finding ---

SNIPPETS = Path(__file__).parent / "snippets"
MARK = re.compile(r"# <- ([\w, -]+)$")
LINT_RULES = sorted(rule.name for rule in RULES.values() if rule.group != "Configs")


@dataclass(frozen=True)
class Snippet:
    file: str
    kind: str
    title: str
    text: str

    @property
    def expected(self) -> set[tuple[str, int]]:
        lines = enumerate(self.text.splitlines(), start=1)
        marks = [(number, mark.group(1)) for number, line in lines if (mark := MARK.search(line))]
        return {(rule.strip(), number) for number, rules in marks for rule in rules.split(",")}


def snippets_in(path: Path) -> list[Snippet]:
    parts = re.split(r"^=== (header|bad|good)(?:: (.*))?\n", path.read_text(), flags=re.MULTILINE)[1:]
    sections = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    header = next((text for kind, _, text in sections if kind == "header"), "")
    return [Snippet(path.stem, kind, title, header + text) for kind, title, text in sections if kind != "header"]


ALL = [snippet for path in sorted(SNIPPETS.glob("*.txt")) for snippet in snippets_in(path)]


@pytest.mark.parametrize("snippet", ALL, ids=[f"{s.file}-{s.kind}-{s.title}" for s in ALL])
def test_snippet_has_exactly_the_findings_it_marks(snippet: Snippet) -> None:
    found = lint_tree(ast.parse(snippet.text), snippet.text, "train.py")
    assert {(finding.rule, finding.place.line) for finding in found} == snippet.expected
    assert bool(snippet.expected) == (snippet.kind == "bad"), "a bad snippet marks its findings, a good one has none"


@pytest.mark.parametrize("rule", LINT_RULES)
def test_every_lint_rule_has_three_failing_and_three_passing_snippets(rule: str) -> None:
    own = [snippet for snippet in ALL if snippet.file == rule]
    failing = [s for s in own if s.kind == "bad" and rule in {name for name, _ in s.expected}]
    passing = [s for s in own if s.kind == "good"]
    assert len(failing) >= 3
    assert len(passing) >= 3


@pytest.mark.parametrize(
    ("path", "is_judged"),
    [
        ("train.py", True),
        ("tests/parity.py", False),
        ("test_parity.py", False),
        ("benchmarks/sweep.py", False),
        ("profile_training.py", False),
        ("latest_training.py", True),
    ],
)
def test_tests_and_benchmarks_are_not_judged_as_training(path: str, is_judged: bool) -> None:
    loop = "for x, y in loader:\n    with torch.autocast('cuda'):\n        loss = model(x, y)\n"
    text = f"import torch\n{loop}    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    assert bool(lint_tree(ast.parse(text), text, path)) == is_judged
    saves = text + "torch.save(model.state_dict(), 'last.pt')\n"
    assert bool(lint_tree(ast.parse(saves), saves, path)) == (is_judged or "test" not in path)


# --- configs as people have them, each with exactly the findings and the effective values it must give ---

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


# --- training scripts by an author who had not read the linter: exactly the findings judged true ---

HOLDOUT = Path(__file__).parent / "holdout"
SCRIPTS = sorted(HOLDOUT.glob("*.py"))
JUDGED: list[dict[str, Any]] = yaml.safe_load((HOLDOUT / "judged.yaml").read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_holdout_script_has_exactly_the_findings_judged_true(script: Path) -> None:
    text = script.read_text()
    found = {(finding.place.line, finding.rule) for finding in lint_tree(ast.parse(text), text, script.name)}
    judged_true = {(one["line"], one["rule"]) for one in JUDGED if one["file"] == script.name and one["rule"] in RULES}
    assert found - judged_true == set(), "a finding that was not judged true"
    assert judged_true - found == set(), "a true finding was lost"
