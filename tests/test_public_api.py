"""The public API is pinned: a change of it decides the next version number (CONTRIBUTING.md, "Versions")."""

from __future__ import annotations

import difflib

import halfstep
from doc_pages import ROOT
from public_api import list_public_api

PINNED = ROOT / "tests" / "public_api.txt"


def test_the_public_api_is_as_pinned() -> None:
    found = list(list_public_api())
    changes = [
        line
        for line in difflib.unified_diff(PINNED.read_text().splitlines(), found, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changes, (
        "the public API changed. If that is intended, store it in the same commit "
        "(python tests/support/public_api.py > tests/public_api.txt) and add a line to CHANGELOG.md:\n"
        + "\n".join(changes)
    )


def test_the_version_is_stated_once_and_is_semantic() -> None:
    import re
    import tomllib

    import halfstep_check

    for module in (halfstep, halfstep_check):
        assert re.fullmatch(r"\d+\.\d+\.\d+", module.__version__)
        folder = ROOT / "packages" / module.__name__.replace("_", "-")
        assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]


def test_the_policy_names_every_part_of_the_public_api() -> None:
    policy = (ROOT / "CONTRIBUTING.md").read_text().split("## Versions")[1].split("\n## ")[0]
    for part in ("`hs.`", "commands", "settings", "exit codes", "files", "tests/public_api.txt"):
        assert part in policy, part
