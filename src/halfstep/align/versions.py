"""Which framework version a project pins: what a value means can depend on it."""

from __future__ import annotations

import re

PIN = re.compile(
    r"""["']?(?:pytorch[-_]lightning|lightning)["']?(?:\[[\w,-]*\])?\s*(?:[=:]\s*)?["']?\s*(?:[=~^><!]=?\s*)*v?(\d+(?:\.\d+)*)""",
    re.IGNORECASE,
)
LOCKED = re.compile(r'name\s*=\s*"(?:pytorch-)?lightning"\s*\nversion\s*=\s*"(\d+(?:\.\d+)*)"')


def lightning_version(text: str) -> str:
    """The Lightning version that a requirements, pyproject or lock file pins; empty when it pins none."""
    found = LOCKED.search(text) or PIN.search(text)
    return found.group(1) if found else ""
