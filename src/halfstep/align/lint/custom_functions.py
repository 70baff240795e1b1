"""torch.autograd.Function under autocast: without custom_fwd and custom_bwd, forward and backward see other dtypes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.align.findings import Finding
from halfstep.align.lint.amp import Amp
from halfstep.align.lint.script import Function, Script, dotted_name, methods_of

MATMULS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d", "einsum"}


def find(amp: Amp) -> Iterator[Finding]:
    if not amp.uses_autocast:
        return
    # Called on the spot, or kept: `group_points = GroupPoints.apply`.
    uses = (n.value for n in amp.script.nodes if isinstance(n, ast.Attribute) and n.attr == "apply")
    applied = {dotted_name(owner) for owner in uses}
    for node in amp.script.classes:
        if node.name not in applied or not is_function_class(node, amp.script):
            continue
        forward = methods_of(node).get("forward")
        if forward is not None and needs_guard(forward, amp.script) and not is_guarded(forward, amp.script):
            message = f"{node.name}.forward multiplies matrices or calls a kernel, and is not told about autocast"
            fix = 'decorate forward with torch.amp.custom_fwd(device_type="cuda"), backward with custom_bwd'
            yield amp.script.finding("custom-function-unguarded", forward, message, fix=fix)


def is_function_class(node: ast.ClassDef, script: Script) -> bool:
    return any(
        script.name_of(base) in ("torch.autograd.Function", "torch.autograd.function.Function") for base in node.bases
    )


def needs_guard(forward: Function, script: Script) -> bool:
    """Matmuls, which autocast would cast, or a compiled extension, which takes one dtype."""
    if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for n in script.below(forward)):
        return True
    names = [script.name_of(call.func) for call in script.calls_below(forward)]
    kernels = ("_cuda", "_ext", "_C")
    return any(
        n.rsplit(".", 1)[-1] in MATMULS or any(part.endswith(kernels) for part in n.split(".")[:-1]) for n in names
    )


def is_guarded(forward: Function, script: Script) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in forward.decorator_list]
    opens = any("autocast" in dotted_name(call.func) for call in script.calls_below(forward))
    return opens or any("custom_fwd" in script.name_of(d) for d in decorators)
