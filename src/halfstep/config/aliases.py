"""Keys of other tools and the settings they stand for: one table for files, flags and overrides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfstep.config.section import parse_scalar

Role = Literal["name", "switch", "switch or name", "type", "fp16", "bf16", "optimizations"]
"""What a key sets: the precision's name, mixed precision on or off, which half format, or one format on or off."""

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
    """The setting that a foreign key means, and how its value is converted."""

    path: str
    convert: Callable[[object], object] = lambda value: value


def convert_compile_model(compile_model: object) -> object:
    """Convert `compile_model: true` to `train.fast`, so that there is one setting for the mode."""
    is_on = parse_scalar(compile_model) if isinstance(compile_model, str) else compile_model
    return {"True": "compile", "False": "off"}.get(str(is_on), compile_model)


def convert_clip_type(algorithm: object) -> object:
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
    # nanoGPT's and transformers' names for the size of a GPT-2.
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
    "log.verbose": ("verbose",),
    "log.ledger": ("ledger",),
    "log.ledger_every": ("ledger_every",),
}
KEY_ALIASES: dict[str, Alias] = {key: Alias(path=path) for path, keys in FOREIGN_KEYS.items() for key in keys}
KEY_ALIASES |= dict.fromkeys(
    ("compile_model", "compile", "train.compile"), Alias(path="train.fast", convert=convert_compile_model)
)
KEY_ALIASES |= dict.fromkeys(
    ("clip_type", "gradient_clip_algorithm", "trainer.gradient_clip_algorithm"),
    Alias(path="train.clip_type", convert=convert_clip_type),
)

GLOBAL_ALIASES = {"BATCH_SIZE_PER_GPU": "train.batch_size"}
"""Globals of SlotContrast's configs that set one of our settings if no reference uses them."""
