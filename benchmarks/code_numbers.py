"""Count what a new engineer has to read, in one or several checkouts.

    git worktree add .old COMMIT
    python benchmarks/code_numbers.py .old .

Code lines have no blanks, comments or docstrings. Public names are functions, classes and constants of modules without
an underscore. A single importer is the only module that imports another one of the same folder. The config's files are
those with a function that is given the RunConfig between `halfstep train` and its first step; the step's files those
with a function that the second step of hs.Step calls. A family's files elsewhere are those outside its folder that no
other family needs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

FAMILIES = ("classification", "segmentation", "language", "diffusion", "radio", "slots")
SHARED = ("models", "data", "kernels")
"""Rooms that may hold what belongs to one family only."""

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
            "train.fast=off", "data.num_workers=0", "--out", OUT]
sys.setprofile(watch)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
assert is_done
print("counted", len(files))
"""

STEP_TRACER = """
import sys, torch, halfstep as hs
model = torch.nn.Linear(4, 3)
step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), precision="fp32", clip_norm=1.0)
files = set()
def watch(frame, event, argument):
    if event == "call" and "/src/halfstep" in frame.f_code.co_filename:
        files.add(frame.f_code.co_filename)
loss = lambda batch: model(batch).square().mean()
step(loss, [torch.randn(2, 4)])
sys.setprofile(watch)
step(loss, [torch.randn(2, 4)])
sys.setprofile(None)
print("counted", len(files))
"""


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
    files = {
        ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for source in sources
        for path in sorted(source.rglob("*.py"))
    }
    lines = [count_lines(path) for path in files.values()]
    raw, code, comments = (sum(counts) for counts in zip(*lines, strict=True))
    importers = find_importers(files)
    single = [
        name
        for name, users in importers.items()
        if len(users) == 1 and folder_of(next(iter(users))) == folder_of(name) and not name.endswith("_triton")
    ]
    elsewhere = [len(find_family_files(family, importers)) for family in FAMILIES]
    return {
        "files": f"{len(files):,}",
        "lines": f"{raw:,}",
        "code lines": f"{code:,}",
        "of these in the library": f"{sum(count_lines(path)[1] for path in sources[0].rglob('*.py')):,}",
        "lines with a comment": f"{comments / raw:.1%}",
        "public names": f"{sum(len(public_names(path)) for path in files.values()):,}",
        "modules with a single importer, same folder": f"{len(single)}",
        "rooms": f"{len([path for one in sources for path in one.iterdir() if (path / '__init__.py').exists()])}",
        "files the config passes to the first step": trace(CONFIG_TRACER, tree),
        "files a step of hs.Step passes": trace(STEP_TRACER, tree),
        "files of a family outside its folder": f"{min(elsewhere)} to {max(elsewhere)}",
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


def public_names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def find_importers(files: dict[str, Path]) -> dict[str, set[str]]:
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfstep"):
                module = node.module or ""
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    importers[inner if inner in files else module].add(name)
    return importers


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def find_family_files(family: str, importers: dict[str, set[str]]) -> list[str]:
    """Return modules of shared rooms that serve this family only, directly or through each other."""

    def users(module: str, seen: frozenset[str]) -> set[str]:
        found: set[str] = set()
        for user in importers[module] - seen:
            if user.split(".")[1] in SHARED:
                found |= users(user, seen | {module})
            else:
                found.add(".".join(user.split(".")[1:3]))
        return found

    modules = [name for name in list(importers) if name.count(".") > 1 and name.split(".")[1] in SHARED]
    return [module for module in modules if users(module, frozenset()) == {f"workloads.{family}"}]


def find_sources(tree: Path) -> list[Path]:
    """Return the folders of the library and of the application, which were one package once."""
    packages = tree / "packages"
    divided = [packages / "halfstep/src/halfstep", packages / "halfstep-train/src/halfstep_train"]
    return divided if divided[0].exists() else [tree / "src" / "halfstep"]


def trace(script: str, tree: Path) -> str:
    paths = [str(source.parent) for source in find_sources(tree)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"OUT = {folder!r} + '/run'\n{script}"], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}, cwd=folder,
        )  # fmt: skip
    return done.stdout.rsplit("counted ", 1)[1].strip()


if __name__ == "__main__":
    main()
