"""Configs of RadioDiff and its forks (`radio_train.yaml`, `first_radio.yaml`) in our settings. No torch here.

Each of their keys means something here or is named with the reason why it does not. Some do not mean there what they
say: `min_lr` is the floor of a factor, `image_size` is never read, `gradient_accumulate_every` of stage 1 is whose turn
it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.config.foreign import Foreign
from halfstep.errors import ConfigError

Document = Mapping[str, Any]

DATA_NAMES: Mapping[str, Mapping[str, Any]] = {
    "radio": {"data.simulation": "DPM"},
    "IRT4": {"data.simulation": "IRT4", "data.max_transmitters": 2},
    "DPMCAR": {"data.simulation": "DPM", "data.cars": True},
}
"""Their data sets that are folders of RadioMapSeer; others need maps that somebody computed."""

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


def claim(document: Document, name: str) -> Foreign | None:
    """Stage 2 by its U-Net beside a first stage, stage 1 by LDM's sizes at the top of `model`."""
    model = _section(document, "model")
    if "unet" in model and "ddconfig" in _section(model, "first_stage"):
        return stage2(document)
    if "ddconfig" in model and "lossconfig" in model:
        return stage1(document)
    return None


def stage2(document: Document) -> Foreign:
    model, unet = _section(document, "model"), _section(_section(document, "model"), "unet")
    _refuse_other_forms(model, unet)
    values, notes = shared_values(document)
    finetuned = _section(document, "finetune").get("ckpt_path")
    values |= _given(
        {
            "train.accumulate": _section(document, "trainer").get("gradient_accumulate_every"),
            "model.sampling_steps": model.get("sampling_timesteps"),
            "model.scale_factor": model.get("scale_factor") if model.get("default_scale", False) else "auto",
            "model.smallest_time": model.get("eps"),
            "model.weighted_loss": model.get("weighting_loss", False),
            "model.l1": model.get("use_l1", True),
            "model.weights": finetuned or model.get("ckpt_path"),
            "model.vae": _section(model, "first_stage").get("ckpt_path"),
            "model.width": unet.get("dim"),
            "model.multipliers": unet.get("dim_mults"),
            "model.windows": unet.get("window_sizes1"),
            "model.feature_windows": unet.get("window_sizes2"),
            "model.fourier_scale": unet.get("fourier_scale"),
        }
    )
    values |= first_stage_values(_section(model, "first_stage"))
    if not unet.get("without_pretrain", False):
        notes.append(
            "the public model starts its condition pyramid from torchvision's ImageNet weights, which it downloads; "
            "here it starts new, or from model.pyramid.weights=FILE"
        )
    return Foreign(
        workload="radiodiff",
        values=values,
        used=(
            *SHARED_USED,
            *(f"model.{key}" for key in STAGE2_USED),
            *(f"model.unet.{key}" for key in UNET_USED),
            *(f"model.first_stage.{key}" for key in FIRST_STAGE_USED),
            "trainer.gradient_accumulate_every",
            "finetune.ckpt_path",
        ),
        unused={**TRAINER_UNUSED, **STAGE2_UNUSED},
        notes=notes,
    )


STAGE2_USED = (
    "model_type", "model_name", "sampling_timesteps", "loss_type", "objective", "start_dist", "scale_factor",
    "scale_by_std", "default_scale", "scale_by_softsign", "eps", "weighting_loss", "use_l1", "ckpt_path",
)  # fmt: skip
UNET_USED = (
    "dim", "cond_net", "fix_bb", "channels", "dim_mults", "window_sizes1", "window_sizes2", "fourier_scale",
    "without_pretrain", "DPMCARK", "cond_in_dim",
)  # fmt: skip
FIRST_STAGE_USED = ("embed_dim", "ddconfig.z_channels", "ddconfig.ch", "ddconfig.ch_mult", "ddconfig.num_res_blocks",
                    "ddconfig.dropout", "ckpt_path")  # fmt: skip
