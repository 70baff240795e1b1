"""Which framework version a project pins: what a value means can depend on it."""

from __future__ import annotations

import re

GAP = r"[ \t]{0,4}"
# Every repeat is bounded: these files come from anywhere, and open repeats side by side take quadratic time.
PIN = re.compile(
    rf"""(?:pytorch[-_])?lightning["']?(?:\[[\w,-]{{0,40}}\])?{GAP}(?:[=:]{GAP})?["']?{GAP}"""
    rf"""(?:[=~^><!]=?{GAP}){{0,3}}v?(\d+(?:\.\d+){{0,3}})""",
    re.IGNORECASE,
)
LOCKED = re.compile(r'name\s*=\s*"(?:pytorch-)?lightning"\s*\nversion\s*=\s*"(\d+(?:\.\d+)*)"')


def lightning_version(text: str) -> str:
    """The Lightning version that a requirements, pyproject or lock file pins; empty when it pins none."""
    found = LOCKED.search(text) or PIN.search(text)
    return found.group(1) if found else ""
