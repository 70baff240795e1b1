"""Models of the published sizes have the published numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from halfstep_train.models.vit import build_vit
from halfstep_train.workloads.classification.resnet import build_resnet
from halfstep_train.workloads.diffusion.config import DiffusionModelConfig
from halfstep_train.workloads.diffusion.diffusers_nets import build_net, make_unet_config, make_vae_config
from halfstep_train.workloads.language.gpt2 import GPT2S, build_gpt2
from halfstep_train.workloads.segmentation.unet import UNet
from halfstep_train.workloads.slots.dvae import DVae

SIZES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: build_resnet("resnet18"), 11_689_512),
    "resnet34": (lambda: build_resnet("resnet34"), 21_797_672),
    "resnet50": (lambda: build_resnet("resnet50"), 25_557_032),
    "resnet101": (lambda: build_resnet("resnet101"), 44_549_160),
    "resnet152": (lambda: build_resnet("resnet152"), 60_192_808),
    "vit_s_16": (lambda: build_vit("vit_s_16"), 22_050_664),
    "vit_b_16": (lambda: build_vit("vit_b_16"), 86_567_656),
    "vit_l_16": (lambda: build_vit("vit_l_16"), 304_326_632),
    "unet": (lambda: UNet(), 31_037_698),
    "unet, bilinear": (lambda: UNet(bilinear=True), 17_263_042),
    "gpt2": (lambda: build_gpt2("gpt2"), 124_439_808),
    "gpt2_medium": (lambda: build_gpt2("gpt2_medium"), 354_823_168),
    "gpt2_large": (lambda: build_gpt2("gpt2_large"), 774_030_080),
    "U-Net of diffusers' example": (
        lambda: build_net(make_unet_config(DiffusionModelConfig(), (3, 64, 64))),
        113_673_219,
    ),
    "VAE of Stable Diffusion": (
        lambda: build_net(make_vae_config(channels=(128, 256, 512, 512), layers=2, latent_channels=4, image_size=256)),
        83_653_863,
    ),
    "STEVE's encoder": (lambda: DVae(4096), 680_515),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    build, count = SIZES[name]
    with torch.device("meta"):
        model = build()
    padding = (50304 - 50257) * GPT2S[name].dim if name in GPT2S else 0
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == count
