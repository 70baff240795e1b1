"""NaN "handling" that hides the cause, and clipping that is applied twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.accumulation import Window, find_inner_windows, find_windows
from halfstep_check.lint.amp import Amp, is_clip, is_plain_backward
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import Script, dotted_name, keyword, last_name

OUTPUT_NAMES = ("out", "output", "outputs", "logits", "pred", "preds", "prediction", "predictions", "noise_pred")
CHECKS = ("isnan", "isinf", "isfinite")


def find_hidden_nans(amp: Amp) -> Iterator[Finding]:
    if not amp.goes_backward:
        return
    yield from find_replaced_nans(amp)
    for trace in amp.traces:
        yield from find_double_clipping(amp, trace)
        yield from find_clipping_within_window(amp, trace)


def find_replaced_nans(amp: Amp) -> Iterator[Finding]:
    fix = "find the cause: skip the step, count it, and look at the first module that is not finite"
    for call in amp.script.calls:
        name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
        if name in ("nan_to_num", "nan_to_num_") and replaces_result(amp, call):
            yield amp.script.report("nan-hidden", call, "nan_to_num on a loss or gradient trains on garbage", fix=fix)
    for node in amp.script.nodes:
        if isinstance(node, ast.If) and leaves_out_of_evaluation(amp, node):
            message = "the evaluation skips batches with a non-finite loss: its result looks better than it is"
            yield amp.script.report("nan-hidden", node, message, fix="let the mean be NaN, or count and report them")
        elif isinstance(node, ast.If) and tests_finite(node.test, amp.script):
            for statement in node.body:
                if replaces_loss(statement) or zeroes_gradient(statement):
                    message = "a non-finite loss or gradient is replaced, and training continues"
                    yield amp.script.report("nan-hidden", statement, message, fix=fix)
        elif isinstance(node, ast.Assign) and masks_gradient(node):
            yield amp.script.report("nan-hidden", node, "non-finite gradient entries are set to zero", fix=fix)


def leaves_out_of_evaluation(amp: Amp, node: ast.If) -> bool:
    """Match `if isnan(loss): continue`, or `if not isnan(loss): total += …`, where a function evaluates."""
    function = amp.script.owners.get(id(node))
    words = re.split(r"[_\W]+", function.name.lower()) if function is not None else []
    inner = amp.script.calls_below(function) if function is not None else ()
    if not {"eval", "evaluate", "validate", "validation", "val", "valid"} & set(words) or any(
        getattr(call.func, "attr", "") == "backward" for call in inner
    ):
        return False
    loops = [n for n in amp.script.walk_below(function or node) if isinstance(n, ast.For)]
    if "loss" not in ast.unparse(node.test).lower() or not any(node in amp.script.walk_below(loop) for loop in loops):
        return False
    # Two spellings: skip the bad batch, or count only the good ones.
    skips = len(node.body) == 1 and isinstance(node.body[0], ast.Continue) and tests_finite(node.test, amp.script)
    negated = node.test.operand if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not) else None
    good = (
        list_called_names(negated) & {"isnan", "isinf"}
        if negated is not None
        else list_called_names(node.test) == {"isfinite"}
    )
    adds = not node.orelse and any(isinstance(s, ast.AugAssign) or ".append(" in ast.unparse(s) for s in node.body)
    return skips or bool(good) and adds


def replaces_result(amp: Amp, call: ast.Call) -> bool:
    """Return whether nan_to_num works on a loss, a gradient, or what the model just put out; cleaning input data is
    fine."""
    if amp.script.resolve_name(call.func).startswith("numpy."):
        return False  # a number to log: nothing goes backward through NumPy
    taken = (n.attr for n in amp.script.nodes if isinstance(n, ast.Attribute) and n.value is call)
    if any(name in ("detach", "item") for name in taken):
        return False  # likewise
    method = isinstance(call.func, ast.Attribute) and not amp.script.resolve_name(call.func).startswith("torch.")
    first = call.args[0] if call.args else call.func
    target = call.func.value if method and isinstance(call.func, ast.Attribute) else first
    text = ast.unparse(target).lower()
    if is_loss_name(text) or text.endswith((".grad", ".grad.data")) or text in ("grad", "g"):
        return True
    put_out = text in OUTPUT_NAMES or isinstance(target, ast.Call) and is_model_call(target, amp.script)
    owner = amp.script.owners.get(id(call), amp.script.tree)
    return put_out and any(getattr(inner.func, "attr", "") == "backward" for inner in amp.script.calls_below(owner))


def is_loss_name(text: str) -> bool:
    last = text.rsplit(".", 1)[-1]
    return last == "loss" or last.startswith("loss_") or last.endswith("_loss")


def tests_finite(test: ast.expr, script: Script) -> bool:
    """Match `isnan(…)` or `not isfinite(…)`, also among other tests: the branch of the bad case."""
    if isinstance(test, ast.BoolOp):
        return any(tests_finite(value, script) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "isfinite" in list_called_names(inline_helper(test.operand, script))
    return bool(list_called_names(inline_helper(test, script)) & {"isnan", "isinf", "not isfinite"})


def list_called_names(node: ast.AST) -> set[str]:
    """Return last names of all calls; those directly under a `not` are marked."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        negates = isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not)
        found |= {f"not {name}" if negates else name for name in list_called_names(child)}
    if isinstance(node, ast.Call):
        found.add(getattr(node.func, "attr", "") or getattr(node.func, "id", ""))
    return found


def inline_helper(test: ast.expr, script: Script) -> ast.expr:
    """Return what a helper of this module that only returns an expression computes; anything else stays as it is."""
    helper = script.functions.get(dotted_name(test.func)) if isinstance(test, ast.Call) else None
    only = helper.body[-1] if helper is not None and len(helper.body) <= 2 else None
    return only.value if isinstance(only, ast.Return) and only.value is not None else test


