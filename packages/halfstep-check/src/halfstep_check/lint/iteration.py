"""The order within one iteration: gradients are computed, unscaled by their scaler, and present when the optimizer
steps."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp, is_clip, is_same_object, is_scaled_backward, is_scaler_step, strip_function
from halfstep_check.lint.flow import Condition, Event, Trace
from halfstep_check.lint.script import dotted_name, is_constant, keyword, last_name, list_names

MAY_TRAIN = re.compile(r"back|grad|closure|train|step|optim|scal|fit", re.IGNORECASE)
"""In the name of a function that may run backward itself."""


PENALTY = re.compile(r"grad(ient)?_?penalty|\b(wgan_)?gp\b|\br1_?(reg|penalty|loss)?\b|_gp\b", re.IGNORECASE)
"""In the name of a function that differentiates a gradient."""


def find_wrong_iterations(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        yield from find_lone_update(amp, trace)
        yield from find_unscaled_penalty(amp, trace)
        for step in (e for e in trace.calls("step") if e.optimizer and not takes_closure(e)):
            yield from find_clipping_after_step(amp, trace, step)
            yield from find_clipping_before_backward(amp, trace, step)


def find_unscaled_penalty(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a gradient of a gradient under fp16: autograd.grad() of an unscaled output."""
    if not any(is_scaled_backward(e) and not amp.is_disabled(e.scaled_by) for e in trace.events):
        return
    for event in trace.events:
        region = event.region
        if region is None or not region.may_be_on or region.dtype != "fp16" or region.device == "cpu":
            continue
        text = ast.unparse(event.node)
        inner = event.name == "torch.autograd.grad" and "create_graph=True" in text
        if (inner or is_penalty(amp, trace, event)) and "scale" not in text and "float()" not in text:
            message = "the inner gradient comes from fp16 autocast and is not scaled: its small entries become zero"
            fix = "grad(scaler.scale(out), …), then divide by scaler.get_scale(); or compute the penalty in fp32"
            yield amp.script.report("penalty-unscaled", event.node, message, fix=fix)
            return


