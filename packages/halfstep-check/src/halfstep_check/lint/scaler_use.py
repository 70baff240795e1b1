"""A scaler is asked what it can answer, and used as what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_scaled_backward
from halfstep_check.lint.flow import Trace
from halfstep_check.lint.script import Script
from halfstep_check.lint.syntax import dotted_name, is_constant, last, leaves, paired


def find(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from updated_twice(amp, trace)
    yield from asked_for_result(amp)
    yield from missing_attribute(amp)
    yield from entered_scale(amp)
    yield from called_as_function(amp)
    yield from scaled_for_nothing(amp)
    yield from loaded_into_none(amp)


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
    known = SCALER_API | set_here | asked
    for node in amp.script.nodes if amp.scalers else ():
        unknown = isinstance(node, ast.Attribute) and node.attr not in known
        if unknown and isinstance(node, ast.Attribute) and is_scaler(amp, node.value) and node.attr[:2] != "__":
            message = f"GradScaler has no `{node.attr}`: an AttributeError when this line runs"
            fix = "unscale_(optimizer), then torch.nn.utils.clip_grad_norm_; step() skips what is not finite"
            yield amp.script.finding("scaler-misused", node, message, fix=fix)


def entered_scale(amp: Amp) -> Iterator[Finding]:
    """`with scaler.scale(loss):` is apex's form; torch's scale() returns a tensor."""
    for node in (n for n in amp.script.nodes if isinstance(n, ast.With)):
        for call in (item.context_expr for item in node.items):
            func = call.func if isinstance(call, ast.Call) else None
            if isinstance(func, ast.Attribute) and func.attr == "scale" and is_scaler(amp, func.value):
                message = "scale() returns a tensor, which is no context: this raises, and nothing is scaled"
                fix = f"{ast.unparse(call)}.backward()"
                yield amp.script.finding("scaler-misused", node, message, fix=fix)


def called_as_function(amp: Amp) -> Iterator[Finding]:
    """`scaler(loss).backward()`; timm's wrapper is called so, and has no step() and update() of its own."""
    used = {dotted_name(call.func) for call in amp.script.calls}
    for call in amp.script.calls:
        name = dotted_name(call.func)
        own = "scaler" in last(name).lower() and amp.script.class_of(name) is None
        if (
            own
            and call.args
            and {f"{name}.step", f"{name}.update"} <= used
            and last(name) not in amp.script.local_names
        ):
            message = f"a GradScaler is not called: `{ast.unparse(call)}` is a TypeError"
            fix = f"{name}.scale({ast.unparse(call.args[0])})"
            yield amp.script.finding("scaler-misused", call, message, fix=fix)


def scaled_for_nothing(amp: Amp) -> Iterator[Finding]:
    """`scaler.scale(loss)` as a line of its own: the product is dropped, and nothing goes backward."""
    for node in (n for n in amp.script.nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)):
        call = node.value
        func = call.func if isinstance(call, ast.Call) else None
        named = isinstance(func, ast.Attribute) and func.attr == "scale" and "scal" in last(dotted_name(func.value))
        if named and isinstance(call, ast.Call) and len(call.args) == 1:
            message = f"what {ast.unparse(call)} returns is dropped: no backward() runs, and the step has no gradients"
            yield amp.script.finding("step-without-backward", call, message, fix=f"{ast.unparse(call)}.backward()")


def loaded_into_none(amp: Amp) -> Iterator[Finding]:
    """`scaler = GradScaler() if amp else None`, and load_state_dict() on it that no test guards."""
    script = amp.script
    for call in (c for c in script.calls if getattr(c.func, "attr", "") == "load_state_dict"):
        target = call.func.value  # type: ignore[attr-defined]
        name = dotted_name(target)
        uses = script.handed(name) if name and script.is_taken(target) else [target]
        off = [u for u in uses if any(map(is_none_without_amp(amp), script.values(dotted_name(u))))]
        if off and not any(is_guarded(script, node, last(name)) for node in (call, *off)):
            message = f"{last(name)} is None without AMP: this is an AttributeError at every resume"
            yield amp.script.finding("scaler-misused", call, message, fix=f"if {name} is not None: …")


def is_none_without_amp(amp: Amp) -> Callable[[ast.expr], bool]:
    def judge(value: ast.expr) -> bool:
        choice = isinstance(value, ast.IfExp) and is_constant(value.orelse, None)
        return choice and any(True for _ in amp.made_scalers(value))

    return judge


def is_guarded(script: Script, node: ast.AST, name: str) -> bool:
    """Whether a test, or a try, in the function around a node looks at the scaler, at AMP, or at the checkpoint."""
    home = script.owners.get(id(node), script.tree)
    kinds = ast.If | ast.IfExp | ast.Try | ast.BoolOp
    around = [n for n in script.below(home) if isinstance(n, kinds) and node in script.below(n)]
    tests = [n.test if isinstance(n, ast.If | ast.IfExp) else n for n in around]
    left = [n.test for n in script.below(home) if isinstance(n, ast.If) and leaves(n.body)]
    words = re.compile(rf"\b{name}\b|scaler|amp\b|fp16|mixed|half|precision|cuda|enable")
    return any(isinstance(t, ast.Try) or words.search(ast.unparse(t)) for t in (*tests, *left))


def updated_twice(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """update() and update() again with no step between: no inf was looked for since, and GradScaler raises."""
    scaled = {last(made.key) for made in amp.scalers if made.enabled is not False}
    updates = [e for e in trace.calls("update") if last(e.receiver) in scaled]
    for first, second in zip(updates, updates[1:], strict=False):
        between = trace.events[first.index + 1 : second.index]
        same = first.receiver == second.receiver and first.loops == second.loops
        same = same and first.conditions == second.conditions and first.node is not second.node
        if same and not any(e.method in ("step", "unscale_") for e in between):
            message = "update() a second time after one step: GradScaler raises, no inf check was recorded since"
            yield amp.script.finding("scaler-misused", second.node, message, fix="update once", related=first.node)


def is_scaler(amp: Amp, node: ast.expr) -> bool:
    """Whether a name is a GradScaler made here (or None) and nothing else, in its own class or function."""
    name = dotted_name(node)
    if last(name) not in {last(made.key) for made in amp.scalers}:
        return False
    home = amp.script.owners.get(id(node))
    if "." not in name and home is not None and name in {a.arg for a in ast.walk(home.args) if isinstance(a, ast.arg)}:
        return False
    own = [c for c in amp.script.classes if node in amp.script.below(c)] if name.startswith("self.") else []
    places: list[ast.AST] = [*own] or [amp.script.tree]
    stores = [n for place in places for n in amp.script.below(place) if isinstance(n, ast.Assign)]
    values = [
        v
        for n in stores
        for t, v in paired(n)
        if last(dotted_name(t)) == last(name) and ("." in dotted_name(t)) == ("." in name)
    ]
    return bool(values) and all(is_constant(v, None) or any(True for _ in amp.made_scalers(v)) for v in values)


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
