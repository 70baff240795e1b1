"""How often `halfstep check` is right on public scripts that a reviewer labelled before the tool saw them.

    python benchmarks/check_holdout.py FOLDER --name first

FOLDER holds labels.yaml, sources.csv, scripts/, configs/ and, where there are any, projects/. The scripts are other
people's and are not stored here; what is stored are the labels, where each file comes from (repository, path, commit),
and what was found. A finding within six lines of a label is taken for it, for the nearest of several. Doubtful labels
do not count as missed, nor as false where found.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
import yaml

from halfstep_check.check import check
from halfstep_check.export import export_json
from recording import store

NEAR = 6
SAID = {"fp32", "tf32", "fp16", "bf16"}


def check_paths(*paths: Path, project: Path | None = None) -> dict[str, Any]:
    return export_json(check(paths, project=project))


def distance(line: int, label: dict[str, Any]) -> int:
    return min(abs(line - other) for other in (label["line"], *label.get("also_lines", ())))


def is_near(line: int, label: dict[str, Any]) -> bool:
    return distance(line, label) <= NEAR


def is_for(line: int, label: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """Whether a finding speaks of this label: near it, and nearer to no other."""
    return is_near(line, label) and all(distance(line, label) <= distance(line, other) for other in others)


def of_scripts(folder: Path, labels: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rows, extra, num_findings = [], [], 0
    for name, defects in labels.items():
        said = [one for one in check_paths(folder / name)["findings"] if one["severity"] != "info"]
        num_findings += len(said)
        rows += [
            {"file": name, **defect, "found": any(is_for(one["line"], defect, defects) for one in said)}
            for defect in defects
        ]
        extra += [
            {"file": name, "line": one["line"], "rule": one["rule"], "severity": one["severity"]}
            for one in said
            if not any(is_near(one["line"], defect) for defect in defects)
        ]
    firm = [row for row in rows if not row.get("doubtful")]
    recall = {
        severity: [sum(row["found"] for row in firm if row["severity"] == severity),
                   sum(row["severity"] == severity for row in firm)]
        for severity in ("serious", "warning")
    }  # fmt: skip
    return {"files": len(labels), "findings": num_findings, "unlabelled": extra, "recall": recall, "labels": rows}


def of_configs(folder: Path, labels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    wrong = []
    for name, label in labels.items():
        stated = check_paths(folder / name)["effective"].get("precision", {}).get("value", "not stated")
        expected = label["effective"]
        if label.get("doubtful"):
            continue
        if stated != expected and (expected in SAID or stated in SAID):
            wrong.append({"file": name, "labelled": expected, "said": stated})
    return {"files": len(labels), "differing": wrong}


def is_about(found: dict[str, Any], label: dict[str, Any], root: Path) -> bool:
    return Path(found["path"]) == root / label["file"] and is_near(found["line"], label)


def of_projects(folder: Path, labels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each finding of `--project`, and whether a label stands near it (where the labels name a file and a line)."""
    rows = []
    for name, label in labels.items():
        root = folder / "projects" / name
        said = [one for one in check_paths(project=root)["findings"] if one["severity"] != "info"]
        all_conflicts = [one for one in label.get("conflicts", ()) if one["severity"] != "info"]
        wanted = [one for one in all_conflicts if not one.get("doubtful")]
        placed = [one for one in all_conflicts if "line" in one]
        findings = [
            {"file": str(Path(one["path"]).relative_to(root)), "line": one["line"], "rule": one["rule"],
             "labelled": any(is_about(one, conflict, root) for conflict in placed)}
            for one in said
        ]  # fmt: skip
        rows.append({"project": name, "conflicts": len(wanted), "findings": findings,
                     "found": sum(any(is_about(one, conflict, root) for one in said) for conflict in wanted
                                  if "line" in conflict)})  # fmt: skip
    return {"projects": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True, help="of the set: the file is check_holdout_NAME.json")
    arguments = parser.parse_args()
    folder = arguments.folder
    labels = yaml.safe_load((folder / "labels.yaml").read_text())
    with (folder / "sources.csv").open(newline="") as file:
        sources = list(csv.DictReader(file))
    found = {
        "command": f"python benchmarks/check_holdout.py FOLDER --name {arguments.name}",
        "scripts": of_scripts(folder, labels["scripts"]),
        "configs": of_configs(folder, labels["configs"]),
        "projects": of_projects(folder, labels.get("projects", {})),
        "sources": sources,
    }
    scripts = found["scripts"]
    print(f"{scripts['findings']} warnings and errors, {len(scripts['unlabelled'])} without a label near them")
    for severity, (hits, total) in scripts["recall"].items():
        print(f"{severity}: {hits} of {total} found")
    projects = found["projects"]["projects"]
    total = sum(len(row["findings"]) for row in projects)
    labelled = sum(one["labelled"] for row in projects for one in row["findings"])
    print(f"projects: {labelled} of {total} findings near a label, {sum(row['found'] for row in projects)} of "
          f"{sum(row['conflicts'] for row in projects)} conflicts found")  # fmt: skip
    print(f"configs: {len(found['configs']['differing'])} of {found['configs']['files']} read otherwise than labelled")
    store(f"check_holdout_{arguments.name}", found, torch.device("cpu"))


if __name__ == "__main__":
    main()
