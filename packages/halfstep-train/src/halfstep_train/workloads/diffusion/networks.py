"""The networks of a diffusion model: a new or loaded U-Net, the frozen VAE and text encoder, and the conditions.

`adopt_settings` takes schedule, target and sample size from the folder of a trained U-Net, which infers the noise level
from the timestep: with another schedule or target, fine-tuning would silently start from scratch. Settings that the
user leaves open come from the folder; settings of the user win, and differences are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, ModelError, explain_refused_pickle, suggest_install
from halfstep.islands import fp32_island
from halfstep_train.data import noise
from halfstep_train.data.files import list_some
from halfstep_train.data.loader import Samples
from halfstep_train.models.layers import LEVELS_HALVE, divide_side
from halfstep_train.workloads.base.frozen_vae import (
    CachedLatents,
    LatentCache,
    WithColumn,
    choose_vae_format,
    describe_resume,
    hash_weights,
    open_or_encode,
)
from halfstep_train.workloads.base.using import spread_indices
from halfstep_train.workloads.base.workload import Batch, FrozenPart, OpenedData
from halfstep_train.workloads.diffusion.config import DiffusionConfig, NoiseConfig
from halfstep_train.workloads.diffusion.data import (
    DiffusionData,
    make_square_samples,
    scale_images,
)
from halfstep_train.workloads.diffusion.diffusers_nets import (
    CODEC,
    IMAGE_CHANNELS,
    TEXT_UNET,
    UNET,
    VAE,
    Net,
    build_net,
    choose_weight_files,
    count_halvings,
    find_net_folder,
    get_latent_shape,
    is_on_meta,
    make_unet_config,
    open_net,
    read_json,
    refuse_missing_weights,
)
from halfstep_train.workloads.diffusion.noise_schedule import THEIR_SCHEDULES, THEIR_TARGETS

MORE_CONDITIONS = ("addition_embed_type", "encoder_hid_dim", "class_embed_type", "time_cond_proj_dim")
"""Settings of diffusers' U-Nets that need inputs that are not supported."""
SHOWN_CLASSES = 5
"""Class names in the run's header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionParts:
    """Everything in a diffusion model apart from its U-Net."""

    conditions: Conditions
    vae: Net | None
    vae_source: str
    shape: tuple[int, int, int]
    """Shape (C, H, W) of a sample, in pixels or latents."""


def list_frozen_parts(config: DiffusionConfig, parts: DiffusionParts, *, with_vae: bool) -> dict[str, FrozenPart]:
    found: dict[str, FrozenPart] = {}
    if parts.vae is not None and with_vae:
        found["vae"] = FrozenPart(module=parts.vae, source=parts.vae_source)
    if isinstance(parts.conditions, TextConditions):
        found["text_encoder"] = FrozenPart(module=parts.conditions.encoder, source=str(config.model.text_encoder))
    return found


def open_parts(config: DiffusionConfig, classes: tuple[str, ...]) -> DiffusionParts:
    """Load the VAE and the text encoder, if the config names them."""
    side, settings = config.data.image_size, config.model
    conditions: Conditions = Conditions()
    if settings.conditioning == "class":
        conditions = ClassConditions(classes)
    elif settings.text_encoder:
        conditions = open_text(settings.text_encoder)
    if not settings.vae:
        return DiffusionParts(conditions=conditions, vae=None, vae_source="", shape=(IMAGE_CHANNELS, side, side))
    folder = find_net_folder(settings.vae, "vae", "model.vae")
    vae = open_net(folder, [VAE]).requires_grad_(False).eval()
    divide_side(side, 2 ** count_halvings(vae.config), LEVELS_HALVE)
    return DiffusionParts(conditions=conditions, vae=vae, vae_source=str(folder), shape=get_latent_shape(vae, side))


def build_unet(config: DiffusionConfig, parts: DiffusionParts, store: Mapping[str, Any] | None = None) -> Net:
    """Build the U-Net: with the config of a stored run, from a folder with weights, or new."""
    if store:
        model = build_net(store["unet"])
    elif config.model.weights:
        model = open_net(find_net_folder(config.model.weights, "unet", "model.weights"), [UNET, TEXT_UNET])
        _check_fits(model, config, parts)
        model.register_to_config(sample_size=parts.shape[1])  # the size that a pipeline samples
    else:
        conditions = parts.conditions
        sizes = {"num_classes": conditions.num_classes, "text_dim": conditions.text_dim}
        model = build_net(make_unet_config(config.model, parts.shape, **sizes))
    vae_halvings = count_halvings(parts.vae.config) if parts.vae is not None else 0
    divide_side(config.data.image_size, 2 ** (vae_halvings + count_halvings(model.config)), LEVELS_HALVE)
    if config.train.activation_checkpointing:
        model.enable_gradient_checkpointing()
    return model


def _check_fits(model: Net, config: DiffusionConfig, parts: DiffusionParts) -> None:
    """Refuse a loaded U-Net that was made for other samples or conditions."""
    channels, conditions = parts.shape[0], parts.conditions
    expected = {
        "in_channels": channels,
        "out_channels": channels,
        "cross_attention_dim": conditions.text_dim,
        "num_class_embeds": conditions.num_classes,
        **dict.fromkeys(MORE_CONDITIONS, 0),
    }
    found = {name: model.config.get(name) or 0 for name in expected}
    if differences := [
        f"{name}={found[name]}, not {value}" for name, value in expected.items() if found[name] != value
    ]:
        samples = "images" if parts.vae is None else "latents of the VAE"
        raise ConfigError(
            f"the U-Net of {config.model.weights} does not fit this run: {'; '.join(differences)}",
            why=f"{samples} have {channels} channels; a condition can only be text or a class "
            "(num_class_embeds: classes + 1)",
            fix="give it the VAE (model.vae), text encoder (model.text_encoder) or classes (model.conditioning=class) "
            "that it was trained with, or use another model.weights",
        )


class Conditions:
    """Conditions of the U-Net. This base class is that of an unconditional model."""

    num_classes = 0
    """Number of classes, plus one for "unconditional"; 0 without classes."""
    text_dim = 0
    column = ""
    """The tensor of a batch that holds the conditions."""
    about = ""
    """A description of the conditions for the run's header."""

    def drop(self, batch: Batch, *, key: tuple[int, ...], share: float) -> Batch:
        """Replace the conditions of a random fraction of samples by the empty one, as classifier-free guidance
        needs."""
        if not self.column:
            return {}
        given = batch[self.column]
        drawn = noise.uniform(key, len(given), (1,) * (given.ndim - 1), given.device, stream="drop_condition")
        return {self.column: torch.where(drawn < share, self.make_empty(len(given), given.device)[self.column], given)}

    def make_keywords(self, batch: Batch) -> dict[str, Tensor]:
        """Return the conditions of a batch as keyword arguments of the U-Net."""
        return {}

    def make_empty(self, num: int, device: torch.device) -> Batch:
        """Return the conditions of `num` unconditional samples."""
        return {}

    @property
    def is_conditional(self) -> bool:
        return bool(self.num_classes or self.text_dim)


