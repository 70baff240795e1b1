"""Workloads by name: one dict of import paths, imported on first use. A family is a folder that defines a Kind."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from halfstep.config import load as configs
from halfstep.workloads.base.kind import Kinds

if TYPE_CHECKING:
    from halfstep.config.schema import RunConfig
    from halfstep.workloads.base.workload import Workload

SEGMENTATION, CLASSIFICATION, LANGUAGE, SLOTS = (
    "halfstep.workloads.segmentation:KIND",
    "halfstep.workloads.classification:KIND",
    "halfstep.workloads.language:KIND",
    "halfstep.workloads.slots:KIND",
)

KINDS = Kinds(
    {
        "resnet18": CLASSIFICATION,
        "resnet34": CLASSIFICATION,
        "resnet50": CLASSIFICATION,
        "resnet101": CLASSIFICATION,
        "resnet152": CLASSIFICATION,
        "vit_s_16": CLASSIFICATION,
        "vit_b_16": CLASSIFICATION,
        "vit_l_16": CLASSIFICATION,
        "unet": SEGMENTATION,
        "gpt2": LANGUAGE,
        "gpt2_medium": LANGUAGE,
        "gpt2_large": LANGUAGE,
        "gpt2_xl": LANGUAGE,
        "vae": "halfstep.workloads.diffusion:VAE",
        "diffusion": "halfstep.workloads.diffusion:DIFFUSION",
        "steve": "halfstep.workloads.slots:STEVE",
        "slotcontrast_steve": "halfstep.workloads.slots:WITH_WORDS",
        "slotcontrast": SLOTS,
        "radiodiff_vae": "halfstep.workloads.radio:VAE_KIND",
        "radiodiff": "halfstep.workloads.radio:KIND",
    }
)

DEMO_WORKLOAD = "unet"
"""The workload in help texts and suggestions that need an example."""

load = partial(configs.load, kinds=KINDS)
from_dict = partial(configs.load_dict, kinds=KINDS)


def get_model_name(config: RunConfig) -> str:
    """Return the name of the family's model, also for a workload given as an import path."""
    return KINDS.of(config.workload).get_model_name(config.workload)


def build(config: RunConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload that `config.workload` names; the `store` of an earlier run fixes the facts found in its
    data."""
    return KINDS.of(config.workload).build(config, store)
