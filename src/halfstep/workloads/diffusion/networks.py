"""The networks of a diffusion model: a U-Net, new or of a folder, and the frozen ones beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.errors import ConfigError
from halfstep.models.diffusers_nets import (
    TEXT_UNET,
    UNET,
    VAE,
    Net,
    build_net,
    check_side,
    freeze_,
    halvings,
    net_folder,
    open_net,
    set_checkpointing,
    unet_config,
)
from halfstep.workloads.diffusion.conditions import ClassConditions, Conditions, TextConditions, open_text
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.parts import FrozenPart

IMAGE_CHANNELS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a diffusion model is made of beside its U-Net."""

    conditions: Conditions
    vae: Net | None
    vae_source: str
    shape: tuple[int, int, int]
    """Of what is diffused: pixels or latents (C, H, W)."""


def frozen_parts(config: DiffusionConfig, parts: Parts, *, with_vae: bool) -> dict[str, FrozenPart]:
    found: dict[str, FrozenPart] = {}
    if parts.vae is not None and with_vae:
        found["vae"] = FrozenPart(module=parts.vae, source=parts.vae_source)
    if isinstance(parts.conditions, TextConditions):
        found["text_encoder"] = FrozenPart(module=parts.conditions.encoder, source=str(config.model.text_encoder))
    return found


def open_parts(config: DiffusionConfig, classes: tuple[str, ...]) -> Parts:
    """VAE and text encoder from their folders, and the shape of what is diffused."""
    side, wish = config.data.image_size, config.model
    conditions: Conditions = Conditions()
    if wish.conditioning == "class":
        conditions = ClassConditions(classes)
    elif wish.text_encoder:
        conditions = open_text(wish.text_encoder)
    if not wish.vae:
        return Parts(conditions=conditions, vae=None, vae_source="", shape=(IMAGE_CHANNELS, side, side))
    folder = net_folder(wish.vae, "vae", "model.vae")
    vae = freeze_(open_net(folder, [VAE]))
    check_side(side, halvings(vae.config), "the VAE halves them", "data.image_size")
    latent = side >> halvings(vae.config)
    shape = (int(vae.config.latent_channels), latent, latent)
    return Parts(conditions=conditions, vae=vae, vae_source=str(folder), shape=shape)


def model_of(config: DiffusionConfig, parts: Parts, store: Mapping[str, Any] | None = None) -> Net:
    """The U-Net: of a stored run in its form, of a folder with its weights, or new."""
    if store:
        model = build_net(store["unet"])
    elif config.model.weights:
        model = open_net(net_folder(config.model.weights, "unet", "model.weights"), [UNET, TEXT_UNET])
        _check_fits(model, config, parts)
    else:
        model = build_net(new_unet(config, parts.shape, parts.conditions))
    by_vae = halvings(parts.vae.config) if parts.vae is not None else 0
    halved_by = "VAE and U-Net halve them" if by_vae else "the U-Net halves them"
    check_side(config.data.image_size, by_vae + halvings(model.config), halved_by, "data.image_size")
    set_checkpointing(model, config.train.activation_checkpointing)
    return model


def new_unet(config: DiffusionConfig, shape: tuple[int, int, int], conditions: Conditions) -> dict[str, Any]:
    size = config.model
    return unet_config(
        sample_size=shape[1],
        sample_channels=shape[0],
        channels=size.channels,
        layers=size.layers,
        attention=size.attention,
        attention_head_dim=size.attention_head_dim,
        dropout=size.dropout,
        num_classes=conditions.num_classes,
        text_dim=conditions.text_dim,
    )


def _check_fits(model: Net, config: DiffusionConfig, parts: Parts) -> None:
    """A U-Net from a folder that was made for other samples or conditions."""
    source, found = config.model.weights, model.config
    channels, conditions = parts.shape[0], parts.conditions
    if int(found.in_channels) != channels:
        raise ConfigError(
            f"the U-Net of {source} takes {found.in_channels} channels, here are {channels}",
            fix="a latent model needs its VAE: model.vae=DIR" if channels == IMAGE_CHANNELS else "another model.vae",
        )
    if (found.get("cross_attention_dim") or 0) != conditions.text_dim and isinstance(conditions, TextConditions):
        raise ConfigError(
            f"the U-Net of {source} reads text of {found.get('cross_attention_dim')} numbers a token, the text encoder "
            f"gives {conditions.text_dim}",
            fix="the text encoder it was trained with",
        )
    if type(model).__name__ == TEXT_UNET and not isinstance(conditions, TextConditions):
        raise ConfigError(f"the U-Net of {source} is told text", fix="model.conditioning=text model.text_encoder=DIR")
    if (found.get("num_class_embeds") or 0) != conditions.num_classes:
        raise ConfigError(
            f"the U-Net of {source} knows {found.get('num_class_embeds') or 0} classes, here are "
            f"{conditions.num_classes} with the one for nothing said",
            fix="data with its classes, or no model.weights",
        )
