"""Numbers that do not survive half precision: sums that overflow, epsilons that vanish, losses autocast refuses."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator

from halfstep_check.findings import Finding
from halfstep_check.lint.amp import Amp
from halfstep_check.lint.dtypes import (
    NEUTRAL,
    Inference,
    get_cast_dtype,
    get_tensor_argument,
    is_model_call,
    list_function_bodies,
)
from halfstep_check.lint.flow import Event, Trace
from halfstep_check.lint.script import (
    Function,
    Script,
    argument,
    dotted_name,
    keyword,
    last_name,
    list_methods,
    list_parameters,
    read_number,
)
from halfstep_check.shared.formats import BF16, FP16, Format, round_value

FORMATS = {"fp16": FP16, "bf16": BF16}


def find_lost_values(amp: Amp) -> Iterator[Finding]:
    if not amp.uses_autocast and not any(n in amp.script.text for n in (".half()", "float16")):
        return
    found: list[Finding] = []

    def visit(node: ast.expr, types: Inference) -> None:
        if isinstance(node, ast.Call):
            found.extend(find_half_sums(amp.script, node, types))
            found.extend(find_half_losses(amp.script, node, types))
            found.extend(find_vanishing_eps(amp.script, node, types))
            found.extend(find_vanishing_addends(amp.script, node, types))
            found.extend(find_manual_casts(amp.script, node, types))
            found.extend(find_overflowing_fills(amp.script, node, types))
            follow_loss_function(amp.script, node, types)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.extend(find_tiny_addends(amp.script, node.right, types))

    for body in list_function_bodies(amp.script):
        Inference(script=amp.script, visit=visit).run(body)
    yield from found
    yield from find_overflow_in_layers(amp)
    yield from find_refused_bce(amp)


def follow_loss_function(script: Script, node: ast.Call, types: Inference) -> None:
    """Walk a loss function of this module with the dtypes it is given, one level deep."""
    callee = get_loss_function(script, node)
    dtypes = [types.infer_dtype(value) for value in node.args]
    # One level is enough for custom losses, and keeps the walk linear.
    if callee is None or types.depth or not FORMATS.keys() & set(dtypes):
        return
    parameters = [p.arg for p in callee.args.args if p.arg != "self"]
    known = dict(zip(parameters, dtypes, strict=False))
    Inference(script=script, visit=types.visit, types=known, region=types.region, depth=1).run(callee.body)


def get_loss_function(script: Script, node: ast.Call) -> Function | None:
    """Return a function of the module, or the forward of a class of it whose instance is called."""
    name = dotted_name(node.func)
    if name in script.functions:
        return script.functions[name]
    made = script.list_values(name)
    maker = dotted_name(made[0].func) if len(made) == 1 and isinstance(made[0], ast.Call) else ""
    owner = next((c for c in script.classes if c.name == maker), None)
    return list_methods(owner).get("forward") if owner is not None else None


def find_half_sums(script: Script, node: ast.Call, types: Inference) -> Iterator[Finding]:
    """Find a sum over many elements of a half tensor, where autocast does not lift it to fp32."""
    name = getattr(node.func, "attr", "")
    if name != "sum" or types.active or keyword(node, "dtype") is not None or not sums_much(node, script):
        return
    dtype = types.infer_dtype(get_tensor_argument(node, script))
    if dtype not in FORMATS:
        return
    harm = "overflows beyond 65504" if dtype == "fp16" else "keeps 8 significant bits"
    message = f"a sum over a {dtype} tensor outside autocast stays {dtype} and {harm}"
    yield script.report("half-loss-sum", node, message, fix="call .float() on the tensor before it is summed")


def find_half_losses(script: Script, node: ast.Call, types: Inference) -> Iterator[Finding]:
    """Find a CTC loss of half log-probabilities, or a mean square of two half tensors, where autocast lifts neither."""
    made = [v for v in script.list_values(dotted_name(node.func)) if isinstance(v, ast.Call)]
    names = {last_name(dotted_name(call.func)) for call in (node, *made)}
    dtypes = [types.infer_dtype(value) for value in node.args[:2]]
    if types.active or len(dtypes) < 2 or dtypes[0] not in FORMATS or get_loss_function(script, node) is not None:
        return
    by_torch = made or script.resolve_name(node.func).startswith("torch.")
    # Another file's `criterion.ctc_loss` under autocast(enabled=False) is likely to cast by itself.
    if names & {"ctc_loss", "CTCLoss"} and (by_torch or types.region is None):
        message = f"a CTC loss of {dtypes[0]} outside autocast: torch has no half kernel for it, and raises"
        yield script.report("half-loss-sum", node, message, fix="call .float() on the log-probabilities")
    elif names & {"mse_loss", "MSELoss"} and dtypes[0] == dtypes[1] == "fp16":
        message = "a mean square of two fp16 tensors outside autocast stays fp16: errors above 255 become inf"
        yield script.report("half-loss-sum", node, message, fix="call .float() on both")


def sums_much(node: ast.Call, script: Script) -> bool:
    """Match sums over everything, or over several dimensions."""
    is_function = script.resolve_name(node.func).startswith("torch.")
    dim = argument(node, 1 if is_function else 0, "dim")
    return dim is None or isinstance(dim, ast.Tuple | ast.List) and len(dim.elts) > 1


def read_setting(script: Script, node: ast.expr | None) -> float | None:
    """Return the number behind an expression: a literal, a constant, or a parameter's default that no call
    overrides."""
    node = script.read_constant(node)
    owner = script.owners.get(id(node)) if isinstance(node, ast.Name) else None
    if owner is None or not isinstance(node, ast.Name) or node.id in script.list_stored_names(owner):
        return read_number(node)
    # A parameter counts as its default only if no call in this file overrides it.
    positional = [p.arg for p in (*owner.args.posonlyargs, *owner.args.args)]
    defaults = dict(zip(reversed(positional), reversed(owner.args.defaults), strict=False))
    pairs = zip(owner.args.kwonlyargs, owner.args.kw_defaults, strict=True)
    defaults |= {p.arg: value for p, value in pairs if value is not None}
    names = {owner.name} | {c.name for c in script.classes if owner in c.body and owner.name == "__init__"}
    place = [p for p in positional if p != "self"].index(node.id) if node.id in positional else len(positional)
    calls = [c for c in script.calls if last_name(dotted_name(c.func)) in names]
    return read_number(defaults.get(node.id)) if not any(gives(c, place, node.id) for c in calls) else None


def gives(call: ast.Call, place: int, name: str) -> bool:
    """Return whether a call sets this parameter, or may do so through * or **."""
    spread = any(isinstance(value, ast.Starred) for value in call.args)
    return spread or len(call.args) > place or any(item.arg in (name, None) for item in call.keywords)


def vanishes(value: float | None, fmt: Format) -> bool:
    return value is not None and value > 0 and round_value(value, fmt) == 0.0


def find_vanishing_eps(script: Script, node: ast.Call, types: Inference) -> Iterator[Finding]:
    name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    fmt = (
        FORMATS.get(types.infer_dtype(get_tensor_argument(node, script)))
        if name in ("normalize", "clamp", "clamp_min")
        else None
    )
    if fmt is None:
        return
    if name == "normalize" and not types.active and script.resolve_name(node.func).endswith("functional.normalize"):
        eps = keyword(node, "eps")
        if vanishes(1e-12 if eps is None else read_setting(script, eps), fmt):
            message = f"F.normalize's eps is zero in {fmt.name}: a zero row becomes 0/0 = NaN"
            yield script.report("eps-vanishes", node, message, fix="normalize(x.float()), or eps=1e-4")
    elif name in ("clamp", "clamp_min"):
        offset = 1 if script.resolve_name(node.func).startswith("torch.") else 0
        low = read_setting(script, argument(node, offset, "min"))
        high = read_setting(script, argument(node, offset + 1, "max"))
        if vanishes(low, fmt):
            yield script.report("eps-vanishes", node, f"clamp's min {low:g} is zero in {fmt.name}", fix="clamp in fp32")
        elif high is not None and 0 < high < 1 and round_value(high, fmt) == 1.0:
            message = f"clamp's max {high!r} rounds to 1 in {fmt.name}: it limits nothing"
            yield script.report("eps-vanishes", node, message, fix="clamp in fp32")


def find_vanishing_addends(script: Script, node: ast.Call, types: Inference) -> Iterator[Finding]:
    """Find log(p + 1e-8) and sqrt(x + 1e-8) on half values: the addend is zero there."""
    name = getattr(node.func, "attr", "")
    if name in ("log", "sqrt", "rsqrt", "log2", "log10"):
        yield from find_tiny_addends(script, get_tensor_argument(node, script), types)


def find_tiny_addends(script: Script, node: ast.expr, types: Inference) -> Iterator[Finding]:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return
    for value, eps in ((node.left, read_setting(script, node.right)), (node.right, read_setting(script, node.left))):
        fmt = FORMATS.get(types.infer_dtype(value))
        if fmt is not None and vanishes(eps, fmt):
            message = f"{eps:g} is zero in {fmt.name}: adding it protects nothing"
            yield script.report("eps-vanishes", node, message, fix="compute this in fp32: .float() first")


def find_overflow_in_layers(amp: Amp) -> Iterator[Finding]:
    """Find overflows in layers of this script; where every region is fp16, so are their matmuls."""
    kinds = {(region.dtype, region.device == "cpu") for region in amp.regions}
    if kinds != {("fp16", False)} or "masked_fill" not in amp.script.text:
        return
    found: list[Finding] = []

    def visit(node: ast.expr, types: Inference) -> None:
        if isinstance(node, ast.Call):
            found.extend(find_overflowing_fills(amp.script, node, types))

    around = dataclasses.replace(amp.regions[0], enabled=True)
    for layer in (node for node in amp.script.nodes if isinstance(node, Function)):
        numbers = [a.arg for a in layer.args.args if a.annotation and "float" in ast.unparse(a.annotation)]
        types = dict.fromkeys(numbers, NEUTRAL)
        Inference(script=amp.script, visit=visit, region=around, types=types).run(layer.body)
    yield from found


def find_overflowing_fills(script: Script, node: ast.Call, types: Inference) -> Iterator[Finding]:
    """Find masked_fill(mask, -1e9) on fp16 scores: torch refuses a value that fp16 cannot hold."""
    if getattr(node.func, "attr", "") not in ("masked_fill", "masked_fill_") or not node.args:
        return
    value = read_setting(script, keyword(node, "value") or node.args[-1])
    if (
        value is not None
        and FP16.largest < abs(value) < math.inf
        and types.infer_dtype(get_tensor_argument(node, script)) == "fp16"
    ):
        message = f"masked_fill with {value:g} on an fp16 tensor: fp16 ends at 65504, and torch raises"
        fix = "torch.finfo(x.dtype).min, or float('-inf')"
        yield script.report("fp16-overflow", node, message, fix=fix)


def find_manual_casts(script: Script, node: ast.Call, types: Inference) -> Iterator[Finding]:
    """Find model(x.half()) under autocast: autocast casts what should be cast, and keeps fp32 what should stay."""
    if types.active is None or not is_model_call(node, script):
        return
    for argument_node in node.args:
        value = types.hand_casts.get(dotted_name(argument_node), argument_node)
        if isinstance(value, ast.Call) and get_cast_dtype(value, script) in FORMATS:
            message = (
                "an input is cast to half by hand under autocast: ops that autocast keeps in fp32 get a rounded input"
            )
            yield script.report("manual-cast", value, message, fix="drop the cast, autocast does it where it helps")


def find_refused_bce(amp: Amp) -> Iterator[Finding]:
    kinds: dict[str, list[bool]] = {}
    for name in amp.script.assigned:
        kinds.setdefault(last_name(name), []).extend(is_bce_loss(v, amp.script) for v in amp.script.trace_origins(name))
    # A name that is also given another loss may be that one here.
    made = {name for name, found in kinds.items() if found and all(found)}
    for trace in amp.traces:
        for event in trace.events:
            region = event.region
            if region is None or not region.may_be_on or region.device == "cpu" or not isinstance(event.node, ast.Call):
                continue
            by_function = event.name.endswith("functional.binary_cross_entropy")
            by_loss = last_name(event.called) in made and event.called not in list_parameters(trace.root)
            if by_function or by_loss or is_in_loss_module(amp, event):
                message = "binary_cross_entropy raises under CUDA autocast: its gradient can leave fp16's range"
                fix = "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the logits"
                yield amp.script.report("bce-under-autocast", event.node, message, fix=fix)


def is_in_loss_module(amp: Amp, event: Event) -> bool:
    """Return whether the loss that is called is a class of this file whose forward() runs binary_cross_entropy."""
    owner = amp.script.find_class(event.called) if event.called else None
    forward = amp.script.list_methods(owner).get("forward") if owner is not None else None
    if forward is None or "autocast" in ast.unparse(forward) or "cuda.amp" in ast.unparse(forward):
        return False
    names = [amp.script.resolve_name(call.func) for call in amp.script.calls_below(forward)]
    held = {name: amp.script.trace_origins(name) for name in amp.script.assigned if name.startswith("self.")}
    own = {name for name, made in held.items() if made and all(is_bce_loss(v, amp.script) for v in made)}
    return any(name.endswith("functional.binary_cross_entropy") or name in own for name in names)


def is_bce_loss(value: ast.expr, script: Script) -> bool:
    return isinstance(value, ast.Call) and script.resolve_name(value.func).endswith("nn.BCELoss")


def find_host_waits(amp: Amp) -> Iterator[Finding]:
    if amp.uses_autocast:
        for trace in amp.traces:
            yield from find_waits_every_step(amp, trace)


def find_waits_every_step(amp: Amp, trace: Trace) -> Iterator[Finding]:
    """Find `.item()` on a loss in the loop that trains, at every step."""
    trained = {event.loops for event in trace.calls("backward") if event.loops}
    for event in trace.calls("item"):
        if event.loops in trained and not event.conditions and "loss" in last_name(event.receiver).lower():
            message = "loss.item() makes the CPU wait for the GPU at every step"
            yield amp.script.report(
                "item-every-step", event.node, message, fix="keep the tensor, read it every N steps"
            )
            return
