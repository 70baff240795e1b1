"""Build diffusers' networks by size, open them from local folders, and refuse image sizes they cannot process.

Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.disk import parse_json
from halfstep.errors import ConfigError, Interrupted, ModelError, explain_refused_pickle, format_count, suggest_install
from halfstep_train.models.posterior import Codec, split_moments
from halfstep_train.workloads.diffusion.config import DiffusionModelConfig

LARGEST_NORM_GROUPS, FEWEST_IN_GROUP = 32, 4
"""Most groups of a GroupNorm, as in all published models, and fewest channels per group. Narrow levels get fewer
groups: normalising a single channel would remove its brightness."""
WEIGHT_FILE = re.compile(r"(diffusion_pytorch_|pytorch_)?model[.-].*(safetensors|bin)")
VAE, UNET, TEXT_UNET = "AutoencoderKL", "UNet2DModel", "UNet2DConditionModel"
IMAGE_CHANNELS = 3
OTHER_NAMES = {"vae": ("vqvae",)}
"""Other folder names of networks: LDMPipeline has its VAE in `vqvae`."""
Net = Any
"""A network of diffusers, which has no type annotations."""


def make_vae_config(*, channels: Sequence[int], layers: int, latent_channels: int, image_size: int) -> dict[str, Any]:
    """Return the config of an AutoencoderKL. Stable Diffusion uses channels (128, 256, 512, 512), 2 layers and 4 latent
    channels."""
    return {
        "_class_name": VAE,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "block_out_channels": list(channels),
        "layers_per_block": layers,
        "latent_channels": latent_channels,
        "norm_num_groups": _count_norm_groups(channels),
        "sample_size": image_size,
    }


def make_unet_config(
    settings: DiffusionModelConfig, shape: Sequence[int], *, num_classes: int = 0, text_dim: int = 0
) -> dict[str, Any]:
    """Return the config, for samples of shape (C, H, W), of a UNet2DModel or, with text, of a UNet2DConditionModel, as
    in diffusers' examples."""
    channels, attention = settings.channels, settings.attention
    levels = len(channels)
    if attention is None:
        attention = tuple(range(levels - 1)) if text_dim else (max(0, levels - 2),)
    if outside := [level for level in attention if not 0 <= level < levels]:
        raise ConfigError(f"model.attention names level {outside[0]} of {levels}", fix=f"use levels 0 to {levels - 1}")
    kind = "CrossAttn" if text_dim else "Attn"
    has_attention = [level in set(attention) for level in range(levels)]
    config: dict[str, Any] = {
        "_class_name": TEXT_UNET if text_dim else UNET,
        "sample_size": shape[1],
        "in_channels": shape[0],
        "out_channels": shape[0],
        "down_block_types": [f"{kind}DownBlock2D" if yes else "DownBlock2D" for yes in has_attention],
        "up_block_types": [f"{kind}UpBlock2D" if yes else "UpBlock2D" for yes in reversed(has_attention)],
        "block_out_channels": list(channels),
        "layers_per_block": settings.layers,
        "attention_head_dim": settings.attention_head_dim,
        "dropout": settings.dropout,
        "norm_num_groups": _count_norm_groups(channels),
    }
    if num_classes:
        config["num_class_embeds"] = num_classes
    return config | ({"cross_attention_dim": text_dim} if text_dim else {})


def build_net(config: Mapping[str, Any]) -> Net:
    """Build a network from its diffusers config, whose `_class_name` names the class."""
    kind = import_diffusers_class(str(config["_class_name"]))
    try:
        return kind.from_config({name: value for name, value in config.items() if name != "_class_name"})
    except (ValueError, TypeError, ZeroDivisionError, AssertionError) as error:
        raise ConfigError(
            f"diffusers cannot build {config['_class_name']} with channels {tuple(config['block_out_channels'])}",
            why=" ".join(str(error).split())[:300],
            fix="model.channels in multiples of 32, or of model.attention_head_dim",
        ) from error


def dump_config(net: Net) -> dict[str, Any]:
    """Return the JSON config from which `build_net` can rebuild the network."""
    private = {"_name_or_path", "_diffusers_version", "_use_default_values"}
    found = {name: value for name, value in dict(net.config).items() if name not in private}
    return json.loads(json.dumps({"_class_name": type(net).__name__, **found}))


def find_net_folder(folder: str, part: str, setting: str) -> Path:
    """Return the folder of a network: the given one, or a subfolder of a pipeline or a run."""
    root = Path(folder).expanduser()
    names = (part, *OTHER_NAMES.get(part, ()))
    for path in (root, *(top / name for top in (root, root / "model") for name in names)):
        if (path / "config.json").is_file():
            return path
    raise ModelError(
        f"{setting}={folder}: neither this local folder nor {part}/ in it has a config.json",
        why="halfstep downloads nothing",
        fix="give a folder that save_pretrained wrote, or model/ of a run",
    )


