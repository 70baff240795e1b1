"""Calls of torch.amp: old names, the arguments each call accepts, and how a GradScaler is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halfstep_check.findings import Edit, Finding
from halfstep_check.lint.amp import Amp, is_scaled_backward
from halfstep_check.lint.flow import Trace
from halfstep_check.lint.regions import read_format
from halfstep_check.lint.script import (
    Script,
    argument,
    dotted_name,
    is_constant,
    keyword,
    last_name,
    leaves,
    pair_assignments,
)

OLD_MODULES = ("torch.cuda.amp", "torch.cpu.amp")
MOVED = {"autocast", "GradScaler", "custom_fwd", "custom_bwd"}


def find_old_names(amp: Amp) -> Iterator[Finding]:
    """Find old names of torch.amp, once per file; code that supports old and new torch is left alone."""
    script = amp.script
    imports = [n for n in script.nodes if isinstance(n, ast.ImportFrom) and n.module in OLD_MODULES]
    imports = [node for node in imports if any(alias.name in MOVED for alias in node.names)]
    calls = [(call, found) for call in script.calls if (found := match_old_attribute(call.func, script))]
    uses: list[ast.ImportFrom | ast.Call] = [*imports, *(call for call, _ in calls)]
    first = min(uses, key=lambda node: node.lineno, default=None)
    if first is None or serves_two_versions(script):
        return
    # Edit all occurrences or none: half an edit would leave both names in the file. Uses of imported names are
    # unambiguous only if a single import provides them.
    parts = [make_attribute_edits(script, call, *found) for call, found in calls]
    parts += [make_import_edits(script, imports[0]) if len(imports) == 1 else ()] if imports else []
    edits = [edit for part in parts for edit in part] if all(parts) else []
    old = imports[0].module or "" if imports else calls[0][1][0]
    places = len(imports) + len(calls)
    message = f"{old} is deprecated since torch 2.4" + (f" ({places} times)" if places > 1 else "")
    device = old.split(".")[1]
    fix = f'torch.amp, with the device first: torch.amp.autocast("{device}", …), torch.amp.GradScaler("{device}", …)'
    yield script.report("deprecated-amp", first, message, fix=fix, edits=tuple(edits))


def serves_two_versions(script: Script) -> bool:
    """Match `try: from torch.amp … except ImportError: from torch.cuda.amp …`, or a test of torch's version around
    it."""
    modules = {node.module for node in script.nodes if isinstance(node, ast.ImportFrom)}
    if modules & {"torch.amp"} and modules & set(OLD_MODULES):
        return True
    guards = [n for n in script.nodes if isinstance(n, ast.Try) or isinstance(n, ast.If) and asks_version(n.test)]
    return any(uses_old_name(node, script) for guard in guards for node in script.walk_below(guard))


def asks_version(test: ast.expr) -> bool:
    text = ast.unparse(test).lower()
    return "hasattr" in text or "version" in text


def uses_old_name(node: ast.AST, script: Script) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in OLD_MODULES
    return isinstance(node, ast.Attribute) and asks_old(node, script)


def asks_old(node: ast.Attribute, script: Script) -> bool:
    return node.attr in MOVED and script.resolve_name(node.value) in OLD_MODULES


def make_attribute_edits(script: Script, call: ast.Call, module: str, name: str) -> tuple[Edit, ...]:
    """Return the edits of a call that writes the module out; through an alias such as `amp.autocast` the import would
    have to change."""
    line, column = script.find_position(call.func.lineno, call.func.col_offset)
    if not script.lines[line - 1].startswith(module, column):
        return ()
    arguments = make_call_edits(script, call, module, name)
    start, end = (line, column), (line, column + len(module))
    return (Edit(path=script.path, start=start, end=end, replacement="torch.amp"), *arguments) if arguments else ()


def match_old_attribute(node: ast.expr, script: Script) -> tuple[str, str] | None:
    """Return (module, name) of `torch.cuda.amp.autocast` written out; a name imported from there is reported at its
    import."""
    if not isinstance(node, ast.Attribute) or not asks_old(node, script):
        return None
    return script.resolve_name(node.value), node.attr


def make_import_edits(script: Script, node: ast.ImportFrom) -> tuple[Edit, ...]:
    """Return the import and every use of what it imports, or nothing when one of them cannot be rewritten for
    certain."""
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
            rewritten = make_call_edits(script, calls[id(use)], module, use.id)
            if not rewritten:
                return ()
            edits += rewritten
    return tuple(edits)


def make_call_edits(script: Script, call: ast.Call, module: str, name: str) -> tuple[Edit, ...]:
    """Return the edits that turn `autocast(True)` into `autocast("cuda", enabled=True)`; none if the meaning is
    uncertain."""
    device = module.split(".")[1]
    if len(call.args) > 1 and name == "autocast" or any(isinstance(a, ast.Starred) for a in call.args):
        return ()
    if any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args) or keyword(call, "device"):
        return ()  # written for torch.amp already
    line, column = script.find_position(call.func.end_lineno or 0, call.func.end_col_offset or 0)
    if script.lines[line - 1][column : column + 1] != "(":
        return ()
    word = f'device_type="{device}"' if name.startswith("custom") else f'"{device}"'
    comma = ", " if call.args or call.keywords else ""
    edits = [Edit(path=script.path, start=(line, column + 1), end=(line, column + 1), replacement=word + comma)]
    if name == "autocast" and call.args:
        at = script.find_position(call.args[0].lineno, call.args[0].col_offset)
        # Same spot as the device where the first argument follows directly: one edit must say both.
        if at == (line, column + 1):
            return (Edit(path=script.path, start=at, end=at, replacement=f"{word}, enabled="),)
        edits.append(Edit(path=script.path, start=at, end=at, replacement="enabled="))
    return tuple(edits)


FLAG = re.compile(
    r"^(use_?|enable_?|no_?|with_?|is_?)*(amp|fp16|bf16|mixed|mixed_precision|half|autocast|enabled?)$", re.I
)
NEW_AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
OLD_SCALERS = ("torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
NEW_SCALERS = ("torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One argument of one call: the kinds that torch refuses there, and what it wants."""

    names: tuple[str, ...]
    position: int
    argument: str
    refused: tuple[str, ...]
    wants: str
    fix: str


