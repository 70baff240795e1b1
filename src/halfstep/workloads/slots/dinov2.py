"""DINOv2's vision transformer (Oquab et al. 2023) as a source of features: every patch's tokens after the last block.

It is `models/vit.py`'s blocks with patches of 14 pixels and layer scale, under the same names, so that the tables of
`foreign_names.py` load timm's, the official and Hugging Face's files. The position table is that of 518 pixels,
whatever size the images have; for others it is resampled as timm does (bicubic, antialiased).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.models.foreign_names import in_names_of
from halfstep.models.layers import PatchConv2d
from halfstep.models.recompute import Blocks
from halfstep.models.vit import EncoderBlock, ViTSize, checked_grid, resized_positions
from halfstep.models.weights import load_weights_, read_weights

DINOV2 = {
    "vit_small_patch14_dinov2": ViTSize(depth=12, heads=6, dim=384, mlp_dim=1536, patch=14),
    "vit_base_patch14_dinov2": ViTSize(depth=12, heads=12, dim=768, mlp_dim=3072, patch=14),
    "vit_large_patch14_dinov2": ViTSize(depth=24, heads=16, dim=1024, mlp_dim=4096, patch=14),
}
"""By timm's names."""
TABLE_GRID = 37
"""Rows and columns of the released position tables: 518 pixels."""
LAYER_SCALE = 1e-5
NOT_NEEDED = ("mask_token", "embeddings.mask_token", "head.weight", "head.bias")
"""What released files hold beside the encoder."""


class FeatureEncoder(nn.Module):
    """Class token and patches (N, 1 + rows · columns, dim) to tokens of the same shape, not normalised."""

    def __init__(self, size: ViTSize, grid: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, grid**2 + 1, size.dim).normal_(std=0.02))
        blocks = {f"encoder_layer_{i}": EncoderBlock(size, LAYER_SCALE, is_last=False) for i in range(size.depth)}
        self.layers = Blocks(blocks, checkpointing=False)
        self.ln = nn.LayerNorm(size.dim, eps=1e-6)

    def forward(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        tokens = tokens + resized_positions(self.pos_embedding, rows, columns, antialias=True)
        return self.layers(tokens)


class DinoV2(nn.Module):
    """Normalised images (N, 3, H, W) to features (N, patches, dim) of the last block; sides are multiples of 14."""

    def __init__(self, size: ViTSize, *, grid: int = TABLE_GRID) -> None:
        super().__init__()
        self.patch, self.dim = size.patch, size.dim
        self.conv_proj = PatchConv2d(3, size.dim, size.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.dim))
        self.encoder = FeatureEncoder(size, grid)
        nn.init.trunc_normal_(self.conv_proj.weight, std=math.sqrt(1 / (3 * size.patch**2)))

    def forward(self, images: Tensor) -> Tensor:
        return self.tokens(images)[:, 1:]

    def tokens(self, images: Tensor) -> Tensor:
        """The class token's and every patch's, as the last block leaves them."""
        rows, columns = checked_grid(images.shape[2], images.shape[3], self.patch)
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1).to(patches.dtype), patches], dim=1)
        return self.encoder(tokens, rows, columns)


def dinov2(name: str, *, depth: int = 0, heads: int = 0, dim: int = 0, grid: int = TABLE_GRID) -> DinoV2:
    """A model by timm's name; a size above 0 replaces the published one."""
    given = {"depth": depth, "heads": heads, "dim": dim, "mlp_dim": 4 * dim}
    size = replace(DINOV2[name], **{part: value for part, value in given.items() if value})
    if size.dim % size.heads:
        raise ModelError(f"{size.dim} channels for {size.heads} heads", why="the heads share the channels evenly")
    return DinoV2(size, grid=grid)


def load_backbone_(model: DinoV2, path: str) -> None:
    """Weights from a local file under any of the names; another architecture is an error that says how it differs."""
    load_backbone_weights_(model, read_weights(Path(path))[0], source=path)


IN_SLOTCONTRAST = "encoder.module.backbone.model."
"""Where a checkpoint of SlotContrast's own project holds it."""


def load_backbone_weights_(model: DinoV2, weights: Mapping[str, Tensor], *, source: str) -> None:
    inside = {name: value for name, value in weights.items() if name.startswith(IN_SLOTCONTRAST)}
    weights = {name.removeprefix(IN_SLOTCONTRAST): value for name, value in (inside or weights).items()}
    own = model.state_dict()
    named = in_names_of(own, {name: value for name, value in weights.items() if name not in NOT_NEEDED})
    table = named.get("encoder.pos_embedding")
    if table is not None and table.ndim == 3 and table.shape[2] == model.dim:
        model.encoder.pos_embedding = nn.Parameter(torch.empty_like(table))  # its own grid, resampled when used
    # Files of feature extractors end with the last block.
    named = {name: own[name] for name in ("encoder.ln.weight", "encoder.ln.bias")} | named
    depth = len(model.encoder.layers)
    load_weights_(model, {name: value for name, value in named.items() if _block(name) < depth}, source=source)


def _block(name: str) -> int:
    """A weight's block; -1 outside. Blocks behind the last one that is asked for have no part in its features."""
    found = re.match(r"encoder\.layers\.encoder_layer_(\d+)\.", name)
    return int(found[1]) if found else -1
