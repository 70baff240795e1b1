"""Translate config files of SlotContrast, and of its fork with STEVE's words, into our settings.

Each key is either read or listed as unused with a reason; a key that would train a different model is an error. Values
come from a `ForeignReader`, which records every key that is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.errors import ConfigError
from halfstep_train.config.foreign import Foreign, ForeignReader
from halfstep_train.workloads.slots.config import DINO_PATCH

MODULES = {"initializer", "encoder", "processor", "decoder"}
CROPS = {
    None: "none",
    "central": "central",
    "short_side_resize_central": "central",
    "short_side_resize_random": "random",
}
SCORED = ("VideoARI", "ImageARI", "VideoIoU", "ImageIoU")
"""Metrics that every run computes; IoU with `matching: overlap` is mBO."""
COMPARED = {
    "MSELoss": ("decoder.reconstruction", "encoder.backbone_features"),
    "Slot_Slot_Contrastive_Loss": ("processor.state", "encoder.backbone_features"),
}
"""The tensors that each loss compares, by upstream's names; the contrastive loss does not use its target."""
SCORED_MASKS = "decoder_masks_hard"
PROCESSES = "the command sets the number of ranks: --gpus N, or torchrun"
UNUSED = {
    key: why
    for why, keys in {
        "a run's folder is named by --out": "experiment_group experiment_name",
        "steps count, upstream as here": "trainer.max_epochs trainer.check_val_every_n_epoch",
        PROCESSES: "trainer.strategy trainer.find_unused_parameters trainer.num_nodes",
        "metrics are computed in validation": "train_metrics",
        "the same workers read both splits (data.num_workers)": "dataset.num_val_workers",
        "an epoch is every video once": "dataset.samples_per_epoch",
        "validation reads every clip of its shards once": "dataset.val_size",
        "halfstep evaluate --data DIR evaluates others": "dataset.test_shards dataset.test_size dataset.test_pipeline",
        "shards are read by offset, without a cache": "dataset.cache_train dataset.cache_val dataset.cache_dir",
        "lengths are read from the files": "dataset.train_pipeline.video_size dataset.val_pipeline.video_size",
        "the whole set is shuffled": "dataset.train_pipeline.shuffle_size",
        "validation is not shuffled": "dataset.val_pipeline.shuffle_size",
        "labels are read from the masks": "dataset.train_pipeline.transforms.num_classes "
        "dataset.val_pipeline.transforms.num_classes",
        "the decoder's masks are drawn": "model.masks_to_visualize",
    }.items()
    for key in keys.split()
}


def translate_config(document: Mapping[str, Any], name: str) -> Foreign | None:
    """Translate a config of SlotContrast or its fork; return None for any other file."""
    model = document.get("model")
    if not isinstance(model, Mapping) or not {"grouper", "decoder", "encoder"} <= model.keys():
        return None
    if "dataset" not in document or "optimizer" not in document:
        return None
    read = ForeignReader(document)
    values = {
        **_translate_run(read),
        **_translate_optimizer(read),
        **_translate_model(read),
        **_translate_losses(read),
        **_translate_data(read),
        **_translate_metrics(read),
    }
    read.unused |= {key: why for key, why in UNUSED.items() if key not in read.unused}
    workload = "slotcontrast_steve" if _has_words(read) else "slotcontrast"
    return Foreign(workload=workload, values=_drop_unset(values), used=sorted(read.used), unused=read.unused)


def _drop_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if value is not None}