def open_net(folder: Path, expected: Sequence[str]) -> Net:
    """Load the network of a diffusers folder, in fp32; refuse other classes, missing and non-finite weights."""
    config = read_json(folder / "config.json")
    name = str(config.get("_class_name"))
    if name not in expected:
        raise ModelError(f"{folder} contains another network: {name}", fix=f"give a folder of {' or '.join(expected)}")
    channels = [config.get(end, IMAGE_CHANNELS) for end in ("in_channels", "out_channels")]
    if name == VAE and channels != [IMAGE_CHANNELS] * 2:
        raise ModelError(
            f"the VAE in {folder} has in_channels={channels[0]!r}, out_channels={channels[1]!r}",
            why=f"images are RGB here: {IMAGE_CHANNELS} channels",
            fix="use another VAE",
        )
    if is_on_meta():
        return build_net(config).train()
    try:
        net, found = import_diffusers_class(name).from_pretrained(
            folder,
            local_files_only=True,
            torch_dtype=torch.float32,
            low_cpu_mem_usage=False,
            output_loading_info=True,
            **choose_weight_files(folder),
        )
    except Exception as error:  # diffusers may raise anything for a broken folder
        raise ModelError(
            f"cannot open the {name} in {folder}",
            why=explain_refused_pickle(error) or " ".join(str(error).split())[:300],
            fix="save it again, as safetensors",
        ) from error
    refuse_missing_weights(folder, found)
    if broken := [name for name, tensor in net.state_dict().items() if not bool(tensor.isfinite().all())]:
        raise ModelError(
            f"the weights in {folder} are not finite: {broken[0]}",
            fix="use another copy of the weights, in fp32 or bf16",
        )
    return net.train()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model's folder."""
    try:
        return dict(parse_json(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"cannot read {path}", why=str(error), fix="save the model again") from error


def refuse_missing_weights(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse missing weights: `from_pretrained` would initialise them at random and continue.

    `found` is the loading info of `from_pretrained`.
    """
    if missing := sorted(map(str, found["missing_keys"])):
        raise ModelError(
            f"the weights in {folder} lack {format_count(len(missing), 'tensor')}, such as {missing[0]}",
            why="they would be initialised at random",
            fix="use a copy that save_pretrained wrote",
        )


def is_on_meta() -> bool:
    """True while networks are built on the meta device to estimate their cost; weights need not be read then."""
    return torch.get_default_device().type == "meta"


def choose_weight_files(folder: Path) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that select the best weights of a folder.

    Full precision is preferred to half precision (`*.fp16.*`), then safetensors to pickles.
    """
    names = [path.name.split(".") for path in folder.iterdir() if WEIGHT_FILE.fullmatch(path.name)]
    kinds = (("".join(middle).split("-")[0], ending == "bin") for _, *middle, ending in names)
    # In `model.fp16.safetensors` the variant is fp16. No variant sorts first, and False before True.
    variant, is_pickled = min(kinds, default=("", False))
    return ({"variant": variant} if variant else {}) | ({"use_safetensors": False} if is_pickled else {})


def count_halvings(net_config: Mapping[str, Any]) -> int:
    """Return how often a network halves its input: once per level but the last."""
    return len(net_config["block_out_channels"]) - 1


def get_latent_shape(vae: Net, side: int) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of the latent of a square image."""
    latent = side >> count_halvings(vae.config)
    return int(vae.config.latent_channels), latent, latent


class DiffusersCodec(Codec):
    """Encoding and decoding with an AutoencoderKL, without the scale and shift of latents."""

    def encode(self, vae: Net, images: Tensor) -> tuple[Tensor, Tensor]:
        return split_moments(vae.encode(images).latent_dist.parameters)

    def decode(self, vae: Net, latents: Tensor) -> Tensor:
        image: Tensor = vae.decode(latents).sample
        return image


CODEC = DiffusersCodec()


def decode_scaled(vae: Net, latents: Tensor) -> Tensor:
    """Decode latents of the U-Net to images (N, 3, H, W) in -1..1, in fp32."""
    shift = vae.config.shift_factor or 0.0
    return CODEC.decode(vae, latents.float() / vae.config.scaling_factor + shift).float()


def _count_norm_groups(channels: Sequence[int]) -> int:
    # All levels share one number of groups, which must divide every number of channels.
    groups = math.gcd(LARGEST_NORM_GROUPS, *channels)
    while groups > 1 and min(channels) // groups < FEWEST_IN_GROUP:
        groups //= 2
    return groups


def import_diffusers_class(name: str) -> Any:
    """Import a class of diffusers, which is optional; raise ModelError if that fails."""
    try:
        import diffusers

        return getattr(diffusers, name)
    except (ImportError, RuntimeError) as error:
        if isinstance(error.__cause__, Interrupted):  # diffusers wraps every exception of an import
            raise error.__cause__ from None
        raise ModelError(
            "diffusers cannot be imported",
            why=" ".join(str(error).split()),
            fix=suggest_install("diffusers", "transformers", "tokenizers"),
        ) from error
