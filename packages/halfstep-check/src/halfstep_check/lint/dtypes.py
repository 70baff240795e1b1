"""A small dtype inference: which values of a function are certainly half precision, by autocast's own op lists.

CUDA autocast computes matmuls and convolutions in half and lifts softmax, exp, log, pow, sum, norms and losses to fp32.
Pointwise ops (sigmoid, relu, clamp, +, *) keep what they get. Outside the region nothing is lifted: a half value stays
half. A value of unknown dtype makes the result unknown, because half times fp32 is fp32.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from halfstep_check.lint.regions import Region, read_format, read_region
from halfstep_check.lint.script import Function, Script, dotted_name, keyword, pair_assignments

UNKNOWN = ""
NEUTRAL = "scalar"
"""A Python number: it takes the dtype of what it is combined with."""

LIFTED = {
    *("softmax", "log_softmax", "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "sum"),
    *("prod", "cumsum", "cumprod", "norm", "dist", "cdist", "layer_norm", "group_norm", "softplus", "softmin"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "renorm"),
    *("binary_cross_entropy_with_logits", "cosine_similarity", "cosine_embedding_loss", "poisson_nll_loss"),
    *("triplet_margin_loss", "hinge_embedding_loss", "margin_ranking_loss", "acos", "asin", "cosh", "sinh", "tan"),
}
"""CUDA ops that autocast to float32 (docs/source/amp.rst)."""
LOWERED = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "mv"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
}
KEEPERS = {
    *("sigmoid", "tanh", "relu", "gelu", "silu", "leaky_relu", "elu"),
    *("abs", "neg", "sqrt", "clamp", "clamp_min", "mean"),
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "contiguous", "detach", "clone"),
    *("max", "min", "amax", "amin", "square", "mul", "add", "sub", "div", "expand", "expand_as", "repeat", "chunk"),
    *("cpu", "cuda", "normalize", "interpolate", "dropout", "relu_", "masked_fill", "t", "gather", "upsample"),
}
MODEL_WORDS = (
    *("model", "net", "unet", "network", "generator", "discriminator", "encoder", "decoder", "backbone"),
    "netg",
)


@dataclass(kw_only=True)
class Inference:
    """Walks a function and calls `visit(expression, self)` on every expression with dtypes known so far."""

    script: Script
    visit: Callable[[ast.expr, Inference], None]
    types: dict[str, str] = field(default_factory=dict)
    region: Region | None = None
    depth: int = 0
    hand_casts: dict[str, ast.expr] = field(default_factory=dict)
    """Names whose value was cast to half by hand under autocast, and the cast."""

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.walk_statement(statement)

    def walk_statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.With | ast.AsyncWith):
            # The innermost region counts; it ends with its block.
            before = self.region
            for item in node.items:
                opened = read_region(item.context_expr, self.script)
                self.region = opened if opened is not None else self.region
            self.run(node.body)
            self.region = before
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.look(child)
        if isinstance(node, ast.Assign):
            self.note_cast(node)
            dtypes = [(target, self.infer_dtype(value)) for target, value in pair_assignments(node)]
            for target, dtype in dtypes:
                several = isinstance(target, ast.Tuple | ast.List)
                for part in target.elts if several else [target]:  # type: ignore[attr-defined]
                    self.assign([part], dtype if not self.may_be_lifted(part, node.value, several) else UNKNOWN)
        elif isinstance(node, ast.AugAssign):
            self.assign(
                [node.target], self.combine_dtypes([self.infer_dtype(node.target), self.infer_dtype(node.value)])
            )
        elif isinstance(node, ast.For):
            self.iterate(node.target, node.iter)
        for part in ("body", "orelse", "finalbody"):
            self.run(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            self.run(handler.body)

    def iterate(self, target: ast.expr, over: ast.expr) -> None:
        """What a loop takes from a list has the list's dtype, also through zip and enumerate."""
        name = getattr(over.func, "id", "") if isinstance(over, ast.Call) else ""
        if isinstance(over, ast.Call) and name == "zip" and isinstance(target, ast.Tuple):
            for element, source in zip(target.elts, over.args, strict=False):
                self.iterate(element, source)
        elif isinstance(over, ast.Call) and name == "enumerate" and isinstance(target, ast.Tuple) and over.args:
            self.iterate(target.elts[-1], over.args[0])
        elif isinstance(over, ast.Name | ast.Attribute):
            self.assign([target], self.infer_dtype(over))

    def may_be_lifted(self, target: ast.expr, value: ast.expr, several: bool) -> bool:
        """Return whether a model may end in a softmax or a loss, which autocast runs in fp32: probabilities, other
        outputs."""
        if not isinstance(value, ast.Call) or not is_model_call(value, self.script):
            return False
        name = dotted_name(target).lower()
        main = re.match(r"out|logit|pred", name) and not re.search(r"len|size|mask|loss|prob", name)
        return several and not main or "prob" in name or self.script.ends_lifted

    def look(self, node: ast.expr) -> None:
        self.visit(node, self)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.look(child)
            elif isinstance(child, ast.keyword):
                self.look(child.value)

    def assign(self, targets: list[ast.expr], dtype: str) -> None:
        for target in targets:
            elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            for element in elements:
                if name := dotted_name(element):
                    self.types[name] = dtype

    def note_cast(self, node: ast.Assign) -> None:
        name = dotted_name(node.targets[0])
        self.hand_casts.pop(name, None)
        by_hand = isinstance(node.value, ast.Call) and get_cast_dtype(node.value, self.script) in ("fp16", "bf16")
        if self.active and by_hand:
            self.hand_casts[name] = node.value

    @property
    def active(self) -> Region | None:
        """The region that is on here, or on where it is asked for (`enabled=args.amp`), on CUDA as far as known."""
        return (
            self.region if self.region is not None and self.region.may_be_on and self.region.device != "cpu" else None
        )

    def infer_dtype(self, node: ast.expr) -> str:
        """Return fp16, bf16, fp32, a neutral number, or unknown."""
        if isinstance(node, ast.Constant):
            return NEUTRAL if isinstance(node.value, int | float) else UNKNOWN
        if is_number(node, self.script):
            return NEUTRAL
        if isinstance(node, ast.Name):
            return self.types.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            known = self.types.get(dotted_name(node))
            return (
                known
                if known is not None
                else (self.infer_dtype(node.value) if node.attr in ("logits", "sample") else UNKNOWN)
            )
        if isinstance(node, ast.Subscript):
            return self.infer_dtype(node.value)
        if isinstance(node, ast.BinOp):
            return self.infer_binary(node)
        if isinstance(node, ast.UnaryOp):
            return self.infer_dtype(node.operand)
        return self.infer_call(node) if isinstance(node, ast.Call) else UNKNOWN

    def infer_binary(self, node: ast.BinOp) -> str:
        if isinstance(node.op, ast.MatMult) and self.active:
            return self.active.dtype
        # Type promotion: half with fp32 is fp32, a Python number changes nothing.
        both = self.combine_dtypes([self.infer_dtype(node.left), self.infer_dtype(node.right)])
        return "fp32" if isinstance(node.op, ast.Pow) and self.active and both not in (UNKNOWN, NEUTRAL) else both

    def combine_dtypes(self, dtypes: list[str]) -> str:
        tensors = {dtype for dtype in dtypes if dtype != NEUTRAL}
        # One fp32 operand is enough; an unknown one leaves the result unknown.
        if "fp32" in tensors:
            return "fp32"
        return tensors.pop() if len(tensors) == 1 else (UNKNOWN if tensors else NEUTRAL)

    def infer_call(self, node: ast.Call) -> str:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        cast = get_cast_dtype(node, self.script)
        if cast:
            return cast
        if self.active and (name in LOWERED or is_model_call(node, self.script)):
            return self.active.dtype
        # Autocast's lists decide before the argument's own dtype does.
        if self.active and name in LIFTED:
            return "fp32"
        if name in LIFTED or name in KEEPERS:
            return self.infer_dtype(get_tensor_argument(node, self.script))
        return UNKNOWN


