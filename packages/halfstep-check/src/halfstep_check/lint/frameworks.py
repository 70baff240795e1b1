"""Who runs backward and step: Trainer, Lightning, Accelerate, DeepSpeed and apex scale in their own calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_same_object
from halfstep_check.lint.flow import Trace
from halfstep_check.lint.script import Function, Script, dotted_name, is_constant, keyword, last_name, list_methods

RULE = "framework-bypassed"


def find_bypassed_frameworks(amp: Amp) -> Iterator[Finding]:
    yield from find_backward_in_compute_loss(amp)
    yield from find_unscaled_apex(amp)
    yield from find_wrapping_before_apex(amp)
    for trace in amp.traces:
        yield from find_foreign_scaler_step(amp, trace)


def list_backwards(amp: Amp, function: ast.AST) -> list[ast.Call]:
    calls = amp.script.calls_below(function)
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"]


def find_backward_in_compute_loss(amp: Amp) -> Iterator[Finding]:
    """Find a Trainer's compute_loss() that runs backward: training_step() runs it again, on a graph that is gone."""
    script = amp.script
    given = {
        dotted_name(n.value)
        for n in script.nodes
        if isinstance(n, ast.Assign) and dotted_name(n.targets[0]).endswith(".compute_loss")
    }
    functions = [n for n in script.nodes if isinstance(n, Function) and n.name in given - {""}]
    for node in script.classes:
        bases = [last_name(script.resolve_name(base)) for base in node.bases]
        if any(base.endswith("Trainer") and base not in script.class_by_name for base in bases):
            functions += [m for name, m in list_methods(node).items() if name == "compute_loss" and takes_inputs(m)]
    for function in functions:
        for call in list_backwards(amp, function)[:1]:
            message = "Trainer runs backward() on what compute_loss() returns: the graph is gone by then, and it raises"
            yield script.report(RULE, call, message, fix="return the loss, and let training_step() run backward")


def takes_inputs(function: Function) -> bool:
    return [a.arg for a in function.args.args][:2] == ["self", "model"]


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
            message = f"{last_name(step.optimizer)} is {owner}'s, which scales by itself: your GradScaler bypasses it"
            fix = f"{owner}'s backward() and step(), and no GradScaler"
            yield amp.script.report(RULE, (scaled or [step])[-1].node, message, fix=fix, related=step.node)
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


def find_wrapping_before_apex(amp: Amp) -> Iterator[Finding]:
    """Find `net = DataParallel(net)` and then amp.initialize(net): apex refuses wrapped models."""
    for call in (c for c in amp.script.calls if amp.script.resolve_name(c.func) == "apex.amp.initialize" and c.args):
        made = [c for v in amp.script.list_values(dotted_name(call.args[0])) for c in amp.script.calls_below(v)]
        wraps = [
            c for c in made if last_name(dotted_name(c.func)) in ("DataParallel", "DistributedDataParallel", "DDP")
        ]
        wraps = [c for c in wraps if amp.script.share_scope(c, call) and c.lineno < call.lineno]
        for wrap in (c for c in wraps if not switches_apex_off(amp.script, c)):
            message = f"apex's initialize() gets a model inside {last_name(dotted_name(wrap.func))}, and raises"
            yield amp.script.report("launch-refused", call, message, fix="wrap the model after it", related=wrap)
            return


def switches_apex_off(script: Script, wrap: ast.Call) -> bool:
    """Return whether the branch that wraps the model also turns apex off, as timm's trainers do: `use_amp = None`."""
    branches = [n for n in script.nodes if isinstance(n, ast.If) and wrap in script.walk_below(n)]
    stores = [n for branch in branches for n in script.walk_below(branch) if isinstance(n, ast.Assign)]
    return any(
        "amp" in ast.unparse(s.targets[0]) and (is_constant(s.value, None) or is_constant(s.value, False))
        for s in stores
    )


def find_unscaled_apex(amp: Amp) -> Iterator[Finding]:
    """Find amp.initialize(…, loss_scale=1.0): fp16 whose gradients are not scaled, and whose overflows are not
    noticed."""
    for call in (c for c in amp.script.calls if amp.script.resolve_name(c.func) == "apex.amp.initialize"):
        level, scale = (amp.script.read_default(keyword(call, name)) for name in ("opt_level", "loss_scale"))
        off = isinstance(level, ast.Constant) and level.value == "O0"
        if isinstance(scale, ast.Constant) and scale.value in (1, "1", "1.0") and not off:
            message = "loss_scale=1 scales nothing: fp16 gradients below 6e-8 become zero, and no overflow is noticed"
            yield amp.script.report(
                "fp16-without-scaler", keyword(call, "loss_scale") or call, message, fix='loss_scale="dynamic"'
            )