def _translate_run(read: ForeignReader) -> dict[str, Any]:
    devices = read("trainer.devices", 1)
    if devices not in (1, "1", "auto", [0], -1):
        read.unused["trainer.devices"] = f"{PROCESSES}; the batch size is per GPU"
    accelerator = str(read("trainer.accelerator", "auto"))
    interval = read("trainer.val_check_interval", 5000)
    if not isinstance(interval, int):
        raise ConfigError(
            f"trainer.val_check_interval is {interval}",
            why="fractions of an epoch are not supported",
            fix="give a number of steps",
        )
    clip_type = read("trainer.gradient_clip_algorithm")
    return {
        "train.seed": read("seed"),
        "train.checkpoint_every": read("checkpoint_every_n_steps", 1000),
        "train.max_steps": _read_max_steps(read),
        "train.validate_every_steps": interval,
        "train.report_every": read("trainer.log_every_n_steps", 100),
        "train.clip_norm": read("trainer.gradient_clip_val", 0),
        "train.clip_type": "l2" if clip_type == "norm" else clip_type,
        "train.accumulate": read("trainer.accumulate_grad_batches"),
        "train.deterministic": read("trainer.deterministic"),
        "precision": read("trainer.precision"),
        "device": {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}.get(accelerator),
    }


def _read_max_steps(read: ForeignReader) -> Any:
    return read("trainer.max_steps", 100_000)


# --- optimizer ---


def _translate_optimizer(read: ForeignReader) -> dict[str, Any]:
    steps, at = _read_max_steps(read), "optimizer.lr_scheduler"
    schedule = _translate_schedule(read(at, {}), at, steps)
    groups = [_translate_group(group, index, steps) for index, group in enumerate(read("optimizer.param_groups", []))]
    return {
        "optimizer.name": str(read("optimizer.name", "adam")).lower(),
        "optimizer.lr": read("optimizer.lr"),
        "optimizer.weight_decay": read("optimizer.weight_decay", 0.0),
        "optimizer.betas": read("optimizer.betas"),
        "optimizer.eps": read("optimizer.eps"),
        **{f"schedule.{key}": value for key, value in schedule.items()},
        "optimizer.groups": groups or None,
    }


def _translate_schedule(given: Any, where: str, max_steps: Any) -> dict[str, Any]:
    """Translate a schedule. Upstream counts decay from the end of the warmup, which takes 1000 steps by default."""
    known = {"name", "warmup_steps", "decay_steps", "decay_rate"}
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - known)):
        content = ", ".join(unknown) if isinstance(given, Mapping) else repr(given)
        raise ConfigError(f"{where} holds {content}", fix=f"use only the keys {', '.join(sorted(known))}")
    name = given.get("name", "constant")
    warmup, decay = int(given.get("warmup_steps", 1000)), int(given.get("decay_steps", 100_000))
    shapes = {"linear_warmup": "constant", "exp_decay_with_warmup": "exponential", "cosine_decay_with_warmup": "cosine"}
    if name == "constant":
        return {"name": "constant", "warmup_steps": 0}
    if name not in shapes:
        raise ConfigError(f"unknown schedule {where}.name={name}", fix=f"use constant, {', '.join(shapes)}")
    shape = {"name": shapes[name], "warmup_steps": warmup}
    if name == "linear_warmup" or (isinstance(max_steps, int) and 0 < max_steps <= warmup):
        return shape  # a run that ends during its warmup never decays
    if decay <= warmup:
        raise ConfigError(f"{where}: {decay} decay_steps end within {warmup} warmup_steps", fix="set more decay_steps")
    if name == "cosine_decay_with_warmup":
        return shape
    rate = float(given.get("decay_rate", 0.5))
    if not 0 < rate < 1:
        raise ConfigError(f"{where}.decay_rate is {rate:g}", fix="set a number between 0 and 1")
    # decay_rate^(steps / (decay - warmup)) as a half-life.
    return shape | {"half_life_steps": max(1, round((decay - warmup) * math.log(0.5) / math.log(rate)))}


def _translate_group(given: Any, index: int, max_steps: Any) -> dict[str, Any]:
    where = f"optimizer.param_groups[{index}]"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}", fix="write a mapping with modules and lr")
    modules = [given["modules"]] if isinstance(given.get("modules"), str) else list(given.get("modules") or ())
    unknown = sorted(set(given) - {"modules", "lr", "lr_scheduler", "weight_decay"})
    if unknown or not modules or set(modules) - MODULES:
        raise ConfigError(
            f"{where}: modules {modules}" + (f", and {', '.join(unknown)}" if unknown else ""),
            why="a group has modules, and may have an lr, an lr_scheduler and a weight_decay",
            fix=f"modules among {', '.join(sorted(MODULES))}",
        )
    scheduled = given.get("lr_scheduler")
    return _drop_unset(
        {
            "modules": modules,
            "lr": given.get("lr"),
            "weight_decay": given.get("weight_decay"),
            "schedule": scheduled and _translate_schedule(scheduled, f"{where}.lr_scheduler", max_steps),
        }
    )


