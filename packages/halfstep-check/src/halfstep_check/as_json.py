"""A report as plain data, for scripts."""

from __future__ import annotations

from typing import Any

from halfstep_check.check import Report
from halfstep_check.declarations import Source
from halfstep_check.findings import Finding
from halfstep_check.rules import severity_of


def as_dict(report: Report) -> dict[str, Any]:
    """Sources, what is in effect, findings and what could not be read."""
    return {
        "exit_code": report.exit_code,
        "sources": [source_dict(source) for source in report.sources],
        "effective": {
            row.topic: {"value": row.value, "source": row.source, "spelled": row.spelled, "reason": row.reason}
            for row in report.effective
        },
        "findings": [finding_dict(finding) for finding in report.findings],
        "unreadable": [{"what": error.what, "why": error.why, "fix": error.fix} for error in report.unreadable],
        "without_statement": list(report.silent),
        "scripts": report.num_scripts,
        "ignored": report.num_ignored,
    }


def source_dict(source: Source) -> dict[str, Any]:
    says = [
        {"topic": s.topic, "value": s.value, "spelled": s.spelled, "line": s.place.line} for s in source.declarations
    ]
    named_by = str(source.named_by) if source.named_by else None
    return {"name": source.name, "dialect": source.dialect, "named_by": named_by, "says": says}


def finding_dict(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": severity_of(finding).value,
        "path": finding.place.path,
        "line": finding.place.line,
        "column": finding.place.column,
        "message": finding.message,
        "fix": finding.fix,
        "related": [str(place) for place in finding.related],
        "fixable": bool(finding.edits),
    }
