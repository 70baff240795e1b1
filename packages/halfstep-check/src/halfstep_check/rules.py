"""The catalogue of rules: what each one finds, why it matters, an example, and the public threads behind it.

The texts are in rules.toml.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from halfstep_check.findings import Finding, Severity
from halfstep_check.shared.errors import ConfigError, suggest_nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What `halfstep-check --explain RULE` says."""

    name: str
    group: str
    severity: Severity
    title: str
    why: str
    fix: str
    bad: str
    """A script, or config files, which break this rule and no other; `split_example` splits it."""
    good: str
    """The same, corrected."""
    threads: tuple[str, ...] = ()
    """Public issue threads about this mistake, as owner/repository#number."""


def load_rules() -> dict[str, Rule]:
    rules = {}
    for name, text in tomllib.loads(files("halfstep_check").joinpath("rules.toml").read_text("utf-8")).items():
        severity, threads = Severity(text.pop("severity")), tuple(text.pop("threads", ()))
        rules[name] = Rule(name=name, severity=severity, threads=threads, **text)
    return rules


RULES = load_rules()


def get_severity(finding: Finding) -> Severity:
    return finding.severity or RULES[finding.rule].severity


def get_rule(name: str) -> Rule:
    """Return the rule of this name, or an error with the nearest ones."""
    if name not in RULES:
        raise ConfigError(f"unknown rule {name!r}", fix=suggest_nearest(name, RULES))
    return RULES[name]


def split_example(example: str) -> dict[str, str]:
    """Return the files of an example by name: each begins with `# NAME`, and what has no name is a script."""
    first, *parts = re.split(r"^# ([\w-]+\.\w+)\n", example + "\n", flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True)) or {"train.py": first}