def replaces_loss(node: ast.stmt) -> bool:
    """Match `loss = torch.zeros(…)`, `loss = loss * 0` and the like."""
    if not isinstance(node, ast.Assign) or not is_loss_name(dotted_name(node.targets[0]).lower()):
        return False
    text = ast.unparse(node.value)
    products = (n for n in ast.walk(node.value) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult))
    by_zero = any(is_zero(product.left) or is_zero(product.right) for product in products)
    return by_zero or any(word in text for word in ("zeros", "tensor(0", "nan_to_num", "torch.where"))


def is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def zeroes_gradient(node: ast.stmt) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Expr | ast.Assign | ast.For) and any(
        word in text for word in (".grad.zero_()", ".grad.fill_(0", ".grad.data.zero_()", ".grad = torch.zeros")
    )


def masks_gradient(node: ast.Assign) -> bool:
    """Match `p.grad[torch.isnan(p.grad)] = 0` and `p.grad = torch.where(isnan(p.grad), 0, p.grad)`."""
    target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
    if ".grad[" in target:
        return any(f"{check}(" in target for check in CHECKS)
    return target.endswith(".grad") and "where(" in value and any(check in value for check in CHECKS)


def find_double_clipping(amp: Amp, trace: Trace) -> Iterator[Finding]:
    clips = [event for event in trace.events if is_clip(event)]
    for first, second in zip(clips, clips[1:], strict=False):
        same = first.name == second.name and get_clipped_text(first) == get_clipped_text(second) != ""
        between = trace.events[first.index + 1 : second.index]
        restarted = any(e.method in ("step", "backward", "zero_grad") for e in between)
        if same and first.loops == second.loops and first.implied_by(second) and not restarted:
            message = "gradients are clipped a second time before the step"
            yield amp.script.report("clip-twice", second.node, message, fix="keep one of them", related=first.node)


def find_clipping_within_window(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find a clip at every micro-batch of a window: the sum so far is clipped, and again with the next."""
    yield from find_clipping_within_accumulate(amp, trace)
    for window in (*find_windows(trace), *find_inner_windows(amp, trace)):
        inside = trace.events[window.backward.index : window.step.index]
        yield from find_clipping_at_every_sync(amp, window, inside)
        gated = window.step.conditions - window.backward.conditions
        plain = [e for e in trace.events if is_plain_backward(e) and e.loops == window.backward.loops]
        for clip in (e for e in inside if is_clip(e) and e.loops == window.backward.loops):
            unscaled = any(not e.excludes(clip) for e in plain)  # a scaled one is clip-before-unscale's
            if unscaled and not clip.conditions & gated and not clip.excludes(window.step):
                message = f"the sum is clipped after each of {window.length} micro-batches, not once before the step"
                yield amp.script.report("clip-twice", clip.node, message, fix="clip where the optimizer steps")
                return


def find_clipping_at_every_sync(amp: Amp, window: Window, inside: list[Event]) -> Iterator[Finding]:
    """Find `if accelerator.sync_gradients: clip` of an Accelerator without a window, which syncs at every batch."""
    for clip in (e for e in inside if e.method in ("clip_grad_norm_", "clip_grad_value_")):
        owner = amp.script.canonicalise(clip.receiver)
        asked = {text for text, _ in clip.conditions - window.backward.conditions}
        if owner in amp.accelerators and not counts_window(amp, owner) and all("sync_gradients" in t for t in asked):
            message = (
                f"the sum is clipped after each of {window.length} micro-batches: the Accelerator accumulates none"
            )
            fix = "Accelerator(gradient_accumulation_steps=…), and step at every batch under accumulate()"
            yield amp.script.report("clip-twice", clip.node, message, fix=fix, related=window.step.node)
            return


def find_clipping_within_accumulate(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find accelerator.clip_grad_norm_() under accumulate() and not under `if accelerator.sync_gradients:`."""
    opened = {e.receiver: e for e in trace.calls("accumulate") if counts_window(amp, e.receiver)}
    for clip in trace.calls("clip_grad_norm_", "clip_grad_value_"):
        owner = opened.get(clip.receiver)
        gated = any("sync_gradients" in text or "%" in text for text, _ in clip.conditions)
        if owner is not None and owner.loops == clip.loops and owner.index < clip.index and not gated:
            message = "gradients are clipped at every micro-batch: in fp16 that unscales them twice, which raises"
            fix = f"clip only under `if {last_name(clip.receiver)}.sync_gradients:`"
            yield amp.script.report("clip-twice", clip.node, message, fix=fix, related=owner.node)
            return


def counts_window(amp: Amp, accelerator: str) -> bool:
    """Return whether an Accelerator is made here with a window that may be longer than one."""
    made = [v for v in amp.script.list_values(accelerator) if isinstance(v, ast.Call)]
    words = ("gradient_accumulation_steps", "gradient_accumulation_plugin")
    lengths = [amp.script.read_constant(keyword(call, word)) for call in made for word in words]
    return any(length is not None and getattr(length, "value", None) != 1 for length in lengths)


def get_clipped_text(event: Event) -> str:
    """Return what a clip works on, as it is written."""
    return ast.unparse(event.node.args[0]) if isinstance(event.node, ast.Call) and event.node.args else ""


MODEL_WORDS = (
    *("model", "net", "unet", "network", "generator", "discriminator", "encoder", "decoder", "backbone"),
    "netg",
)


def is_model_call(node: ast.Call, script: Script) -> bool:
    """Match a call of something that has parameters in this script, or bears a model's name."""
    name = dotted_name(node.func).rsplit(".", 1)[-1]
    return name in script.model_names or name.lower() in MODEL_WORDS or name.endswith(("_model", "_net"))