def is_penalty(amp: Amp, trace: Trace, event: Event) -> bool:
    """Match `gradient_penalty(critic, real, fake)` of another file: it is given the model that it differentiates."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    named = func is not None and PENALTY.search(ast.unparse(func)) is not None
    run = {e.called for e in trace.events if isinstance(e.node, ast.Call)}
    return named and any(last_name(a) in amp.script.model_names or a in run for a in event.arguments if a)


def takes_closure(step: Event) -> bool:
    """Match `optimizer.step(closure)`: the optimizer itself runs backward."""
    return bool(step.arguments) and step.optimizer == step.arguments[0] and not step.receiver


def list_same_iteration(trace: Trace, event: Event) -> list[Event]:
    """Return what happens in the same iteration as an event, on a path that it can share."""
    depth = len(event.loops)
    return [e for e in trace.events if e.loops[:depth] == event.loops and not e.excludes(event) and e is not event]


def find_clipping_after_step(amp: Amp, trace: Trace, step: Event) -> Iterator[Finding]:
    """Find a clip that follows the step, with no other step or backward after it in the iteration."""
    later = [e for e in list_same_iteration(trace, step) if e.index > step.index and e.loops == step.loops]
    for event in later if step.loops else ():
        if event.method == "backward" or event.optimizer:
            return
        rest = [e for e in later if e.index > event.index]
        used = any(e.method == "backward" or e.optimizer for e in rest)
        clips = is_clip(event) or event.method in ("clip_grad_norm_", "clip_grad_value_")  # an Accelerator's, too
        if clips and event.conditions >= step.conditions and not used:
            message = f"gradients are clipped after {last_name(step.optimizer)}.step(): the step used them unclipped"
            fix = "clip before the step, after unscale_() where a scaler is used"
            yield amp.script.report("clip-after-step", event.node, message, fix=fix, related=step.node)
            return


def find_clipping_before_backward(amp: Amp, trace: Trace, step: Event) -> Iterator[Finding]:
    """Find zero_grad(), clip, backward(), step(): what is clipped is empty, what steps is not clipped."""
    before = [e for e in list_same_iteration(trace, step) if e.index < step.index and e.loops == step.loops != ()]
    for clip in filter(is_clip, before):
        mine = [e for e in before if not e.excludes(clip)]
        since = [e for e in mine if e.index < clip.index]
        cleared = max((e.index for e in since if e.method == "zero_grad"), default=None)
        computed = [e for e in since if cleared is not None and e.index > cleared and MAY_TRAIN.search(e.method)]
        later = [e for e in mine if e.index > clip.index and (e.method == "backward" or is_clip(e))]
        if cleared is not None and not computed and later and later[0].method == "backward" and len(later) == 1:
            message = "gradients are clipped before backward() computes them: the step uses them unclipped"
            fix = "clip after backward(), and after unscale_() where a scaler is used"
            yield amp.script.report("clip-after-step", clip.node, message, fix=fix, related=later[0].node)
            return


def begins(event: Event, step: Event) -> bool:
    """Return whether nothing that was computed before an event reaches a step, which runs wherever the event does."""
    cleared = event.method == "zero_grad" and last_name(event.receiver) == last_name(step.optimizer)
    other = bool(event.optimizer) and last_name(event.optimizer) != last_name(step.optimizer)
    return (cleared or other) and event.loops == step.loops and event.conditions <= step.conditions


def is_scaler_object(amp: Amp, trace: Trace, key: str) -> bool:
    made = {last_name(made.key) for made in amp.scalers}
    asked = {last_name(e.receiver) for e in trace.calls("unscale_", "get_scale")}
    return last_name(key) in made | asked or "scaler" in last_name(key).lower()


def find_lone_update(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find update() on a path that leaves before any step() or unscale_(): without an inf check it raises."""
    for update in trace.calls("update"):
        own = [e for e in trace.calls("step", "unscale_") if e.receiver == update.receiver]
        same = [e for e in own if e.loops[: len(update.loops)] == update.loops]
        others = [e for e in same if e.excludes(update) and e.index > update.index and e.optimizer]
        live = is_scaler_object(amp, trace, update.receiver) and not amp.is_disabled(update.receiver)
        # A scaler of the user's own, `scaler.step_fused(optimizer)`, may look for inf there.
        live = live and not any(e.receiver == update.receiver and "step_" in e.method for e in trace.events)
        if update.loops and live and others and all(e.excludes(update) for e in own):
            message = "update() on a path without step() or unscale_(): GradScaler raises without an inf check"
            fix = "call update() only where the optimizer steps"
            yield amp.script.report("scaler-misused", update.node, message, fix=fix, related=others[0].node)
            return


BAD_GRADIENT = re.compile(
    r"(nan|inf\b|inf_|finite|overflow|bad|invalid).*(grad|norm)|(grad|norm).*(nan|inf\b|finite|overflow)", re.IGNORECASE
)
AMP_WORDS = re.compile(r"amp|fp16|half|mixed|scaler|precision|enabled", re.IGNORECASE)


def find_unreached_calls(amp: Amp) -> Iterator[Finding]:
    for trace in amp.traces:
        scaled = [e for e in trace.events if is_scaled_backward(e) and not amp.is_disabled(e.scaled_by)]
        if scaled:
            yield from find_skipped_update(amp, trace, scaled)
            yield from find_raising_overflow(amp, trace, scaled)
        yield from find_steps_never_due(amp, trace)


