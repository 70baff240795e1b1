"""Questions to single nodes of a syntax tree, which need no script around them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def last(key: str) -> str:
    """`scaler` of `self.scaler` and of `train:scaler`."""
    return key.rsplit(".", 1)[-1].rsplit(":", 1)[-1]


def dotted_name(node: ast.AST | None) -> str:
    """`a.b.c` of a chain of attributes, or an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def paired(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with their values; `a, b = f(), g()` is two assignments."""
    for target in node.targets:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(target.elts) == len(node.value.elts)
        ):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument by position or by name."""
    return call.args[position] if len(call.args) > position else keyword(call, name)


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def methods_of(class_node: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in class_node.body if isinstance(node, Function)}


def parameters_of(root: ast.AST) -> set[str]:
    return {a.arg for a in ast.walk(root.args) if isinstance(a, ast.arg)} if isinstance(root, Function) else set()


def passed_by(statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """Tests whose answer is known after a statement, because the other one leaves; those inside its blocks too."""
    if isinstance(statement, ast.If):
        if leaves(statement.body):
            yield statement.test, False
        elif leaves(statement.orelse):
            yield statement.test, True
    if isinstance(statement, ast.If | ast.With | ast.Try):
        handlers = getattr(statement, "handlers", [])
        parts = [statement.body, getattr(statement, "orelse", []), *(handler.body for handler in handlers)]
        for inner in (inner for part in parts if not leaves(part) for inner in part):
            yield from passed_by(inner)


def ends_window(test: ast.expr) -> ast.expr | None:
    """`i % n == 0` for `i % n != 0` and for `i % n` alone, which hold where it does not."""
    unequal = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq) and len(test.ops) == 1
    left = test.left if unequal and isinstance(test, ast.Compare) else test
    zero = test.comparators[0] if unequal and isinstance(test, ast.Compare) else ast.Constant(value=0)
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mod) or getattr(zero, "value", None) != 0:
        return None
    return ast.copy_location(ast.Compare(left=left, ops=[ast.Eq()], comparators=[zero]), test)


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a block never falls through to what follows it."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
