"""What a training script itself passes: `Trainer(…)`, `TrainingArguments(…)`, `Accelerator(…)`, FSDP policies, dicts.

Only literals count; a computed argument is not a declaration.
"""

from __future__ import annotations

import ast
import dataclasses
import re

from halfstep_check.declarations import Declaration, Draft, Source, parse_number
from halfstep_check.dialects import lightning, own, transformers
from halfstep_check.document import Node, Scalar
from halfstep_check.findings import Finding, split_lines
from halfstep_check.spellings import ACCELERATE_WORDS, parse_dtype

RELEVANT = re.compile(
    r"Trainer\(|Fabric\(|TrainingArguments|Config\(|Accelerator\(|MixedPrecision|use_amp|clip_grad_|native_amp"
    r"|import deepspeed|from deepspeed"
)
AUTOCAST_LINE = "autocast_line"
IMPORTS = "imports"
HF_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig")


class Literals:
    """Turns literal Python expressions into nodes with positions in characters."""

    def __init__(self, text: str, path: str) -> None:
        self.lines = split_lines(text)
        self.path = path
        # A module of policies alone is used by another that may scale.
        self.may_scale = "GradScaler" in text or "scaler" in text or ".backward(" not in text

    def node(self, value: ast.expr, key: ast.expr | ast.keyword | None = None) -> Node | None:
        literal = self.literal(value)
        if literal is None:
            return None
        text, quote = literal
        return Node(
            value=text,
            path=self.path,
            start=self.position(value.lineno, value.col_offset),
            end=self.position(value.end_lineno or value.lineno, value.end_col_offset or value.col_offset),
            quote=quote,
            key_start=self.position(key.lineno, key.col_offset) if key is not None else None,
        )

    def literal(self, value: ast.expr) -> tuple[Scalar, str] | None:
        if isinstance(value, ast.Constant) and isinstance(value.value, (str, int, float, bool)):
            return value.value, self.quote(value) if isinstance(value.value, str) else ""
        if isinstance(value, ast.Attribute) and parse_dtype(value.attr):
            return value.attr, ""
        return None

    def quote(self, value: ast.expr) -> str:
        line, column = self.position(value.lineno, value.col_offset)
        mark = self.lines[line - 1][column : column + 1]
        return mark if mark in ("'", '"') else '"'

    def position(self, line: int, byte_column: int) -> tuple[int, int]:
        """Convert a position of `ast`, which counts UTF-8 bytes, to characters."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return line, len(text.encode()[:byte_column].decode(errors="ignore"))

    def mapping(self, pairs: list[tuple[str, ast.expr, ast.expr | ast.keyword]], at: ast.expr) -> Node:
        nodes = {name: node for name, value, key in pairs if (node := self.node(value, key)) is not None}
        line = self.position(at.lineno, at.col_offset)
        return Node(value=nodes, path=self.path, start=line, end=line)

    def keywords(self, call: ast.Call) -> Node:
        return self.mapping([(k.arg, k.value, k) for k in call.keywords if k.arg], call)

    def dictionary(self, value: ast.Dict) -> Node:
        pairs = zip(value.keys, value.values, strict=True)
        named = [(k.value, v, k) for k, v in pairs if isinstance(k, ast.Constant) and isinstance(k.value, str)]
        return self.mapping([(name, v, k) for name, v, k in named], value)


def read_script_sources(tree: ast.Module, text: str, path: str, *, lightning_version: str = "") -> list[Source]:
    """Return every framework call and config dict of this script that states a precision."""
    if not RELEVANT.search(text):
        return []
    literals = Literals(text, path)
    found: list[Source | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.append(read_call(node, literals, lightning_version))
        elif isinstance(node, ast.Dict) and "use_amp" in {getattr(key, "value", None) for key in node.keys}:
            found.append(read_dict(literals.dictionary(node)))
    found += [find_clipping(tree, literals), find_overwritten_amp(tree, literals), read_engine(tree, literals)]
    said = (source for source in found if source is not None)
    return [source for source in said if source.declarations or source.findings or IMPORTS in source.facts]


def read_engine(tree: ast.Module, literals: Literals) -> Source | None:
    """Return the imports of a script that starts DeepSpeed, and the line where it opens autocast itself."""
    names = list_imported_modules(tree)
    if "deepspeed" not in names:
        return None
    facts = {IMPORTS: " ".join(sorted(names))}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.With)):
        contexts = [item.context_expr for item in node.items]
        if any(isinstance(c, ast.Call) and ast.unparse(c.func).endswith("autocast") for c in contexts):
            facts.setdefault(AUTOCAST_LINE, str(node.lineno))
    return Source(name=literals.path, dialect="script", facts=facts)


def list_imported_modules(tree: ast.Module) -> set[str]:
    """Return the top-level names of all imported modules."""
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in plain | parts}


def find_clipping(tree: ast.Module, literals: Literals) -> Source | None:
    """Return the script's own clip_grad_norm_: what a framework clips as well is clipped twice."""
    for call in filter(is_torch_clip, ast.walk(tree)):
        assert isinstance(call, ast.Call)
        literal = literals.literal(call.args[1]) if len(call.args) > 1 else None
        limit = parse_number(literal[0]) if literal is not None else None
        place = literals.mapping([], call).place
        said = Declaration(topic="clip", value=limit or "set", spelled=f"{ast.unparse(call.func)}(…)", place=place)
        return Source(name=literals.path, dialect="script", declarations=(said,))
    return None


