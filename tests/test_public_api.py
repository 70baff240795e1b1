"""The public API is pinned: a change of it decides the next version number (CONTRIBUTING.md, "Versions")."""

from __future__ import annotations

import difflib

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
