"""Frozen backbones of SlotContrast: DINOv2, and fixed filters for demos and tests.

DINOv2's vision transformer (Oquab et al. 2023) returns the token of every patch after the last block. It consists of
the blocks of `models/vit.py` with patches of 14 pixels and layer scale, under the same names, so that
`models/weights.py` loads files of timm, of the official repository and of Hugging Face. The position table is always
that of 518 pixels; for other image sizes it is resampled as in timm (bicubic, antialiased).

`FilterBank` needs no weights: its features are soft colour histograms and edge strengths of patches, and their
positions. Similar patches get similar features. Positions are included, as in a transformer's features, because slots
could not tell where their object is otherwise. The features contain no semantics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep.recompute import Blocks
from halfstep_train.models.layers import PatchConv2d, check_heads, divide_side
from halfstep_train.models.vit import PATCHES_TILE, EncoderBlock, ViTSize, resize_positions
from halfstep_train.models.weights import load_weights_, match_names

DINOV2 = {
    "vit_small_patch14_dinov2": ViTSize(depth=12, heads=6, dim=384, mlp_dim=1536, patch=14),
    "vit_base_patch14_dinov2": ViTSize(depth=12, heads=12, dim=768, mlp_dim=3072, patch=14),
    "vit_large_patch14_dinov2": ViTSize(depth=24, heads=16, dim=1024, mlp_dim=4096, patch=14),
}
"""Sizes by timm's names."""
TABLE_GRID = 37
"""Rows and columns of the released position tables: 518 pixels."""
LAYER_SCALE = 1e-5
NOT_NEEDED = ("mask_token", "embeddings.mask_token", "head.weight", "head.bias")
"""Entries of released files that are not part of the encoder."""


class FeatureEncoder(nn.Module):
    """Run the transformer blocks on class token and patches (N, 1 + rows · columns, dim), without the last norm."""

    def __init__(self, size: ViTSize, grid: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, grid**2 + 1, size.dim).normal_(std=0.02))
        blocks = {f"encoder_layer_{i}": EncoderBlock(size, layer_scale=LAYER_SCALE) for i in range(size.depth)}
        self.layers = Blocks(blocks, checkpointing=False)
        self.ln = nn.LayerNorm(size.dim, eps=1e-6)

    def forward(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        tokens = tokens + resize_positions(self.pos_embedding, rows, columns, antialias=True)
        return self.layers(tokens)


class DinoV2(nn.Module):
    """Compute features (N, patches, dim) of normalised images (N, 3, H, W), whose sides are multiples of 14."""

    def __init__(self, size: ViTSize, *, grid: int = TABLE_GRID) -> None:
        super().__init__()
        self.patch, self.dim = size.patch, size.dim
        self.conv_proj = PatchConv2d(3, size.dim, size.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.dim))
        self.encoder = FeatureEncoder(size, grid)
        nn.init.trunc_normal_(self.conv_proj.weight, std=math.sqrt(1 / (3 * size.patch**2)))

    def forward(self, images: Tensor) -> Tensor:
        return self.compute_tokens(images)[:, 1:]

    def compute_tokens(self, images: Tensor) -> Tensor:
        """Return the class token and the patch tokens after the last block."""
        rows = divide_side(images.shape[2], self.patch, PATCHES_TILE)
        columns = divide_side(images.shape[3], self.patch, PATCHES_TILE)
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1).to(patches.dtype), patches], dim=1)
        return self.encoder(tokens, rows, columns)


def build_dinov2(name: str, *, depth: int = 0, heads: int = 0, dim: int = 0, grid: int = TABLE_GRID) -> DinoV2:
    """Build a model by timm's name; a depth, heads or dim above 0 replaces the published one."""
    given = {"depth": depth, "heads": heads, "dim": dim, "mlp_dim": 4 * dim}
    size = replace(DINOV2[name], **{part: value for part, value in given.items() if value})
    check_heads(size.dim, size.heads)
    return DinoV2(size, grid=grid)


IN_SLOTCONTRAST = "encoder.module.backbone.model."
"""Prefix of the backbone in a checkpoint of SlotContrast's project."""