def find_skipped_update(amp: Amp, trace: Trace, scaled: list[Event]) -> Iterator[Finding]:
    """Find unscale_ (or a gradient that is not finite) on a path that leaves out update(): the next unscale_ raises."""
    seen: set[str] = set()
    unscales = [e for e in trace.calls("unscale_") if e.receiver and e.loops]
    for event, scaler in [*((e, e.receiver) for e in unscales), *((e, e.scaled_by) for e in scaled)]:
        missing = get_missing_conditions(trace, event, scaler)
        if missing is None or scaler in seen or amp.is_disabled(scaler):
            continue
        name, when = last_name(scaler), " and ".join(sorted(format_condition(*c) for c in missing))
        fix = f"{name}.update() on every path that unscales; {name}.step() skips bad steps by itself"
        if event.method == "unscale_":
            seen.add(scaler)
            message = f"unscale_() runs here, {name}.update() only where {when}: otherwise the next unscale_() raises"
            yield amp.script.report("update-skipped", event.node, message, fix=fix)
        elif any(BAD_GRADIENT.search(text) for text, _ in missing):
            seen.add(scaler)
            texts = {strip_function(text) for text, _ in missing if BAD_GRADIENT.search(text)}
            tests = [n for n in amp.script.nodes if isinstance(n, ast.If) and ast.unparse(n.test) in texts]
            message = f"non-finite gradients skip {name}.update(): the scale that caused them stays"
            yield amp.script.report("update-skipped", tests[0] if tests else event.node, message, fix=fix)


def format_condition(text: str, holds: bool) -> str:
    return f"`{text}`" if holds else f"not `{text}`"


def get_missing_conditions(trace: Trace, event: Event, scaler: str) -> frozenset[Condition] | None:
    """Return what must hold for the nearest update beyond what holds here; None where every path has one."""
    updates = [u for u in trace.calls("update") if is_same_object(u.receiver, scaler) and u.index > event.index]
    updates = [u for u in updates if not u.excludes(event) and event.loops[: len(u.loops)] == u.loops]
    if not updates or any(u.loops != event.loops for u in updates):
        return None
    more = [
        drop_parts(
            c for c in list_new_conditions(trace, event, u) if not is_implied(c, event) and c[0] not in trace.fatal
        )
        for u in updates
    ]
    # Updates in opposite branches cover both paths.
    both = any(one.excludes(other) for one, other in itertools.combinations(updates, 2))
    return None if both or frozenset() in more else min(more, key=len)


def drop_parts(conditions: Iterable[Condition]) -> frozenset[Condition]:
    """Return the conditions without the parts of an `a and b` that is among them."""
    known = set(conditions)
    whole = [ast.parse(text, mode="eval").body for text, holds in known if holds and " and " in text]
    parts = {ast.unparse(v) for n in whole if isinstance(n, ast.BoolOp) and isinstance(n.op, ast.And) for v in n.values}
    return frozenset((text, holds) for text, holds in known if not (holds and text in parts))


def list_new_conditions(trace: Trace, event: Event, later: Event) -> set[Condition]:
    """Return conditions of a later event that are new, or tested again after one of their names changed."""
    changed = {strip_function(target) for e in trace.events[event.index : later.index] for target in e.targets}
    # `if not torch.isfinite(norm):` is a new question after norm was computed again.
    anew = [list_names(guard.test) & changed for guard in later.guards if guard not in event.guards]
    again = {c for c in later.conditions if any(re.search(rf"\b{name}\b", c[0]) for names in anew for name in names)}
    return {*(later.conditions - event.conditions), *again}


def is_implied(condition: Condition, event: Event) -> bool:
    """Return whether a condition says nothing new: it asks for AMP, for the last optimizer, or `a or b` where a is
    known."""
    text, holds = condition
    known = any(held and f"{fact} or " in f"{text} or " for fact, held in event.conditions)
    last_in_turn = re.search(r"optim\w*(idx|index|_i\b)|num_optim", text) is not None
    return bool(AMP_WORDS.search(text)) or text.startswith("except ") or last_in_turn or holds and known


