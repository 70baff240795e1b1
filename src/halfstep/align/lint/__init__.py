"""Lint for mixed-precision code: rules over the syntax tree, with data flow through functions and methods."""

from __future__ import annotations

import ast
import re

from halfstep.align.findings import Finding
from halfstep.align.lint import (
    accumulation,
    api,
    checkpoints,
    clearing,
    contracts,
    coverage,
    evaluation,
    frameworks,
    hiding,
    hints,
    iteration,
    lifetimes,
    numerics,
    reached,
    regimes,
    scaler_order,
    scaler_use,
    skips,
    switches,
    weights,
)
from halfstep.align.lint.amp import Amp
from halfstep.align.lint.script import Script
from halfstep.errors import ConfigError

FAMILIES = (
    *(scaler_order, iteration, reached, regimes, skips, accumulation, numerics, weights),
    *(scaler_use, contracts, frameworks, clearing, coverage, switches),
    *(checkpoints, lifetimes, api, hiding, evaluation, hints),
)
RELEVANT = re.compile(r"\bautocast\b|GradScaler|\.backward\(|is_bf16_supported|cuda\.amp|type\s*=\s*bool\b|Trainer\(")
"""What every rule needs one of; other files are not analysed."""


def lint_tree(tree: ast.Module, text: str, path: str) -> list[Finding]:
    """All findings of one script, each once."""
    if not RELEVANT.search(text):
        return []
    try:
        amp = Amp(Script(tree=tree, text=text, path=path))
        found = [finding for family in FAMILIES for finding in family.find(amp)]
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be read", fix="check the scripts it was made from") from error
    first = {(f.rule, f.place.line): f for f in reversed(found)}
    return sorted(first.values(), key=lambda f: (f.place, f.rule))
