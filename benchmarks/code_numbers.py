"""Count what one person has to take over, in one or several checkouts.

    git worktree add .old COMMIT
    python benchmarks/code_numbers.py .old .

Code lines have no blanks, comments or docstrings. The config's files are those with a function that is given the
RunConfig between `halfstep train` and its first step, in the last of the checkouts.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

CONFIG_TRACER = """
import sys, threading
files, is_done = set(), False
def watch(frame, event, argument):
    global is_done
    code = frame.f_code
    if event == "return" and code.co_name == "__call__" and code.co_filename.endswith("run/engine.py"):
        is_done = True
    if is_done or event != "call" or "/src/halfstep" not in code.co_filename:
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = (kind for name in names for kind in type(frame.f_locals.get(name)).__mro__)
    if any(kind.__name__ == "RunConfig" for kind in kinds):
        files.add(code.co_filename)
from halfstep.__main__ import main
sys.argv = ["halfstep", "train", "unet", "train.max_steps=2", "device=cpu", "precision=fp32", "log.quiet=true",
            "train.fast=off", "data.num_workers=0", "--out", sys.argv[1] + "/run"]
sys.setprofile(watch)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
assert is_done
print(len(files))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, help="checkouts")
    trees: list[Path] = parser.parse_args().trees
    columns = [count(tree.resolve()) for tree in trees]
    print(f"{'':44}", *(f"{tree!s:>12}" for tree in trees))
    for name in columns[0]:
        print(f"{name:44}", *(f"{column[name]:>12}" for column in columns))
    print(f"{'files the config passes to the first step':44}", trace_config(trees[-1].resolve()))


def count(tree: Path) -> dict[str, str]:
    sources = find_sources(tree)
    lines = [count_lines(path) for source in sources for path in source.rglob("*.py")]
    raw, code, comments = (sum(counts) for counts in zip(*lines, strict=True))
    return {
        "files": f"{len(lines):,}",
        "lines": f"{raw:,}",
        "code lines": f"{code:,}",
        "of these in the library": f"{sum(count_lines(path)[1] for path in sources[0].rglob('*.py')):,}",
        "lines with a comment": f"{comments / raw:.1%}",
        **{name: f"{sum(count_lines(path)[1] for path in found):,}" for name, found in find_others(tree).items()},
    }


def find_others(tree: Path) -> dict[str, list[Path]]:
    tests = [tree / "tests", *tree.glob("packages/*/tests")]
    return {
        "code lines of halfstep-check": [*tree.glob("packages/halfstep-check/src/**/*.py")],
        "code lines of tests": [path for folder in tests for path in folder.rglob("*.py")],
        "code lines of benchmarks": [*(tree / "benchmarks").glob("*.py")],
    }


def trace_config(tree: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        paths = {"PYTHONPATH": ":".join(str(source.parent) for source in find_sources(tree)), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", CONFIG_TRACER, folder]
        return subprocess.run(command, env=paths, check=True, capture_output=True, text=True).stdout.split()[-1]


def count_lines(path: Path) -> tuple[int, int, int]:
    """Return all lines of a file, its lines of code, and its lines with a comment."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    empty = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in empty:
            code |= set(range(token.start[0], token.end[0] + 1))
    return text.count("\n"), len(code - docstrings), len(comments)


def find_sources(tree: Path) -> list[Path]:
    """Return the folders of the library and of the application, which were one package once."""
    packages = tree / "packages"
    divided = [packages / "halfstep/src/halfstep", packages / "halfstep-train/src/halfstep_train"]
    return divided if divided[0].exists() else [tree / "src" / "halfstep"]


if __name__ == "__main__":
    main()
