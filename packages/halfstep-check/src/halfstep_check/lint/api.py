"""Calls of torch.amp: old names, a device that is missing, and how a GradScaler is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Edit, Finding
from halfstep_check.lint.amp import Amp, is_same_object
from halfstep_check.lint.flow import Trace
from halfstep_check.lint.script import (
    Script,
    dotted_name,
    is_constant,
    keyword,
    last_name,
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


NEW_AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
OLD_SCALERS = ("torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
NEW_SCALERS = ("torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler")


def find_refused_arguments(amp: Amp) -> Iterator[Finding]:
    script = amp.script
    if not serves_two_versions(script):
        for call in script.calls:
            yield from find_missing_device(script, call)


def find_missing_device(script: Script, call: ast.Call) -> Iterator[Finding]:
    """Find `from torch.amp import autocast` and `autocast()`: there the device comes first, and has no default."""
    given = call.args or any(item.arg in (None, "device_type") for item in call.keywords)
    if script.resolve_name(call.func) in NEW_AUTOCASTS and not given:
        message = "torch.amp.autocast() raises TypeError without a device_type; only torch.cuda.amp's has a default"
        yield script.report("launch-refused", call, message, fix='autocast("cuda")')
    elif script.resolve_name(call.func) == "torch.cuda.amp.autocast" and keyword(call, "device_type") is not None:
        message = "torch.cuda.amp.autocast() takes no device_type and raises TypeError"
        yield script.report("launch-refused", call, message, fix="torch.amp.autocast(…)")
    elif script.resolve_name(call.func) in (*OLD_SCALERS, *NEW_SCALERS) and keyword(call, "device_type") is not None:
        yield script.report("launch-refused", call, "GradScaler() takes device, not device_type", fix='device="cuda"')


def find_misused_scalers(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from find_double_updates(amp, trace)
        yield from find_foreign_scaler_step(amp, trace)
    yield from find_missing_attributes(amp)
    yield from find_called_scalers(amp)
    yield from find_dropped_scaling(amp)


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
            message = f"GradScaler has no attribute `{node.attr}`: this line raises AttributeError"
            fix = "call unscale_(optimizer), then torch.nn.utils.clip_grad_norm_(); step() skips non-finite gradients"
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
            message = f"a GradScaler cannot be called: `{ast.unparse(call)}` raises TypeError"
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
            message = f"the result of {ast.unparse(call)} is dropped: backward() never runs, and there are no gradients"
            yield amp.script.report("scaler-misused", call, message, fix=f"{ast.unparse(call)}.backward()")


def find_double_updates(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find update() and update() again with no step between: no inf was looked for since, and GradScaler raises."""
    scaled = {last_name(made.key) for made in amp.scalers if made.enabled is not False}
    updates = [e for e in trace.calls("update") if last_name(e.receiver) in scaled]
    for first, second in zip(updates, updates[1:], strict=False):
        between = trace.events[first.index + 1 : second.index]
        same = first.receiver == second.receiver and first.loops == second.loops
        same = same and first.conditions == second.conditions and first.node is not second.node
        if same and not any(e.method in ("step", "unscale_") for e in between):
            message = "second update() after one step: GradScaler raises, because no inf check was recorded in between"
            yield amp.script.report(
                "scaler-misused", second.node, message, fix="call update() once", related=first.node
            )


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


def find_foreign_scaler_step(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find scaler.step(optimizer) of an optimizer that belongs to DeepSpeed, or to an Accelerator that scales
    itself."""
    for step in (e for e in trace.calls("step") if e.optimizer and e.arguments and not amp.is_disabled(e.receiver)):
        if not any(is_same_object(made.key, step.receiver) for made in amp.scalers):
            continue
        # Only if every path here prepares it: a script with a branch for DeepSpeed may have another one.
        given = [e for e in trace.events[: step.index] if e.conditions <= step.conditions]
        stores = (e.node for e in given if step.optimizer in e.targets)
        owners = (find_owner(amp, node.value) for node in stores if isinstance(node, ast.Assign))
        owner = next(filter(None, owners), "")
        if owner:
            scaled = [e for e in trace.calls("backward") if e.scaled_by == step.receiver and not e.excludes(step)]
            message = (
                f"{last_name(step.optimizer)} belongs to {owner}, which scales itself: this GradScaler bypasses it"
            )
            fix = f"use {owner}'s backward() and step(), without a GradScaler"
            yield amp.script.report(
                "framework-bypassed", (scaled or [step])[-1].node, message, fix=fix, related=step.node
            )
            return


def find_owner(amp: Amp, value: ast.expr) -> str:
    """Return who scales the loss of an optimizer with this value: "deepspeed" for deepspeed.initialize(…), the name of
    the accelerator for accelerator.prepare(…) if it scales; otherwise an empty string."""
    if not isinstance(value, ast.Call):
        return ""
    name = amp.script.resolve_name(value.func)
    if name == "deepspeed.initialize":
        return "deepspeed"
    accelerator = dotted_name(value.func).removesuffix(".prepare")
    if accelerator not in amp.accelerators or not name.endswith(".prepare"):
        return ""
    # Accelerator(mixed_precision="fp16") scales by itself; with a plugin, DeepSpeed or FSDP do.
    made = [call for call in amp.script.list_values(accelerator) if isinstance(call, ast.Call)]
    has_plugin = any(keyword(call, word) is not None for call in made for word in ("deepspeed_plugin", "fsdp_plugin"))
    return last_name(accelerator) if has_plugin or amp.accelerators[accelerator] == "fp16" else ""
