"""Vision transformer (Dosovitskiy et al. 2020) with torchvision's names; ViT-B/16 has 86,567,656 parameters.

Attention is torch's fused kernel with the weights of `nn.MultiheadAttention`. For images of another size than the model
was built for, position embeddings are interpolated. Blocks may have layer scale (Touvron et al. 2021), as DINOv2's do.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, get_matmul_dtype, to_fp32
from halfstep.recompute import Blocks, keeps_every_product
from halfstep_train.kernels.fast_forms import has_half_autocast, has_room_for_tiles, has_triton, is_forced_on, is_wanted
from halfstep_train.kernels.transformer_chain import Stream, TransformerBlock, run_blocks
from halfstep_train.models.layers import (
    Checks,
    PatchConv2d,
    accept_any,
    are_plain,
    check_heads,
    consists_of,
    divide_side,
    has_bias,
    has_gain_and_bias,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTSize:
    """Sizes of a ViT."""

    depth: int
    heads: int
    dim: int
    mlp_dim: int
    patch: int = 16


VITS = {
    "vit_s_16": ViTSize(depth=12, heads=6, dim=384, mlp_dim=1536),
    "vit_b_16": ViTSize(depth=12, heads=12, dim=768, mlp_dim=3072),
    "vit_l_16": ViTSize(depth=24, heads=16, dim=1024, mlp_dim=4096),
}
"""Published sizes: B and L as in torchvision, S as in DeiT (Touvron et al. 2020)."""


PATCHES_TILE = "patches tile the image"
"""Why the side of an image must be a multiple of the patch size."""


class SelfAttention(nn.Module):
    """Self-attention with the parameters of `nn.MultiheadAttention`, of which only the first `num_queries` tokens are
    computed."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, num_queries: int) -> Tensor:
        dim = x.shape[2]
        if num_queries == x.shape[1]:
            q, k, v = self._project(x, 0, 3)
        else:
            (q,), (k, v) = self._project(x[:, :num_queries], 0, 1), self._project(x, 1, 3)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).reshape(x.shape[0], num_queries, dim))

    def _project(self, x: Tensor, first: int, end: int) -> Tensor:
        """Return the projections `first` to `end` - 1, of queries (0), keys (1) and values (2): (end - first, N, heads,
        tokens, head dim)."""
        batch, tokens, dim = x.shape
        rows = slice(first * dim, end * dim)
        projected = F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])
        return projected.view(batch, tokens, end - first, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch, which starts small."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each with a norm before it and a shortcut around it.

    Of the last block only the first token, the class token, is used: the fast form computes no other.
    """

    def __init__(self, size: ViTSize, *, layer_scale: float = 0.0, is_last: bool = False) -> None:
        super().__init__()
        self.is_last = is_last
        self.ln_1 = nn.LayerNorm(size.dim, eps=1e-6)
        self.self_attention = SelfAttention(size.dim, size.heads)
        self.ls_1 = LayerScale(size.dim, layer_scale) if layer_scale else nn.Identity()
        self.ln_2 = nn.LayerNorm(size.dim, eps=1e-6)
        # torchvision has dropout layers in between, so the second linear layer is number 3.
        layers = {"0": nn.Linear(size.dim, size.mlp_dim), "1": nn.GELU(), "3": nn.Linear(size.mlp_dim, size.dim)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ls_2 = LayerScale(size.dim, layer_scale) if layer_scale else nn.Identity()
        for linear in (self.mlp[0], self.mlp[2]):
            assert isinstance(linear, nn.Linear)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        num_read = 1 if self.is_last and is_wanted("class_token", x) else x.shape[1]
        x = x[:, :num_read] + self.ls_1(self.self_attention(self.ln_1(x), num_read))
        return x + self.ls_2(self.mlp(self.ln_2(x)))

    def make_chain_block(self) -> TransformerBlock:
        """Return the layers of this block for `run_blocks`, which computes the same as `forward` without layer
        scale."""
        attention, first, second = self.self_attention, self.mlp[0], self.mlp[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        return TransformerBlock(
            num_heads=attention.heads, norm_1=self.ln_1, in_weight=attention.in_proj_weight,
            in_bias=attention.in_proj_bias, out=attention.out_proj, norm_2=self.ln_2, first=first, second=second,
        )  # fmt: skip


class Encoder(nn.Module):
    """Compute the features (N, dim) of the class token from class token and patches (N, 1 + rows · columns, dim)."""

    def __init__(self, size: ViTSize, num_positions: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, num_positions, size.dim).normal_(std=0.02))
        blocks = {f"encoder_layer_{i}": EncoderBlock(size, is_last=i == size.depth - 1) for i in range(size.depth)}
        self.layers = Blocks(blocks, checkpointing=checkpointing)
        self.ln = nn.LayerNorm(size.dim, eps=1e-6)

    def forward(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        tokens = tokens + resize_positions(self.pos_embedding, rows, columns)
        # Only the class token is used, and a layer norm acts on each token separately.
        return self.ln(self._run_layers(tokens)[:, 0])

    def _run_layers(self, tokens: Tensor) -> Tensor:
        if not (self.training and wants_chain(self.layers, tokens) and self._can_run_chain()):
            return self.layers(tokens)
        # The chain returns the residual stream and its last branch, not yet added.
        x, branch, bias = self._run_chain(tokens)
        # The last block is compiled instead: of its tokens only one is used, so fused kernels would gain little.
        return self.layers[-1](x if branch is None or bias is None else x + (branch + bias))

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _can_run_chain(self) -> bool:
        """True if all layers are as built and trained, so that the fused kernels compute the same."""
        blocks = list(self.layers)[:-1]
        trains = all(weight.requires_grad for block in blocks for weight in block.parameters())
        are_known = consists_of((self.layers, *blocks), Blocks, *[EncoderBlock] * len(blocks))
        parts = (self.layers, *(part for block in blocks for part in block.modules()))
        return trains and are_known and are_plain(parts, CHAINED) and has_room_for_tiles(self.pos_embedding.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_chain(self, tokens: Tensor) -> Stream:
        blocks = list(self.layers)[:-1]
        if not self._can_run_chain():  # compiled code checks only once; a layer may have been replaced since
            return Stream(nn.Sequential(*blocks)(tokens), None, None)
        layers = [block.make_chain_block() for block in blocks if isinstance(block, EncoderBlock)]
        return run_blocks(layers, tokens, get_matmul_dtype(tokens), keep=self.layers.recompute == "none")


def wants_chain(blocks: nn.Module, tokens: Tensor) -> bool:
    """True if blocks should run as a chain of our kernels between matmuls.

    That is faster in compiled code on a GPU under autocast, and can be forced.
    """
    is_fast = torch.compiler.is_compiling() and tokens.is_cuda and has_half_autocast(tokens)
    are_kept = isinstance(blocks, Blocks) and len(blocks) > 1 and keeps_every_product(blocks.recompute)
    is_possible = torch.is_grad_enabled() and tokens.dtype == torch.float32 and are_kept
    return is_possible and is_forced_on("chain", otherwise=is_fast) and has_triton()


def is_whole(block: EncoderBlock) -> bool:
    """True if the modules of a block have the classes it was built with, and there is no layer scale."""
    attention = (block.ln_1, block.self_attention, block.ls_1)
    has_attention = consists_of(attention, nn.LayerNorm, SelfAttention, nn.Identity)
    perceptron = (block.ln_2, *block.mlp.children(), block.ls_2)
    return has_attention and consists_of(perceptron, nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear, nn.Identity)


CHAINED: Checks = {
    nn.LayerNorm: has_gain_and_bias,
    nn.Linear: has_bias,
    nn.GELU: lambda part: part.approximate == "none",
    SelfAttention: lambda part: type(part.out_proj) is nn.Linear,
    EncoderBlock: is_whole,
    **dict.fromkeys((nn.Identity, nn.Sequential, Blocks), accept_any),
}
"""Modules that `kernels.transformer_chain` can replace, each with a check."""


class ViT(nn.Module):
    """Compute logits (N, num_classes) of images (N, 3, H, W), whose sides are multiples of the patch size."""

    head_name = "heads.head"

    def __init__(
        self,
        size: ViTSize,
        *,
        num_classes: int = 1000,
        image_size: int = 224,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_heads(size.dim, size.heads)
        self.patch = size.patch
        self.grid = divide_side(image_size, size.patch, PATCHES_TILE)
        self.conv_proj = PatchConv2d(3, size.dim, size.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.dim))
        self.encoder = Encoder(size, self.grid**2 + 1, checkpointing=checkpointing)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(size.dim, num_classes)))
        nn.init.trunc_normal_(self.conv_proj.weight, std=math.sqrt(1 / (3 * size.patch**2)))
        for zero in (self.conv_proj.bias, *self.heads.parameters()):
            assert zero is not None
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        rows = divide_side(x.shape[2], self.patch, PATCHES_TILE)
        columns = divide_side(x.shape[3], self.patch, PATCHES_TILE)
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1)
        return self.heads(self.encoder(tokens, rows, columns))


def resize_positions(positions: Tensor, rows: int, columns: int, *, antialias: bool = False) -> Tensor:
    """Resample position embeddings (1, 1 + side², dim) to another grid, bicubic in fp32; that of the class token
    stays."""
    side = math.isqrt(positions.shape[1] - 1)
    if (rows, columns) == (side, side):
        return positions
    with fp32_island():
        # (1, dim, side, side)
        grid = to_fp32(positions[:, 1:]).transpose(1, 2).unflatten(2, (side, side))
        grid = F.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False, antialias=antialias)
        return torch.cat([positions[:, :1], grid.flatten(2).transpose(1, 2).to(positions.dtype)], dim=1)


def build_vit(name: str, *, depth: int = 0, heads: int = 0, dim: int = 0, patch: int = 0, **options: Any) -> ViT:
    """Build `vit_s_16`, `vit_b_16` or `vit_l_16` with the options of `ViT`; sizes above 0 replace the published
    ones."""
    given = {"depth": depth, "heads": heads, "dim": dim, "mlp_dim": 4 * dim, "patch": patch}
    return ViT(replace(VITS[name], **{part: value for part, value in given.items() if value}), **options)