class ClassConditions(Conditions):
    """A class per sample; the last number means unconditional."""

    column = "label"

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.num_classes = tuple(names), len(names) + 1
        self.about = f"one of {len(names)} classes: {list_some(names, SHOWN_CLASSES)}"

    def make_keywords(self, batch: Batch) -> dict[str, Tensor]:
        return {"class_labels": batch["label"]}

    def make_empty(self, num: int, device: torch.device) -> Batch:
        return {"label": torch.full((num,), len(self.names), device=device)}


class TextConditions(Conditions):
    """Text per sample, encoded by a frozen CLIP text model."""

    column = "tokens"

    def __init__(self, encoder: Any, tokenizer: Any) -> None:
        self.encoder, self.tokenizer, self.text_dim = encoder, tokenizer, int(encoder.config.hidden_size)
        # A tokenizer without a limit reports a huge number.
        self.length = min(int(tokenizer.model_max_length), int(encoder.config.max_position_embeddings))
        self._empty = self.tokenize([""])
        self.about = f"a caption of up to {self.length} tokens"

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Return token ids (N, L); captions longer than the encoder's maximum are truncated."""
        if not captions:
            return torch.zeros(0, self.length, dtype=torch.int64)
        fixed = {"padding": "max_length", "truncation": True, "max_length": self.length}
        return self.tokenizer(list(captions), return_tensors="pt", **fixed)["input_ids"]

    def make_keywords(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad(), fp32_island():
            return {"encoder_hidden_states": self.encoder(batch["tokens"])[0]}

    def make_empty(self, num: int, device: torch.device) -> Batch:
        return {"tokens": self._empty.to(device).expand(num, -1)}


def open_text(folder: str) -> TextConditions:
    """Load CLIP's text model and tokenizer, from a pipeline or from a folder with both."""
    path = find_net_folder(folder, "text_encoder", "model.text_encoder")
    tokenizer_path = path.parent / "tokenizer" if (path.parent / "tokenizer").is_dir() else path
    try:
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

        with silence_transformers():
            if is_on_meta():
                encoder = CLIPTextModel(CLIPTextConfig.from_pretrained(path, local_files_only=True))
            else:
                loaded: Any = CLIPTextModel.from_pretrained(
                    path,
                    local_files_only=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                    **choose_weight_files(path),
                )
                encoder, found = loaded
                refuse_missing_weights(path, found)
        tokenizer = CLIPTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError("transformers is not installed", fix=suggest_install("transformers", "tokenizers")) from error
    except Exception as error:  # transformers may raise anything for a broken folder
        raise ModelError(
            f"cannot open the text encoder in {Path(folder)}",
            why=explain_refused_pickle(error) or " ".join(str(error).split())[:300],
            fix="give a folder with text_encoder/ and tokenizer/, as Stable Diffusion has, best with safetensors",
        ) from error
    return TextConditions(encoder.requires_grad_(False).eval(), tokenizer)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disable the progress bars and warnings of transformers inside this context."""
    import transformers

    logging: Any = transformers.utils.logging
    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


# --- the settings with which weights were trained ---


OUR_SCHEDULES = {theirs: ours for ours, theirs in THEIR_SCHEDULES.items()}
OUR_TARGETS = {theirs: ours for ours, theirs in THEIR_TARGETS.items()}
THEIR_NUMBERS = {
    "steps": "num_train_timesteps",
    "beta_start": "beta_start",
    "beta_end": "beta_end",
    "zero_terminal_snr": "rescale_betas_zero_snr",
}
"""diffusers' names, by ours; the defaults are the same."""


def adopt_settings(config: DiffusionConfig) -> tuple[DiffusionConfig, dict[str, Any], list[str]]:
    """Return the config with settings from `model.weights` where the user left them open, those settings by path, and
    notes about differences."""
    if not config.model.weights:
        return config, {}, []
    unet = find_net_folder(config.model.weights, "unet", "model.weights")
    schedule, notes = _read_schedule(config.model.weights, unet)
    adopted, settled = config, dict[str, Any]()
    for path, value in {**schedule, **_read_size(config, unet)}.items():
        section, name = path.split(".")
        given = getattr(config, section)
        if name not in given.model_fields_set:
            settled[path] = value
            adopted = adopted.replace(**{section: {name: value}})
        elif getattr(given, name) != value:
            notes.append(f"{path}={getattr(given, name)}: {unet.parent} was trained with {value}")
    if why := adopted.explain_untrainable():
        raise ConfigError(
            why, why=f"the config leaves these open, so those of model.weights={config.model.weights} apply"
        )
    return adopted, settled, notes


def _read_schedule(weights: str, unet: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the schedule of a pipeline as settings by path, and notes; empty if it has no scheduler."""
    path = unet.parent / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        return {}, []
    found = read_json(path)
    try:
        if found.get("trained_betas") is not None:
            raise ValueError("trained_betas")
        values = {name: found[key] for name, key in THEIR_NUMBERS.items() if key in found}
        noise = NoiseConfig.model_validate({"schedule": OUR_SCHEDULES[found["beta_schedule"]], **values})
        target = OUR_TARGETS[found.get("prediction_type", "epsilon")]
    except (KeyError, ValueError, TypeError) as error:
        what = f"{path} contains a diffusion process that is not supported: {' '.join(str(error).split())}"
        if unet == Path(weights).expanduser():  # the user named the U-Net, not the pipeline: ignore its schedule
            return {}, [f"{what}; noise.* and model.target are used"]
        raise ConfigError(
            what,
            why="its U-Net was trained with that process",
            fix="give the U-Net's folder (model.weights=DIR/unet) to train with noise.* and model.target",
        ) from error
    theirs = {f"noise.{name}": getattr(noise, name) for name in ("schedule", *THEIR_NUMBERS)}
    return {**theirs, "model.target": target}, []


def _read_size(config: DiffusionConfig, unet: Path) -> dict[str, Any]:
    """Return the image size that the U-Net was trained on, as a setting; empty if unknown."""
    side = read_json(unet / "config.json").get("sample_size")
    if type(side) is not int or side < 1:
        return {}
    if config.model.vae:
        side <<= count_halvings(read_json(find_net_folder(config.model.vae, "vae", "model.vae") / "config.json"))
    return {"data.image_size": side}


# --- cached latents ---


TRIED_IMAGES = 8
"""Images on which the formats of the VAE are compared."""


def pick_images(samples: Samples, num: int = TRIED_IMAGES) -> Tensor:
    """Return a few images spread over the whole set, in -1..1."""
    indices = spread_indices(len(samples), num)
    bytes_ = torch.stack([samples.sample(index, key=(0, 0, index))["image"] for index in indices])
    return scale_images({"image": bytes_}, key=(), flip=0.0)


def open_latents(config: DiffusionConfig, data: DiffusionData, vae: Any, format_name: str) -> LatentCache:
    """Open the latents of all images, first training, then validation; encode them if necessary."""
    splits = (data.train, data.val)
    return open_or_encode(
        config,
        data.root,
        [make_square_samples(listing, config.data.image_size) for listing in splits],
        [listing.paths for listing in splits],
        "image",
        lambda image: scale_images({"image": image}, key=(), flip=0.0),
        vae,
        CODEC,
        format=format_name,
        flips=bool(config.data.flip),
    )


Store = Mapping[str, Any]
Tokens = list[Tensor] | None


def open_samples(
    config: DiffusionConfig, data: DiffusionData, parts: DiffusionParts, store: Store | None
) -> OpenedData:
    """Open samples of images or cached latents. The VAE's format is chosen once, when a run starts."""
    tokens = None
    listings = (data.train, data.val)
    plain: list[Samples] = [make_square_samples(listing, config.data.image_size) for listing in listings]
    if isinstance(parts.conditions, TextConditions):
        tokens = [parts.conditions.tokenize(captions) for captions in data.captions]
        plain = [WithColumn(part, "tokens", words) for part, words in zip(plain, tokens, strict=True)]
    if parts.vae is None:
        return OpenedData(train=plain[0], val=plain[1], about=(("diffuses", "pixels"),))
    about = [("diffuses", f"latents of {parts.vae_source}")]
    modules = dict(config.precision.modules)
    if store is None:
        form, why = choose_format(config, data, parts)
        # Added again below, unless latents are cached: then the VAE is not a module of the run.
        modules.pop("vae", None)
        about.append(("VAE's format", f"{form}: {why}"))
    else:
        # A resumed run keeps the format it was started with, whatever this device would choose.
        form = store.get("vae_format") or modules.pop("vae", "fp32")
    if config.data.cache == "off":
        settled = {"precision.modules": {**modules, "vae": form}}
        return OpenedData(train=plain[0], val=plain[1], about=tuple(about), settled=settled)
    found = _open_cached(config, data, parts, form, store, tokens)
    return replace(found, about=(*about, *found.about), settled={"precision.modules": modules})


def choose_format(config: DiffusionConfig, data: DiffusionData, parts: DiffusionParts) -> tuple[str, str]:
    """Choose the format of the VAE: as requested, else fp32 or TF32 if the run uses it, else the more accurate half
    format. Return its name, and the reason."""
    requested, default = config.precision.modules.get("vae"), config.precision.default
    if requested is None and default in ("fp32", "tf32"):
        return default, "the format of the run"
    samples = make_square_samples(data.train, config.data.image_size)
    return choose_vae_format(config, parts.vae, CODEC.decode_means, lambda: pick_images(samples), requested or "auto")


def _open_cached(
    config: DiffusionConfig, data: DiffusionData, parts: DiffusionParts, form: str, store: Store | None, tokens: Tokens
) -> OpenedData:
    """Open cached latents as samples; refuse another VAE than that of the stored run.

    The store holds the checksums of latents and VAE, and the VAE's format."""
    own = hash_weights(parts.vae)
    stored = {name: str((store or {}).get(name, "")) for name in ("latents_sha256", "vae_sha256")}
    if stored["vae_sha256"] not in ("", own):
        raise ModelError(
            f"{parts.vae_source} is not the VAE of this run",
            why=f"SHA-256 of its weights {own[:12]}… instead of {stored['vae_sha256'][:12]}…",
            fix="restore that VAE, or start a new run",
        )
    cache = open_latents(config, data, parts.vae, form)
    line = f"cached in {cache.path}, {_describe_views(cache)}"
    line += describe_resume(cache, stored["latents_sha256"])
    # One cache holds both splits, training images first.
    split = len(data.train)
    extra: list[dict[str, Tensor]] = [{"label": torch.tensor(part.labels)} for part in (data.train, data.val)]
    for part, words in zip(extra, tokens or (), strict=tokens is not None):
        part["tokens"] = words
    return OpenedData(
        train=CachedLatents(cache.moments[:split], flip=config.data.flip, extra=extra[0]),
        val=CachedLatents(cache.moments[split:], extra=extra[1]),
        about=(("latents", line),),
        store={"latents_sha256": cache.checksum, "vae_sha256": own, "vae_format": form},
    )


def _describe_views(cache: LatentCache) -> str:
    return "with flips" if cache.moments.shape[1] > 1 else "without augmentation"