CONTRACTS = (
    Contract(names=NEW_AUTOCASTS, position=0, argument="device_type", refused=("device", "bool", "dtype"),
             wants="the device's type, a string", fix='autocast("cuda", …), or device.type'),
    Contract(names=NEW_AUTOCASTS, position=1, argument="dtype", refused=("bool", "str"),
             wants="a torch.dtype as its second argument", fix="dtype=torch.float16, enabled=…"),
    Contract(names=("torch.cuda.amp.autocast",), position=0, argument="enabled", refused=("str", "device", "dtype"),
             wants="true or false first: the device is in its name", fix='torch.amp.autocast("cuda", …)'),
    Contract(names=OLD_SCALERS, position=0, argument="init_scale", refused=("str", "device", "bool"),
             wants="the first scale, a number", fix='torch.amp.GradScaler("cuda", enabled=…)'),
    Contract(names=NEW_SCALERS, position=0, argument="device", refused=("bool",),
             wants="the device first", fix='GradScaler("cuda", enabled=…)'),
)  # fmt: skip


def find_refused_arguments(amp: Amp) -> Iterator[Finding]:
    script = amp.script
    if not serves_two_versions(script):
        for call in script.calls:
            yield from find_broken_contracts(script, call)
            yield from find_missing_device(script, call)


def find_broken_contracts(script: Script, call: ast.Call) -> Iterator[Finding]:
    name = script.resolve_name(call.func)
    for contract in CONTRACTS:
        value = argument(call, contract.position, contract.argument) if name in contract.names else None
        by_position = len(call.args) > contract.position
        if value is not None and infer_kind(script, value, by_name=by_position) in contract.refused:
            message = f"{last_name(name)}() gets `{ast.unparse(value)}` where it wants {contract.wants}"
            yield script.report("launch-refused", call, message, fix=contract.fix)


def find_missing_device(script: Script, call: ast.Call) -> Iterator[Finding]:
    """Find `from torch.amp import autocast` and `autocast()`: there the device comes first, and has no default."""
    given = call.args or any(item.arg in (None, "device_type") for item in call.keywords)
    if script.resolve_name(call.func) in NEW_AUTOCASTS and not given:
        message = "torch.amp.autocast() without a device_type is a TypeError; only torch.cuda.amp's has a default"
        yield script.report("launch-refused", call, message, fix='autocast("cuda")')
    elif script.resolve_name(call.func) == "torch.cuda.amp.autocast" and keyword(call, "device_type") is not None:
        message = "torch.cuda.amp.autocast() takes no device_type: a TypeError"
        yield script.report("launch-refused", call, message, fix="torch.amp.autocast(…)")
    elif script.resolve_name(call.func) in (*OLD_SCALERS, *NEW_SCALERS) and keyword(call, "device_type") is not None:
        yield script.report("launch-refused", call, "GradScaler() takes device, not device_type", fix='device="cuda"')


