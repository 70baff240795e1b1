"""Lint for mixed-precision code: rules over the syntax tree, with data flow through functions and methods."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from halfstep_check.findings import Finding
from halfstep_check.lint import (
    accumulation,
    agreement,
    api,
    checkpoints,
    clearing,
    contracts,
    coverage,
    division,
    frameworks,
    graphs,
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
    sync,
    weights,
)
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.linking import with_imports
from halfstep_check.lint.script import Script
from halfstep_check.shared.errors import ConfigError

OF_LINES = (numerics, contracts, switches, api, hints, sync)
"""Families that judge lines of this file as they stand."""
OF_FLOW = (
    *(scaler_order, iteration, reached, regimes, skips, accumulation, weights),
    *(scaler_use, frameworks, graphs, clearing, coverage, checkpoints, lifetimes, hiding, agreement, division),
)
"""Families that follow objects, also into helpers imported from files beside it."""
RELEVANT = re.compile(
    r"\bautocast\b|GradScaler|\.backward\(|is_bf16_supported|cuda\.amp|type\s*=\s*bool\b|Trainer\(|LightningModule"
)
"""What every rule needs one of; other files are not analysed."""


def lint_tree(tree: ast.Module, text: str, path: str) -> list[Finding]:
    """All findings of one script, each once."""
    if not RELEVANT.search(text):
        return []
    try:
        alone = Amp(Script(tree=tree, text=text, path=path))
        whole, linked_text = with_imports(tree, text, path)
        linked = alone if whole is tree else Amp(Script(tree=whole, text=linked_text, path=path))
        found = [f for family in OF_LINES for f in family.find(alone)]
        found += [f for family in OF_FLOW for f in family.find(linked)]
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be read", fix="check the scripts it was made from") from error
    end = text.count("\n") + 1
    here = [replace(f, related=tuple(p for p in f.related if p.line <= end)) for f in found if f.place.line <= end]
    first = {(f.rule, f.place.line): f for f in reversed(here)}
    return sorted(first.values(), key=lambda f: (f.place, f.rule))
