"""One rule of the catalogue."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from halfstep_check.findings import Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What `halfstep-check --explain RULE` says."""

    name: str
    severity: Severity
    title: str
    why: str
    fix: str
    bad: str
    """A script, or config files, which break this rule and no other; `example_files` splits it."""
    good: str
    """The same, corrected."""
    threads: tuple[str, ...] = ()
    """Public issue threads about this mistake, as owner/repository#number."""

    def __post_init__(self) -> None:
        for name in ("bad", "good"):
            object.__setattr__(self, name, textwrap.dedent(getattr(self, name)).strip())


def split_example(example: str) -> dict[str, str]:
    """Return the files of an example by name: each begins with `# NAME`, and what has no name is a script."""
    first, *parts = re.split(r"^# ([\w-]+\.\w+)\n", example + "\n", flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True)) or {"train.py": first}
