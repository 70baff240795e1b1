"""Translate config files of SlotContrast, and of its fork with STEVE's words, into our settings.

Each key is either read or listed as unused with a reason; a key that would train a different model is an error. Values
come from a `ForeignReader`, which records every key that is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from halfstep.errors import ConfigError
from halfstep_train.config.foreign import Foreign, ForeignReader
from halfstep_train.workloads.slots.config import DINO_PATCH

CROPS = {
    None: "none",
    "central": "central",
    "short_side_resize_central": "central",
    "short_side_resize_random": "random",
}
SCORED = ("VideoARI", "ImageARI", "VideoIoU", "ImageIoU")
"""Metrics that every run computes; IoU with `matching: overlap` is mBO."""
PROCESSES = "the command sets the number of ranks: --gpus N, or torchrun"
UNUSED = {
    key: why
    for why, keys in {
        "a run's folder is named by --out": "experiment_group experiment_name",
        "the length is counted in steps, here and upstream": "trainer.max_epochs trainer.check_val_every_n_epoch",
        PROCESSES: "trainer.devices trainer.strategy trainer.find_unused_parameters trainer.num_nodes",
        "metrics are computed in validation": "train_metrics",
        "the same workers read both splits (data.num_workers)": "dataset.num_val_workers",
        "an epoch is every video once": "dataset.samples_per_epoch",
        "validation reads every clip of its shards once": "dataset.val_size",
        "halfstep evaluate --data DIR uses other data": "dataset.test_shards dataset.test_size dataset.test_pipeline",
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

TRAIN, VAL = "dataset.train_pipeline", "dataset.val_pipeline"
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model.input_type": ("video",),
    "model.target_type": ("features",),
    "model.target_encoder": (),
    "model.mask_resizers": (),
    "model.eval_mode_config": (),
    "model.modules_to_load": (),
    "model.encoder.name": ("FrameEncoder",),
    "model.encoder.spatial_flatten": (False,),
    "model.encoder.use_silicon_vit": (False,),
    "model.encoder.backbone.name": ("TimmExtractor",),
    "model.encoder.backbone.frozen": (True,),
    "model.encoder.output_transform.name": ("networks.two_layer_mlp",),
    "model.encoder.output_transform.layer_norm": (True,),
    "model.initializer.name": ("FixedLearnedInit",),
    "model.grouper.name": ("SlotAttention",),
    "model.grouper.use_gru": (True,),
    "model.grouper.use_mlp": (True,),
    "model.grouper.eps": (1e-8,),
    "model.predictor.name": ("networks.TransformerEncoder",),
    "model.predictor.n_blocks": (1,),
    "model.predictor.n_heads": (4,),
    "model.decoder.name": ("MLPDecoder",),
    "model.decoder.activation": ("relu",),
    "model.decoder.eval_output_size": (),
    "dataset.name": ("WebdatasetDataModule",),
    f"{TRAIN}.use_chunks": (True,),
    f"{TRAIN}.transforms.use_movi_normalization": (False,),
    f"{TRAIN}.duplicate": (),
    f"{VAL}.duplicate": (),
}
"""Values of keys that are supported; any other value would train a different model, or on other data."""
IMPLIED = (
    "model.encoder.output_transform.outp_dim",
    *(f"model.encoder.backbone.model_kwargs.{key}" for key in ("dynamic_img_size", "embed_dim", "depth", "num_heads")),
    "model.predictor.dim",
    "model.decoder.inp_dim",
    "model.decoder.outp_dim",
    *(f"{pipe}.{key}" for pipe in (TRAIN, VAL) for key in ("keys", "transforms.name", "transforms.type")),
    f"{VAL}.transforms.crop_type",
)
"""Keys whose values follow from others."""
SETTINGS: dict[str, tuple[str, Any]] = {
    "train.seed": ("seed", None),
    "train.checkpoint_every": ("checkpoint_every_n_steps", 1000),
    "train.max_steps": ("trainer.max_steps", 100_000),
    "train.validate_every_steps": ("trainer.val_check_interval", 5000),
    "train.report_every": ("trainer.log_every_n_steps", 100),
    "train.clip_norm": ("trainer.gradient_clip_val", 0),
    "train.accumulate": ("trainer.accumulate_grad_batches", None),
    "train.deterministic": ("trainer.deterministic", None),
    "precision": ("trainer.precision", None),
    "optimizer.lr": ("optimizer.lr", None),
    "optimizer.weight_decay": ("optimizer.weight_decay", 0.0),
    "optimizer.betas": ("optimizer.betas", None),
    "optimizer.eps": ("optimizer.eps", None),
    "model.backbone": ("model.encoder.backbone.model", None),
    "model.slots": ("model.initializer.n_slots", None),
    "model.iterations": ("model.grouper.n_iters", 3),
    "model.decoder_hidden": ("model.decoder.hidden_dims", None),
    "model.weights": ("model.load_weights", None),
    "data.train_shards": ("dataset.train_shards", None),
    "data.val_shards": ("dataset.val_shards", None),
    # Lightning gives every rank a loader with this batch size.
    "per_device_train_batch_size": ("dataset.batch_size", 32),
    "per_device_eval_batch_size": ("dataset.val_batch_size", None),
    "data.num_workers": ("dataset.num_workers", None),
    "data.chunk_size": (f"{TRAIN}.chunk_size", 6),
    "data.flip": (f"{TRAIN}.transforms.h_flip_prob", 0.0),
}
"""Our settings: their key, and the value that upstream uses without it (None: ours)."""


def translate_config(document: Mapping[str, Any]) -> Foreign | None:
    """Translate a config of SlotContrast or its fork; return None for any other file."""
    model = document.get("model")
    if not isinstance(model, Mapping) or not {"grouper", "decoder", "encoder"} <= model.keys():
        return None
    if "dataset" not in document or "optimizer" not in document:
        return None
    read = ForeignReader(document)
    for key, allowed in REQUIRED.items():
        read.must_be(key, *allowed, why="another value would train a different model, or on other data")
    for key in IMPLIED:
        read(key)
    values = {
        **{ours: read(theirs, usual) for ours, (theirs, usual) in SETTINGS.items()},
        **_translate_run(read),
        **_translate_optimizer(read),
        **_translate_backbone(read),
        **_translate_slots(read),
        **(_translate_words(read) if _has_words(read) else {}),
        **_translate_losses(read),
        **_translate_data(read),
        **_translate_metrics(read),
    }
    read.unused |= UNUSED | ({} if _has_words(read) else WITHOUT_WORDS)
    workload = "slotcontrast_steve" if _has_words(read) else "slotcontrast"
    given = {path: value for path, value in values.items() if value is not None}
    return Foreign(workload=workload, values=given, used=sorted(read.used), unused=read.unused)


def _translate_run(read: ForeignReader) -> dict[str, Any]:
    accelerator = str(read("trainer.accelerator", "auto"))
    clip_type = read("trainer.gradient_clip_algorithm")
    every = read("model.visualize_every_n_steps", 1000)
    return {
        "train.clip_type": "l2" if clip_type == "norm" else clip_type,
        "device": {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}.get(accelerator),
        "train.sample_every": every if read("model.visualize", False) else None,
    }


# --- optimizer ---


def _translate_optimizer(read: ForeignReader) -> dict[str, Any]:
    steps, at = read("trainer.max_steps", 100_000), "optimizer.lr_scheduler"
    schedule = _translate_schedule(read(at, {}), at, steps)
    groups = [_translate_group(group, index, steps) for index, group in enumerate(read("optimizer.param_groups", []))]
    return {
        "optimizer.name": str(read("optimizer.name", "adam")).lower(),
        **{f"schedule.{key}": value for key, value in schedule.items()},
        "optimizer.groups": groups or None,
    }


def _translate_schedule(given: Any, where: str, max_steps: Any) -> dict[str, Any]:
    """Translate a schedule. Upstream counts decay from the end of the warmup, which takes 1000 steps by default."""
    known = {"name", "warmup_steps", "decay_steps", "decay_rate"}
    if not isinstance(given, Mapping) or not given.keys() <= known:
        raise ConfigError(f"{where} contains {given}", fix=f"use only the keys {', '.join(sorted(known))}")
    name, rate = given.get("name", "constant"), float(given.get("decay_rate", 0.5))
    warmup, decay = int(given.get("warmup_steps", 1000)), int(given.get("decay_steps", 100_000))
    shapes = {"linear_warmup": "constant", "exp_decay_with_warmup": "exponential", "cosine_decay_with_warmup": "cosine"}
    if name == "constant":
        return {"name": "constant", "warmup_steps": 0}
    if name not in shapes:
        raise ConfigError(f"unknown schedule {where}.name={name}", fix=f"use constant, {', '.join(shapes)}")
    shape = {"name": shapes[name], "warmup_steps": warmup}
    if name == "linear_warmup" or (isinstance(max_steps, int) and 0 < max_steps <= warmup):
        return shape  # a run that ends during its warmup never decays
    if decay <= warmup or not 0 < rate < 1:
        raise ConfigError(
            f"{where}: {decay} decay_steps, {warmup} warmup_steps and a decay_rate of {rate:g}",
            fix="set more decay_steps than warmup_steps, and a decay_rate between 0 and 1",
        )
    if name == "cosine_decay_with_warmup":
        return shape
    # decay_rate^(steps / (decay - warmup)) as a half-life.
    return shape | {"half_life_steps": max(1, round((decay - warmup) * math.log(0.5) / math.log(rate)))}


def _translate_group(given: Any, index: int, max_steps: Any) -> Any:
    """Translate a group of parameters; our schema refuses what it does not know."""
    if not isinstance(given, Mapping):
        return given
    group = {key: [value] if key == "modules" and isinstance(value, str) else value for key, value in given.items()}
    if scheduled := group.pop("lr_scheduler", None):
        where = f"optimizer.param_groups[{index}].lr_scheduler"
        group["schedule"] = _translate_schedule(scheduled, where, max_steps)
    return group


# --- model ---


def _translate_backbone(read: ForeignReader) -> dict[str, Any]:
    at = "model.encoder"
    if dim := read(f"{at}.output_transform.inp_dim"):
        read.must_be(f"{at}.output_transform.hidden_dim", 2 * dim, why="it is twice the features")
    kwargs = read.section(f"{at}.backbone.model_kwargs")
    weights = read(f"{at}.backbone.checkpoint_path")
    is_random = not read(f"{at}.backbone.pretrained", False) and weights is None
    return {
        "model.backbone_weights": "random" if is_random else weights,
        "model.backbone_size": [
            kwargs.get("depth", _find_block(read)),
            kwargs.get("num_heads", 0),
            kwargs.get("embed_dim", 0),
        ],
    }


def _find_block(read: ForeignReader) -> int:
    """Return the number of blocks up to the one whose tokens are the features; 0: the last one, vit_block12."""
    given = read("model.encoder.backbone.features", "vit_block12")
    named = [given] if isinstance(given, str) else list(given)
    main = str(read("model.encoder.main_features_key", "vit_block12" if "vit_block12" in named else named[0]))
    found = re.fullmatch(r"vit_block(\d+)", main)
    if found is None or main not in named:
        why = f"backbone.features lists {', '.join(named)}"
        fix = "choose one of them that is a block: model.encoder.main_features_key=vit_block12"
        raise ConfigError(f"features {main} are not available", why=why, fix=fix)
    if others := [name for name in named if name != main]:
        read.unused["model.encoder.backbone.features"] = f"{', '.join(others)} are computed upstream and never read"
    return int(found[1]) if main != "vit_block12" else 0


def _translate_slots(read: ForeignReader) -> dict[str, Any]:
    dim = read("model.grouper.slot_dim") or read("model.initializer.dim")
    read.must_be("model.initializer.dim", dim, why="it is the size of a slot")
    for key, usual in (("kvq_dim", dim), ("inp_dim", dim), ("hidden_dim", 4 * dim if dim else None)):
        read.must_be(f"model.grouper.{key}", usual, why="it follows from the slots' size")
    iterations = read("model.grouper.n_iters", 3)
    first = read("model.latent_processor.first_step_corrector_args.n_iters", iterations)
    if first != iterations + 1:
        raise ConfigError(
            f"{first} iterations in the first frame and {iterations} in the others",
            why="the first frame takes one more iteration, as in all published configs",
            fix=f"model.latent_processor.first_step_corrector_args.n_iters: {iterations + 1}",
        )
    if not read.section("model.predictor"):
        raise ConfigError("model.predictor is missing", why="a transformer block predicts the next frame's slots")
    if isinstance(side := read(f"{TRAIN}.transforms.input_size"), int):
        patches = (side // DINO_PATCH) ** 2
        read.must_be("model.decoder.n_patches", patches, why=f"frames of {side} pixels have {patches} patches")
    return {"model.slot_dim": dim}


def _translate_losses(read: ForeignReader) -> dict[str, Any]:
    """Translate losses by their class, with the weights of the same keys; upstream drops a loss of weight 0."""
    losses, weights = read.parts("model.losses"), read.section("model.loss_weights")
    values: dict[str, Any] = {"model.contrast_weight": 0.0}
    if _has_words(read):
        values |= {"model.dvae_weight": 0.0, "model.words_weight": 0.0}
    for key, given in losses.items():
        weight, kind = weights.get(key, 1.0), given.get("name")
        at = f"model.losses.{key}"
        read(f"model.loss_weights.{key}")
        if kind in COMPARED:
            _refuse_unsupported_parts(read, at, kind)
            if kind != "MSELoss":
                values["model.contrast_weight"] = weight
            elif weight != 1:
                raise ConfigError(f"the weight of {at} is {weight}", fix="1, with the other weights relative to it")
        elif _has_words(read):
            read(at)
            values |= _translate_word_loss(given, weight, at)
        else:
            read.unused |= dict.fromkeys((at, f"model.loss_weights.{key}"), "it needs the discrete VAE, which is off")
    if losses and not any(given.get("name") == "MSELoss" for given in losses.values()):
        raise ConfigError("model.losses has no MSELoss", why="slots reconstruct the backbone's features")
    return values


COMPARED: dict[str, dict[str, tuple[Any, ...]]] = {
    "MSELoss": {"pred_key": ("decoder.reconstruction",)},
    "Slot_Slot_Contrastive_Loss": {"pred_key": ("processor.state",), "temperature": (0.1,), "batch_contrast": (True,)},
}
"""The tensor that each loss compares, by upstream's names, and its supported settings."""