SIZES = re.compile(r"(dim|size|heads|channels|hidden|d_k|d_model|d_head)$")


def is_number(node: ast.expr, script: Script) -> bool:
    """Match Python's own numbers: `math.sqrt(d)`, `q.size(-1)`, `x.shape[0]`, and attributes that hold one or a
    width."""
    if isinstance(node, ast.Call):
        sized = getattr(node.func, "attr", "") == "size" or getattr(node.func, "id", "") in ("len", "float", "int")
        return sized or script.resolve_name(node.func).startswith(("math.", "numpy."))
    if isinstance(node, ast.Subscript):
        return getattr(node.value, "attr", "") == "shape"
    if is_power(node) and isinstance(node, ast.BinOp):
        return isinstance(node.left, ast.Attribute | ast.Name) and getattr(node.right, "value", None) == 0.5
    if isinstance(node, ast.Attribute):
        values = script.list_values(dotted_name(node))
        held = [v for v in values if isinstance(v, ast.Call) and is_number(v, script) or is_power(v)]
        return bool(SIZES.search(node.attr)) or bool(values) and held == values
    return False


def is_power(node: ast.expr) -> bool:
    """Match `head_dim ** -0.5`, which a module keeps as its scale."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def get_cast_dtype(node: ast.Call, script: Script) -> str:
    """Return the dtype that `.half()`, `.float()` or `.to(torch.float16)` gives, or nothing."""
    if not isinstance(node.func, ast.Attribute):
        return ""
    simple = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
    if node.func.attr in simple and not node.args:
        return simple[node.func.attr]
    if node.func.attr in ("to", "type"):
        target = [*node.args, *([value] if (value := keyword(node, "dtype")) is not None else [])]
        return next(filter(None, (read_format(argument, script) for argument in target)), "")
    return ""


def get_tensor_argument(node: ast.Call, script: Script) -> ast.expr:
    """Return what an op works on: its receiver for a method, its first argument for torch.f and F.f."""
    is_method = isinstance(node.func, ast.Attribute) and not script.resolve_name(node.func).startswith("torch.")
    if is_method and isinstance(node.func, ast.Attribute):
        return node.func.value
    return node.args[0] if node.args else node.func


def is_model_call(node: ast.Call, script: Script) -> bool:
    """Match a call of something that has parameters in this script, or bears a model's name."""
    name = dotted_name(node.func).rsplit(".", 1)[-1]
    return name in script.model_names or name.lower() in MODEL_WORDS or name.endswith(("_model", "_net"))


def list_function_bodies(script: Script) -> Iterator[list[ast.stmt]]:
    """Return the module's own statements and every function, each walked by itself."""
    yield script.tree.body
    yield from (node.body for node in script.nodes if isinstance(node, Function))
