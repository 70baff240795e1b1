"""HF TrainingArguments, as JSON, YAML or constructor arguments.

`fp16`/`bf16` overwrite ACCELERATE_MIXED_PRECISION, so they beat the accelerate file; with neither, the file decides.
"""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source, is_on
from halfstep_check.dialects.accelerate import is_filled
from halfstep_check.document import Node
from halfstep_check.spellings import HF_OPTIMIZERS, parse_dtype

MARKS = (
    "per_device_train_batch_size",
    "output_dir",
    "max_grad_norm",
    "num_train_epochs",
    "gradient_accumulation_steps",
)


def recognises(root: Node) -> bool:
    flags = any(isinstance(root.scalar_at(key), bool) for key in ("fp16", "bf16", "tf32"))
    marks = sum(root.has(mark) for mark in MARKS)
    # A model's config.json has a torch_dtype too, and is not about training.
    return flags or marks >= 2 or (marks == 1 and root.has("torch_dtype") and not root.has("architectures"))


def read(root: Node) -> Source:
    draft = Draft(root, "transformers")
    read_arguments(draft, "")
    return draft.freeze()


def read_arguments(draft: Draft, prefix: str) -> None:
    root = draft.root
    draft.facts["strategy"] = "deepspeed" if root.scalar_at(prefix + "deepspeed") else ""
    fp16, bf16 = (is_on(root.scalar_at(prefix + key)) for key in ("fp16", "bf16"))
    if fp16 and bf16:
        draft.find("two-precisions", "fp16 and bf16 are both on: transformers refuses", prefix + "bf16", fix="keep one")
    elif fp16 or bf16:
        say_precision(draft, prefix, "fp16" if fp16 else "bf16")
    draft.say_number("clip", prefix + "max_grad_norm")
    draft.say_number("accumulate", prefix + "gradient_accumulation_steps")
    draft.say_number("batch", prefix + "per_device_train_batch_size")
    draft.refer(prefix + "deepspeed", (".json",))
    if not draft.facts["strategy"] and (root.scalar_at(prefix + "fsdp") or is_filled(root.get(prefix + "fsdp_config"))):
        draft.facts["strategy"] = "fsdp"
    read_optimizer(draft, prefix + "optim")
    if root.has(prefix + "tf32"):
        draft.say("tf32", "on" if is_on(root.scalar_at(prefix + "tf32")) else "off", prefix + "tf32")
    if root.scalar_at(prefix + "half_precision_backend") == "apex":
        message = "half_precision_backend apex: apex no longer has apex.amp, nor transformers 5 this argument"
        draft.find("unknown-value", message, prefix + "half_precision_backend", fix="delete it")
    for key in ("fp16_full_eval", "bf16_full_eval"):
        if is_on(root.scalar_at(prefix + key)) and fp16 | bf16 and key[:4] != ("fp16" if fp16 else "bf16"):
            message = f"{key} casts the weights for evaluation to a different format than training uses"
            draft.find("precision-conflict", message, prefix + key, fix=f"drop {key}")


def read_optimizer(draft: Draft, key: str) -> None:
    """State how the optimizer stores its state; unknown names state nothing."""
    word = str(draft.root.scalar_at(key) or "")
    if word in HF_OPTIMIZERS:
        draft.say("optimizer state", HF_OPTIMIZERS[word], key)
    elif word == "adamw_hf":
        message = "adamw_hf: transformers 5 removed it together with its own AdamW"
        draft.find("unknown-value", message, key, fix="adamw_torch", edits=draft.edit(key, "adamw_torch"))


def say_precision(draft: Draft, prefix: str, precision: str) -> None:
    other = "bf16" if precision == "fp16" else "fp16"
    off = draft.edit(prefix + precision, "False" if draft.root.path.endswith(".py") else "false")
    on = tuple(edit for edit in draft.edit(prefix + other, "True" if draft.root.path.endswith(".py") else "true"))
    rewrites = {"fp32": off} | ({other: off + on} if on else {})
    draft.say_autocast(precision, prefix + precision, rewrites)
    say_weights(draft, prefix, precision)


def say_weights(draft: Draft, prefix: str, precision: str) -> None:
    """fp32, unless DeepSpeed casts them or the model is loaded in another dtype."""
    loaded = parse_dtype(draft.root.scalar_at(prefix + "torch_dtype"))
    if draft.facts["strategy"] == "deepspeed":
        draft.say("weights", f"{precision} + fp32 master", prefix + "deepspeed")
    elif loaded is not None:
        draft.say("weights", loaded, prefix + "torch_dtype")
    else:
        draft.say("weights", "fp32", prefix + precision)
