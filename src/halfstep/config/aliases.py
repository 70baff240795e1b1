"""Every spelling users bring, in two tables: precision names, and the keys of other tools.

Names come from the guides, Lightning (`bf16-mixed`, `16`), Accelerate (`no`, `fp16`), Composer (`amp_bf16`), Hugging
Face (`fp16: true`), torch (`bfloat16`, `high`). One table means one meaning everywhere: file, flag, override, dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfstep.config.section import typed
from halfstep.errors import ConfigError, nearest

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "fp8", "bf16-true")
MIXED = ("bf16", "fp16", "fp8")
"""Precisions that compute in fewer bits than the weights have: what `use_amp: true` can mean."""

SPELLINGS: dict[str, tuple[str, ...]] = {
    "auto": ("auto",),
    "fp32": (
        *("fp32", "float32", "float", "single", "full", "32", "32-true", "32-bit", "amp_fp32", "highest"),
        *("no", "none", "null", "~", "off", "false"),
    ),
    "tf32": ("tf32", "tensorfloat32", "tf32-mixed", "high"),
    "bf16": ("bf16", "bfloat16", "bf16-mixed", "bfloat16-mixed", "mixed_bfloat16", "mixed_bf16", "amp_bf16", "bfloat"),
    "fp16": (
        *("fp16", "float16", "half", "16", "16-mixed", "16-bit", "fp16-mixed", "float16-mixed"),
        *("mixed_float16", "mixed_fp16", "amp_fp16"),
    ),
    "fp8": (
        *("fp8", "float8", "8", "fp8-mixed", "amp_fp8", "e4m3", "fp8_e4m3", "float8_e4m3", "float8_e4m3fn"),
        *("hybrid", "transformer-engine"),
    ),
    "bf16-true": ("bf16-true", "bfloat16-true", "pure_bf16", "true_bf16"),
}
PRECISION_NAMES: dict[str, str] = {word: name for name, words in SPELLINGS.items() for word in words}

FP16_WEIGHTS = (
    "fp16 weights lose every update smaller than 1/2048 of the weight, and cannot be unscaled safely",
    "use fp16 (fp32 weights, fp16 compute), or bf16-true to save the memory of the weights",
)
FP64 = ("halfstep trains in fp32 and below", "use fp32, the most exact precision here")
E5M2 = ("two mantissa bits are too few for weights and activations", "use fp8: e4m3 forward, e5m2 for gradients")
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("fp16-true", "16-true", "float16-true", "half-true", "pure_fp16", "true_fp16"), FP16_WEIGHTS),
    **dict.fromkeys(("64", "64-true", "fp64", "float64", "double"), FP64),
    **dict.fromkeys(("e5m2", "fp8_e5m2", "float8_e5m2"), E5M2),
}
"""Spellings with a clear meaning that halfstep does not offer: why, and what to use."""


def precision_name(value: object, where: str = "") -> str:
    """The one precision this spelling means; `where` says in an error who wrote it."""
    word = str(value).strip().lower().removeprefix("torch.")
    if word in PRECISION_NAMES:
        return PRECISION_NAMES[word]
    at = f" ({where})" if where else ""
    if word in REFUSED:
        why, fix = REFUSED[word]
        raise ConfigError(f"precision {value!s} is not offered{at}", why=why, fix=fix)
    fix = nearest(word, PRECISIONS) if word else f"one of {', '.join(PRECISIONS)}"
    raise ConfigError(f"unknown precision {str(value)!r}{at}", fix=fix)


Role = Literal["name", "switch", "switch or name", "type", "fp16", "bf16", "optimizations"]
"""What a key says about the precision: its name, mixed on or off, which half format, or one format on or off."""

PRECISION_KEYS: dict[str, Role] = {
    "precision": "name",
    "precision.default": "name",
    "mixed_precision": "switch or name",
    "use_amp": "switch",
    "amp": "switch",
    "amp_dtype": "type",
    "precision_type": "type",
    "fp16": "fp16",
    "bf16": "bf16",
    "use_optimizations": "optimizations",
}
PRECISION_KEYS |= {
    f"{section}.{key}": role
    for section in ("trainer", "train")
    for key, role in PRECISION_KEYS.items()
    if key != "precision.default"
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Where a foreign key lives in our tree, and how its value is said there."""

    path: str
    convert: Callable[[object], object] = lambda value: value


