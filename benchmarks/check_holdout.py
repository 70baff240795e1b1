"""How often `halfstep check` is right on public scripts that a reviewer labelled before the tool saw them.

    python benchmarks/check_holdout.py FOLDER --name first

FOLDER holds labels.yaml, sources.csv, scripts/, configs/ and projects/. The scripts are other people's and are not
stored here; what is stored are the labels, where each file comes from (repository, path, commit), and what was found. A
finding within six lines of a label is taken for it. Doubtful labels do not count as missed, nor as false where found.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from recording import store

NEAR = 6
SAID = {"fp32", "tf32", "fp16", "bf16"}


def checked(*words: str) -> dict[str, Any]:
    call = [sys.executable, "-m", "halfstep", "check", *words, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(call, capture_output=True, text=True, check=False).stdout)
    return found


def is_near(line: int, label: dict[str, Any]) -> bool:
    return any(abs(line - other) <= NEAR for other in (label["line"], *label.get("also_lines", ())))


def of_scripts(folder: Path, labels: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rows, extra, num_findings = [], [], 0
    for name, defects in labels.items():
        said = [one for one in checked(str(folder / name))["findings"] if one["severity"] != "info"]
        num_findings += len(said)
        rows += [
            {"file": name, **defect, "found": any(is_near(one["line"], defect) for one in said)} for defect in defects
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
        stated = checked(str(folder / name))["effective"].get("precision", {}).get("value", "not stated")
        expected = label["effective"]
        if stated != expected and (expected in SAID or stated in SAID):
            wrong.append({"file": name, "labelled": expected, "said": stated})
    return {"files": len(labels), "differing": wrong}


def of_projects(folder: Path, labels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for name, label in labels.items():
        said = checked("--project", str(folder / "projects" / name))["findings"]
        wanted = [one for one in label.get("conflicts", ()) if not one.get("doubtful") and one["severity"] != "info"]
        rows.append({"project": name, "conflicts": len(wanted),
                     "findings": [one["rule"] for one in said if one["severity"] != "info"]})  # fmt: skip
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
        "scripts": of_scripts(folder, labels["scripts"]),
        "configs": of_configs(folder, labels["configs"]),
        "projects": of_projects(folder, labels["projects"]),
        "sources": sources,
    }
    scripts = found["scripts"]
    print(f"{scripts['findings']} warnings and errors, {len(scripts['unlabelled'])} without a label near them")
    for severity, (hits, total) in scripts["recall"].items():
        print(f"{severity}: {hits} of {total} found")
    print(f"configs: {len(found['configs']['differing'])} of {found['configs']['files']} read otherwise than labelled")
    store(f"check_holdout_{arguments.name}", found, torch.device("cpu"))


if __name__ == "__main__":
    main()
