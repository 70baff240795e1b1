"""Lint for mixed-precision code: rules over the syntax tree, with data flow through functions and methods."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

from halfstep_check.findings import Finding
from halfstep_check.lint import (
    accumulation,
    api,
    checkpoints,
    clearing,
    coverage,
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
    numerics.find_refused_bce,
    api.find_refused_arguments,
    switches.find_stuck_switches,
    api.find_old_names,
    numerics.find_host_waits,
    accumulation.find_unreduced_gradients,
)
"""Rules about single lines of this file."""
FLOW_RULES = (
    numerics.find_manual_casts,
    scaler_order.find_wrong_order,
    iteration.find_wrong_iterations,
    iteration.find_unreached_calls,
    regimes.find_unscaled_fp16,
    scaler_order.find_ignored_skips,
    accumulation.find_undivided_windows,
    weights.find_half_weights,
    api.find_misused_scalers,
    clearing.find_repeated_backward,
    clearing.find_uncleared_gradients,
    coverage.find_uncovered_models,
    checkpoints.find_unsaved_scalers,
    checkpoints.find_remade_scalers,
    hiding.find_hidden_nans,
)
"""Rules that follow objects through calls, also into helpers imported from neighbouring files."""
RELEVANT = re.compile(
    r"\bautocast\b|GradScaler|\.backward\(|is_bf16_supported|cuda\.amp|type\s*=\s*bool\b|Trainer\(|LightningModule"
)
"""What every rule needs one of; other files are not analysed."""

TEST = re.compile(r"^test_|^conftest$")
TEST_FOLDERS = ("test", "tests")
PROBE = re.compile(
    r"^(bench|benchmark|profile|profiling)(_|$)|_(bench|benchmark|profile|profiler|test)$", re.IGNORECASE
)
PROBE_FOLDERS = ("benchmark", "benchmarks", "profiling")
TIMES = re.compile(r"speed|benchmark|profile", re.IGNORECASE)
SAVES = re.compile(r"\bsave(_checkpoint|_pretrained|_model|_state|_weights)?\(")


def discards_weights(path: str, text: str) -> bool:
    """Return whether a script is a test, or a benchmark that saves nothing: what it trains is thrown away."""
    name, folder = Path(path).stem, Path(path).parent.name.lower()
    if TEST.search(name) or folder in TEST_FOLDERS:
        return True
    return (PROBE.search(name) is not None or folder in PROBE_FOLDERS) and not SAVES.search(text)


def list_timing_lines(tree: ast.Module) -> set[int]:
    """Return the lines of functions that only measure: `def benchmark_step(…)`, `def test_speed(…)`."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and TIMES.search(n.name)]
    return {line for node in functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def lint_tree(tree: ast.Module, text: str, path: str) -> list[Finding]:
    """Return all findings of one script, each once."""
    if not RELEVANT.search(text):
        return []
    try:
        alone = Amp(Script(tree=tree, text=text, path=path))
        whole, linked_text = append_imports(tree, text, path)
        linked = alone if whole is tree else Amp(Script(tree=whole, text=linked_text, path=path))
        found = [f for find in LINE_RULES for f in find(alone)]
        if not discards_weights(path, text):
            timed = list_timing_lines(tree)
            found += [f for find in FLOW_RULES for f in find(linked) if f.place.line not in timed]
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be read", fix="check the scripts it was made from") from error
    # Imported helpers are appended to the text: lines past its end are other files'.
    end = text.count("\n") + 1
    here = [replace(f, related=tuple(p for p in f.related if p.line <= end)) for f in found if f.place.line <= end]
    # Several traces may report one line; reversed, so that the first report wins.
    first = {(f.rule, f.place.line): f for f in reversed(here)}
    return sorted(first.values(), key=lambda f: (f.place, f.rule))
