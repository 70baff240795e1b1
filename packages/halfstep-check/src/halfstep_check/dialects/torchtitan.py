"""torchtitan's TOML: bf16 or fp32, no loss scaling, gradients reduced in fp32."""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source
from halfstep_check.document import Node
from halfstep_check.spellings import TITAN_WORDS, parse_dtype


def recognises(root: Node) -> bool:
    named = root.has("training.mixed_precision_param") or root.has("training.mixed_precision_reduce")
    return named or (root.has("training", "job") and root.has("parallelism"))


def read(root: Node) -> Source:
    draft = Draft(root, "torchtitan")
    key = "training.mixed_precision_param"
    if not root.has(key):
        draft.say("precision", "bf16", key)  # torchtitan's default
    if not root.has(key) or draft.read_word(key, TITAN_WORDS, "torchtitan") is not None:
        draft.say("weights", parse_dtype(root.scalar_at("training.dtype") or "float32") or "fp32", key)
    read_reduction(draft)
    draft.say_number("clip", "training.max_norm")
    draft.say_number("batch", "training.local_batch_size")
    if root.scalar_at("training.global_batch_size") != -1:
        draft.say_number("global batch", "training.global_batch_size")
    return draft.freeze()


def read_reduction(draft: Draft) -> None:
    key = "training.mixed_precision_reduce"
    word = draft.root.scalar_at(key)
    if word is None:
        draft.say("reduce", "fp32", key)
        return
    reduce = parse_dtype(word)
    if reduce is not None:
        draft.say("reduce", reduce, key)
    if reduce != "fp32":
        message = f"mixed_precision_reduce {word!r}: torchtitan accepts only float32"
        draft.find("unknown-value", message, key, fix="set it to float32", edits=draft.edit(key, "float32"))
