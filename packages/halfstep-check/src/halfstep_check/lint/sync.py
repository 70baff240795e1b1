"""no_sync() leaves out the reduction over ranks; the backward before the step must have it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.script import Script
from halfstep_check.lint.syntax import Function, dotted_name, names_in

RULE = "gradients-not-reduced"
FIX = "run the backward of a window's last micro-batch outside no_sync()"
REDUCES = re.compile(r"all_?reduce|reduce_scatter|sync_grad|average_grad", re.IGNORECASE)
"""Whoever reduces by hand."""


def find(amp: Amp) -> Iterator[Finding]:
    if "no_sync" in amp.script.code and not REDUCES.search(amp.script.code):
        yield from never_reduced(amp.script)
        yield from wrong_micro_batch(amp.script)


def unsynced(script: Script, node: ast.AST) -> list[ast.With]:
    """`with model.no_sync():`; a choice between that and nullcontext() is decided at run time."""
    blocks = [n for n in script.below(node) if isinstance(n, ast.With)]
    return [n for n in blocks if any(is_no_sync(item.context_expr) for item in n.items)]


def is_no_sync(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and getattr(context.func, "attr", "") == "no_sync"


def named(script: Script, node: ast.AST, method: str) -> list[ast.Call]:
    return [c for c in script.calls_below(node) if getattr(c.func, "attr", "") == method]


def never_reduced(script: Script) -> Iterator[Finding]:
    """Every backward() of a function that steps stands in no_sync()."""
    for function in (n for n in script.nodes if isinstance(n, Function)):
        chosen = {id(n) for i in script.below(function) if isinstance(i, ast.If) for n in script.below(i)}
        blocks = [b for b in unsynced(script, function) if id(b) not in chosen]
        inside = {id(c) for block in blocks for c in named(script, block, "backward")}
        steps = [
            c for c in named(script, function, "step") if script.is_optimizer(dotted_name(c.func)[: -len(".step")])
        ]
        if inside and steps and all(id(c) in inside for c in named(script, function, "backward")):
            message = "every backward() before the step is in no_sync(): each rank steps on its own gradients"
            yield script.finding(RULE, blocks[0], message, fix=FIX, related=steps[0])


def wrong_micro_batch(script: Script) -> Iterator[Finding]:
    """no_sync() at the micro-batch whose backward the step waits for, as its test and the counter's place tell."""
    for loop in (n for n in script.nodes if isinstance(n, ast.For | ast.While)):
        choices = [(i, n) for i, n in enumerate(loop.body) if isinstance(n, ast.If)]
        for place, choice in choices:
            test, block = ast.unparse(choice.test), unsynced(script, choice)
            holds = any(b in script.below(s) for b in block for s in choice.body)
            due = [(i, n) for i, n in choices if i >= place and ast.unparse(n.test) == test]
            due = [(i, n) for i, n in due if any(named(script, s, "step") for s in n.body)]
            moved = due and counts(loop.body[place + 1 : due[0][0]], choice.test)
            if "%" in test and block and due and holds != bool(moved):
                message = f"no_sync() also covers the last micro-batch before the step where `{test}`"
                yield script.finding(RULE, block[0], message, fix=FIX, related=due[0][1])
                break


def counts(between: list[ast.stmt], test: ast.expr) -> bool:
    """Whether the counter that a test looks at goes on between it and the same test."""
    targets = {dotted_name(n.target) for n in between if isinstance(n, ast.AugAssign)}
    return bool(targets & (names_in(test) | {dotted_name(n) for n in ast.walk(test)}))