def fast_path(compile_model: object) -> object:
    """Guide 0's `compile_model` is our `train.fast`: two switches for one thing could disagree."""
    is_on = typed(compile_model) if isinstance(compile_model, str) else compile_model
    return {"True": "compile", "False": "off"}.get(str(is_on), compile_model)


def clip_type(algorithm: object) -> object:
    return {"norm": "l2"}.get(str(algorithm), algorithm)


FOREIGN_KEYS: dict[str, tuple[str, ...]] = {
    "train.epochs": ("epochs", "num_epochs", "max_epochs", "trainer.max_epochs", "trainer.epochs"),
    "train.max_steps": ("max_steps", "trainer.max_steps", "train_num_steps", "trainer.train_num_steps", "max_iters"),
    "train.batch_size": ("batch_size", "data.batch_size", "dataset.batch_size", "trainer.batch_size"),
    "train.accumulate": (
        *("accumulate", "accumulation_steps", "gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
        *("accumulate_grad_batches", "trainer.gradient_accumulate_every", "gradient_accumulate_every"),
    ),
    "train.clip_norm": (
        *("clip_norm", "grad_clip", "gradient_clip_val", "trainer.gradient_clip_val", "gradient_clipping"),
        *("max_grad_norm", "trainer.max_grad_norm"),
    ),
    "train.early_stopping_patience": ("early_stopping_patience", "trainer.early_stopping_patience"),
    "train.checkpoint_every": (
        *("checkpoint_every", "checkpoint_every_n_steps", "trainer.save_and_sample_every", "checkpointing_steps"),
    ),
    "train.checkpoints_total_limit": ("checkpoints_total_limit",),
    "train.report_every": ("report_every", "log_every_n_steps", "trainer.log_every_n_steps", "trainer.log_freq"),
    "train.seed": ("seed", "trainer.seed"),
    "train.deterministic": ("deterministic", "trainer.deterministic"),
    "train.activation_checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "train.auto_batch": ("auto_batch",),
    "optimizer.lr": ("lr", "learning_rate", "optimizer.learning_rate", "trainer.lr", "train.lr"),
    "optimizer.name": ("optimizer",),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.momentum": ("momentum",),
    "schedule.name": ("schedule", "lr_scheduler", "scheduler"),
    "schedule.warmup_steps": ("warmup_steps", "lr_warmup_steps", "warmup_iters"),
    "schedule.warmup_epochs": ("warmup_epochs",),
    "data.dir": ("data_dir", "data", "dataset.dir"),
    "data.num_workers": ("num_workers", "workers", "dataset.num_workers"),
    "data.image_size": ("image_size", "img_size"),
    "model.path": ("model",),
    # nanoGPT's and transformers' words for the size of a GPT-2.
    "model.depth": ("n_layer",),
    "model.heads": ("n_head",),
    "model.dim": ("n_embd",),
    "model.context": ("block_size", "n_positions"),
    "model.dropout": ("dropout",),
    "train.validate_every_steps": ("eval_interval",),
    "ema.enabled": ("ema", "use_ema"),
    "ema.decay": ("ema_decay",),
    "precision.strict": ("strict",),
    "precision.simulate": ("simulate",),
    "log.tensorboard": ("tensorboard",),
    "log.quiet": ("quiet",),
    "log.ledger": ("ledger",),
    "log.ledger_every": ("ledger_every",),
}
KEY_ALIASES: dict[str, Alias] = {key: Alias(path=path) for path, keys in FOREIGN_KEYS.items() for key in keys}
KEY_ALIASES |= dict.fromkeys(("compile_model", "compile", "train.compile"), Alias(path="train.fast", convert=fast_path))
KEY_ALIASES |= dict.fromkeys(
    ("clip_type", "gradient_clip_algorithm", "trainer.gradient_clip_algorithm"),
    Alias(path="train.clip_type", convert=clip_type),
)

GLOBAL_ALIASES = {"BATCH_SIZE_PER_GPU": "train.batch_size"}
"""Globals of guide 3 that mean a setting of ours where nothing refers to them."""