def load_backbone_weights_(model: DinoV2, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Load weights under any known naming, with the position table of the file; for another architecture, raise an
    error that describes the difference."""
    # A checkpoint of SlotContrast contains the backbone; other files are the backbone.
    inside = {name: value for name, value in weights.items() if name.startswith(IN_SLOTCONTRAST)}
    weights = {name.removeprefix(IN_SLOTCONTRAST): value for name, value in (inside or weights).items()}
    own = model.state_dict()
    named = match_names(own, {name: value for name, value in weights.items() if name not in NOT_NEEDED})
    table = named.get("encoder.pos_embedding")
    if table is not None and table.ndim == 3 and table.shape[2] == model.dim:
        # The file's grid; it is resampled when used.
        model.encoder.pos_embedding = nn.Parameter(torch.empty_like(table))
    # Files of feature extractors may lack the last norm, which features do not use.
    named = {name: own[name] for name in ("encoder.ln.weight", "encoder.ln.bias")} | named
    depth = len(model.encoder.layers)
    load_weights_(model, {name: value for name, value in named.items() if _find_block(name) < depth}, source=source)


def _find_block(name: str) -> int:
    """Return the block number of a weight, or -1. Blocks after the last requested one are not loaded."""
    found = re.match(r"encoder\.layers\.encoder_layer_(\d+)\.", name)
    return int(found[1]) if found else -1


LEVELS = (0.15, 0.5, 0.85)
"""Red, green and blue levels of the 27 reference colours."""
SHARPNESS = 12.0
"""Inverse temperature of the softmax over reference colours."""
WAVES = (1, 2, 3, 4)
"""Half periods per frame of the cosines that encode the position of a patch."""
SPREAD = 0.06
"""Typical standard deviation of a channel over the patches of a frame; features are divided by it."""


class FilterBank(nn.Module):
    """Compute features (N, patches, 40) of images (N, 3, H, W) in 0..1: 27 of colour, 5 of edges, 8 of position."""

    look_dim = len(LEVELS) ** 3 + 5
    dim = look_dim + 2 * len(WAVES)

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch
        sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        diagonal = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 2.0]]) / 8
        edges = torch.stack([sobel, sobel.T, diagonal, diagonal.flip(1)])
        self.register_buffer("levels", torch.tensor(LEVELS).view(-1, 1, 1))
        self.register_buffer("edges", edges.unsqueeze(1))

    def forward(self, images: Tensor) -> Tensor:
        with fp32_island():
            images = to_fp32(images)
            levels, edges = self.get_buffer("levels").float(), self.get_buffer("edges").float()
            # Reference colours are all triples of levels, so the softmax over them is a product of three softmaxes.
            nearness = torch.softmax(-SHARPNESS * (images.unsqueeze(2) - levels).square(), dim=2)
            red, green, blue = nearness.unbind(1)
            nearness = _multiply_channels(_multiply_channels(red, green), blue)
            grey = images.mean(1, keepdim=True)
            strength = F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), edges).abs()
            pooled = F.avg_pool2d(torch.cat([nearness, 4 * strength, grey], dim=1), self.patch)
            # Subtract the mean of the frame: what all patches have in common does not distinguish them.
            looks = (pooled - pooled.mean((2, 3), keepdim=True)) / SPREAD
            positions = _encode_positions(looks.shape[2], looks.shape[3], looks.device).expand(len(looks), -1, -1, -1)
            return torch.cat([looks, positions], dim=1).flatten(2).transpose(1, 2)


def _multiply_channels(one: Tensor, other: Tensor) -> Tensor:
    """Multiply every channel of (N, C, H, W) with every channel of (N, D, H, W): (N, C · D, H, W)."""
    return (one.unsqueeze(2) * other.unsqueeze(1)).flatten(1, 2)


def _encode_positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return cosines (1, 8, rows, columns) of the vertical and horizontal position of patches."""
    down, across = ((torch.arange(count, device=device) + 0.5) / count for count in (rows, columns))
    waves = [torch.cos(math.pi * wave * down).view(-1, 1).expand(rows, columns) for wave in WAVES]
    waves += [torch.cos(math.pi * wave * across).expand(rows, columns) for wave in WAVES]
    return torch.stack(waves).unsqueeze(0)
