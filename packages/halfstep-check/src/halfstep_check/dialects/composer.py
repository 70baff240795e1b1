"""MosaicML Composer and LLM Foundry YAML."""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source
from halfstep_check.document import Node
from halfstep_check.spellings import COMPOSER_WORDS

MARKS = ("max_duration", "global_train_batch_size", "device_train_microbatch_size", "eval_interval", "algorithms")


def recognises(root: Node) -> bool:
    return str(root.scalar_at("precision")).startswith("amp_") or sum(root.has(mark) for mark in MARKS) >= 2


def read(root: Node) -> Source:
    draft = Draft(root, "composer")
    fsdp = root.get("fsdp_config") or root.get("parallelism_config.fsdp")
    draft.facts["strategy"] = "fsdp" if fsdp is not None else ""
    if root.has("precision"):
        read_precision(draft, fsdp)
    if root.has("algorithms.gradient_clipping.clipping_threshold"):
        draft.say_number("clip", "algorithms.gradient_clipping.clipping_threshold")
    draft.say_number("batch", "device_train_microbatch_size")
    draft.say_number("global batch", "global_train_batch_size")
    return draft.freeze()


def read_precision(draft: Draft, fsdp: Node | None) -> None:
    precision = draft.read_word("precision", COMPOSER_WORDS, "Composer")
    if fsdp is None or precision not in ("bf16", "fp16"):
        return
    if str(fsdp.scalar_at("mixed_precision")).upper() != "PURE":
        draft.say("reduce", "fp32", "precision")
        return
    block = "fsdp_config" if draft.root.has("fsdp_config") else "parallelism_config.fsdp"
    key = f"{block}.mixed_precision"
    message = f"mixed_precision PURE also reduces gradients in {precision}"
    draft.say_reduced(precision, key, message, fix="DEFAULT reduces in fp32", edits=draft.edit(key, "DEFAULT"))
