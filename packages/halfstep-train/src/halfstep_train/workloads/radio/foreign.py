"""Translate configs of RadioDiff and its forks (`radio_train.yaml`, `first_radio.yaml`). No torch here.

Each of their keys is either translated or reported with the reason why not. Some keys do not mean what their names
suggest: `min_lr` is the floor of a factor, `image_size` is never read, and stage 1's `gradient_accumulate_every`
alternates between autoencoder and discriminator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.errors import ConfigError
from halfstep_train.config.foreign import Foreign, ForeignReader

DATA_NAMES: Mapping[str, Mapping[str, Any]] = {
    "radio": {"data.simulation": "DPM"},
    "IRT4": {"data.simulation": "IRT4"},
    "DPMCAR": {"data.simulation": "DPM", "data.cars": True},
}
"""Their data sets that are folders of RadioMapSeer; others need precomputed maps."""

OWN_FOLDER = "--out names the run's folder"
RESUMES = "--resume RUN continues a run"
NOT_READ = "the public code does not use it either"
TRAINER_UNUSED = {
    "trainer.results_folder": OWN_FOLDER,
    "trainer.enable_resume": RESUMES,
    "trainer.resume_milestone": RESUMES,
    "trainer.test_before": "the first sample is drawn after trainer.save_and_sample_every steps",
    "trainer.ema_update_after_step": "the average warms up from the first step on (ema.warmup_power)",
    "trainer.ema_update_every": "the average moves with every step",
    "sampler": "halfstep predict and evaluate draw samples: --steps",
}


_SIZE = "maps have data.image_size pixels; the public loader ignores this value and gives 256"
STAGE2_UNUSED = {
    "model.image_size": _SIZE,
    "model.input_keys": "the inputs are the map and its condition",
    "model.ignore_keys": "weights must fit the model",
    "model.only_model": "halfstep has its own kind of checkpoint",
    "model.timesteps": "time is continuous in 0..1; the public loss does not use its table either",
    "model.train_sample": NOT_READ,
    "model.perceptual_weight": "the public stage 2 has no such loss: it sets it to 0",
    "model.use_disloss": NOT_READ,
    "model.unet.out_mul": "each decoder gives one latent",
    "model.unet.cond_dim": NOT_READ,
    "model.unet.cond_dim_mults": NOT_READ,
    "model.unet.cond_pe": NOT_READ,
    "model.unet.num_pos_feats": NOT_READ,
    "model.unet.cond_feature_size": NOT_READ,
    "model.unet.input_size": "the Fourier filter is sized from its map",
    "model.first_stage.lossconfig": "it is the loss of stage 1",
    "model.first_stage.ddconfig.double_z": "a Gaussian has a mean and a variance",
    "model.first_stage.ddconfig.resolution": _SIZE,
    "model.first_stage.ddconfig.in_channels": "maps have one channel",
    "model.first_stage.ddconfig.out_ch": "maps have one channel",
    "model.first_stage.ddconfig.attn_resolutions": "attention is in the middle only",
}
SHARED = {
    "train.batch_size": "data.batch_size",
    "train.max_steps": "trainer.train_num_steps",
    "train.sample_every": "trainer.save_and_sample_every",
    "train.validate_every_steps": "trainer.save_and_sample_every",
    "train.checkpoint_every": "trainer.save_and_sample_every",
    "train.report_every": "trainer.log_freq",
    "optimizer.lr": "trainer.lr",
    "optimizer.weight_decay": "trainer.weight_decay",
    # Theirs is the floor of the factor, not of the learning rate.
    "schedule.min_factor": "trainer.min_lr",
}
FIRST_STAGE = {
    "model.first_stage.width": "ddconfig.ch",
    "model.first_stage.multipliers": "ddconfig.ch_mult",
    "model.first_stage.num_blocks": "ddconfig.num_res_blocks",
    "model.first_stage.latent_channels": "embed_dim",
}
STAGE2 = {
    "train.accumulate": "trainer.gradient_accumulate_every",
    "model.sampling_steps": "model.sampling_timesteps",
    "model.vae": "model.first_stage.ckpt_path",
    "model.width": "model.unet.dim",
    "model.multipliers": "model.unet.dim_mults",
    "model.windows": "model.unet.window_sizes1",
    "model.fourier_scale": "model.unet.fourier_scale",
}
STAGE1 = {
    "model.weights": "model.ckpt_path",
    "model.kl_weight": "model.lossconfig.kl_weight",
    "model.discriminator.start": "model.lossconfig.disc_start",
    "model.discriminator.weight": "model.lossconfig.disc_weight",
}
"""Keys of a public config, by our settings (the four dictionaries above)."""
BUILT: Mapping[str, Any] = {
    "model.model_type": "const_sde",
    "model.model_name": "cond_unet",
    "model.objective": "pred_KC",
    "model.loss_type": "l2",
    "model.start_dist": "normal",
    "model.scale_by_std": True,
    "model.scale_by_softsign": False,
    "model.unet.cond_net": "swin",
    "model.unet.fix_bb": False,
    "model.unet.DPMCARK": False,
    "model.unet.cond_in_dim": 3,
    "model.use_l1": True,
    "model.eps": 1e-4,
}
"""Values of public keys that are supported; any other value selects a method that is not implemented."""


def translate_config(document: Mapping[str, Any]) -> Foreign | None:
    """Translate a RadioDiff config; return None for other documents.

    Stage 2 has a U-Net and a first stage in `model`; stage 1 has LDM's `ddconfig` and `lossconfig` there.
    """
    read = ForeignReader(document)
    model = read.section("model")
    if "unet" in model and "ddconfig" in read.section("model.first_stage"):
        return read_stage2(read)
    return read_stage1(read) if "ddconfig" in model and "lossconfig" in model else None


def read_stage2(read: ForeignReader) -> Foreign:
    """Translate a config of stage 2, the diffusion model."""
    for key, built in BUILT.items():
        read.must_be(key, built, why="only this value is implemented; another one is a different method")
    values, notes = read_shared_values(read, "model.first_stage")
    finetuned, own = read("finetune.ckpt_path"), read("model.ckpt_path")
    scale, is_fixed = read("model.scale_factor"), read("model.default_scale", False)
    values |= read.values(STAGE2) | {
        "model.scale_factor": scale if is_fixed and scale is not None else "auto",
        "model.weighted_loss": read("model.weighting_loss", False),
        **({"model.weights": finetuned or own} if finetuned or own else {}),
    }
    read.must_be("model.unet.window_sizes2", read("model.unet.window_sizes1"), why="both have the same windows")
    read("model.unet.channels")  # marks the key as used: the channels follow from the first stage
    if not read("model.unet.without_pretrain", False):
        notes.append(
            "the public model starts its condition pyramid from torchvision's ImageNet weights, which it downloads; "
            "here it starts new, or from model.pyramid.weights=FILE"
        )
    unused = {**TRAINER_UNUSED, **STAGE2_UNUSED}
    return Foreign(workload="radiodiff", values=values, used=sorted(read.used), unused=unused, notes=notes)


def read_stage1(read: ForeignReader) -> Foreign:
    """Translate a config of stage 1, the autoencoder."""
    values, notes = read_shared_values(read, "model")
    # The public trainer of stage 1 has another power than that of stage 2.
    values |= read.values(STAGE1) | {"schedule.power": 0.95}
    is_never = read.section("trainer").get("gradient_accumulate_every") == 1
    turns = "there it alternates between the two networks; here both step each time"
    turns += "; with 1, the public trainer never trains its discriminator" if is_never else ""
    notes.append("the public loss adds LPIPS, whose weights it downloads; here the loss is |error| + error² and KL")
    size_keys = {
        key.replace("model.first_stage.", "model."): why
        for key, why in STAGE2_UNUSED.items()
        if key.startswith("model.first_stage.ddconfig")
    }
    unused = {
        **TRAINER_UNUSED,
        **size_keys,
        "model.lossconfig.disc_in_channels": "maps have one channel",
        "model.lossconfig.perceptual_weight": "there is no LPIPS here",
        "trainer.gradient_accumulate_every": turns,
    }
    return Foreign(workload="radiodiff_vae", values=values, used=sorted(read.used), unused=unused, notes=notes)


def read_shared_values(read: ForeignReader, first_stage: str) -> tuple[dict[str, Any], list[str]]:
    """Translate the keys that both stages have: data, trainer, precision, sizes of the autoencoder. Also return notes
    for the user."""
    precision, notes = _read_precision(read)
    notes.append("RadioDiff's split has the same maps in training, validation and test: RadioUNet's split is used")
    if attended := read.section(f"{first_stage}.ddconfig").get("attn_resolutions"):
        raise ConfigError(
            f"ddconfig.attn_resolutions: {attended} is not supported",
            why="attention is in the middle only, as in every public radio config",
            fix="attn_resolutions: []",
        )
    latent = read(f"{first_stage}.embed_dim")
    read.must_be(f"{first_stage}.ddconfig.z_channels", latent, why=f"the latent has {latent} channels")
    read.must_be(f"{first_stage}.ddconfig.dropout", 0.0, why="the autoencoder has no dropout")
    sizes = {ours: f"{first_stage}.{theirs}" for ours, theirs in FIRST_STAGE.items()}
    return {**_read_simulation(read), **read.values(SHARED | sizes), **precision}, notes


def _read_precision(read: ForeignReader) -> tuple[dict[str, str], list[str]]:
    """Translate `trainer.amp` and `trainer.fp16`; also return notes."""
    amp, fp16 = read("trainer.amp"), read("trainer.fp16")
    if amp is None and fp16 is None:
        return {}, []
    if amp and not fp16:
        note = (
            "trainer.amp: true with fp16: false is read as bf16; the public trainer computes it in fp16 without loss "
            "scaling, regardless of accelerate's config (halfstep check explains it)"
        )
        return {"precision.default": "bf16"}, [note]
    return {"precision.default": "fp16" if amp else "fp32"}, []


def _read_simulation(read: ForeignReader) -> Mapping[str, Any]:
    """Translate the name of the data set to settings of the RadioMapSeer folder."""
    name = read("data.name", "radio")
    if name not in DATA_NAMES:
        raise ConfigError(
            f"data.name: {name} is a data set halfstep does not read",
            why="it needs k² maps, masks or samples that are not part of RadioMapSeer",
            fix=f"use one of {', '.join(DATA_NAMES)}, or a custom data set: data.dir in RadioMapSeer's layout",
        )
    return DATA_NAMES[name]
