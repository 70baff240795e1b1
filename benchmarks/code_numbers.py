"""Count the lines of the library and of the application, in one or several checkouts.

    git worktree add .old COMMIT
    python benchmarks/code_numbers.py .old .

Code lines have no blanks, comments or docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, help="checkouts")
    trees: list[Path] = parser.parse_args().trees
    columns = [count(tree.resolve()) for tree in trees]
    print(f"{'':44}", *(f"{tree!s:>12}" for tree in trees))
    for name in columns[0]:
        print(f"{name:44}", *(f"{column[name]:>12}" for column in columns))


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
    }


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