def infer_kind(script: Script, node: ast.expr, *, by_name: bool = False) -> str:
    """Return bool, str, device or dtype, where the script leaves no doubt; `by_name`, a flag's name counts as bool."""
    asked, node = node, script.read_constant(node) or node
    if isinstance(node, ast.Constant):
        return {bool: "bool", str: "str"}.get(type(node.value), "")
    if isinstance(node, ast.Compare) or isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "bool"
    if isinstance(node, ast.Call):
        name = script.resolve_name(node.func)
        return {"torch.device": "device", "torch.cuda.is_available": "bool"}.get(name, "")
    if read_format(node, script):
        return "dtype"
    values = script.list_values(dotted_name(asked))
    made = {infer_kind(script, value) for value in values if isinstance(value, ast.Call | ast.Constant | ast.Compare)}
    if len(made) == 1 and len(values) == len(
        [v for v in values if isinstance(v, ast.Call | ast.Constant | ast.Compare)]
    ):
        return made.pop()
    return "bool" if by_name and not values and FLAG.search(last_name(dotted_name(asked))) else ""


def find_misused_scalers(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from find_double_updates(amp, trace)
    yield from find_tested_results(amp)
    yield from find_missing_attributes(amp)
    yield from find_called_scalers(amp)
    yield from find_dropped_scaling(amp)
    yield from find_loads_into_none(amp)


SCALER_API = {
    *("scale", "unscale_", "step", "update", "is_enabled", "state_dict", "load_state_dict"),
    *(f"{verb}_{name}" for verb in ("get", "set") for name in ("growth_factor", "backoff_factor", "growth_interval")),
    *("get_scale", "_scale", "_enabled", "_device", "_growth_tracker", "_per_optimizer_states", "_init_scale"),
    *("_growth_factor", "_backoff_factor", "_growth_interval", "_unscale_grads_", "_found_inf_per_device"),
    *("_check_inf_per_device", "_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker", "_maybe_opt_step"),
    *("_get_scale_async", "_get_growth_tracker", "_init_growth_tracker", "_amp_update_scale_cpu_"),
}


def find_missing_attributes(amp: Amp) -> Iterator[Finding]:
    """Find `scaler.clip_grad_norm_(…)`: GradScaler has no such thing, unless the script asks first or sets it
    itself."""
    set_here = {n.attr for n in amp.script.nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
    asked = {n.value for n in amp.script.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    known = SCALER_API | set_here | asked
    for node in amp.script.nodes if amp.scalers else ():
        unknown = isinstance(node, ast.Attribute) and node.attr not in known
        if unknown and isinstance(node, ast.Attribute) and is_scaler(amp, node.value) and node.attr[:2] != "__":
            message = f"GradScaler has no `{node.attr}`: an AttributeError when this line runs"
            fix = "unscale_(optimizer), then torch.nn.utils.clip_grad_norm_; step() skips what is not finite"
            yield amp.script.report("scaler-misused", node, message, fix=fix)


def find_called_scalers(amp: Amp) -> Iterator[Finding]:
    """Find `scaler(loss).backward()`; timm's wrapper is called so, and has no step() and update() of its own."""
    used = {dotted_name(call.func) for call in amp.script.calls}
    for call in amp.script.calls:
        name = dotted_name(call.func)
        own = "scaler" in last_name(name).lower() and amp.script.find_class(name) is None
        if (
            own
            and call.args
            and {f"{name}.step", f"{name}.update"} <= used
            and last_name(name) not in amp.script.local_names
        ):
            message = f"a GradScaler is not called: `{ast.unparse(call)}` is a TypeError"
            fix = f"{name}.scale({ast.unparse(call.args[0])})"
            yield amp.script.report("scaler-misused", call, message, fix=fix)


def find_dropped_scaling(amp: Amp) -> Iterator[Finding]:
    """Find `scaler.scale(loss)` as a line of its own: the product is dropped, and nothing goes backward."""
    for node in (n for n in amp.script.nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)):
        call = node.value
        func = call.func if isinstance(call, ast.Call) else None
        named = (
            isinstance(func, ast.Attribute) and func.attr == "scale" and "scal" in last_name(dotted_name(func.value))
        )
        if named and isinstance(call, ast.Call) and len(call.args) == 1:
            message = f"what {ast.unparse(call)} returns is dropped: no backward() runs, and the step has no gradients"
            yield amp.script.report("step-without-backward", call, message, fix=f"{ast.unparse(call)}.backward()")


def find_loads_into_none(amp: Amp) -> Iterator[Finding]:
    """Find `scaler = GradScaler() if amp else None` with a load_state_dict() on it that no test guards."""
    script = amp.script
    for call in (c for c in script.calls if getattr(c.func, "attr", "") == "load_state_dict"):
        target = call.func.value  # type: ignore[attr-defined]
        name = dotted_name(target)
        uses = script.list_passed_values(name) if name and script.is_taken(target) else [target]
        off = [u for u in uses if any(map(is_none_without_amp(amp), script.list_values(dotted_name(u))))]
        if off and not any(is_guarded(script, node, last_name(name)) for node in (call, *off)):
            message = f"{last_name(name)} is None without AMP: this is an AttributeError at every resume"
            yield amp.script.report("scaler-misused", call, message, fix=f"if {name} is not None: …")


def is_none_without_amp(amp: Amp) -> Callable[[ast.expr], bool]:
    def judge(value: ast.expr) -> bool:
        choice = isinstance(value, ast.IfExp) and is_constant(value.orelse, None)
        return choice and any(True for _ in amp.list_made_scalers(value))

    return judge


def is_guarded(script: Script, node: ast.AST, name: str) -> bool:
    """Return whether a test, or a try, in the function around a node looks at the scaler, at AMP, or at the
    checkpoint."""
    home = script.owners.get(id(node), script.tree)
    kinds = ast.If | ast.IfExp | ast.Try | ast.BoolOp
    around = [n for n in script.walk_below(home) if isinstance(n, kinds) and node in script.walk_below(n)]
    tests = [n.test if isinstance(n, ast.If | ast.IfExp) else n for n in around]
    left = [n.test for n in script.walk_below(home) if isinstance(n, ast.If) and leaves(n.body)]
    words = re.compile(rf"\b{name}\b|scaler|amp\b|fp16|mixed|half|precision|cuda|enable")
    return any(isinstance(t, ast.Try) or words.search(ast.unparse(t)) for t in (*tests, *left))


def find_double_updates(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find update() and update() again with no step between: no inf was looked for since, and GradScaler raises."""
    scaled = {last_name(made.key) for made in amp.scalers if made.enabled is not False}
    updates = [e for e in trace.calls("update") if last_name(e.receiver) in scaled]
    for first, second in zip(updates, updates[1:], strict=False):
        between = trace.events[first.index + 1 : second.index]
        same = first.receiver == second.receiver and first.loops == second.loops
        same = same and first.conditions == second.conditions and first.node is not second.node
        if same and not any(e.method in ("step", "unscale_") for e in between):
            message = "update() a second time after one step: GradScaler raises, no inf check was recorded since"
            yield amp.script.report("scaler-misused", second.node, message, fix="update once", related=first.node)


def is_scaler(amp: Amp, node: ast.expr) -> bool:
    """Return whether a name is a GradScaler made here (or None) and nothing else, in its own class or function."""
    name = dotted_name(node)
    if last_name(name) not in {last_name(made.key) for made in amp.scalers}:
        return False
    home = amp.script.owners.get(id(node))
    if "." not in name and home is not None and name in {a.arg for a in ast.walk(home.args) if isinstance(a, ast.arg)}:
        return False
    own = [c for c in amp.script.classes if node in amp.script.walk_below(c)] if name.startswith("self.") else []
    places: list[ast.AST] = [*own] or [amp.script.tree]
    stores = [n for place in places for n in amp.script.walk_below(place) if isinstance(n, ast.Assign)]
    values = [
        v
        for n in stores
        for t, v in pair_assignments(n)
        if last_name(dotted_name(t)) == last_name(name) and ("." in dotted_name(t)) == ("." in name)
    ]
    return bool(values) and all(is_constant(v, None) or any(True for _ in amp.list_made_scalers(v)) for v in values)


def find_tested_results(amp: Amp) -> Iterator[Finding]:
    """Find `stepped = scaler.step(optimizer)` and a test of it: without a closure it is None, skipped or not."""
    keys = {last_name(made.key) for made in amp.scalers}
    keys |= {last_name(e.scaled_by) for t in amp.traces for e in t.events if is_scaled_backward(e)}
    results: dict[str, ast.Call] = {}
    for name, values in amp.script.assigned.items():
        call = values[0] if len(values) == 1 else None
        if isinstance(call, ast.Call) and is_bare_step(amp.script, call, keys):
            results[name] = call
    for node in amp.script.nodes:
        if not isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            continue
        for inner in amp.script.walk_below(node.test):
            call = results.get(dotted_name(inner))
            if isinstance(inner, ast.Call) and is_bare_step(amp.script, inner, keys):
                call = inner
            if call is not None:
                message = "the result of scaler.step() does not tell a skip: without a closure it is None either way"
                fix = "compare scaler.get_scale() before and after update()"
                yield amp.script.report("step-result-tested", node.test, message, fix=fix, related=call)
                break


def is_bare_step(script: Script, call: ast.Call, scalers: set[str]) -> bool:
    """Match `scaler.step(optimizer)` without a closure, of an optimizer of torch: others may return something."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "step" else None
    bare = last_name(dotted_name(owner)) in scalers and len(call.args) == 1 and not call.keywords
    return bare and not script.made_elsewhere(dotted_name(call.args[0]))