# --- model ---


def _translate_model(read: ForeignReader) -> dict[str, Any]:
    read.must_be("model.input_type", "video", why="slots are tracked over frames")
    read.must_be("model.target_type", "features", why="the decoder reconstructs the backbone's features")
    for part in ("target_encoder", "mask_resizers", "eval_mode_config", "modules_to_load"):
        if read(f"model.{part}") is not None:
            raise ConfigError(f"model.{part} is not supported", fix="leave it out")
    every = read("model.visualize_every_n_steps", 1000)
    return {
        **_translate_backbone(read),
        **_translate_slots(read),
        **_translate_decoder(read),
        **(_translate_words(read) if _has_words(read) else _note_switched_off(read)),
        "model.weights": read("model.load_weights"),
        "train.sample_every": every if read("model.visualize", False) else None,
    }


def _note_switched_off(read: ForeignReader) -> dict[str, Any]:
    """List the fork's keys for words as unused."""
    temperatures = ("gumbel_start_temp", "gumbel_final_temp", "gumbel_anneal_steps")
    for key in ("dvae", "steve_decoder", *temperatures, "decoder.steve", "decoder.vocab_size"):
        read.unused[f"model.{key}"] = "model.use_dvae is off"
    return {}


def _translate_backbone(read: ForeignReader) -> dict[str, Any]:
    at = "model.encoder"
    read.must_be(f"{at}.use_silicon_vit", False, why="its weights are another project's")
    read.must_be(f"{at}.backbone.name", "TimmExtractor", why="features come from a vision transformer")
    read.must_be(f"{at}.backbone.frozen", True, why="the backbone is not trained")
    read.must_be(f"{at}.spatial_flatten", False, why="features are tokens already")
    read.must_be(f"{at}.name", "FrameEncoder", why="every frame is encoded alone")
    for key, value in (("name", "networks.two_layer_mlp"), ("layer_norm", True)):
        read.must_be(f"{at}.output_transform.{key}", value, why="features pass a LayerNorm and two layers")
    dim, hidden = read(f"{at}.output_transform.inp_dim"), read(f"{at}.output_transform.hidden_dim")
    read.note(at, "output_transform.outp_dim")
    if dim and hidden not in (None, 2 * dim):
        raise ConfigError(f"{at}.output_transform.hidden_dim is {hidden}", fix=f"twice the features: {2 * dim}")
    kwargs = read.section(f"{at}.backbone.model_kwargs")
    read.note(f"{at}.backbone.model_kwargs", "dynamic_img_size", "embed_dim", "depth", "num_heads")
    weights = read(f"{at}.backbone.checkpoint_path")
    is_random = not read(f"{at}.backbone.pretrained", False) and weights is None
    return {
        "model.backbone": read(f"{at}.backbone.model"),
        "model.backbone_weights": "random" if is_random else weights,
        "model.backbone_size": [
            _find_block(read, kwargs) or 0,
            kwargs.get("num_heads", 0),
            kwargs.get("embed_dim", 0),
        ],
    }


