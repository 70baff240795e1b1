"""Accelerate's YAML: `accelerate launch` turns it into environment variables, which the constructor may override.

An explicit `Accelerator(mixed_precision=…)` beats this file, and a plain `python train.py` never reads it
(accelerate `state.py` reads ACCELERATE_MIXED_PRECISION only when the argument is None).
"""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source, is_on
from halfstep_check.document import Node
from halfstep_check.spellings import ACCELERATE_WORDS

MARKS = ("compute_environment", "distributed_type", "mixed_precision", "main_training_function", "num_machines")
LAUNCHER_KEYS = {
    *MARKS,
    *("num_processes", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
    *("use_cpu", "gpu_ids", "debug", "downcast_bf16", "dynamo_config", "dynamo_backend", "fsdp_config", "fp8_config"),
    *("deepspeed_config", "gradient_accumulation_steps", "fp16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
    *("enable_cpu_affinity", "mpirun_config", "megatron_lm_config", "ipex_config", "command_file", "commands"),
}
DEEPSPEED_FILE_OWNS = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model")


def recognises(root: Node) -> bool:
    return root.has("distributed_type") or sum(root.has(mark) for mark in MARKS) >= 2 or is_minimal(root)


def is_minimal(root: Node) -> bool:
    """Match a file of `mixed_precision` with a launcher's keys and nothing else: many trainers have a key of that
    name."""
    return root.has("mixed_precision") and isinstance(root.value, dict) and root.value.keys() <= LAUNCHER_KEYS


def read(root: Node) -> Source:
    draft = Draft(root, "accelerate")
    strategy = str(root.scalar_at("distributed_type") or "NO").upper()
    draft.facts["strategy"] = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(strategy, "")
    read_precision(draft)
    if draft.facts["strategy"] == "deepspeed":
        read_deepspeed(draft)
    else:
        draft.say_number("accumulate", "gradient_accumulation_steps")
    draft.say_number("devices", "num_processes")
    find_keys_without_effect(draft, strategy)
    return draft.freeze()


def read_precision(draft: Draft) -> None:
    root = draft.root
    key = "mixed_precision" if root.has("mixed_precision") else "fp16"
    node = root.get(key)
    if node is None:
        return
    word = str(node.scalar).lower() if key == "mixed_precision" else ("fp16" if is_on(node.scalar) else "no")
    precision = ACCELERATE_WORDS.get("no" if word in ("false", "none") else word)
    if precision is None:
        message = f"accelerate does not know mixed_precision {node.scalar!r}"
        draft.find("unknown-value", message, key, fix=f"one of {', '.join(ACCELERATE_WORDS)}")
        return
    # A bare `no` is a bool to YAML, and accelerate wants the word.
    spelled = {**ACCELERATE_WORDS, "'no'" if not node.quote else "no": "fp32"}
    words = {precision: (node.rewritten(word),) for word, precision in spelled.items()}
    draft.say_autocast(precision, key, words if key == "mixed_precision" else None)
    cast = draft.facts["strategy"] == "deepspeed" and precision in ("bf16", "fp16")
    draft.say("weights", f"{precision} + fp32 master" if cast else "fp32", key)
    if cast and precision == "bf16" and not find_deepspeed_file(draft.root):
        message = "with DEEPSPEED bf16 casts the weights (and keeps an fp32 master): it is not autocast"
        draft.find("deepspeed-bf16-weights", message, key, fix="for fp32 weights use another distributed_type")
    if draft.facts["strategy"] == "fsdp" and precision in ("bf16", "fp16"):
        # FullyShardedDataParallelPlugin.set_mixed_precision: param, reduce and buffer dtype are all this one.
        message = f"FSDP with mixed_precision {precision} also reduces gradients in {precision}"
        fix = "give FullyShardedDataParallelPlugin a mixed_precision_policy with reduce_dtype float32"
        draft.say_reduced(precision, key, message, fix=fix)


def find_deepspeed_file(root: Node) -> str:
    """Return the DeepSpeed JSON that this file names; `none` is accelerate's own word for none."""
    name = root.scalar_at("deepspeed_config.deepspeed_config_file")
    return "" if name in (None, "none") else str(name)


def read_deepspeed(draft: Draft) -> None:
    prefix = "deepspeed_config."
    file = find_deepspeed_file(draft.root)
    if not file:
        draft.say_number("accumulate", prefix + "gradient_accumulation_steps")
        draft.say_number("clip", prefix + "gradient_clipping")
        return
    draft.refer(prefix + "deepspeed_config_file", (".json",))
    for key in filter(draft.root.has, (*(prefix + key for key in DEEPSPEED_FILE_OWNS), "mixed_precision")):
        draft.find(
            "launch-refused",
            f"{key} next to deepspeed_config_file: accelerate launch refuses to start",
            key,
            fix=f"delete {key} here and set it in {file}",
        )


def find_keys_without_effect(draft: Draft, strategy: str) -> None:
    root = draft.root
    if root.has("fp16") and root.has("mixed_precision"):
        message = "fp16 is accelerate's old key: it is dropped if mixed_precision is set"
        draft.find("ignored-key", message, "fp16", fix="delete it")
    if is_on(root.scalar_at("downcast_bf16")) and strategy != "TPU" and strategy != "XLA":
        message = f"downcast_bf16 only affects TPUs; distributed_type is {strategy}"
        draft.find("ignored-key", message, "downcast_bf16", fix="set it to 'no'")
    for block, owner in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if is_filled(root.get(block)) and strategy != owner:
            message = f"{block} has no effect: distributed_type is {strategy}"
            draft.find("ignored-key", message, block, fix=f"set distributed_type: {owner}, or delete the block")
    if is_filled(root.get("fp8_config")) and root.scalar_at("mixed_precision") != "fp8":
        message = f"fp8_config has no effect: mixed_precision is {root.scalar_at('mixed_precision')}"
        draft.find("ignored-key", message, "fp8_config", fix="set mixed_precision: fp8, or delete the block")


def is_filled(node: Node | None) -> bool:
    return node is not None and isinstance(node.value, dict) and bool(node.value)
