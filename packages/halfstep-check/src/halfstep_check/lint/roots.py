"""Where traces start: functions that train or evaluate, and that nothing else of the script runs."""

from __future__ import annotations

import ast

from halfstep_check.lint.flow import MAX_INLINED, Trace
from halfstep_check.lint.script import Script
from halfstep_check.lint.syntax import Function, methods_of

STEP_WORDS = {
    *("backward", "unscale_", "scale", "clip_grad_norm_", "clip_grad_value_", "zero_grad", "eval", "get_scale"),
    "autograd",
    *("autocast", "GradScaler", "no_grad", "inference_mode", "binary_cross_entropy", "BCELoss"),
}
STEPPED_WORDS = ("scaler", "optim", "sched", "ema", "opt")


def trains(function: ast.AST, script: Script) -> bool:
    """Whether a function does any part of a training or evaluation step itself."""
    for node in script.below(function):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in STEP_WORDS or name in script.autocast_names:
            return True
        if name in ("step", "update") and isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).lower()
            if any(word in owner for word in (*STEPPED_WORDS, *script.scaler_names)):
                return True
    return False


def training_functions(script: Script) -> frozenset[int]:
    """Functions that take part in a step, and those that call them, by identity."""
    functions = [node for node in script.nodes if isinstance(node, Function)]
    found = {id(node) for node in functions if trains(node, script)}
    called = {
        id(f): {getattr(c.func, "attr", "") or getattr(c.func, "id", "") for c in script.calls_below(f)}
        for f in functions
    }
    for _ in range(MAX_INLINED):
        names = {node.name for node in functions if id(node) in found}
        found |= {id(node) for node in functions if called[id(node)] & names}
    return frozenset(found)


def calls_any(script: Script, function: Function, methods: dict[str, Function]) -> bool:
    names = {call.func.attr for call in script.calls_below(function) if isinstance(call.func, ast.Attribute)}
    return not names.isdisjoint(methods)


def traces_of(script: Script) -> list[Trace]:
    """One trace for every training function that nothing else runs, and one for the module's own statements."""
    trainers = training_functions(script)
    traces = [Trace(script, script.tree, trainers=trainers)]
    owners = {id(method): node for node in script.classes for method in methods_of(node).values()}
    functions = [node for node in script.nodes if isinstance(node, Function) and id(node) in trainers]
    traces += [Trace(script, function, owners.get(id(function)), trainers=trainers) for function in functions]
    # A base's loop that calls steps of its subclass.
    traces += [
        Trace(script, method, node, trainers=trainers)
        for node in script.classes
        for name, method in script.methods(node).items()
        if id(method) in trainers and name not in methods_of(node) and calls_any(script, method, methods_of(node))
    ]
    inlined = {function for trace in traces for function in trace.inlined}
    return [trace for trace in traces if id(trace.root) not in inlined]
