"""A scaler that is there on every path, and not asked what it does not answer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, is_scaled_backward, is_scaler_step, last
from halfstep.align.lint.flow import Trace, is_none, leaves
from halfstep.align.lint.script import Function, dotted_name, names_in, paired

AMP_WORDS = ("amp", "fp16", "half", "mixed", "scaler", "precision", "cuda", "dtype", "device", "16")
"""A condition with one of these may mean the same as the one under which the scaler is made."""


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from undefined(amp, trace)
    yield from asked_for_result(amp)
    yield from missing_attribute(amp)


SCALER_API = {
    *("scale", "unscale_", "step", "update", "is_enabled", "state_dict", "load_state_dict"),
    *(f"{verb}_{name}" for verb in ("get", "set") for name in ("growth_factor", "backoff_factor", "growth_interval")),
    *("get_scale", "_scale", "_enabled", "_device", "_growth_tracker", "_per_optimizer_states", "_init_scale"),
    *("_growth_factor", "_backoff_factor", "_growth_interval", "_unscale_grads_", "_found_inf_per_device"),
    *("_check_inf_per_device", "_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker", "_maybe_opt_step"),
    *("_get_scale_async", "_get_growth_tracker", "_init_growth_tracker", "_amp_update_scale_cpu_"),
}


def missing_attribute(amp: Amp) -> Iterator[Finding]:
    """`scaler.clip_grad_norm_(…)`: GradScaler has no such thing, unless the script asks first or sets it itself."""
    set_here = {n.attr for n in amp.script.nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
    asked = {n.value for n in amp.script.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for node in amp.script.nodes if amp.scalers else ():
        unknown = isinstance(node, ast.Attribute) and node.attr not in SCALER_API | set_here | asked
        if unknown and isinstance(node, ast.Attribute) and is_scaler(amp, node.value) and node.attr[:2] != "__":
            message = f"GradScaler has no `{node.attr}`: an AttributeError when this line runs"
            fix = "unscale_(optimizer), then torch.nn.utils.clip_grad_norm_; step() skips what is not finite"
            yield amp.script.finding("scaler-misused", node, message, fix=fix)


def is_scaler(amp: Amp, node: ast.expr) -> bool:
    """Whether a name is a GradScaler made here (or None) and nothing else, in its own class or function."""
    name = dotted_name(node)
    if last(name) not in {last(made.key) for made in amp.scalers}:
        return False
    home = amp.script.owners.get(id(node))
    if "." not in name and home is not None and name in {a.arg for a in ast.walk(home.args) if isinstance(a, ast.arg)}:
        return False
    own = [c for c in amp.script.classes if node in amp.script.below(c)] if name.startswith("self.") else []
    places = own or [amp.script.tree]
    stores = [n for place in places for n in amp.script.below(place) if isinstance(n, ast.Assign)]
    values = [
        v
        for n in stores
        for t, v in paired(n)
        if last(dotted_name(t)) == last(name) and ("." in dotted_name(t)) == ("." in name)
    ]
    return bool(values) and all(is_none(v) or any(True for _ in amp.made_scalers(v)) for v in values)


def undefined(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """A scaler made in one branch of an `if`, and used where that branch need not have run."""
    for made in amp.scalers:
        home: ast.AST = amp.script.owners.get(id(made.call), amp.script.tree)
        if "." in made.key or home is not trace.root:
            continue
        branch = one_sided(amp, home, made.key, made.call)
        if branch is None:
            continue
        test = ast.unparse(branch.test)
        for use in trace.events:
            is_use = use.scaled_by == made.key or is_scaler_step(use, made.key)
            made_at = next((e.index for e in trace.events if e.node is made.call), len(trace.events))
            after = use.index > made_at and branch not in use.guards
            words = {*AMP_WORDS, *(name.lower() for name in names_in(branch.test)), test.lower()}
            related = any(word in text.lower() for text, _ in use.conditions for word in words)
            if is_use and after and not related:
                message = f"{made.key} exists only where `{test}`: on the other path this is a NameError"
                fix = f"make it on every path: {made.key} = GradScaler(enabled=…)"
                yield amp.script.finding("scaler-undefined", use.node, message, fix=fix, related=made.call)
                return


def one_sided(amp: Amp, home: ast.AST, name: str, call: ast.Call) -> ast.If | None:
    """The `if` of this function that assigns the name on one side only, when nothing else gives it a value."""
    stores = [n for n in amp.script.nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
    arguments = [a.arg for a in ast.walk(home.args) if isinstance(a, ast.arg)] if isinstance(home, Function) else []
    globals_ = [n for n in amp.script.below(home) if isinstance(n, ast.Global | ast.Nonlocal)]
    own = [n for n in stores if amp.script.owners.get(id(n), amp.script.tree) is home]
    outer = [n for n in stores if id(n) not in amp.script.owners] if isinstance(home, Function) else []
    if len(own) != 1 or outer or name in arguments or globals_:
        return None
    around = [n for n in amp.script.below(home) if isinstance(n, ast.If) and call in amp.script.calls_below(n)]
    if len(around) != 1 or any(
        call in amp.script.calls_below(n) for n in amp.script.below(home) if isinstance(n, ast.Try)
    ):
        return None
    branch = around[0]
    inside = any(call in amp.script.calls_below(statement) for statement in branch.body)
    other = branch.orelse if inside else branch.body
    exits = any("exit" in ast.unparse(c.func) for s in other for c in amp.script.calls_below(s))
    main = "__name__" in ast.unparse(branch.test)
    return None if leaves(other) or exits or main else branch


def asked_for_result(amp: Amp) -> Iterator[Finding]:
    """`stepped = scaler.step(optimizer)` and a test of it: without a closure it is None, skipped or not."""
    keys = {last(made.key) for made in amp.scalers}
    keys |= {last(e.scaled_by) for t in amp.traces for e in t.events if is_scaled_backward(e)}
    results: dict[str, ast.Call] = {}
    for name, values in amp.script.assigned.items():
        call = values[0] if len(values) == 1 else None
        if isinstance(call, ast.Call) and is_bare_step(call, keys):
            results[name] = call
    for node in amp.script.nodes:
        if not isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            continue
        for inner in amp.script.below(node.test):
            call = results.get(dotted_name(inner))
            if isinstance(inner, ast.Call) and is_bare_step(inner, keys):
                call = inner
            if call is not None:
                message = "the result of scaler.step() does not tell a skip: without a closure it is None either way"
                fix = "compare scaler.get_scale() before and after update()"
                yield amp.script.finding("step-result-tested", node.test, message, fix=fix, related=call)
                break


def is_bare_step(call: ast.Call, scalers: set[str]) -> bool:
    """`scaler.step(optimizer)` without a closure."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "step" else None
    return last(dotted_name(owner)) in scalers and len(call.args) == 1 and not call.keywords
