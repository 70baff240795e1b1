"""Who runs backward and step: Trainer, Lightning, Accelerate, DeepSpeed and apex scale in their own calls."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from halfstep_check.findings import Finding, Severity
from halfstep_check.lint.amp import Amp, is_clip, is_plain_backward, same_object
from halfstep_check.lint.flow import Trace
from halfstep_check.lint.script import Function, dotted_name, keyword, last, methods_of

RULE = "framework-bypassed"


def find_bypassed_frameworks(amp: Amp) -> Iterator[Finding]:
    yield from backward_in_compute_loss(amp)
    yield from plain_backward_in_lightning(amp)
    yield from apex_without_scaling(amp)
    yield from wrapped_before_apex(amp)
    for trace in amp.traces:
        yield from scaled_for_a_framework(amp, trace)
        yield from stepped_by_own_scaler(amp, trace)
        yield from beside_accelerate(amp, trace)
        yield from not_prepared(amp, trace)
        yield from beside_deepspeed(amp, trace)
        yield from beside_apex(amp, trace)


def backwards_in(amp: Amp, function: ast.AST) -> list[ast.Call]:
    calls = amp.script.calls_below(function)
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"]


def backward_in_compute_loss(amp: Amp) -> Iterator[Finding]:
    """A Trainer's compute_loss() that runs backward: training_step() runs it again, on a graph that is gone."""
    script = amp.script
    given = {
        dotted_name(n.value)
        for n in script.nodes
        if isinstance(n, ast.Assign) and dotted_name(n.targets[0]).endswith(".compute_loss")
    }
    functions = [n for n in script.nodes if isinstance(n, Function) and n.name in given - {""}]
    for node in script.classes:
        bases = [last(script.name_of(base)) for base in node.bases]
        if any(base.endswith("Trainer") and base not in script.class_by_name for base in bases):
            functions += [m for name, m in methods_of(node).items() if name == "compute_loss" and takes_inputs(m)]
    for function in functions:
        for call in backwards_in(amp, function)[:1]:
            message = "Trainer runs backward() on what compute_loss() returns: the graph is gone by then, and it raises"
            yield script.finding(RULE, call, message, fix="return the loss, and let training_step() run backward")


def takes_inputs(function: Function) -> bool:
    return [a.arg for a in function.args.args][:2] == ["self", "model"]


def plain_backward_in_lightning(amp: Amp) -> Iterator[Finding]:
    """loss.backward() in training_step(): a second one with automatic optimization, an unscaled one without."""
    for node in amp.script.classes:
        bases = {
            last(amp.script.name_of(base))
            for base in (*node.bases, *(b for p in amp.script.parents(node) for b in p.bases))
        }
        step = amp.script.methods(node).get("training_step")
        if "LightningModule" not in bases or step is None:
            continue
        manual = "automatic_optimization = False" in ast.unparse(node)
        own = "scaler" in ast.unparse(step).lower()
        calls = [
            c for c in backwards_in(amp, step) if dotted_name(c.func) not in ("self.backward", "self.fabric.backward")
        ]
        for call in calls[:1] if not own else ():
            message = "Lightning runs backward() on what training_step() returns: here it runs twice"
            if manual:
                message = (
                    "loss.backward() goes round Lightning's precision plugin: with 16-mixed nothing scales the loss"
                )
            found = amp.script.finding(
                RULE, call, message, fix="self.manual_backward(loss)" if manual else "return the loss"
            )
            yield dataclasses.replace(found, severity=Severity.WARNING if manual else None)


