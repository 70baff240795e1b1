"""What each check of the lint finds on labelled scripts, compared with its lines.

    python benchmarks/check_ablation.py FOLDER [FOLDER ...] --name sets_1_to_6

Each FOLDER has the layout that check_holdout.py reads. A check is a function that reports findings; several may report
one rule. Its own labels are the firm labels that no other warning or error hits. Checks are removed greedily, those
with the fewest own labels per line first, while a check has fewer than one per 150 lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import yaml

from check_holdout import is_for, is_near
from halfstep_check.check import check
from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.script import Script
from halfstep_check.rules import get_severity
from recording import store

LINES_PER_LABEL = 150
LINES: dict[str, int] = {}
"""Lines of each check that reported something."""


def record_checks() -> dict[tuple[str, int], str]:
    """Make every finding leave the name of the function that reports it, by rule and line."""
    reported: dict[tuple[str, int], str] = {}
    original = Script.report

    def finding(self: Script, rule: str, *given: Any, **options: Any) -> Finding:
        code = sys._getframe(1).f_code
        name = f"{Path(code.co_filename).stem}.{code.co_name}"
        LINES[name] = max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1
        made = original(self, rule, *given, **options)
        reported[rule, made.place.line] = name
        return made

    Script.report = finding  # type: ignore[method-assign]
    return reported


def read_findings(folders: list[Path]) -> list[dict[str, Any]]:
    """One row per script: its labels, and the line, rule and check of each warning or error."""
    rows, reported = [], record_checks()
    for folder in folders:
        for name, labels in yaml.safe_load((folder / "labels.yaml").read_text())["scripts"].items():
            reported.clear()
            found = [one for one in check([folder / name]).findings if get_severity(one) is not Severity.INFO]
            lines = [(f.place.line, f.rule, reported.get((f.rule, f.place.line), "configs")) for f in found]
            rows.append({"labels": labels, "found": lines})
    return rows


def score(rows: list[dict[str, Any]], removed: Collection[str] = ()) -> dict[str, int]:
    """Count labels hit and findings near no label, with the checks or rules in `removed` switched off."""
    total = {"labels_found": 0, "labels": 0, "serious_found": 0, "serious": 0, "findings": 0, "without_label": 0}
    for row in rows:
        labels = row["labels"]
        lines = [line for line, *names in row["found"] if not set(names) & set(removed)]
        for label in labels:
            if label.get("doubtful") or label["severity"] == "info":
                continue
            hit = any(is_for(line, label, labels) for line in lines)
            total["labels"] += 1
            total["labels_found"] += hit
            total["serious"] += label["severity"] == "serious"
            total["serious_found"] += hit and label["severity"] == "serious"
        total["findings"] += len(lines)
        total["without_label"] += sum(not any(is_near(line, label) for label in labels) for line in lines)
    return total


def measure(rows: list[dict[str, Any]], names: Collection[str], removed: Collection[str]) -> dict[str, dict[str, int]]:
    """What is lost when one more check or rule is switched off."""
    whole, table = score(rows, removed), {}
    for name in sorted(set(names) - set(removed)):
        rest = score(rows, {*removed, name})
        lost = {key: whole[key] - rest[key] for key in ("labels_found", "findings", "without_label")}
        table[name] = {**lost, "lines": LINES.get(name, 0)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--name", required=True, help="of the sets: the file is check_ablation_NAME.json")
    arguments = parser.parse_args()
    rows = read_findings(arguments.folders)
    found = [one for row in rows for one in row["found"]]
    checks, rules = {name for *_, name in found}, {rule for _, rule, _ in found}
    one_by_one = measure(rows, checks, ())
    removed: list[str] = []
    while poor := {
        name: row["labels_found"] / row["lines"]
        for name, row in measure(rows, checks, removed).items()
        if row["labels_found"] * LINES_PER_LABEL < row["lines"]
    }:
        removed.append(min(poor, key=lambda name: poor[name]))
    result = {
        "command": f"python benchmarks/check_ablation.py FOLDER ... --name {arguments.name}",
        "scripts": len(rows),
        "all_checks": score(rows),
        "without_removed": score(rows, removed),
        "removed": removed,
        "checks": one_by_one,
        "rules": measure(rows, rules, ()),
    }
    for name, row in one_by_one.items():
        print(f"{name:40} {row}{'  removed' if name in removed else ''}")
    print(result["all_checks"], result["without_removed"])
    store(f"check_ablation_{arguments.name}", result, torch.device("cpu"))


if __name__ == "__main__":
    main()
