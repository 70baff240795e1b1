"""DeepSpeed's JSON. Its `fp16` and `bf16` cast the weights themselves and keep an fp32 master: that is not autocast."""

from __future__ import annotations

from halfstep_check.declarations import AUTO, Draft, Source, is_on
from halfstep_check.document import Node
from halfstep_check.findings import Edit
from halfstep_check.spellings import parse_dtype

MARKS = ("train_micro_batch_size_per_gpu", "zero_optimization", "zero_allow_untested_optimizer", "steps_per_print")
SCALER_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def recognises(root: Node) -> bool:
    blocks = any(isinstance(root.get(key), Node) and root.has(f"{key}.enabled") for key in ("fp16", "bf16", "bfloat16"))
    return blocks or root.has("torch_autocast.enabled") or any(root.has(mark) for mark in MARKS)


def read(root: Node) -> Source:
    draft = Draft(root, "deepspeed")
    draft.facts["strategy"] = "deepspeed"
    read_precision(draft)
    if root.has("optimizer.type"):
        draft.say("optimizer state", f"DeepSpeed's {root.scalar_at('optimizer.type')}", "optimizer.type")
    draft.say_number("clip", "gradient_clipping")
    draft.say_number("accumulate", "gradient_accumulation_steps")
    draft.say_number("batch", "train_micro_batch_size_per_gpu")
    draft.say_number("global batch", "train_batch_size")
    find_batch_arithmetic(draft)
    return draft.freeze()


def read_precision(draft: Draft) -> None:
    root = draft.root
    bf16 = "bf16" if root.has("bf16") or not root.has("bfloat16") else "bfloat16"
    switches = {"fp16": "fp16.enabled", "bf16": f"{bf16}.enabled"}
    on = [name for name, key in switches.items() if is_on(root.scalar_at(key))]
    autocast = is_on(root.scalar_at("torch_autocast.enabled"))
    if len(on) == 2:
        message = "fp16 and bf16 are both enabled: DeepSpeed stops with an assertion"
        draft.find("two-precisions", message, switches["bf16"], fix="keep one of them")
    elif on:
        say_cast_weights(draft, on[0], switches)
    elif autocast:
        dtype = parse_dtype(root.scalar_at("torch_autocast.dtype") or "bfloat16")
        draft.say("precision", dtype or "bf16", "torch_autocast.enabled")
        draft.say("weights", "fp32", "torch_autocast.enabled")
        if dtype == "fp16":  # its ZeRO optimizers and the plain engine then keep a torch GradScaler
            draft.say("scaling", "dynamic", "torch_autocast.dtype")
    elif any(root.scalar_at(key) == AUTO for key in switches.values()):
        key = next(key for key in switches.values() if root.scalar_at(key) == AUTO)
        draft.say("precision", AUTO, key)
    elif any(root.has(key) for key in switches.values()):
        key = next(key for key in switches.values() if root.has(key))
        draft.say("precision", "fp32", key, list_rewrites(draft, switches))
    if on and autocast:
        message = f"torch_autocast and {on[0]} are both on: {on[0]} already casts the weights"
        draft.find("two-precisions", message, "torch_autocast.enabled", fix=f"disable {on[0]} to keep fp32 weights")
    if is_on(root.scalar_at("amp.enabled")):
        message = "amp is apex.amp, which apex no longer contains"
        draft.find("unknown-value", message, "amp.enabled", fix="use bf16, or torch_autocast for fp32 weights")


def list_rewrites(draft: Draft, switches: dict[str, str]) -> dict[str, tuple[Edit, ...]]:
    """Return the edits that select each precision; only switches that the file contains can be changed."""
    found = {}
    for precision in ("fp16", "bf16", "fp32"):
        if precision == "fp32" or draft.root.has(switches[precision]):
            edits = [draft.edit(key, str(name == precision).lower()) for name, key in switches.items()]
            found[precision] = tuple(edit for group in edits for edit in group)
    return found


def say_cast_weights(draft: Draft, precision: str, switches: dict[str, str]) -> None:
    key = switches[precision]
    draft.say("precision", precision, key, list_rewrites(draft, switches))
    draft.say("weights", f"{precision} + fp32 master", key)
    block = key.removesuffix(".enabled")
    if precision == "fp16":
        scale = draft.root.scalar_at("fp16.loss_scale")
        draft.say("scaling", f"static {scale}" if scale else "dynamic", "fp16.loss_scale" if scale else key)
        return
    message = "DeepSpeed bf16 stores the weights in bf16 (with an fp32 master): it is not autocast over fp32 weights"
    draft.find("deepspeed-bf16-weights", message, key, fix="for fp32 weights use torch_autocast instead")
    idle = [f"{block}.{name}" for name in SCALER_KEYS if draft.root.has(f"{block}.{name}")]
    if idle:
        keys = "the key" if len(idle) == 1 else "such keys"
        message = f"{', '.join(idle)}: bf16 needs no loss scaling; DeepSpeed 0.17 refuses {keys}, older ones drop them"
        draft.find("scaling-with-bf16", message, idle[0], fix=f"delete {', '.join(idle)}")


def find_batch_arithmetic(draft: Draft) -> None:
    """train_batch_size = micro batch × accumulation × processes, or DeepSpeed stops with an assertion."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (draft.root.scalar_at(key) for key in keys)
    if isinstance(whole, bool) or not isinstance(whole, int) or not isinstance(micro, int):
        return
    window = micro * (steps if isinstance(steps, int) else 1)
    if window <= 0 or whole <= 0 or whole % window:
        message = f"train_batch_size {whole} is not a multiple of {micro} × {steps if isinstance(steps, int) else 1}"
        fix = "set train_batch_size = micro batch × accumulation × number of processes"
        draft.find("batch-arithmetic", message, "train_batch_size", fix=fix)
