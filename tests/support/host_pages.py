"""Run the code of a page on an integration, block after block."""

from __future__ import annotations

import warnings
from typing import Any

from doc_pages import ROOT, blocks

MOST_LINES = 5  # that a reader adds or changes


def run_page(name: str) -> dict[str, Any]:
    """Run the Python blocks of a page, check that its changes are short, and return the names that the code defined."""
    page = ROOT / "docs" / "integrations" / f"{name}.md"
    for change in blocks(page, "diff"):
        assert sum(line.startswith("+") for line in change.text.splitlines()) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped steps and capsules, and the host's own
        for block in blocks(page, "python"):
            exec(compile(block.text, block.where, "exec"), names)
    return names
