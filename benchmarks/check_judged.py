"""How many findings in unlabelled public scripts were judged true, and how many of those the check still reports.

    python benchmarks/check_judged.py FOLDER

FOLDER holds a checkout of each repository as OWNER+NAME, at the commit that check_judged.json names. One warning or
error per repository and rule was drawn at random and judged by reading the script, each round with the causes of the
rounds before fixed; the verdicts are kept, what the check reports today is counted again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch

from halfstep_check.check import check
from recording import RESULTS, store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    judged = json.loads((RESULTS / "check_judged.json").read_text())["judged"]
    found: dict[Path, set[tuple[str, int]]] = {}
    for row in judged:
        path = folder / row["repository"].replace("/", "+", 1) / row["file"]
        if path not in found:
            found[path] = {(one.rule, one.place.line) for one in check([path]).findings}
        row["still_reported"] = (row["rule"], row["line"]) in found[path]
    rounds = sorted({row["round"] for row in judged})
    result = {
        "command": "python benchmarks/check_judged.py FOLDER",
        "when_first_run": {number: count([row for row in judged if row["round"] == number]) for number in rounds},
        "now": count([row for row in judged if row["still_reported"]]),
        "rules": {rule: count([row for row in judged if row["rule"] == rule])
                  for rule, _ in Counter(row["rule"] for row in judged).most_common()},
        "judged": judged,
    }  # fmt: skip
    print({key: result[key] for key in ("when_first_run", "now", "rules")})
    store("check_judged", result, torch.device("cpu"))


def count(rows: list[dict[str, object]]) -> dict[str, int]:
    return {"findings": len(rows), "true": sum(bool(row["is_true"]) for row in rows)}


if __name__ == "__main__":
    main()
