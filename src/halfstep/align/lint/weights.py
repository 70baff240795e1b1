"""Weights cast to half and given to an optimizer that expects fp32."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp, last
from halfstep.align.lint.dtypes import explicit_cast
from halfstep.align.lint.script import Script, dotted_name

PLAIN_OPTIMIZERS = {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "LBFGS"}

EVALUATION_WORDS = ("eval", "infer", "test", "predict", "deploy", "export")


def find(amp: Amp) -> Iterator[Finding]:
    script = amp.script
    optimized = [(name, call) for call in script.calls if is_plain_optimizer(amp, call) for name in models_of(call)]
    restored = {last(dotted_name(c.func).removesuffix(".float")) for c in script.calls if is_float_restore(c)}
    for call in script.calls:
        dtype = explicit_cast(call, script)
        if dtype not in ("fp16", "bf16") or not isinstance(call.func, ast.Attribute) or not amp.goes_backward:
            continue
        model = dotted_name(call.func.value) or assigned_model(amp, call)
        if not model or last(model) in restored or only_to_evaluate(script, call):
            continue
        # `self.model` is one object in all methods, a plain name only in its own function.
        known = [(model, call), *handed_out(script, call, model)]
        if any(
            name == own and ("." in name or script.share_scope(where, made))
            for name, made in optimized
            for own, where in known
        ):
            limit = "1/2048" if dtype == "fp16" else "1/256"
            message = (
                f"{last(model)} is stored in {dtype} and updated in place: changes below {limit} of a weight are lost"
            )
            fix = "keep fp32 weights and use autocast, or an optimizer with an fp32 master copy"
            yield script.finding("half-weights-optimizer", call, message, fix=fix)


def is_plain_optimizer(amp: Amp, call: ast.Call) -> bool:
    name = amp.script.name_of(call.func)
    # Picking by requires_grad means a frozen half model with trainable fp32 parts is likely.
    picks = "requires_grad" in ast.unparse(call)
    return name.startswith("torch.optim.") and name.rsplit(".", 1)[-1] in PLAIN_OPTIMIZERS and not picks


def models_of(call: ast.Call) -> Iterator[str]:
    """`model` of optimizer(model.parameters()), also inside lists and generators."""
    for inner in ast.walk(call):
        if isinstance(inner, ast.Attribute) and inner.attr in ("parameters", "named_parameters"):
            yield dotted_name(inner.value)


def is_float_restore(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "float" and not call.args


def assigned_model(amp: Amp, call: ast.Call) -> str:
    """The name that takes `Net().half()` or `Net().to(device).half()`."""
    for name, values in amp.script.assigned.items():
        if any(call is inner for value in values for inner in chain(value)):
            return name
    return ""


def handed_out(script: Script, call: ast.Call, model: str) -> list[tuple[str, ast.AST]]:
    """Names that take what a function of this module returns, when it returns the model that is cast in it."""
    builder = script.owners.get(id(call))
    if builder is None or "." in model:
        return []
    returns = [n.value for n in script.below(builder) if isinstance(n, ast.Return) and n.value is not None]
    if not any(root(value) == model for value in returns):
        return []
    given = [(name, value) for name, values in script.assigned.items() for value in values]
    return [(n, v) for n, v in given if isinstance(v, ast.Call) and dotted_name(v.func) == builder.name]


def root(value: ast.expr) -> str:
    """`net` of `net.cuda().train()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return dotted_name(value)


def only_to_evaluate(script: Script, call: ast.Call) -> bool:
    """Whether the cast stands under `if args.eval:` and the like."""
    tests = [n.test for n in script.nodes if isinstance(n, ast.If) and any(call is c for c in script.calls_below(n))]
    return any(word in ast.unparse(test).lower() for test in tests for word in EVALUATION_WORDS)


def chain(value: ast.expr) -> Iterator[ast.expr]:
    """A call, what it is called on, and so on: `Net().half().cuda()`."""
    node: ast.expr = value
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else ast.Constant(value=None)
