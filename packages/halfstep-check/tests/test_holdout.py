"""The linter on training scripts by an author who had read neither it nor its tests: exactly the findings judged true.

These are three of the 40 scripts of the first hold-out: the one with branches of the checker that no snippet takes, and
two whose mistakes span several functions. benchmarks/NOTES.md has the figure of all 40.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfstep_check.lint import lint_tree
from halfstep_check.rules import RULES

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
