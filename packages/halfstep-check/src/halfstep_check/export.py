"""A report as JSON for scripts, or as SARIF 2.1.0, which code hosts turn into annotations on a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from halfstep_check.check import Report
from halfstep_check.declarations import Source
from halfstep_check.findings import Finding, Place, Severity
from halfstep_check.rules import RULES, Rule, get_severity

LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def export_json(report: Report) -> dict[str, Any]:
    """Return sources, effective values, findings and what could not be read."""
    return {
        "exit_code": report.exit_code,
        "sources": [describe_source(source) for source in report.sources],
        "effective": {
            row.topic: {"value": row.value, "source": row.source, "spelled": row.spelled, "reason": row.reason}
            for row in report.effective
        },
        "findings": [describe_finding(finding) for finding in report.findings],
        "unreadable": [{"what": error.what, "why": error.why, "fix": error.fix} for error in report.unreadable],
        "without_statement": list(report.silent),
        "skipped": list(report.skipped),
        "scripts": report.num_scripts,
        "ignored": report.num_ignored,
    }


def describe_source(source: Source) -> dict[str, Any]:
    says = [
        {"topic": s.topic, "value": s.value, "spelled": s.spelled, "line": s.place.line} for s in source.declarations
    ]
    named_by = str(source.named_by) if source.named_by else None
    return {"name": source.name, "dialect": source.dialect, "named_by": named_by, "says": says}


def describe_finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": get_severity(finding).value,
        "path": finding.place.path,
        "line": finding.place.line,
        "column": finding.place.column,
        "message": finding.message,
        "fix": finding.fix,
        "related": [str(place) for place in finding.related],
        "fixable": bool(finding.edits),
    }


def export_sarif(findings: Iterable[Finding], version: str) -> dict[str, Any]:
    """Return the findings as one SARIF run."""
    listed = list(findings)
    used = sorted({finding.rule for finding in listed})
    driver = {"name": "halfstep", "version": version, "rules": [describe_rule(RULES[name]) for name in used]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [describe_result(finding) for finding in listed]}],
    }


def describe_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def describe_result(finding: Finding) -> dict[str, Any]:
    text = finding.message + (f". Fix: {finding.fix}" if finding.fix else "")
    return {
        "ruleId": finding.rule,
        "level": LEVELS[get_severity(finding)],
        "message": {"text": text},
        "locations": [describe_location(finding.place)],
        **({"relatedLocations": [describe_location(place) for place in finding.related]} if finding.related else {}),
    }


def describe_location(place: Place) -> dict[str, Any]:
    # SARIF counts from 1; findings without a file line (environment) point at line 1.
    region = {"startLine": max(place.line, 1), "startColumn": place.column + 1}
    # A URI has no spaces, and an absolute one names its scheme.
    uri = ("file://" if place.path.startswith("/") else "") + quote(place.path)
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
