"""SARIF 2.1.0, which code hosts turn into annotations on a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from halfstep_check.findings import Finding, Place, Severity
from halfstep_check.rules import RULES, Rule, severity_of

LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def sarif(findings: Iterable[Finding], version: str) -> dict[str, Any]:
    """The findings as one SARIF run."""
    listed = list(findings)
    used = sorted({finding.rule for finding in listed})
    driver = {"name": "halfstep", "version": version, "rules": [descriptor(RULES[name]) for name in used]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [result(finding) for finding in listed]}],
    }


def descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def result(finding: Finding) -> dict[str, Any]:
    text = finding.message + (f". Fix: {finding.fix}" if finding.fix else "")
    return {
        "ruleId": finding.rule,
        "level": LEVELS[severity_of(finding)],
        "message": {"text": text},
        "locations": [location(finding.place)],
        **({"relatedLocations": [location(place) for place in finding.related]} if finding.related else {}),
    }


def location(place: Place) -> dict[str, Any]:
    # SARIF counts from 1; findings without a file line (environment) point at line 1.
    region = {"startLine": max(place.line, 1), "startColumn": place.column + 1}
    # A URI has no spaces, and an absolute one names its scheme.
    uri = ("file://" if place.path.startswith("/") else "") + quote(place.path)
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
