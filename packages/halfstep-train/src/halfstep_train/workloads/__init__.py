"""Workloads by name: one dict of import paths, imported on first use. A family is a folder that defines a Kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError, suggest_command
from halfstep_train.config import load as configs
from halfstep_train.workloads.base.kind import Kinds

if TYPE_CHECKING:
    from halfstep_train.config.schema import RunConfig
    from halfstep_train.workloads.base.workload import Workload

_CLASSIFICATION = "halfstep_train.workloads.classification:KIND"
KINDS = Kinds(
    {
        **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), _CLASSIFICATION),
        **dict.fromkeys(("vit_s_16", "vit_b_16", "vit_l_16"), _CLASSIFICATION),
        "unet": "halfstep_train.workloads.segmentation:KIND",
        **dict.fromkeys(("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"), "halfstep_train.workloads.language:KIND"),
        "vae": "halfstep_train.workloads.diffusion:VAE",
        "diffusion": "halfstep_train.workloads.diffusion:DIFFUSION",
        "steve": "halfstep_train.workloads.slots:STEVE",
        "slotcontrast_steve": "halfstep_train.workloads.slots:WITH_WORDS",
        "slotcontrast": "halfstep_train.workloads.slots:KIND",
        "radiodiff_vae": "halfstep_train.workloads.radio:VAE_KIND",
        "radiodiff": "halfstep_train.workloads.radio:KIND",
    }
)

DEMO_WORKLOAD = "unet"
"""The workload in help texts and suggestions that need an example."""

CONFIGS = {path.name: path for path in Path(__file__).parent.glob("*/configs/*.yaml")}
"""Config files that come with halfstep, by name."""


def load(target: str, **given: Any) -> configs.Loaded:
    """Load a config, see `config.load.load`; a file that does not exist may be one of CONFIGS."""
    path = Path(target)
    if path.exists() or not configs.is_file(target, KINDS):
        return configs.load(target, kinds=KINDS, **given)
    shipped = CONFIGS.get(path.name)
    if shipped is None:
        raise ConfigError(f"no such config file: {target}", fix=suggest_command_for(path))
    loaded = configs.load(str(shipped), kinds=KINDS, **given)
    note = f"{target} does not exist here: this is {shipped}, which comes with halfstep"
    return replace(loaded, notes=(note, *loaded.notes))


def suggest_command_for(missing: Path) -> str:
    """Suggest the workload and the preset that a file's path names, as in configs/slotcontrast/movi_e.yaml."""
    workload = next((name for name in KINDS if name in (*missing.parts, missing.stem)), None)
    if workload is None:
        return f"give the path of a YAML file, or a workload such as {DEMO_WORKLOAD}"
    presets = [name for name in KINDS.of(workload).get_schema(workload).presets if missing.stem.startswith(name)]
    command = suggest_command("train", workload, *(f"preset={name}" for name in presets))
    return f"give the path of a YAML file, or train halfstep's {workload} without one: {command}"


from_dict = partial(configs.load_dict, kinds=KINDS)


def get_model_name(config: RunConfig) -> str:
    """Return the name of the family's model, also for a workload given as an import path."""
    return KINDS.of(config.workload).get_model_name(config.workload)


def build(config: RunConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload that `config.workload` names; the `store` of an earlier run fixes the facts found in its
    data."""
    return KINDS.of(config.workload).build(config, store)
