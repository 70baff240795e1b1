"""Old names of torch.amp, and a bf16 check that counts emulation. Both can be rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.align.findings import Edit, Finding
from halfstep.align.lint.amp import Amp
from halfstep.align.lint.script import Script, is_constant, keyword

OLD_MODULES = ("torch.cuda.amp", "torch.cpu.amp")
MOVED = {"autocast", "GradScaler", "custom_fwd", "custom_bwd"}


def find(amp: Amp) -> Iterator[Finding]:
    yield from deprecated(amp.script)
    yield from emulated_bf16(amp.script)


def deprecated(script: Script) -> Iterator[Finding]:
    imports = [n for n in script.nodes if isinstance(n, ast.ImportFrom) and n.module in OLD_MODULES]
    for node in imports:
        names = [alias.name for alias in node.names if alias.name in MOVED]
        if names:
            message, fix = described(node.module or "", names[0])
            # Uses can be told apart only when a single import brings the names in.
            edits = import_edits(script, node) if len(imports) == 1 else ()
            yield script.finding("deprecated-amp", node, message, fix=fix, edits=edits)
    for call in script.calls:
        if found := old_attribute(call.func, script):
            message, fix = described(*found)
            yield script.finding("deprecated-amp", call, message, fix=fix, edits=attribute_edits(script, call, *found))


def attribute_edits(script: Script, call: ast.Call, module: str, name: str) -> tuple[Edit, ...]:
    """Only where the module is written out; through an alias such as `amp.autocast` the import would have to change."""
    line, column = script.position(call.func.lineno, call.func.col_offset)
    if not script.lines[line - 1].startswith(module, column):
        return ()
    arguments = call_edits(script, call, module, name)
    start, end = (line, column), (line, column + len(module))
    return (Edit(path=script.path, start=start, end=end, replacement="torch.amp"), *arguments) if arguments else ()


def described(module: str, name: str) -> tuple[str, str]:
    device = module.split(".")[1]
    return f"{module}.{name} is deprecated since torch 2.4", f'torch.amp.{name}("{device}", …)'


def old_attribute(node: ast.expr, script: Script) -> tuple[str, str] | None:
    """(module, name) of `torch.cuda.amp.autocast` written out; a name imported from there is reported at its import."""
    if not isinstance(node, ast.Attribute) or node.attr not in MOVED:
        return None
    module = script.name_of(node.value)
    return (module, node.attr) if module in OLD_MODULES else None


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


def emulated_bf16(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        if not script.name_of(call.func).endswith("cuda.is_bf16_supported"):
            continue
        if is_constant(keyword(call, "including_emulation"), False) or call.args:
            continue
        message = "is_bf16_supported() counts emulation: it says yes on a T4 and a V100, where bf16 is slower than fp32"
        fix = "is_bf16_supported(including_emulation=False)"
        yield script.finding("bf16-check-emulated", call, message, fix=fix, edits=strict_check(script, call))


def strict_check(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    if call.keywords:
        return ()
    at = script.position(call.end_lineno or 0, (call.end_col_offset or 1) - 1)
    return (Edit(path=script.path, start=at, end=at, replacement="including_emulation=False"),)