def _refuse_unsupported_parts(read: ForeignReader, at: str, kind: str) -> None:
    """Refuse a loss between other tensors: it would train a different model."""
    # The contrastive loss does not use its target.
    shared = {"target_key": ("encoder.backbone_features",), "remove_last_n_frames": (0,), "target_transform": ()}
    required = COMPARED[kind] | shared
    if kind == "MSELoss" and (dim := read("model.encoder.output_transform.inp_dim")):
        required["pred_dims"] = ([0, dim],)
    for key, allowed in required.items():
        read.must_be(f"{at}.{key}", *allowed, why=f"{kind} with different values would train a different model")
    for key in ("name", "video_inputs", "patch_inputs", "keep_input_dim"):
        read(f"{at}.{key}")  # they follow from other keys


# --- data ---


def _translate_data(read: ForeignReader) -> dict[str, Any]:
    size, crop = read(f"{TRAIN}.transforms.input_size"), read(f"{TRAIN}.transforms.crop_type")
    if size:
        read.must_be(f"{VAL}.transforms.input_size", size, why=f"frames to train on have {size} pixels")
    read.must_be(f"{VAL}.transforms.mask_size", size, why="masks are compared at the size of the frames")
    if crop not in CROPS:
        raise ConfigError(f"{TRAIN}.transforms.crop_type is {crop}", fix=f"use one of {', '.join(filter(None, CROPS))}")
    return {
        "data.image_size": size,
        "data.chunks": "one" if read(f"{TRAIN}.sample_one_chunk_per_video", False) else "all",
        "data.val_chunk_size": read(f"{VAL}.chunk_size", 6) if read(f"{VAL}.use_chunks", True) else 0,
        "data.crop": CROPS[crop],
    }


