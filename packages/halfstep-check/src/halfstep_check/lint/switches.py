"""Switches of mixed precision that do not switch: a flag that is always true, a test that never changes."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.regions import compares_dtype_with_text, may_be_fp16
from halfstep_check.lint.script import AUTOCASTS, SCALERS, Script, dotted_name, is_constant, keyword, last_name
from halfstep_check.spellings import parse_dtype

AMP_FLAG = re.compile(r"(^|[-_.])(use|enable)?(amp|fp16|bf16|half|mixed|autocast|precision)($|[-_])", re.IGNORECASE)


def find_stuck_switches(amp: Amp) -> Iterator[Finding]:
    yield from find_bool_flags(amp.script)
    for test in list_amp_tests(amp.script):
        yield from find_fixed_tests(amp.script, test)
    yield from find_always_on(amp.script)
    yield from find_or_of_strings(amp.script)
    if amp.goes_backward:
        yield from find_announced_flags(amp.script)
        yield from find_missing_clip(amp.script)


def find_bool_flags(script: Script) -> Iterator[Finding]:
    """Find `add_argument("--amp", type=bool)`: bool("False") is True."""
    for call in script.calls:
        kind = keyword(call, "type")
        if getattr(call.func, "attr", "") != "add_argument" or not isinstance(kind, ast.Name) or kind.id != "bool":
            continue
        flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        flag = next((flag for flag in flags if AMP_FLAG.search(flag)), None)
        if flag is not None:
            message = f"type=bool makes every value true: `{flag} False` turns it on"
            fix = "action=argparse.BooleanOptionalAction"
            yield script.report("amp-switch-stuck", call, message, fix=fix)


ASKS_AMP = re.compile(r"(use|enable|with)?_?(amp|mixed_precision|fp16|bf16|autocast)(_enabled)?", re.IGNORECASE)
LOW_PRECISION = re.compile(
    r"autocast|scaler|accelerat|deepspeed|float16|half\(|apex|fabric|(?-i:\bTrainer\()", re.IGNORECASE
)


def find_announced_flags(script: Script) -> Iterator[Finding]:
    """Find `self.use_amp` that is set and logged in a file that trains in fp32 only."""
    foreign = {dotted_name(b) for c in script.classes for b in c.bases} - {*script.class_by_name, "object", "ABC"}
    flags = {name: values for name, values in script.assigned.items() if ASKS_AMP.fullmatch(last_name(name))}
    for name, values in flags.items() if not foreign and not LOW_PRECISION.search(script.code) else ():
        tests = [n.test for n in script.nodes if isinstance(n, ast.If) and announces(script, n, name)]
        logs = [c for c in script.calls if is_log(c)]
        quiet = {id(n) for part in (*tests, *logs) for n in script.walk_below(part)}
        loads = (n for n in script.nodes if isinstance(getattr(n, "ctx", None), ast.Load) and dotted_name(n) == name)
        reads = list(loads)
        if reads and all(id(n) in quiet for n in reads):
            message = f"{name} is logged, and nothing else reads it: training runs in fp32"
            yield script.report(
                "amp-switch-stuck", values[0], message, fix="pass it to autocast(…, enabled=…), or remove it"
            )


def is_log(call: ast.Call) -> bool:
    return re.search(r"^print$|log", ast.unparse(call.func), re.IGNORECASE) is not None


def announces(script: Script, node: ast.If, name: str) -> bool:
    """Return whether an `if` only logs, and sets the flag that it asks for."""
    inner = [n for statement in node.body for n in script.walk_below(statement)]
    stores = {dotted_name(t) for n in inner if isinstance(n, ast.Assign) for t in n.targets}
    calls = (n for n in inner if isinstance(n, ast.Call))
    jumps = any(isinstance(n, ast.Return | ast.Raise | ast.Continue | ast.Break) for n in inner)
    return all(map(is_log, calls)) and stores <= {name} and not jumps


def find_missing_clip(script: Script) -> Iterator[Finding]:
    """Find `if args.clip_grad: scaler.unscale_(optimizer)`, and no clip after it."""
    for node in (n for n in script.nodes if isinstance(n, ast.If) and "clip" in ast.unparse(n.test)):
        only = [s.value for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
        unscales = len(only) == len(node.body) and all(getattr(c.func, "attr", "") == "unscale_" for c in only)
        around = script.walk_below(script.owners.get(id(node), script.tree))
        tests = {id(n) for i in around if isinstance(i, ast.If) for n in script.walk_below(i.test)}
        words = [getattr(n, "attr", "") or getattr(n, "id", "") for n in around if id(n) not in tests]
        if unscales and not any("clip" in word.lower() or word == "clamp_" for word in words):
            message = f"`{ast.unparse(node.test)}` only unscales: no gradient is ever clipped"
            fix = "torch.nn.utils.clip_grad_norm_(…) after unscale_()"
            yield script.report("amp-switch-stuck", node, message, fix=fix)


def find_always_on(script: Script) -> Iterator[Finding]:
    """Find `add_argument("--amp", action="store_true", default=True)`: nothing turns it off."""
    for call in script.calls:
        action, flags = keyword(call, "action"), [a.value for a in call.args if isinstance(a, ast.Constant)]
        flag = next((f for f in flags if isinstance(f, str) and AMP_FLAG.search(f)), "")
        stuck = (
            isinstance(action, ast.Constant)
            and action.value == "store_true"
            and is_constant(keyword(call, "default"), True)
        )
        word = flag.lstrip("-").replace("-", "[-_]")
        if flag and stuck and not re.search(rf"(no|disable|without)[-_]?{word}|{word}\s*=\s*False", script.text):
            message = f"{flag} is store_true with default=True: no command line can turn it off"
            fix = "action=argparse.BooleanOptionalAction"
            yield dataclasses.replace(
                script.report("amp-switch-stuck", call, message, fix=fix), severity=Severity.WARNING
            )


def find_or_of_strings(script: Script) -> Iterator[Finding]:
    """Find `precision in ["bf16" or "bfloat16"]`, which is `precision in ["bf16"]`."""
    for node in script.nodes:
        parts = [n for c in node.comparators for n in ast.walk(c)] if isinstance(node, ast.Compare) else []
        words = [n.values[0] for n in parts if isinstance(n, ast.BoolOp) and isinstance(n.op, ast.Or)]
        if any(isinstance(w, ast.Constant) and isinstance(w.value, str) and parse_dtype(w.value) for w in words):
            message = f"`{ast.unparse(node)}` tests only the first word: `a or b` of two strings is `a`"
            yield script.report("amp-switch-stuck", node, message, fix="x in ('a', 'b')")


def list_amp_tests(script: Script) -> Iterator[ast.expr]:
    """Return what decides on autocast or a scaler: `enabled=`, the test around it, and the value of `use_amp` and the
    like."""
    for call in script.calls:
        if script.resolve_name(call.func) in AUTOCASTS | SCALERS and (enabled := keyword(call, "enabled")) is not None:
            yield enabled
    for name, values in script.assigned.items():
        if AMP_FLAG.search(name.rsplit(".", 1)[-1]):
            yield from values
    for node in script.nodes:
        branch = node.body if isinstance(node, ast.If) else [node.body] if isinstance(node, ast.IfExp) else []
        if isinstance(node, ast.If | ast.IfExp) and any(makes_amp(script, part) for part in branch):
            yield node.test


def makes_amp(script: Script, node: ast.AST) -> bool:
    return any(script.resolve_name(call.func) in AUTOCASTS | SCALERS for call in script.calls_below(node))


def find_fixed_tests(script: Script, test: ast.expr) -> Iterator[Finding]:
    """Find the parts of a test that are the same in every run."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from find_fixed_tests(script, part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from find_fixed_tests(script, test.operand)
    elif isinstance(test, ast.Attribute) and script.resolve_name(test) == "torch.cuda.is_available":
        message = "is_available is a function and is not called here: always true"
        yield script.report("amp-switch-stuck", test, message, fix="torch.cuda.is_available()")
    elif isinstance(test, ast.Compare) and compares_dtype_with_text(test, script) and may_be_fp16(test.left, script):
        message = f"`{ast.unparse(test)}` is never true: a torch.dtype is compared with a string"
        yield script.report("amp-switch-stuck", test, message, fix="compare with torch.float16")