def scaled_for_a_framework(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """accelerator.backward(scaler.scale(loss)): the framework scales by itself."""
    owners = {*amp.accelerators, *engines(amp)}
    for event in trace.calls("backward"):
        value = event.node.args[0] if isinstance(event.node, ast.Call) and event.node.args else None
        scaled = trace.scaled.get(event.arguments[0]) if event.arguments else None
        by_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "scale"
        if amp.script.canonical(event.receiver) in owners and (by_call or scaled):
            message = (
                f"{last(event.receiver)}.backward() scales by itself: a GradScaler of your own scales a second time"
            )
            yield amp.script.finding(
                RULE, event.node, message, fix=f"{last(event.receiver)}.backward(loss), and no GradScaler"
            )
            return


def stepped_by_own_scaler(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """scaler.step(optimizer) of an optimizer that belongs to DeepSpeed, or to an Accelerator that scales itself."""
    for step in (e for e in trace.calls("step") if e.optimizer and e.arguments and not amp.is_disabled(e.receiver)):
        if not any(same_object(made.key, step.receiver) for made in amp.scalers):
            continue
        # Given to it on every path that leads here: who has a branch for DeepSpeed may have another one.
        given = [e for e in trace.events[: step.index] if e.conditions <= step.conditions]
        stores = (e.node for e in given if step.optimizer in e.targets)
        owners = (owned_by(amp, node.value) for node in stores if isinstance(node, ast.Assign))
        owner = next(filter(None, owners), "")
        if owner:
            scaled = [e for e in trace.calls("backward") if e.scaled_by == step.receiver and not e.excludes(step)]
            message = f"{last(step.optimizer)} is {owner}'s, which scales by itself: your GradScaler goes round it"
            fix = f"{owner}'s backward() and step(), and no GradScaler"
            yield amp.script.finding(RULE, (scaled or [step])[-1].node, message, fix=fix, related=step.node)
            return


def owned_by(amp: Amp, value: ast.expr) -> str:
    """`deepspeed` of deepspeed.initialize(…), `accelerator` of prepare(…) where it has fp16 or a plugin that scales."""
    if not isinstance(value, ast.Call):
        return ""
    name = amp.script.name_of(value.func)
    owner = dotted_name(value.func).removesuffix(".prepare")
    made = [v for v in amp.script.values(owner) if isinstance(v, ast.Call)]
    plugged = any(keyword(v, word) is not None for v in made for word in ("deepspeed_plugin", "fsdp_plugin"))
    if owner in amp.accelerators and name.endswith(".prepare"):
        return last(owner) if plugged or amp.accelerators[owner] == "fp16" else ""
    return "deepspeed" if name == "deepspeed.initialize" else ""


def wrapped_before_apex(amp: Amp) -> Iterator[Finding]:
    """`net = DataParallel(net)` and then amp.initialize(net): apex refuses wrapped models."""
    for call in (c for c in amp.script.calls if amp.script.name_of(c.func) == "apex.amp.initialize" and c.args):
        made = [c for v in amp.script.values(dotted_name(call.args[0])) for c in amp.script.calls_below(v)]
        wraps = [c for c in made if last(dotted_name(c.func)) in ("DataParallel", "DistributedDataParallel", "DDP")]
        for wrap in (v for v in wraps if amp.script.share_scope(v, call) and v.lineno < call.lineno):
            message = f"apex's initialize() gets a model inside {last(dotted_name(wrap.func))}, and raises"
            yield amp.script.finding("launch-refused", call, message, fix="wrap the model after it", related=wrap)
            return


def beside_accelerate(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """loss.backward() before the step of a prepared optimizer: its step() divides by a scale that nobody applied."""
    halves = {name for name, precision in amp.accelerators.items() if precision == "fp16"}
    if not halves or any(amp.script.canonical(e.receiver) in amp.accelerators for e in trace.calls("backward")):
        return
    prepared = {
        last(name)
        for name, values in amp.script.assigned.items()
        for v in values
        if isinstance(v, ast.Call) and dotted_name(v.func).removesuffix(".prepare") in halves
    }
    for backward in (e for e in trace.events if is_plain_backward(e) and e.loops):
        steps = [e for e in trace.calls("step") if e.loops == backward.loops and last(e.optimizer) in prepared]
        if any(e.index > backward.index and not e.excludes(backward) and not e.arguments for e in steps):
            owner = last(min(halves))
            message = (
                f"a plain backward() before the step of an optimizer that {owner} prepared: fp16 gets no loss scaling"
            )
            yield amp.script.finding(RULE, backward.node, message, fix=f"{owner}.backward(loss)")
            return


def not_prepared(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """prepare(model, loader) without the optimizer: its step() unscales nothing and knows no window."""
    calls = [c for c in amp.script.calls if getattr(c.func, "attr", "") in ("prepare", "prepare_optimizer")]
    owned = {c: dotted_name(c.func).rpartition(".")[0] for c in calls}
    given = {last(dotted_name(a)) for c in calls for a in (*c.args, *(k.value for k in c.keywords))}
    stores = [n for n in amp.script.nodes if isinstance(n, ast.Assign) and n.value in calls]
    # `model, optimizer = accelerator.prepare(net, opt)`
    given |= {last(dotted_name(t)) for n in stores for target in n.targets for t in ast.walk(target)} - {""}
    for call, owner in owned.items() if "" not in given else ():
        made = [v for v in amp.script.values(owner) if isinstance(v, ast.Call)]
        gathers = any(keyword(v, "gradient_accumulation_steps") is not None for v in made)
        runs = [e for e in trace.calls("backward") if amp.script.canonical(e.receiver) == owner in amp.accelerators]
        for step in (e for e in trace.calls("step") if e.optimizer and not e.arguments and runs):
            whole = (
                amp.script.share_scope(call, step.node) and runs[0].index < step.index and runs[0].loops == step.loops
            )
            if whole and last(step.optimizer) not in given and (gathers or amp.accelerators[owner] == "fp16"):
                message = (
                    f"{last(owner)} never got {last(step.optimizer)}: it steps at every micro-batch, fp16 unscaled"
                )
                fix = f"hand {last(step.optimizer)} to prepare(), too"
                yield amp.script.finding(RULE, call, message, fix=fix, related=step.node)
                return


def engines(amp: Amp) -> set[str]:
    """`engine` of `engine, optimizer, … = deepspeed.initialize(…)`."""
    found = set()
    for node in (n for n in amp.script.nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)):
        if isinstance(node.value, ast.Call) and amp.script.name_of(node.value.func) == "deepspeed.initialize":
            target = node.targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
            found.add(dotted_name(first))
    return found - {""}


def beside_deepspeed(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """The engine unscales, clips, accumulates and skips in its own step()."""
    names = engines(amp)
    own = [e for e in trace.events if e.receiver and amp.script.canonical(e.receiver) in names]
    if not any(amp.script.canonical(e.called) in names for e in trace.events if e.called) and not own:
        return
    stepped = any(e.method == "step" for e in own)
    for step in (e for e in trace.calls("step") if e.optimizer and not e.arguments and not stepped):
        makers = [v for v in amp.script.values(step.receiver) if isinstance(v, ast.Call)]
        if any(amp.script.name_of(v.func) == "deepspeed.initialize" for v in makers) and any(
            e.method == "backward" for e in own
        ):
            message = "the engine's step() unscales, clips and counts the window: optimizer.step() leaves all that out"
            yield amp.script.finding(RULE, step.node, message, fix=f"{last(min(names))}.step()")
    steps = [e for e in own if e.method == "step"]
    for backward in (e for e in trace.events if is_plain_backward(e)):
        if not any(s.loops == backward.loops and s.conditions <= backward.conditions for s in steps):
            continue
        message = "loss.backward() goes round the DeepSpeed engine: before 0.18 nothing scales or reduces its gradients"
        found = amp.script.finding(RULE, backward.node, message, fix=f"{last(min(names))}.backward(loss)")
        yield dataclasses.replace(found, severity=Severity.WARNING)
        return


def apex_without_scaling(amp: Amp) -> Iterator[Finding]:
    """amp.initialize(…, loss_scale=1.0): fp16 whose gradients are not scaled, and whose overflows are not noticed."""
    for call in (c for c in amp.script.calls if amp.script.name_of(c.func) == "apex.amp.initialize"):
        level, scale = (amp.script.default(keyword(call, name)) for name in ("opt_level", "loss_scale"))
        off = isinstance(level, ast.Constant) and level.value == "O0"
        if isinstance(scale, ast.Constant) and scale.value in (1, "1", "1.0") and not off:
            message = "loss_scale=1 scales nothing: fp16 gradients below 6e-8 become zero, and no overflow is noticed"
            yield amp.script.finding(
                "fp16-without-scaler", keyword(call, "loss_scale") or call, message, fix='loss_scale="dynamic"'
            )


def beside_apex(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """apex's initialize() makes the step expect gradients from amp.scale_loss, and O2 has master copies to clip."""
    made = [c for c in amp.script.calls if amp.script.name_of(c.func) == "apex.amp.initialize"]
    level = keyword(made[0], "opt_level") if made else None
    if not made or isinstance(level, ast.Constant) and level.value == "O0":
        return
    scaled = any(last(dotted_name(c.func)) == "scale_loss" for c in amp.script.calls)
    for backward in (e for e in trace.events if is_plain_backward(e) and e.loops and not scaled):
        if any(e.optimizer and e.loops == backward.loops for e in trace.calls("step")):
            message = "loss.backward() outside amp.scale_loss(): nothing scales fp16's gradients"
            fix = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
            yield amp.script.finding(RULE, backward.node, message, fix=fix, related=made[0])
            return
    for clip in filter(is_clip, trace.events):
        works_on = ast.unparse(clip.node)
        if any(e.excludes(clip) for e in trace.events if e.name == "apex.amp.scale_loss"):
            continue  # the branch without apex
        if isinstance(level, ast.Constant) and level.value == "O2" and ".parameters()" in works_on:
            message = "with O2 the optimizer steps on master copies: clipping the model's own gradients changes nothing"
            yield amp.script.finding(RULE, clip.node, message, fix="clip amp.master_params(optimizer)", related=made[0])
            return