def _translate_metrics(read: ForeignReader) -> dict[str, Any]:
    """Translate metrics. All are always computed; only the treatment of the background is a setting."""
    ignores: set[bool] = set()
    for key, given in read.parts("val_metrics").items():
        masks, matching = given.get("pred_key", "decoder_masks_hard"), given.get("matching", "overlap")
        if given.get("name") in SCORED and (masks, matching) == ("decoder_masks_hard", "overlap"):
            read(f"val_metrics.{key}")
            ignores.add(bool(given.get("ignore_background", False)))
        else:
            read.unused[f"val_metrics.{key}"] = "FG-ARI, ARI and mBO of the decoder's masks are computed"
    return {"model.ignore_background": True in ignores if ignores else None}


# --- words ---


VAE_LOSS, WORDS_LOSS = "DVAEReconstructionLoss", "STEVECrossEntropyLoss"
SIZES = {
    "model.vocabulary": "dvae.vocab_size",
    "model.dvae_checkpointing": "dvae.use_checkpoint",
    "model.words_dim": "steve_decoder.d_model",
    "model.words_blocks": "steve_decoder.num_decoder_blocks",
    "model.words_dropout": "steve_decoder.dropout",
}
"""Keys below `model`, by our settings."""
TEMPERATURES = {"gumbel_start_temp": 1.0, "gumbel_final_temp": 0.1, "gumbel_anneal_steps": 10_000}
WITHOUT_WORDS = {
    f"model.{key}": "model.use_dvae is off"
    for key in ("dvae", "steve_decoder", *TEMPERATURES, "decoder.steve", "decoder.vocab_size")
}


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
    values["model.tau"] = [read(f"model.{key}", usual) for key, usual in TEMPERATURES.items()]
    read.must_be("model.steve_decoder.num_decoder_heads", 4, why="the token decoder has 4 attention heads")
    if not read("model.use_steve_decoder", False):
        return values | {"model.words_blocks": 0}
    read.must_be("model.steve_decoder.vocab_size", vocabulary, why=f"the VAE has {vocabulary} tokens")
    read.must_be("model.steve_decoder.slot_size", read("model.initializer.dim"), why="it is the size of a slot")
    read.must_be("model.steve_decoder.image_size", side, why=f"frames have {side} pixels")
    return values


def _translate_word_loss(given: Mapping[str, Any], weight: float, where: str) -> dict[str, Any]:
    """Translate the loss of the VAE or of the word decoder."""
    reduction, is_per_frame = given.get("reduction", "mean"), given.get("normalize", True)
    if given.get("name") not in (VAE_LOSS, WORDS_LOSS) or not (
        reduction == "mean" or (reduction == "sum" and is_per_frame)
    ):
        raise ConfigError(
            f"{where} is {given.get('name')} with reduction {reduction}, normalize {is_per_frame}",
            why="another loss would train a different model",
            fix=f"{VAE_LOSS} or {WORDS_LOSS} with reduction: mean, or sum with normalize: true (divided by the frames)",
        )
    part = "dvae" if given["name"] == VAE_LOSS else "words"
    return {f"model.{part}_weight": weight, f"model.{part}_loss": reduction}
