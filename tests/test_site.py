"""The docs site builds offline without a warning, loads nothing from elsewhere, and has every page and public name."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep as hs
from doc_pages import ROOT

DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_complete(tmp_path: Path) -> None:
    """One test, because a build takes ten seconds and more."""
    if not importlib.util.find_spec("sphinx"):
        pytest.skip("NOT tested: sphinx is not installed: pip install -c constraints.txt -e 'packages/halfstep[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    built = subprocess.run([*command, str(DOCS), str(site)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")} - {Path("README.html")}
    assert [page for page in pages if not (site / page).exists()] == []
    assert (site / "searchindex.js").exists()

    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^"']*""")
    assert [found for page in site.rglob("*.html") for found in loads.findall(page.read_text())] == []
    styles = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^)"']*""")
    assert [found for sheet in site.rglob("*.css") for found in styles.findall(sheet.read_text())] == []

    text = (site / "api.html").read_text()
    assert [name for name in hs.__all__ if name != "__version__" and f'id="halfstep.{name}"' not in text] == []
