"""`# halfstep: ignore[RULE]` on the line of a finding, or alone on the line above, silences that rule there."""

from __future__ import annotations

import re

from halfstep_check.findings import Finding
from halfstep_check.textlines import lines_of

COMMENT = re.compile(r"#\s*halfstep:\s*ignore(?:\[([\w\s,-]*)\])?")


class Ignores:
    """The ignore comments of one file, by line."""

    def __init__(self, text: str) -> None:
        self.rules: dict[int, set[str]] = {}
        if "halfstep:" not in text:
            return
        for number, line in enumerate(lines_of(text), start=1):
            if comment := COMMENT.search(line):
                names = {name.strip() for name in (comment.group(1) or "*").split(",")}
                stands_alone = line.lstrip().startswith("#")
                self.rules.setdefault(number + 1 if stands_alone else number, set()).update(names)

    def silence(self, finding: Finding) -> bool:
        names = self.rules.get(finding.place.line, set())
        return finding.rule in names or "*" in names
