"""A check on the console: what each source says, what will run, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep_check.findings import Finding
from halfstep_check.resolve import Effective
from halfstep_check.rules import Rule, get_severity
from halfstep_check.shared.terminal import make_plain_table

SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def make_says_table(said: Iterable[tuple[str, str, str, str]]) -> Table:
    """Return the table of declarations: topic, value, spelling and place, grouped by topic."""
    table = make_plain_table("topic", "value", "written as", "where")
    table.columns[2].overflow = table.columns[3].overflow = "fold"
    last = ""
    for topic, *cells in said:
        table.add_row(Text(topic if topic != last else ""), *map(Text, cells))
        last = topic
    return table


def make_runs_table(rows: Iterable[Effective]) -> Table:
    """Return the table of what takes effect: topic, value, source, and why that source wins."""
    table = make_plain_table("in effect", "value", "because of", "why it wins")
    table.columns[2].overflow = "fold"
    for row in rows:
        table.add_row(Text(row.topic), Text(row.value, style="bold green"), Text(row.source), Text(row.reason))
    return table


def make_finding_view(finding: Finding) -> RenderableType:
    """Return a finding with its severity on the left and the rest next to it; long paths are folded, so nothing leaves
    the terminal's width."""
    lines = [Text.assemble((str(finding.place), "bold"), "  ", (f"[{finding.rule}]", "dim")), Text(finding.message)]
    if finding.fix:
        mark = " (--fix can do this)" if finding.edits else ""
        lines.append(Text.assemble(("fix: ", "bold"), finding.fix, (mark, "dim")))
    if finding.related:
        lines.append(Text("see " + ", ".join(map(str, finding.related)), style="dim"))
    grid = Table.grid(padding=0)
    grid.add_column(width=8)
    grid.add_column(overflow="fold")
    severity = get_severity(finding)
    grid.add_row(Text(severity, style=SEVERITY_STYLES[severity]), Text("\n").join(lines))
    return grid


def format_summary(
    findings: Sequence[Finding], *, num_scripts: int, num_sources: int, num_ignored: int, by: str = ""
) -> Text:
    """Return one line; `by` says which rules were applied, where that were not all."""
    counts = {name: sum(get_severity(f) == name for f in findings) for name in SEVERITY_STYLES}
    looked = (
        f"{num_sources} config source{'s' * (num_sources != 1)}, {num_scripts} script{'s' * (num_scripts != 1)}{by}"
    )
    ignored = f", {num_ignored} ignored by comment" if num_ignored else ""
    if not any(counts.values()):
        return Text(f"nothing wrong in {looked}{ignored}", style="bold green")
    plural = {"error": "errors", "warning": "warnings", "info": "info"}
    found = ", ".join(f"{count} {name if count == 1 else plural[name]}" for name, count in counts.items() if count)
    return Text(f"{found} in {looked}{ignored}. --explain RULE says more", style="bold")


def make_rules_table(rules: Iterable[Rule]) -> Table:
    table = make_plain_table("rule", "severity", "what it finds")
    for rule in rules:
        table.add_row(Text(rule.name), Text(rule.severity), Text(rule.title))
    return table


def make_rule_view(rule: Rule) -> Group:
    """Return the whole explanation of a rule."""
    parts: list[RenderableType] = [
        Text.assemble((rule.name, "bold"), f" ({rule.severity.value}): {rule.title}"),
        "",
        Text(rule.why),
        Text.assemble(("fix: ", "bold"), rule.fix),
        "",
        Text("wrong", style="bold red"),
        Padding(Text(rule.bad), (0, 0, 0, 4)),
        Text("right", style="bold green"),
        Padding(Text(rule.good), (0, 0, 0, 4)),
    ]
    if rule.threads:
        parts += ["", Text("public threads: " + ", ".join(rule.threads), style="dim")]
    parts += ["", Text(f"silence one line with  # halfstep: ignore[{rule.name}]", style="dim")]
    return Group(*parts)
