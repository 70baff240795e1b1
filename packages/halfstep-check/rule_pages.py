"""Write one page per rule, and an index of them, from the catalogue of rules.

python rule_pages.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from halfstep_check.rules import RULES, Rule, split_example

INDEX = "README.md"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".txt": "text"}


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {INDEX: index(), **{f"{rule.name}.md": page(rule) for rule in RULES.values()}}


def index() -> str:
    lines = [f"# {len(RULES)} rules of halfstep check", ""]
    lines += [
        "Generated from the catalogue of rules by `make rules`; `halfstep check --explain RULE` shows the same.",
        "",
    ]
    groups: dict[str, list[Rule]] = {}
    for rule in RULES.values():
        groups.setdefault(rule.group, []).append(rule)
    for title, rules in groups.items():
        lines += [f"## {title}", "", "| rule | severity | finds |", "|---|---|---|"]
        lines += [f"| [{rule.name}]({rule.name}.md) | {rule.severity.value} | {rule.title} |" for rule in rules]
        lines += [""]
    return "\n".join(lines)


def page(rule: Rule) -> str:
    lines = [f"# {rule.name}", "", f"**{rule.severity.value.capitalize()}:** {rule.title}.", "", rule.why, ""]
    lines += [f"**Fix:** {rule.fix}", ""]
    lines += ["## Wrong", "", *example(rule.bad), "## Right", "", *example(rule.good)]
    if rule.threads:
        lines += [f"Public threads: {', '.join(rule.threads)}", ""]
    silence = f"Silence one line with `# halfstep: ignore[{rule.name}]`, or the rule with `--ignore {rule.name}`."
    return "\n".join([*lines, f"{silence} [All rules]({INDEX})", ""])


def example(text: str) -> Iterator[str]:
    """Each file in a fence; a script without a name shows none."""
    for name, content in split_example(text).items():
        if content.strip() != text:
            yield from (f"`{name}`:", "")
        yield from (f"```{LANGUAGES[Path(name).suffix]}", content.strip(), "```", "")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
