"""The README's result tables are those of the stored results, and the commands it shows exist."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from halfstep.cli.main import app_with

ROOT = Path(__file__).resolve().parent.parent


def test_result_tables_are_generated_from_the_stored_results() -> None:
    from readme_tables import with_tables

    readme = (ROOT / "README.md").read_text()
    assert with_tables(readme) == readme, "run: python benchmarks/readme_tables.py --write"


def test_every_command_is_in_the_readme_and_every_command_in_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"`halfstep ([\w-]+)", readme))
    assert shown == set(get_command(app_with()).commands)  # type: ignore[attr-defined]


def test_links_of_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