def find_raising_overflow(amp: Amp, trace: Trace, scaled: list[Event]) -> Iterator[Finding]:
    """Find a run that ends at a non-finite gradient, where the scaler would skip the step and lower its scale."""
    for step in (e for e in trace.calls("step") if any(is_scaler_step(e, b.scaled_by) for b in scaled)):
        backward = max((b for b in scaled if b.index < step.index), key=lambda b: b.index, default=None)
        if backward is None or backward.function != step.function:
            continue
        home = amp.script.owners.get(id(step.node), amp.script.tree)
        between = range(backward.node.lineno, step.node.lineno)
        places = [n for n in amp.script.walk_below(home) if isinstance(n, ast.If | ast.Call) and n.lineno in between]
        clips = {id(e.node) for e in trace.events if is_clip(e)}
        caught = [s for n in amp.script.walk_below(home) if isinstance(n, ast.Try) and n.handlers for s in n.body]
        clips -= {id(n) for statement in caught for n in amp.script.walk_below(statement)}
        for node in places:
            strict = id(node) in clips and is_constant(keyword(node, "error_if_nonfinite"), True)  # type: ignore[arg-type]
            if strict or isinstance(node, ast.If) and raises_on_bad_gradient(amp, node):
                message = "an overflow ends the run here: the scaler would skip the step and lower its scale"
                fix = f"let {last_name(backward.scaled_by)}.step() decide, and stop only after many skips in a row"
                yield amp.script.report("overflow-raises", node, message, fix=fix, related=step.node)
                return


def raises_on_bad_gradient(amp: Amp, node: ast.If) -> bool:
    if not isinstance(node.body[-1], ast.Raise) or "loss" in ast.unparse(node.test).lower():
        return False
    values = [v for name in list_names(node.test) for v in amp.script.list_values(name)]
    return any(BAD_GRADIENT.search(ast.unparse(part)) for part in (node.test, *values))


def find_steps_never_due(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a step that waits for a counter that only the step moves."""
    targets = (n.target for n in amp.script.nodes if isinstance(n, ast.For | ast.comprehension))
    counted = {name for target in targets for name in list_names(target)}
    for step in trace.calls("step"):
        gates = [text for text, holds in step.conditions if holds and text in trace.windows]
        for gate in gates if step.optimizer and step.loops else ():
            for counter in list_counters(gate) - counted:
                moves = [
                    e
                    for e in trace.events
                    if counter in map(strip_function, e.targets) and e.loops[:1] == step.loops[:1]
                ]
                everywhere = [
                    n for n in amp.script.nodes if isinstance(n, ast.AugAssign) and dotted_name(n.target) == counter
                ]
                if moves and len(everywhere) <= len(moves) and all(waits(amp, e, gate) for e in moves):
                    message = f"the step waits for `{gate}`, and only the step changes {counter}: it never runs again"
                    fix = "count batches for the window, and steps separately"
                    yield amp.script.report("step-never-due", moves[0].node, message, fix=fix, related=step.node)
                    return


def list_counters(gate: str) -> set[str]:
    """Return `self.step` for `(self.step + 1) % n == 0`."""
    mods = (n for n in ast.walk(ast.parse(gate, mode="eval")) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod))
    # `i % 1` is always due.
    left = [mod.left for mod in mods if not (isinstance(mod.right, ast.Constant) and mod.right.value == 1)]
    parts = [n.left if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add) else n for n in left]
    return {name for part in parts if (name := dotted_name(part))}


def waits(amp: Amp, move: Event, gate: str) -> bool:
    """Return whether a counter moves where the gate is open, `if gate:` or `+= int(gate)`."""
    value = move.node.value if isinstance(move.node, ast.AugAssign) else None
    inner = value.args[0] if isinstance(value, ast.Call) and dotted_name(value.func) == "int" and value.args else None
    given = amp.script.list_values(dotted_name(inner)) if inner is not None else []
    by_gate = any(ast.unparse(part) == gate for part in (*([inner] if inner is not None else []), *given))
    return isinstance(move.node, ast.AugAssign) and (by_gate or (gate, True) in move.conditions)