def find_overwritten_amp(tree: ast.Module, literals: Literals) -> Source | None:
    """Find `accelerator.native_amp = amp`, with which guide 4's trainers bypass Accelerate's setting."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        # timm's `args.native_amp` is a flag; Accelerate's attribute is a switch.
        owner = ast.unparse(target.value).lower() if isinstance(target, ast.Attribute) else ""
        mine = isinstance(target, ast.Attribute) and target.attr == "native_amp" and "accelerator" in owner
        if isinstance(target, ast.Attribute) and mine and not is_false(node):
            message = (
                "native_amp is overwritten: with mixed_precision 'no' autocast then runs without a dtype, "
                "which is float16 on CUDA, without a GradScaler"
            )
            fix = "delete the line, and pass mixed_precision='bf16' or 'fp16' to the Accelerator"
            place = literals.mapping([], target).place
            finding = Finding(rule="fp16-without-scaling", message=message, place=place, fix=fix)
            return Source(name=literals.path, dialect="script", findings=(finding,))
    return None


def is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False


def is_torch_clip(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in ("clip_grad_norm_", "clip_grad_value_") and ast.unparse(node.func.value).endswith("utils")


def read_dict(root: Node) -> Source | None:
    """Read guide 0's config dict; a dict that merely has such keys (names of options) is not one."""
    return own.read_flat(root) if isinstance(root.scalar_at("use_amp"), bool) else None


def read_call(call: ast.Call, literals: Literals, lightning_version: str) -> Source | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    names = {keyword.arg for keyword in call.keywords}
    if name == "Trainer" and names & {"precision", "strategy", "gradient_clip_val", "accumulate_grad_batches"}:
        return read_lightning_call(literals.keywords(call), lightning_version)
    if name == "Fabric" and "precision" in names:
        return read_lightning_call(literals.keywords(call), lightning_version)
    if name in HF_CLASSES:
        return renamed(transformers.read(literals.keywords(call)), "transformers call")
    if name == "Accelerator":
        return read_accelerator_call(literals.keywords(call))
    if name in ("MixedPrecision", "MixedPrecisionPolicy") and "param_dtype" in names:
        return read_fsdp_policy(literals.keywords(call), may_scale=literals.may_scale)
    return None


def renamed(source: Source, dialect: str) -> Source:
    return dataclasses.replace(source, dialect=dialect)


def read_lightning_call(arguments: Node, version: str) -> Source:
    draft = Draft(arguments, "lightning call")
    lightning.read_trainer(draft, "", version)
    return draft.freeze()


def read_accelerator_call(arguments: Node) -> Source:
    draft = Draft(arguments, "Accelerator call")
    word = str(arguments.scalar_at("mixed_precision")).lower()
    if draft.read_word("mixed_precision", ACCELERATE_WORDS, "accelerate", word) is not None:
        draft.say("weights", "fp32", "mixed_precision")
    draft.say_number("accumulate", "gradient_accumulation_steps")
    return draft.freeze()


def read_fsdp_policy(arguments: Node, *, may_scale: bool) -> Source:
    draft = Draft(arguments, "FSDP policy")
    draft.facts["strategy"] = "fsdp"
    compute = parse_dtype(arguments.scalar_at("param_dtype"))
    if compute is None:
        return draft.freeze()
    draft.say("precision", compute, "param_dtype")
    if compute == "fp16" and not may_scale:
        message = "FSDP computes in fp16, and this script has no GradScaler"
        fix = "use ShardedGradScaler, or param_dtype=torch.bfloat16"
        draft.find("fp16-without-scaling", message, "param_dtype", fix=fix)
    reduce = parse_dtype(arguments.scalar_at("reduce_dtype")) or compute
    key = "reduce_dtype" if arguments.has("reduce_dtype") else "param_dtype"
    draft.say("reduce", reduce, key)
    if reduce in ("bf16", "fp16"):
        follows = "" if key == "reduce_dtype" else ": reduce_dtype follows param_dtype"
        message = f"gradients are reduced in {reduce}{follows}"
        draft.find("low-precision-reduce", message, key, fix="reduce_dtype=torch.float32")
    return draft.freeze()
