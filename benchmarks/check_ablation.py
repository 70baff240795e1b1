"""What each rule of `halfstep-check` finds on labelled scripts, compared with the lines that only this rule needs.

    python benchmarks/check_ablation.py FOLDER [FOLDER ...] --name sets_1_to_6

Each FOLDER has the layout that check_holdout.py reads. A rule's own labels are the firm labels that no other finding
hits. Its own lines are those of the functions that report it, together with the helpers that no other rule reaches
(matched by name, so shared helpers are never counted). Rules are then removed greedily, the fewest labels per line
first, while a rule finds less than one label per 150 lines.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import yaml

import halfstep_check.lint
from check_holdout import check_paths, is_for, is_near
from halfstep_check.rules import RULES
from recording import store

LINES_PER_LABEL = 150
Functions = dict[tuple[str, str], ast.FunctionDef]


def read_functions(folder: Path) -> Functions:
    """Functions and methods of the lint, by file and name."""
    trees = {path.name: ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))}
    return {
        (file, node.name): node for file, tree in trees.items() for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }  # fmt: skip


def collect_names(node: ast.AST) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def collect_texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def count_lines(functions: Functions, rules: Collection[str]) -> int:
    """Lines of the functions that would be dead without these rules; `find` of a module calls every rule."""
    names = {key: collect_names(node) for key, node in functions.items()}
    reporting = {key: collect_texts(node) & RULES.keys() for key, node in functions.items()}
    gone = {key for key, reported in reporting.items() if reported and reported <= set(rules)}
    dead = set(gone)
    while True:
        used = set().union(*(names[key] - {key[1]} for key in functions if key not in dead))
        before = set().union(*(names[key] for key in gone), set())
        new = {key for key in functions if key not in dead and key[1] not in used and key[1] in before}
        if not new:
            break
        dead |= new
        gone |= new
    return sum((functions[key].end_lineno or 0) - functions[key].lineno + 1 for key in dead)


def read_findings(folders: list[Path]) -> list[dict[str, Any]]:
    """One row per script: its labels, and the line and rule of each warning or error."""
    rows = []
    for folder in folders:
        for name, labels in yaml.safe_load((folder / "labels.yaml").read_text())["scripts"].items():
            found = [one for one in check_paths(folder / name)["findings"] if one["severity"] != "info"]
            rows.append({"labels": labels, "found": [(one["line"], one["rule"]) for one in found]})
    return rows


def score(rows: list[dict[str, Any]], removed: Collection[str] = ()) -> dict[str, int]:
    total = {"found": 0, "firm": 0, "findings": 0, "without_label": 0}
    for row in rows:
        labels = row["labels"]
        lines = [line for line, rule in row["found"] if rule not in removed]
        firm = [label for label in labels if not label.get("doubtful") and label["severity"] != "info"]
        total["found"] += sum(any(is_for(line, label, labels) for line in lines) for label in firm)
        total["firm"] += len(firm)
        total["findings"] += len(lines)
        total["without_label"] += sum(not any(is_near(line, label) for label in labels) for line in lines)
    return total


def measure_rules(
    rows: list[dict[str, Any]], functions: Functions, removed: Collection[str]
) -> dict[str, dict[str, int]]:
    """Each remaining rule's own labels, findings without a label, and own lines."""
    whole, lines = score(rows, removed), count_lines(functions, removed)
    table = {}
    reported = {text for node in functions.values() for text in collect_texts(node)} & RULES.keys()
    for rule in sorted(reported - set(removed)):
        rest = score(rows, {*removed, rule})
        table[rule] = {
            "labels": whole["found"] - rest["found"],
            "findings": whole["findings"] - rest["findings"],
            "without_label": whole["without_label"] - rest["without_label"],
            "lines": count_lines(functions, {*removed, rule}) - lines,
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--name", required=True, help="of the sets: the file is check_ablation_NAME.json")
    arguments = parser.parse_args()
    rows = read_findings(arguments.folders)
    functions = read_functions(Path(halfstep_check.lint.__file__).parent)
    one_by_one = measure_rules(rows, functions, ())
    removed: list[str] = []
    while True:
        rest = measure_rules(rows, functions, removed)
        poor = {rule: row for rule, row in rest.items() if row["labels"] * LINES_PER_LABEL < row["lines"]}
        if not poor:
            break
        removed.append(min(poor, key=lambda rule: poor[rule]["labels"] / poor[rule]["lines"]))
    for rule, row in one_by_one.items():
        print(f"{rule:30} {row}{'  removed' if rule in removed else ''}")
    result = {
        "command": f"python benchmarks/check_ablation.py FOLDER ... --name {arguments.name}",
        "scripts": len(rows),
        "all_rules": score(rows),
        "without_removed": score(rows, removed),
        "removed_lines": count_lines(functions, removed),
        "removed": removed,
        "rules": one_by_one,
    }
    print({key: value for key, value in result.items() if key != "rules"})
    store(f"check_ablation_{arguments.name}", result, torch.device("cpu"))


if __name__ == "__main__":
    main()