def _find_block(read: ForeignReader, kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of blocks up to the one whose tokens are the features; later blocks do not matter."""
    given = read("model.encoder.backbone.features", "vit_block12")
    named = [given] if isinstance(given, str) else list(given)
    main = str(read("model.encoder.main_features_key", "vit_block12" if "vit_block12" in named else named[0]))
    found = re.fullmatch(r"vit_block(\d+)", main)
    if found is None or main not in named:
        why = f"backbone.features lists {', '.join(named)}"
        fix = "name one of them that is a block: model.encoder.main_features_key=vit_block12"
        raise ConfigError(f"features {main} are not available", why=why, fix=fix)
    if others := [name for name in named if name != main]:
        read.unused["model.encoder.backbone.features"] = f"{', '.join(others)} are computed upstream and never read"
    block = int(found[1])
    return kwargs.get("depth", block if block != 12 else None)


def _translate_slots(read: ForeignReader) -> dict[str, Any]:
    read.must_be("model.initializer.name", "FixedLearnedInit", why="the slots of the first frame are learned")
    read.must_be("model.grouper.name", "SlotAttention", why="slots are corrected by slot attention")
    read.must_be("model.grouper.use_gru", True, why="slots are updated by a recurrent cell")
    read.must_be("model.grouper.use_mlp", True, why="an MLP follows each iteration")
    dim = read("model.grouper.slot_dim") or read("model.initializer.dim")
    for key, usual in (("kvq_dim", dim), ("hidden_dim", 4 * dim if dim else None), ("eps", 1e-8), ("inp_dim", dim)):
        read.must_be(f"model.grouper.{key}", usual, why="it follows from the slots' size")
    iterations = read("model.grouper.n_iters", 3)
    first = read("model.latent_processor.first_step_corrector_args.n_iters", iterations)
    if first != iterations + 1:
        raise ConfigError(
            f"{first} iterations in the first frame and {iterations} in the others",
            why="the first frame takes one more, as in all published configs",
            fix=f"model.latent_processor.first_step_corrector_args.n_iters: {iterations + 1}",
        )
    if not read.section("model.predictor"):
        raise ConfigError("model.predictor is missing", why="a transformer block predicts the next frame's slots")
    read.must_be("model.predictor.name", "networks.TransformerEncoder", why="slots are predicted by a transformer")
    read.must_be("model.predictor.n_blocks", 1, why="the predictor has one block")
    read.must_be("model.predictor.n_heads", 4, why="the predictor has 4 attention heads")
    read.note("model", "predictor.dim", "initializer.dim")
    return {
        "model.slots": read("model.initializer.n_slots"),
        "model.slot_dim": dim,
        "model.iterations": iterations,
    }


def _translate_decoder(read: ForeignReader) -> dict[str, Any]:
    read.must_be("model.decoder.name", "MLPDecoder", why="features are decoded position by position")
    read.must_be("model.decoder.activation", "relu", why="its layers have ReLU between them")
    if read("model.decoder.eval_output_size") is not None:
        raise ConfigError("model.decoder.eval_output_size is not supported", fix="leave it out")
    read.note("model.decoder", "inp_dim", "outp_dim")
    patches, side = read("model.decoder.n_patches"), read("dataset.train_pipeline.transforms.input_size")
    if patches and isinstance(side, int) and patches != (side // DINO_PATCH) ** 2:
        raise ConfigError(
            f"model.decoder.n_patches is {patches}, frames of {side} pixels have {(side // DINO_PATCH) ** 2}",
            fix=f"input_size={math.isqrt(patches) * DINO_PATCH}, or n_patches={(side // DINO_PATCH) ** 2}",
        )
    return {"model.decoder_hidden": read("model.decoder.hidden_dims")}


def _translate_losses(read: ForeignReader) -> dict[str, Any]:
    """Translate losses by their class, with the weights of the same keys; upstream drops a loss of weight 0."""
    losses, weights = read.parts("model.losses"), read.section("model.loss_weights")
    values: dict[str, Any] = {"model.contrast_weight": 0.0}
    if _has_words(read):
        values |= {"model.dvae_weight": 0.0, "model.words_weight": 0.0}
    for key, given in losses.items():
        weight, kind = weights.get(key, 1.0), given.get("name")
        at = f"model.losses.{key}"
        if kind in COMPARED:
            _refuse_unsupported_parts(read, at, kind)
            if kind != "MSELoss":
                values["model.contrast_weight"] = weight
            elif weight != 1:
                raise ConfigError(f"the weight of {at} is {weight}", fix="1, with the other weights relative to it")
        elif kind in (VAE_LOSS, WORDS_LOSS) and _has_words(read):
            values |= _translate_word_loss(given, weight, at)
            read(at)
        else:
            read.unused[at] = f"{kind} needs the discrete VAE, which is off"
            read.unused[f"model.loss_weights.{key}"] = "its loss is not used"
            continue
        read(f"model.loss_weights.{key}")
    if losses and not any(given.get("name") == "MSELoss" for given in losses.values()):
        raise ConfigError("model.losses has no MSELoss", why="slots reconstruct the backbone's features")
    for key in set(weights) - set(losses):
        read.unused[f"model.loss_weights.{key}"] = "there is no such loss"
    return values


def _refuse_unsupported_parts(read: ForeignReader, at: str, kind: str) -> None:
    """Refuse a loss between other tensors: it would train a different model."""
    predicted, target = COMPARED[kind]
    read.must_be(f"{at}.pred_key", predicted, why=f"{kind} is of {predicted}")
    read.must_be(f"{at}.target_key", target, why=f"{kind} is of {predicted}")
    read.must_be(f"{at}.remove_last_n_frames", 0, why="all frames count")
    read.must_be(f"{at}.target_transform", why="features are compared as they are")
    if kind == "MSELoss" and (dim := read("model.encoder.output_transform.inp_dim")):
        read.must_be(f"{at}.pred_dims", [0, dim], why=f"all {dim} features are compared")
    if kind != "MSELoss":
        read.must_be(f"{at}.temperature", 0.1, why="it is the temperature of all published configs")
        read.must_be(f"{at}.batch_contrast", True, why="slots are contrasted with those of all clips")
    read.note(at, "name", "video_inputs", "patch_inputs", "keep_input_dim")


# --- data ---


def _translate_data(read: ForeignReader) -> dict[str, Any]:
    read.must_be("dataset.name", "WebdatasetDataModule", why="data are webdataset shards")
    train, val = "dataset.train_pipeline", "dataset.val_pipeline"
    size, val_size = read(f"{train}.transforms.input_size"), read(f"{val}.transforms.input_size")
    if size and val_size not in (None, size):
        raise ConfigError(
            f"{val}.transforms.input_size is {val_size}, training's {size}", fix="use the same size for both"
        )
    read.must_be(f"{val}.transforms.mask_size", size, why="masks are compared at the size of the frames")
    read.must_be(f"{train}.transforms.use_movi_normalization", False, why="the backbone takes ImageNet's colours")
    for pipeline in (train, val):
        read.note(pipeline, "keys", "transforms.name", "transforms.type", "transforms.crop_type")
        if read(f"{pipeline}.duplicate") is not None:
            raise ConfigError(f"{pipeline}.duplicate is not supported", fix="leave it out")
    crop = read(f"{train}.transforms.crop_type")
    if crop not in CROPS:
        raise ConfigError(f"{train}.transforms.crop_type is {crop}", fix=f"use one of {', '.join(filter(None, CROPS))}")
    read.must_be(f"{train}.use_chunks", True, why="training cuts chunks from videos")
    chunk = read(f"{train}.chunk_size", 6)
    uses_chunks = read(f"{val}.use_chunks", True)
    return {
        "data.train_shards": _to_list(read("dataset.train_shards")),
        "data.val_shards": _to_list(read("dataset.val_shards")),
        # Lightning gives every rank a loader with this batch size.
        "per_device_train_batch_size": read("dataset.batch_size", 32),
        "per_device_eval_batch_size": read("dataset.val_batch_size"),
        "data.num_workers": read("dataset.num_workers"),
        "data.image_size": size,
        "data.chunk_size": chunk,
        "data.chunks": "one" if read(f"{train}.sample_one_chunk_per_video", False) else "all",
        "data.val_chunk_size": read(f"{val}.chunk_size", 6) if uses_chunks else 0,
        "data.crop": CROPS[crop],
        "data.flip": read(f"{train}.transforms.h_flip_prob", 0.0),
    }


def _to_list(given: Any) -> Any:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else given


def _translate_metrics(read: ForeignReader) -> dict[str, Any]:
    """Translate metrics. All are always computed; only the treatment of the background is a setting."""
    ignores: set[bool] = set()
    for key, given in read.parts("val_metrics").items():
        kind, at = given.get("name"), f"val_metrics.{key}"
        if kind not in SCORED or given.get("matching", "overlap") != "overlap":
            read.unused[at] = f"{kind} with this matching is not supported: FG-ARI, ARI and mBO are always computed"
            continue
        if given.get("pred_key", SCORED_MASKS) != SCORED_MASKS:
            read.unused[f"{at}.pred_key"] = "the decoder's masks are scored"
        ignores.add(bool(given.get("ignore_background", False)))
        if given.get("ignore_overlaps", False):
            read.unused[f"{at}.ignore_overlaps"] = "overlapping objects are an error"
        read(at)
    if len(ignores) > 1:
        read.unused["val_metrics"] = "some ignore the background and some do not: ari and fg_ari are both reported"
    return {"model.ignore_background": True in ignores if ignores else None}


VAE_LOSS, WORDS_LOSS = "DVAEReconstructionLoss", "STEVECrossEntropyLoss"
SIZES = {
    "model.vocabulary": "dvae.vocab_size",
    "model.dvae_checkpointing": "dvae.use_checkpoint",
    "model.words_dim": "steve_decoder.d_model",
    "model.words_blocks": "steve_decoder.num_decoder_blocks",
    "model.words_dropout": "steve_decoder.dropout",
}
"""Keys below `model`, by our settings."""


def _has_words(read: ForeignReader) -> bool:
    """True if the config enables the discrete VAE."""
    is_on, predicts = bool(read("model.use_dvae", False)), bool(read("model.use_steve_decoder", False))
    if predicts and not is_on:
        raise ConfigError(
            "model.use_steve_decoder is on and model.use_dvae is off",
            why="the decoder predicts the tokens of the discrete VAE",
            fix="switch both on, or both off",
        )
    return is_on


def _translate_words(read: ForeignReader) -> dict[str, Any]:
    """Translate sizes and temperatures; `_translate_word_loss` translates the losses."""
    vocabulary, side = read("model.dvae.vocab_size"), read("dataset.train_pipeline.transforms.input_size")
    read.must_be("model.dvae.img_channels", 3, why="frames have three colours")
    read.must_be("model.dvae.encode_only", False, why="without its decoder nothing trains the VAE")
    values = {ours: read(f"model.{theirs}") for ours, theirs in SIZES.items()}
    temperatures = {"gumbel_start_temp": 1.0, "gumbel_final_temp": 0.1, "gumbel_anneal_steps": 10_000}
    values["model.tau"] = [read(f"model.{key}", usual) for key, usual in temperatures.items()]
    read.must_be("model.steve_decoder.num_decoder_heads", 4, why="the token decoder has 4 attention heads")
    if not read("model.use_steve_decoder", False):
        return values | {"model.words_blocks": 0}
    read.must_be("model.steve_decoder.vocab_size", vocabulary, why=f"the VAE has {vocabulary} tokens")
    read.must_be("model.steve_decoder.slot_size", read("model.initializer.dim"), why="it is the size of a slot")
    read.must_be("model.steve_decoder.image_size", side, why=f"frames have {side} pixels")
    return values


def _translate_word_loss(given: Mapping[str, Any], weight: float, where: str) -> dict[str, Any]:
    """Translate the loss of the VAE or of the word decoder."""
    reduction = given.get("reduction", "mean")
    if reduction not in ("sum", "mean") or (reduction == "sum" and not given.get("normalize", True)):
        raise ConfigError(
            f"{where} has reduction {reduction}, normalize {given.get('normalize', True)}",
            fix="use reduction: mean, or sum with normalize: true, which divides by the frames",
        )
    part = "dvae" if given["name"] == VAE_LOSS else "words"
    return {f"model.{part}_weight": weight, f"model.{part}_loss": reduction}
