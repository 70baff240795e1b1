"""Old names of torch.amp, which can be rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Edit, Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.script import Script
from halfstep_check.lint.syntax import keyword

OLD_MODULES = ("torch.cuda.amp", "torch.cpu.amp")
MOVED = {"autocast", "GradScaler", "custom_fwd", "custom_bwd"}


def find(amp: Amp) -> Iterator[Finding]:
    yield from deprecated(amp.script)


def deprecated(script: Script) -> Iterator[Finding]:
    """One finding a file, at the first old name; code that serves old and new torch alike is right as it is."""
    imports = [n for n in script.nodes if isinstance(n, ast.ImportFrom) and n.module in OLD_MODULES]
    imports = [node for node in imports if any(alias.name in MOVED for alias in node.names)]
    calls = [(call, found) for call in script.calls if (found := old_attribute(call.func, script))]
    uses: list[ast.ImportFrom | ast.Call] = [*imports, *(call for call, _ in calls)]
    first = min(uses, key=lambda node: node.lineno, default=None)
    if first is None or serves_two_versions(script):
        return
    # Uses can be told apart only when a single import brings the names in.
    edits = list(import_edits(script, imports[0])) if len(imports) == 1 else []
    edits += [edit for call, found in calls for edit in attribute_edits(script, call, *found)]
    old = imports[0].module or "" if imports else calls[0][1][0]
    places = len(imports) + len(calls)
    message = f"{old} is deprecated since torch 2.4" + (f" ({places} places)" if places > 1 else "")
    device = old.split(".")[1]
    fix = f'torch.amp, with the device first: torch.amp.autocast("{device}", …)'
    yield script.finding("deprecated-amp", first, message, fix=fix, edits=tuple(edits))


def serves_two_versions(script: Script) -> bool:
    """`try: from torch.amp … except ImportError: from torch.cuda.amp …`, or a test of torch's version around it."""
    modules = {node.module for node in script.nodes if isinstance(node, ast.ImportFrom)}
    if modules & {"torch.amp"} and modules & set(OLD_MODULES):
        return True
    guards = [n for n in script.nodes if isinstance(n, ast.Try) or isinstance(n, ast.If) and asks_version(n.test)]
    return any(uses_old_name(node, script) for guard in guards for node in script.below(guard))


def asks_version(test: ast.expr) -> bool:
    text = ast.unparse(test).lower()
    return "hasattr" in text or "version" in text


def uses_old_name(node: ast.AST, script: Script) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in OLD_MODULES
    return isinstance(node, ast.Attribute) and asks_old(node, script)


def asks_old(node: ast.Attribute, script: Script) -> bool:
    return node.attr in MOVED and script.name_of(node.value) in OLD_MODULES


def attribute_edits(script: Script, call: ast.Call, module: str, name: str) -> tuple[Edit, ...]:
    """Only where the module is written out; through an alias such as `amp.autocast` the import would have to change."""
    line, column = script.position(call.func.lineno, call.func.col_offset)
    if not script.lines[line - 1].startswith(module, column):
        return ()
    arguments = call_edits(script, call, module, name)
    start, end = (line, column), (line, column + len(module))
    return (Edit(path=script.path, start=start, end=end, replacement="torch.amp"), *arguments) if arguments else ()


def old_attribute(node: ast.expr, script: Script) -> tuple[str, str] | None:
    """(module, name) of `torch.cuda.amp.autocast` written out; a name imported from there is reported at its import."""
    if not isinstance(node, ast.Attribute) or not asks_old(node, script):
        return None
    return script.name_of(node.value), node.attr


def import_edits(script: Script, node: ast.ImportFrom) -> tuple[Edit, ...]:
    """The import and every use of what it imports, or nothing when one of them cannot be rewritten for certain."""
    module = node.module or ""
    if module not in script.lines[node.lineno - 1] or any(a.name not in MOVED or a.asname for a in node.names):
        return ()
    column = script.lines[node.lineno - 1].index(module)
    start, end = (node.lineno, column), (node.lineno, column + len(module))
    edits = [Edit(path=script.path, start=start, end=end, replacement="torch.amp")]
    names = {alias.name for alias in node.names}
    calls = {id(call.func): call for call in script.calls}
    for use in script.nodes:
        if isinstance(use, ast.Name) and use.id in names:
            if id(use) not in calls:
                return ()
            rewritten = call_edits(script, calls[id(use)], module, use.id)
            if not rewritten:
                return ()
            edits += rewritten
    return tuple(edits)


def call_edits(script: Script, call: ast.Call, module: str, name: str) -> tuple[Edit, ...]:
    """`autocast(True)` becomes `autocast("cuda", enabled=True)`; no edit where the meaning is not certain."""
    device = module.split(".")[1]
    if len(call.args) > 1 and name == "autocast" or any(isinstance(a, ast.Starred) for a in call.args):
        return ()
    if any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args) or keyword(call, "device"):
        return ()  # written for torch.amp already
    line, column = script.position(call.func.end_lineno or 0, call.func.end_col_offset or 0)
    if script.lines[line - 1][column : column + 1] != "(":
        return ()
    word = f'device_type="{device}"' if name.startswith("custom") else f'"{device}"'
    comma = ", " if call.args or call.keywords else ""
    edits = [Edit(path=script.path, start=(line, column + 1), end=(line, column + 1), replacement=word + comma)]
    if name == "autocast" and call.args:
        at = script.position(call.args[0].lineno, call.args[0].col_offset)
        # Same spot as the device where the first argument follows directly: one edit must say both.
        if at == (line, column + 1):
            return (Edit(path=script.path, start=at, end=at, replacement=f"{word}, enabled="),)
        edits.append(Edit(path=script.path, start=at, end=at, replacement="enabled="))
    return tuple(edits)
