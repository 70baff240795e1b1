"""Result tables are those of the stored results, the README stays at two screens, and every command has its line."""

from __future__ import annotations

import re

from typer.main import get_command

from doc_pages import ROOT
from halfstep.cli.main import app_with


def test_result_tables_are_generated_from_the_stored_results() -> None:
    from readme_tables import MADE, with_tables

    for page in MADE:
        assert with_tables(page) == page.read_text(), f"{page.name}: run python benchmarks/readme_tables.py --write"


def test_the_readme_stays_at_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_every_command_is_on_the_page_of_commands_and_no_other_is() -> None:
    shown = set(re.findall(r"`halfstep ([\w-]+)", (ROOT / "docs" / "commands.md").read_text()))
    assert shown == set(get_command(app_with()).commands)  # type: ignore[attr-defined]
