"""Benchmarks, demos and examples are run by hand, some only on a GPU: what they import of halfstep is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [path for folder in ("benchmarks", "demos", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("halfstep.", "halfstep_check.")):
            yield from ((node.module or "", name.name) for name in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_of_halfstep_is_there(path: Path) -> None:
    for module, name in imported_names(path):
        has_name = hasattr(importlib.import_module(module), name)
        # A module of its own is not imported: Triton's are for GPUs only.
        assert has_name or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"
