"""Keys of other tools and the settings they stand for: one table for files, flags and overrides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from halfstep_train.config.section import parse_scalar

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


def convert_compile_model(compile_model: object) -> object:
    """Convert `compile_model: true` to `train.fast`, so that there is one setting for the mode."""
    is_on = parse_scalar(compile_model) if isinstance(compile_model, str) else compile_model
    return {"True": "compile", "False": "off"}.get(str(is_on), compile_model)


CONVERSIONS: dict[str, Callable[[object], object]] = {
    "train.fast": convert_compile_model,
    # Other trainers write -1 where no step limits the run.
    "train.max_steps": lambda limit: 0 if str(limit) == "-1" else limit,
    "train.clip_type": lambda algorithm: {"norm": "l2"}.get(str(algorithm), algorithm),
}
"""How values of foreign keys become values of these settings; all others stay as they are."""

FOREIGN_KEYS: dict[str, tuple[str, ...]] = {
    "train.epochs": ("epochs", "num_epochs", "num_train_epochs", "max_epochs", "trainer.max_epochs", "trainer.epochs"),
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
    "train.clip_type": ("clip_type", "gradient_clip_algorithm", "trainer.gradient_clip_algorithm"),
    "train.fast": ("compile_model", "compile", "train.compile"),
    "train.early_stopping_patience": (
        *("early_stopping_patience", "trainer.early_stopping_patience", "patience", "early_stopping.patience"),
    ),
    "train.validate_every": ("check_val_every_n_epoch", "trainer.check_val_every_n_epoch"),
    "train.checkpoint_every": (
        *("checkpoint_every", "checkpoint_every_n_steps", "trainer.save_and_sample_every", "checkpointing_steps"),
        "save_steps",
    ),
    "train.checkpoints_total_limit": ("checkpoints_total_limit", "save_total_limit"),
    "train.report_every": (
        *("report_every", "log_every_n_steps", "trainer.log_every_n_steps", "trainer.log_freq", "logging_steps"),
    ),
    "train.seed": ("seed", "trainer.seed"),
    "train.deterministic": ("deterministic", "trainer.deterministic"),
    "train.activation_checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "train.auto_batch": ("auto_batch",),
    "optimizer.lr": ("lr", "learning_rate", "optimizer.learning_rate", "trainer.lr", "train.lr"),
    "optimizer.name": ("optimizer",),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.momentum": ("momentum",),
    "schedule.name": ("schedule", "lr_scheduler", "scheduler", "lr_scheduler_type"),
    "schedule.warmup_steps": ("warmup_steps", "lr_warmup_steps", "warmup_iters"),
    "schedule.warmup_epochs": ("warmup_epochs",),
    "data.dir": ("data_dir", "data", "dataset.dir"),
    "data.num_workers": ("num_workers", "workers", "dataset.num_workers", "dataloader_num_workers"),
    "data.image_size": ("image_size", "img_size"),
    "model.path": ("model",),
    # nanoGPT's and transformers' names for the size of a GPT-2.
    "model.depth": ("n_layer",),
    "model.heads": ("n_head",),
    "model.dim": ("n_embd",),
    "model.context": ("block_size", "n_positions"),
    "model.dropout": ("dropout",),
    "train.validate_every_steps": ("eval_interval", "eval_steps"),
    "ema.enabled": ("ema", "use_ema"),
    "ema.decay": ("ema_decay",),
    "precision.strict": ("strict",),
    "precision.simulate": ("simulate",),
    "log.track": ("track", "report_to"),
    "train.callbacks": ("callbacks",),
    "log.quiet": ("quiet",),
    "log.verbose": ("verbose",),
    "log.ledger": ("ledger", "ledger_every"),
    "log.watch": ("watch",),
}
KEY_ALIASES: dict[str, str] = {key: path for path, keys in FOREIGN_KEYS.items() for key in keys}
"""The setting that each foreign key means."""

PER_RANK_KEYS: dict[str, str] = {
    "per_device_train_batch_size": "train.batch_size",
    "batch_size_per_gpu": "train.batch_size",
    "per_device_eval_batch_size": "train.val_batch_size",
}
"""Keys that count the samples of one GPU, and the settings that count those of all ranks."""

GLOBAL_ALIASES = {"BATCH_SIZE_PER_GPU": "per_device_train_batch_size"}
"""Globals of SlotContrast's configs that set one of our settings if no reference uses them."""

TRACKERS_INSTEAD = "log.track: [tensorboard] in a file, log.track=tensorboard or --track tensorboard in a command"
HABITS: dict[str, str] = {
    "log.tensorboard": TRACKERS_INSTEAD,
    "tensorboard": TRACKERS_INSTEAD,
    "no_tensorboard": "leave it out: without --track no tracker is used",
    "logger": "--track tensorboard, wandb or mlflow; metrics.jsonl is always written",
    "config": "give the file first: halfstep train FILE",
    "output_dir": "--out DIR is the run's folder, --log-dir DIR its parent",
    "no_sub_logdirs": "--out DIR is the run's folder itself",
    "devices": "--gpus N",
    "num_processes": "--gpus N",
    "gpu_ids": "--gpus 1,2 trains on these two; under torchrun or accelerate launch set CUDA_VISIBLE_DEVICES=1,2",
    "distributed_type": "leave it out, and type --gpus 2, or start with accelerate launch; FSDP: train.shard=true",
    "accelerator": "--device cpu, cuda or mps",
    "adam_beta1": "optimizer.betas=[0.9,0.999]",
    "adam_beta2": "optimizer.betas=[0.9,0.999]",
    "warmup_ratio": "schedule.warmup_epochs=0.3, or schedule.warmup_steps=500",
    "optim": "optimizer.name=adamw, and optimizer.moment_bits=8 for 8-bit AdamW",
    "val_check_interval": "train.validate_every_steps=N or train.validate_every=EPOCHS",
    "save_strategy": "leave it out: each epoch is saved; train.checkpoint_every=N saves by steps",
    "resume_from_checkpoint": "--resume RUN",
    "ckpt_path": "--resume RUN; weights alone: model.weights=FILE",
    "enable_progress_bar": "--quiet shows warnings and the summary only",
    "enable_checkpointing": "leave it out: a run is always saved; --dry removes its folder",
    "run_eval_after_training": "halfstep evaluate RUN, after the run",
    "no_interactive": "leave it out: halfstep train never asks questions",
    "torch_compile": "train.fast=compile, or graph; the default auto takes the fastest",
}
"""Keys and flags of Lightning, transformers and others that mean nothing here as they are, and what to use instead."""
