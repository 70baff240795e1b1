"""halfstep's own config, and guide 0's flat dict of `use_amp` and `amp_dtype`."""

from __future__ import annotations

from halfstep.align.document import Node
from halfstep.align.spellings import dtype_of
from halfstep.align.statements import Draft, Source, is_on
from halfstep.config.aliases import PRECISIONS, precision_name
from halfstep.errors import ConfigError


def recognises(root: Node) -> bool:
    return root.has("workload")


def read(root: Node) -> Source:
    draft = Draft(root, "halfstep")
    key = "precision.default" if root.has("precision.default") else "precision"
    if root.has(key):
        say_precision(draft, key)
    draft.number("clip", "train.clip_norm")
    draft.number("accumulate", "train.accumulate")
    draft.number("batch", "train.batch_size")
    return draft.source()


def say_precision(draft: Draft, key: str) -> None:
    try:
        # An unquoted `no` was read as a bool; the alias table knows that word too.
        precision = precision_name(draft.root.scalar_at(key))
    except ConfigError as error:
        draft.find("unknown-value", error.what, key, fix=error.fix)
        return
    draft.say("precision", precision.removesuffix("-true"), key, {name: draft.edit(key, name) for name in PRECISIONS})
    draft.say("weights", "bf16" if precision == "bf16-true" else "fp32", key)
    if precision == "fp16":
        draft.say("scaling", "dynamic", key)


def recognises_flat(root: Node) -> bool:
    return root.has("use_amp")


def read_flat(root: Node) -> Source:
    """`use_amp` and `amp_dtype` are one statement; without use_amp the dtype is idle."""
    draft = Draft(root, "use_amp/amp_dtype")
    say_flat(draft)
    draft.number("clip", "grad_clip")
    draft.number("accumulate", "accumulation_steps")
    draft.number("batch", "batch_size")
    return draft.source()


def say_flat(draft: Draft) -> None:
    word = draft.root.scalar_at("amp_dtype")
    dtype = dtype_of(word if word is not None else "float16")
    if dtype not in ("fp16", "bf16"):
        message = f"amp_dtype {word!r} is not a format autocast computes in"
        draft.find("unknown-value", message, "amp_dtype", fix="bfloat16 or float16")
        return
    on = is_on(draft.root.scalar_at("use_amp"))
    python = draft.root.path.endswith(".py")
    true, false = ("True", "False") if python else ("true", "false")
    rewrites = {"fp32": draft.edit("use_amp", false)}
    if draft.root.has("amp_dtype"):
        for name, precision in (("bfloat16", "bf16"), ("float16", "fp16")):
            rewrites[precision] = draft.edit("use_amp", true) + draft.edit("amp_dtype", name)
    draft.say("precision", dtype if on else "fp32", "use_amp", rewrites)
    draft.say("weights", "fp32", "use_amp")
    if on and dtype == "fp16":
        draft.say("scaling", "dynamic", "use_amp")
