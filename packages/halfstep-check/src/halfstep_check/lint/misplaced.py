"""Decorators on functions that autograd never calls, optimizers that no one makes, timesteps on the wrong device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.script import SCALERS, Function, Script, dotted_name, keyword, list_methods


def find_plain_custom_functions(amp: Amp) -> Iterator[Finding]:
    """Find custom_fwd and custom_bwd outside of classes: they belong on methods of a torch.autograd.Function."""
    methods = {id(method) for owner in amp.script.classes for method in owner.body}
    for node in amp.script.nodes:
        if not isinstance(node, Function) or id(node) in methods:
            continue
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = amp.script.resolve_name(called)
            if name.endswith(("amp.custom_fwd", "amp.custom_bwd")):
                message = f"{name.rpartition('.')[2]} on a plain function: autograd does not call {node.name}, and "
                message += "nothing restores the autocast state of forward in backward"
                fix = "make forward and backward static methods of a torch.autograd.Function, and decorate these"
                yield amp.script.report("custom-fwd-on-function", decorator, message, fix=fix)


def find_unmade_optimizers(amp: Amp) -> Iterator[Finding]:
    """Find scaler.step(self.optimizer) in a class that makes its scaler and never its optimizer."""
    script = amp.script
    # An attribute that anything in the file sets, by name or with setattr, may be the one.
    stored = {n.attr for n in script.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    sets_by_name = any(dotted_name(call.func) in ("setattr", "vars") for call in script.calls)
    inherited = {dotted_name(base) for owner in script.classes for base in owner.bases}
    for owner in script.classes:
        declared = {dotted_name(n.target) for n in owner.body if isinstance(n, ast.AnnAssign)} | set(
            list_methods(owner)
        )
        is_alone = not owner.bases and owner.name not in inherited and "__getattr__" not in declared
        if not is_alone or sets_by_name or not makes_scaler(owner, script):
            continue
        read = {dotted_name(n) for n in script.walk_below(owner) if isinstance(n, ast.Attribute)}
        unmade = {n for n in read if n.count(".") == 1 and n.startswith("self.")} - {
            f"self.{n}" for n in stored | declared
        }
        for call in script.calls_below(owner):
            is_step = isinstance(call.func, ast.Attribute) and call.func.attr in ("step", "unscale_") and call.args
            # If more is missing, the class is a part of one, whose rest makes the optimizer.
            if is_step and unmade == {name := dotted_name(call.args[0])}:
                message = f"{owner.name} steps {name} but never creates it: the first step raises AttributeError"
                fix = f"{name} = torch.optim.AdamW(model.parameters()) in __init__"
                yield script.report("optimizer-not-made", call, message, fix=fix)
                break


def makes_scaler(owner: ast.ClassDef, script: Script) -> bool:
    return any(script.resolve_name(call.func) in SCALERS for call in script.calls_below(owner))


def find_cpu_timesteps(amp: Amp) -> Iterator[Finding]:
    """Find timesteps that randint draws on the CPU and that a noise scheduler and a network get."""
    script = amp.script
    if "set_default_device" in script.code or "set_default_tensor_type" in script.code:
        return
    for function in (node for node in script.nodes if isinstance(node, Function)):
        below = script.walk_below(function)
        drawn = {
            dotted_name(node.targets[0]): node.value
            for node in below
            if isinstance(node, ast.Assign) and is_drawn_on_cpu(node.value, script)
        }
        # `t = t.to(device)` moves it.
        moved = [
            dotted_name(n.targets[0]) for n in below if isinstance(n, ast.Assign) and n.value not in drawn.values()
        ]
        for call in script.calls_below(function):
            given = {dotted_name(argument) for argument in call.args}
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_noise":
                for name in sorted(given & drawn.keys() - set(moved)):
                    message = f"{name} is drawn on the CPU: the network's time embedding is on the GPU and raises"
                    fix = "give randint the device of the latents: device=latents.device"
                    yield script.report("cpu-timesteps", drawn[name], message, fix=fix)


def is_drawn_on_cpu(value: ast.expr, script: Script) -> bool:
    """Return whether a value is `torch.randint(...)` without a device, also with another dtype, and not moved."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("long", "int"):
        value = value.func.value
    is_randint = isinstance(value, ast.Call) and script.resolve_name(value.func) == "torch.randint"
    return is_randint and keyword(value, "device") is None  # type: ignore[arg-type]
