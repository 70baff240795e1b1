"""Names that other projects give the same weights: prefixes that wrappers put before them, tables for ViT and ResNet.

A table holds (what a name begins with, ours); the rest of the name stays. Whichever form of a file's names fits the
model best is taken, so that a model whose own parts are called `backbone` or `model` loads its own files.
timm's and DeiT's ResNet names are torchvision's, which are ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

WRAPPERS = ("module.", "model.", "net.", "network.", "backbone.", "base_model.")
"""DataParallel and DDP, Lightning, and what scripts call their only part."""
COMPILED = "_orig_mod."  # torch.compile puts it before the names of each part it wrapped, wherever that is

Table = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
_LAYER = r"encoder.layers.encoder_layer_\1"
_THIRDS = {"q": "#0", "k": "#1", "v": "#2"}
"""Queries, keys and values that a file keeps apart are one tensor here: its thirds, in this order."""

RELEASED_VIT: Table = (
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.linear_1\.", rf"{_LAYER}.mlp.0."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.linear_2\.", rf"{_LAYER}.mlp.3."),
)
"""torchvision renamed these layers after it had released its ViT weights."""

TIMM_VIT: Table = (
    (r"cls_token$", "class_token"),
    (r"pos_embed$", "encoder.pos_embedding"),
    (r"(?:reg_token|register_tokens)$", "encoder.register_tokens"),
    (r"patch_embed\.proj\.", "conv_proj."),
    (r"blocks\.(\d+)\.norm([12])\.", rf"{_LAYER}.ln_\2."),
    (r"blocks\.(\d+)\.attn\.qkv\.", rf"{_LAYER}.self_attention.in_proj_"),
    (r"blocks\.(\d+)\.attn\.proj\.", rf"{_LAYER}.self_attention.out_proj."),
    (r"blocks\.(\d+)\.ls([12])\.", rf"{_LAYER}.ls_\2."),
    (r"blocks\.(\d+)\.mlp\.fc1\.", rf"{_LAYER}.mlp.0."),
    (r"blocks\.(\d+)\.mlp\.fc2\.", rf"{_LAYER}.mlp.3."),
    (r"norm\.", "encoder.ln."),
    (r"head\.", "heads.head."),
)
"""Also DeiT's, DINO's and MAE's."""

_HF_LAYER = r"(?:(?:vit|dinov2)\.)?(?:encoder\.layer|layers)\.(\d+)"
HF_VIT: Table = (
    (r"(?:(?:vit|dinov2)\.)?embeddings\.cls_token$", "class_token"),
    (r"(?:(?:vit|dinov2)\.)?embeddings\.position_embeddings$", "encoder.pos_embedding"),
    (r"(?:(?:vit|dinov2)\.)?embeddings\.patch_embeddings\.projection\.", "conv_proj."),
    (rf"{_HF_LAYER}\.layernorm_before\.", rf"{_LAYER}.ln_1."),
    (rf"{_HF_LAYER}\.layernorm_after\.", rf"{_LAYER}.ln_2."),
    (
        rf"{_HF_LAYER}\.attention\.(?:attention\.)?(?:(q)uery|(k)ey|(v)alue|(q|k|v)_proj)\.(weight|bias)$",
        lambda m: m.expand(rf"{_LAYER}.self_attention.in_proj_\6") + _THIRDS[m[2] or m[3] or m[4] or m[5]],
    ),
    (rf"{_HF_LAYER}\.attention\.(?:output\.dense|o_proj)\.", rf"{_LAYER}.self_attention.out_proj."),
    (rf"{_HF_LAYER}\.(?:intermediate\.dense|mlp\.fc1)\.", rf"{_LAYER}.mlp.0."),
    (rf"{_HF_LAYER}\.(?:output\.dense|mlp\.fc2)\.", rf"{_LAYER}.mlp.3."),
    (r"(?:(?:vit|dinov2)\.)?layernorm\.", "encoder.ln."),
    (r"classifier\.", "heads.head."),
)
"""Of released files, and since version 5 of `state_dict()`."""

_DINOV2_LAYER = r"(?:dinov2\.)?encoder\.layer\.(\d+)"
HF_DINOV2: Table = (
    (rf"{_DINOV2_LAYER}\.norm([12])\.", rf"{_LAYER}.ln_\2."),
    (rf"{_DINOV2_LAYER}\.layer_scale([12])\.lambda1$", rf"{_LAYER}.ls_\2.gamma"),
    (rf"{_DINOV2_LAYER}\.attention\.output\.dense\.", rf"{_LAYER}.self_attention.out_proj."),
    *HF_VIT,
)
"""DINOv2's, whose blocks have other names for norms and layer scale than the ViT's."""

_HF_BLOCK = r"(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)"
HF_RESNET: Table = (
    (r"(?:resnet\.)?embedder\.embedder\.convolution\.", "conv1."),
    (r"(?:resnet\.)?embedder\.embedder\.normalization\.", "bn1."),
    (rf"{_HF_BLOCK}\.shortcut\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.0."),
    (rf"{_HF_BLOCK}\.shortcut\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.1."),
    (rf"{_HF_BLOCK}\.layer\.(\d+)\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.conv{int(m[3]) + 1}."),
    (rf"{_HF_BLOCK}\.layer\.(\d+)\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.bn{int(m[3]) + 1}."),
    (r"classifier\.1\.", "fc."),
)
TABLES: tuple[Table, ...] = ((), RELEASED_VIT, TIMM_VIT, HF_VIT, HF_DINOV2, HF_RESNET)

UNUSED = re.compile(r"(?:(?:vit|dinov2)\.)?pooler\.dense\.")
"""A layer that Hugging Face's headless ViT carries and its classifier does not use either."""


def plain(name: str) -> str:
    """Without what torch itself puts in."""
    return name.replace(COMPILED, "").removeprefix("module.")


def in_names_of(own: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names, of those they may have, that most of `own` are among."""
    wanted = set(own)
    given = {plain(name): tensor for name, tensor in weights.items()}
    inner = (given, _unwrapped(given), _without_shared_start(given))
    forms = (_renamed(names, table) for names in inner for table in TABLES)
    return max(forms, key=lambda form: len(wanted & form.keys()))


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without wrappers' prefixes; a name that would then be there twice stays as it is."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        inner = name
        while prefix := next((prefix for prefix in WRAPPERS if inner.startswith(prefix)), ""):
            inner = inner.removeprefix(prefix)
        found[name if inner in found else inner] = tensor
    return found


def _without_shared_start(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a file that holds one part of another model, whatever its name there: `encoder.conv1.weight`."""
    shared = ".".join([*os.path.commonprefix([name.split(".")[:-1] for name in weights]), ""])
    return {name.removeprefix(shared): tensor for name, tensor in weights.items()}


def _renamed(weights: dict[str, Tensor], table: Table) -> dict[str, Tensor]:
    if not table:
        return weights
    found = {_ours(name, table): tensor for name, tensor in weights.items() if not UNUSED.match(name)}
    for whole in [name.removesuffix("#0") for name in found if name.endswith("#0")]:
        if {f"{whole}#{third}" for third in range(3)} <= found.keys():
            found[whole] = torch.cat([found.pop(f"{whole}#{third}") for third in range(3)])
    return found


def _ours(name: str, table: Table) -> str:
    for theirs, ours in table:
        if match := re.match(theirs, name):
            return (match.expand(ours) if isinstance(ours, str) else ours(match)) + name[match.end() :]
    return name
