"""Lint for mixed-precision code: rules over the syntax tree, with data flow through functions and methods."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from halfstep_check.findings import Finding
from halfstep_check.lint import (
    accumulation,
    api,
    checkpoints,
    clearing,
    coverage,
    frameworks,
    hiding,
    iteration,
    numerics,
    regimes,
    scaler_order,
    switches,
    weights,
)
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.linking import append_imports
from halfstep_check.lint.script import Script
from halfstep_check.shared.errors import ConfigError

LINE_RULES = (
    numerics.find_lost_values,
    api.find_refused_arguments,
    switches.find_stuck_switches,
    api.find_old_names,
    numerics.find_host_waits,
    accumulation.find_unreduced_gradients,
)
"""Rules about single lines of this file."""
FLOW_RULES = (
    scaler_order.find_wrong_order,
    iteration.find_wrong_iterations,
    iteration.find_unreached_calls,
    regimes.find_unscaled_fp16,
    scaler_order.find_ignored_skips,
    accumulation.find_undivided_windows,
    weights.find_half_weights,
    api.find_misused_scalers,
    frameworks.find_bypassed_frameworks,
    clearing.find_repeated_backward,
    clearing.find_uncleared_gradients,
    coverage.find_uncovered_models,
    checkpoints.find_unsaved_scalers,
    checkpoints.find_remade_scalers,
    hiding.find_hidden_nans,
    regimes.find_disagreements,
)
"""Rules that follow objects through calls, also into helpers imported from neighbouring files."""
RELEVANT = re.compile(
    r"\bautocast\b|GradScaler|\.backward\(|is_bf16_supported|cuda\.amp|type\s*=\s*bool\b|Trainer\(|LightningModule"
)
"""What every rule needs one of; other files are not analysed."""


def lint_tree(tree: ast.Module, text: str, path: str) -> list[Finding]:
    """Return all findings of one script, each once."""
    if not RELEVANT.search(text):
        return []
    try:
        alone = Amp(Script(tree=tree, text=text, path=path))
        whole, linked_text = append_imports(tree, text, path)
        linked = alone if whole is tree else Amp(Script(tree=whole, text=linked_text, path=path))
        found = [f for find in LINE_RULES for f in find(alone)]
        found += [f for find in FLOW_RULES for f in find(linked)]
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be read", fix="check the scripts it was made from") from error
    end = text.count("\n") + 1
    here = [replace(f, related=tuple(p for p in f.related if p.line <= end)) for f in found if f.place.line <= end]
    first = {(f.rule, f.place.line): f for f in reversed(here)}
    return sorted(first.values(), key=lambda f: (f.place, f.rule))
