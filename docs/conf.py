"""Build the docs site from the Markdown pages of this folder: `make docs`.

Nothing is downloaded, while building or while reading: the theme brings its fonts and scripts along, and there is no
intersphinx. Files of the repository that pages link to (benchmarks/NOTES.md, examples/) are copied into the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = map(str, ROOT.glob("packages/*/src"))

import halfstep  # noqa: E402

project, author = "halfstep", "The halfstep maintainers"
copyright = author  # noqa: A001
version = release = halfstep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]  # the list of pages for readers of the repository; here the sidebar shows it

# `page.md#heading` works as on GitHub. Toctrees are written with colons: the tests read fences of backticks as code.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"halfstep {release}"
html_logo, html_favicon = "_static/logo.svg", "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "tango", "monokai"

smartquotes = False  # "low" is what to type
default_role = "code"  # docstrings have `names` between single backticks, as in Markdown
autodoc_typehints = "none"  # the text gives the types; the signature has the names and defaults
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_use_rtype = False


def hide_catch_all(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any) -> Any:
    """Leave out `**unknown`, which only makes the error for a misspelled argument."""
    return (signature or "").replace(", **unknown", "") or None, returns


def download_files_outside(app: Any, docname: str, source: list[str]) -> None:
    """Turn links to Markdown files outside this folder into downloads, as MyST does with files of other kinds."""
    out = "../" * (docname.count("/") + 1)
    source[0] = re.sub(rf"\]\(({re.escape(out)}(?!\.\.)[^)#]+\.md)[^)]*\)", r"](path:\1)", source[0])


def show_titles(app: Any, docname: str, source: list[str]) -> None:
    """Show a page's title instead of its file name: a link without text gets the title of its target."""
    source[0] = re.sub(r"\[[\w/]+\.md\](\((?:\.\./)?[\w/]+\.md(?:#[\w-]+)?\))", r"[]\1", source[0])


def place_pages_of_folders(app: Any, docname: str, source: list[str]) -> None:
    """Show the guides in the sidebar, below their README, but not the many rules, which cost half of the build time."""
    if docname == "guides/README":
        source[0] += "\n:::{toctree}\n:hidden:\n:glob:\n*\n:::\n"
    elif docname.startswith("rules/") and docname != "rules/README":
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", hide_catch_all)
    app.connect("source-read", download_files_outside)
    app.connect("source-read", show_titles)
    app.connect("source-read", place_pages_of_folders)
