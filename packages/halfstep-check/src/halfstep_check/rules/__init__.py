"""The catalogue of rules: what each one finds, why it matters, an example, and the public threads behind it."""

from __future__ import annotations

from halfstep_check.findings import Finding, Severity
from halfstep_check.rules.configs import CONFIG_RULES
from halfstep_check.rules.loop import LOOP_RULES
from halfstep_check.rules.misplaced import MISPLACED_RULES
from halfstep_check.rules.numerics import NUMERIC_RULES
from halfstep_check.rules.rule import Rule
from halfstep_check.rules.scaler import SCALER_RULES
from halfstep_check.shared.errors import ConfigError, suggest_nearest

__all__ = ["RULES", "Rule", "rule_named", "severity_of"]

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (*CONFIG_RULES, *SCALER_RULES, *LOOP_RULES, *NUMERIC_RULES, *MISPLACED_RULES)
}


def get_severity(finding: Finding) -> Severity:
    return finding.severity or RULES[finding.rule].severity


def get_rule(name: str) -> Rule:
    """Return the rule of this name, or an error with the nearest ones."""
    if name not in RULES:
        raise ConfigError(f"unknown rule {name!r}", fix=suggest_nearest(name, RULES))
    return RULES[name]
