"""The pages of docs/rules are those of the catalogue."""

from __future__ import annotations

from doc_pages import ROOT
from rule_pages import pages


def test_the_pages_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "rules").iterdir()}
    assert written == pages(), "run make rules"
