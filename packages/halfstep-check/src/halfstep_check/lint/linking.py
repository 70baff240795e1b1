"""Appends what a script imports from neighbouring files to the script.

A trainer that scales through a helper of another file is judged with that helper: its classes and functions are
appended, and the calls are followed into them. Findings in appended lines belong to the other file, and are left to it.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

from halfstep_check.lint.script import Function

SCALES = re.compile(r"GradScaler|autocast|\.backward\(|unscale_")
MAX_CHARACTERS = 200_000
"""More than any helper is; a library is not read."""
MAX_PARENTS = 5
"""Folders above the script where a package may start."""


def append_imports(tree: ast.Module, text: str, path: str) -> tuple[ast.Module, str]:
    """Return the script and its text, with the definitions that it imports from neighbouring files and that scale or
    step."""
    own = {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    parts: list[str] = []
    for node in (n for n in tree.body if isinstance(n, ast.ImportFrom)):
        file = find_imported_file(node, Path(path))
        names = frozenset(alias.name for alias in node.names if alias.asname in (None, alias.name)) - own
        parts += extract_definitions(file, names) if file is not None and names else []
    if not parts or sum(map(len, parts)) > MAX_CHARACTERS:
        return tree, text
    # Line numbers of the script itself stay valid; those after its end belong to other files.
    whole = "\n".join([text, *dict.fromkeys(parts), ""])
    return ast.parse(whole), whole


def find_imported_file(node: ast.ImportFrom, path: Path) -> Path | None:
    """Return the file that `from .amp import …` or `from training.amp import …` means, from the script's folder
    upwards."""
    parts = (node.module or "").split(".")
    folders = list(path.resolve().parents)
    starts = folders[node.level - 1 : node.level] if node.level else folders[:MAX_PARENTS]
    for start in starts:
        for file in (start.joinpath(*parts).with_suffix(".py"), start.joinpath(*parts, "__init__.py")):
            if file.is_file() and file != path.resolve():
                return file
    return None


@lru_cache(maxsize=256)
def extract_definitions(file: Path, names: frozenset[str]) -> list[str]:
    """Return the imported classes and functions, what they use of their own file, and its imports from torch."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text) if SCALES.search(text) and len(text) < MAX_CHARACTERS else ast.Module([], [])
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []
    known = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    wanted = [known[name] for name in sorted(names & known.keys())]
    for node in wanted:  # grows as it goes
        used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        wanted += [known[name] for name in sorted(used & known.keys()) if known[name] not in wanted]
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and "torch" in ast.unparse(n)]
    return [ast.unparse(node) for node in (*imports, *wanted)] if wanted else []