_SIZE = "maps have data.image_size pixels; the public loader gives 256 whatever this says"
STAGE2_UNUSED = {
    "model.image_size": _SIZE,
    "model.input_keys": "the inputs are the map and its condition",
    "model.ignore_keys": "weights must fit the model",
    "model.only_model": "checkpoints are ours",
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


def stage1(document: Document) -> Foreign:
    model, loss = _section(document, "model"), _section(_section(document, "model"), "lossconfig")
    values, notes = shared_values(document)
    values |= first_stage_values(model)
    values |= _given(
        {
            "model.weights": model.get("ckpt_path"),
            "model.kl_weight": loss.get("kl_weight"),
            "model.discriminator.start": loss.get("disc_start"),
            "model.discriminator.weight": loss.get("disc_weight"),
            "schedule.power": 0.95,
        }
    )
    turns = _section(document, "trainer").get("gradient_accumulate_every")
    never = "; with 1 the public trainer never trains its discriminator" if turns == 1 else ""
    notes.append("the public loss adds LPIPS, whose weights it downloads; here the loss is |error| + error² and KL")
    return Foreign(
        workload="radiodiff_vae",
        values=values,
        used=(
            *SHARED_USED,
            *(f"model.{key}" for key in FIRST_STAGE_USED),
            *(f"model.lossconfig.{key}" for key in ("disc_start", "kl_weight", "disc_weight")),
        ),
        unused={
            **TRAINER_UNUSED,
            **{
                key.replace("model.first_stage.", "model."): why
                for key, why in STAGE2_UNUSED.items()
                if key.startswith("model.first_stage.ddconfig")
            },
            "model.lossconfig.disc_in_channels": "maps have one channel",
            "model.lossconfig.perceptual_weight": "there is no LPIPS here",
            "trainer.gradient_accumulate_every": "there it alternates the two networks; here both step each time"
            + never,
        },
        notes=notes,
    )


SHARED_USED = (
    "data.name", "data.batch_size", "trainer.lr", "trainer.min_lr", "trainer.train_num_steps",
    "trainer.save_and_sample_every", "trainer.log_freq", "trainer.amp", "trainer.fp16", "trainer.weight_decay",
)  # fmt: skip


def shared_values(document: Document) -> tuple[dict[str, Any], list[str]]:
    """What both stages have: data, trainer, precision; and what to tell of it."""
    data, trainer = _section(document, "data"), _section(document, "trainer")
    precision, notes = _precision(trainer)
    values = _given(
        {
            "train.batch_size": data.get("batch_size"),
            "train.max_steps": trainer.get("train_num_steps"),
            "train.sample_every": trainer.get("save_and_sample_every"),
            "train.validate_every_steps": trainer.get("save_and_sample_every"),
            "train.checkpoint_every": trainer.get("save_and_sample_every"),
            "train.report_every": trainer.get("log_freq"),
            "optimizer.lr": trainer.get("lr"),
            "optimizer.weight_decay": trainer.get("weight_decay"),
            # Theirs is the floor of the factor, not of the learning rate.
            "schedule.min_factor": trainer.get("min_lr"),
            "precision.default": precision,
        }
    )
    notes.append("RadioDiff's own split has a map in training, validation and test: RadioUNet's is used (data.split)")
    return {**_simulation(data), **values}, notes


def _precision(trainer: Document) -> tuple[str | None, list[str]]:
    if "amp" not in trainer and "fp16" not in trainer:
        return None, []
    amp, fp16 = bool(trainer.get("amp", False)), bool(trainer.get("fp16", False))
    if amp and not fp16:
        differs = (
            "trainer.amp: true with fp16: false is read as bf16; the public trainer computes it in fp16 without loss "
            "scaling, whatever accelerate's file says (halfstep check explains it)"
        )
        return "bf16", [differs]
    return ("fp16" if amp else "fp32"), []


def _simulation(data: Document) -> Mapping[str, Any]:
    name = data.get("name", "radio")
    if name not in DATA_NAMES:
        raise ConfigError(
            f"data.name: {name} is a data set halfstep does not read",
            why="it needs k² maps, masks or samples that are not part of RadioMapSeer",
            fix=f"one of {', '.join(DATA_NAMES)}, or a data set of your own: data.dir in RadioMapSeer's layout",
        )
    return DATA_NAMES[name]


def first_stage_values(section: Document) -> dict[str, Any]:
    sizes = _section(section, "ddconfig")
    if sizes.get("attn_resolutions"):
        raise ConfigError(
            f"ddconfig.attn_resolutions: {sizes['attn_resolutions']} is not built here",
            why="attention is in the middle only, as in every public radio config",
            fix="attn_resolutions: []",
        )
    return _given(
        {
            "model.first_stage.width": sizes.get("ch"),
            "model.first_stage.multipliers": sizes.get("ch_mult"),
            "model.first_stage.num_blocks": sizes.get("num_res_blocks"),
            "model.first_stage.z_channels": sizes.get("z_channels"),
            "model.first_stage.latent_channels": section.get("embed_dim"),
            "model.first_stage.dropout": sizes.get("dropout"),
        }
    )


BUILT: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("const_sde",),
    "model_name": ("cond_unet",),
    "objective": ("pred_KC",),
    "loss_type": ("l2",),
    "start_dist": ("normal",),
    "scale_by_std": (True,),
    "scale_by_softsign": (False,),
    "unet.cond_net": ("swin",),
    "unet.fix_bb": (False,),
    "unet.DPMCARK": (False,),
    "unet.cond_in_dim": (3,),
}
"""What the public code offers and this build has; anything else would train another method in silence."""


def _refuse_other_forms(model: Document, unet: Document) -> None:
    for key, known in BUILT.items():
        section, name = (unet, key.removeprefix("unet.")) if key.startswith("unet.") else (model, key)
        if name in section and section[name] not in known:
            raise ConfigError(
                f"model.{key}: {section[name]} is not built here",
                why="training on without it would be another method",
                fix=f"model.{key}: {known[0]}",
            )


def _section(document: Document, name: str) -> Document:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """An empty key (`ckpt_path:`) says nothing."""
    return {path: value for path, value in values.items() if value is not None}
