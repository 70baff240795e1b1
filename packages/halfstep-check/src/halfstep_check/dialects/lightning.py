"""Lightning's `trainer:` block. What a precision string means depends on the major version and on the strategy."""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source
from halfstep_check.document import Node
from halfstep_check.spellings import LIGHTNING_1_WORDS, LIGHTNING_2_WORDS

MARKS = ("accelerator", "devices", "strategy", "max_epochs", "gradient_clip_val", "accumulate_grad_batches")
LONG_WORDS = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
SHORT_WORDS = {"fp32": "32", "fp16": "16", "bf16": "bf16"}


def recognises(root: Node) -> bool:
    return root.has("trainer.precision") or sum(root.has(f"trainer.{mark}") for mark in MARKS) >= 2


def is_trainer_group(root: Node) -> bool:
    """Match a Hydra group such as `configs/trainer/gpu.yaml`, with the Trainer's arguments at the top level."""
    target = str(root.scalar_at("_target_") or "")
    return "lightning" in target and target.endswith("Trainer")


def speaks_at_the_top(root: Node) -> bool:
    """Match `precision: bf16-mixed` without a target: a word that only Lightning has."""
    word = str(root.scalar_at("precision"))
    return word in LIGHTNING_2_WORDS and "-" in word


def find_nested_section(root: Node) -> str | None:
    """Return `training.lightning.` or similar: a block with a precision word and two other arguments of a Trainer."""
    for key, node in root.walk():
        section = key.removesuffix("precision")
        is_word = key.endswith(".precision") and str(node.scalar) in LIGHTNING_2_WORDS
        if is_word and sum(root.has(section + mark) for mark in MARKS) >= 2:
            return section
    return None


def read(root: Node, *, version: str = "", section: str = "trainer.") -> Source:
    draft = Draft(root, "lightning")
    read_trainer(draft, section, version)
    return draft.freeze()


def read_trainer(draft: Draft, prefix: str, version: str) -> None:
    """The arguments of a Trainer, below `prefix`, for the version given (`1.x`, `2.x` or unknown)."""
    strategy = read_strategy(draft.root.get(prefix + "strategy"))
    draft.facts |= {"strategy": strategy, "version": version}
    draft.say_number("clip", prefix + "gradient_clip_val")
    draft.say_number("accumulate", prefix + "accumulate_grad_batches")
    draft.say_number("devices", prefix + "devices")
    key = prefix + "precision"
    node = draft.root.get(key)
    if node is None:
        return
    word = str(node.scalar)
    known = LIGHTNING_1_WORDS if version.startswith("1") else LIGHTNING_2_WORDS
    if word not in known:
        explain_unknown(draft, key, word, version)
    precision = LIGHTNING_2_WORDS.get(word) or LIGHTNING_1_WORDS.get(word)
    if precision is not None:
        say_precision(draft, key, precision, strategy, version)


def read_strategy(node: Node | None) -> str:
    """Return `fsdp`, `deepspeed` or nothing; the strategy may be a name or a block with a class_path."""
    if node is None:
        return ""
    class_path = node.scalar_at("class_path")
    text = str(class_path or (node.scalar if node.scalar is not None else "")).lower()
    return next((name for name in ("fsdp", "deepspeed") if name in text), "")


def explain_unknown(draft: Draft, key: str, word: str, version: str) -> None:
    meant = LIGHTNING_2_WORDS.get(word)
    if version.startswith("1") and meant in SHORT_WORDS:
        message = f"precision {word!r} is Lightning 2's spelling, but version {version} is pinned"
        old = SHORT_WORDS[meant]
        fix = f"write {old!r}, or move to Lightning 2"
        draft.find("unknown-value", message, key, fix=fix, edits=draft.edit(key, old))
        return
    known = LIGHTNING_1_WORDS if version.startswith("1") else LIGHTNING_2_WORDS
    draft.find("unknown-value", f"Lightning does not know precision {word!r}", key, fix=f"one of {', '.join(known)}")


def say_precision(draft: Draft, key: str, precision: str, strategy: str, version: str) -> None:
    words = SHORT_WORDS if version.startswith("1") else LONG_WORDS
    draft.say("precision", precision.removesuffix("-true"), key, {p: draft.edit(key, w) for p, w in words.items()})
    if strategy == "deepspeed" and precision in ("bf16", "fp16"):
        weights = f"{precision} + fp32 master"
    else:
        weights = precision.removesuffix("-true") if precision.endswith("-true") else "fp32"
    draft.say("weights", weights, key)
    if strategy == "deepspeed" and precision == "bf16":
        message = "under the deepspeed strategy bf16-mixed casts the weights to bf16 (with an fp32 master)"
        draft.find("deepspeed-bf16-weights", message, key, fix="use ddp or fsdp for autocast over fp32 weights")
    if precision == "fp16":
        draft.say("scaling", "dynamic", key)
    if strategy == "fsdp" and precision in ("bf16", "fp16"):
        # fabric/plugins/precision/fsdp.py: reduce_dtype follows the precision string.
        message = f"FSDP with {draft.root.scalar_at(key)!r} also reduces gradients in {precision}"
        fix = "give FSDPStrategy a MixedPrecision(reduce_dtype=torch.float32)"
        draft.say_reduced(precision, key, message, fix=fix)
    if precision in ("fp16-true", "bf16-true"):
        half = precision.removesuffix("-true")
        scaled = " or loss scaling" if half == "fp16" else ""
        message = f"{draft.root.scalar_at(key)!r}: weights and optimizer state are {half}, without an fp32 copy{scaled}"
        draft.find("half-weights", message, key, fix=f"use {half.replace('fp', '')}-mixed, or an optimizer made for it")
