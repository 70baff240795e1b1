"""diffusers' residual block by kernels of our own: what its captured steps run instead of the block's own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.kernels.group_norm import fits, group_norm_silu
from halfstep.models.diffusers_nets import Net


def blocks_of(net: Net) -> Mapping[type[nn.Module], Callable[..., Any] | None]:
    """Its residual blocks, and with text its transformers, which are compiled."""
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    own: Any = ResnetBlock2D.forward

    def forward(block: Any, input_tensor: Tensor, temb: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
        if rest or more or not is_plain(block, input_tensor, temb):
            found: Tensor = own(block, input_tensor, temb, *rest, **more)
            return found
        return residual(block, input_tensor, temb)

    is_told = any(isinstance(module, Transformer2DModel) for module in net.modules())
    return {ResnetBlock2D: forward} | ({Transformer2DModel: None} if is_told else {})


def is_plain(block: Any, x: Tensor, temb: Tensor | None) -> bool:
    """Whether it is the block that all published networks have, and its maps are ours to normalise."""
    resizes = block.upsample is not None or block.downsample is not None
    # The blocks of a VAE's decoder name another ("group"), and are told no time.
    told = temb is None or block.time_embedding_norm in ("default", "scale_shift")
    knows = told and isinstance(block.nonlinearity, nn.SiLU)
    return knows and not resizes and fits(x, block.norm1) and type(block.norm2) is nn.GroupNorm


def residual(block: Any, x: Tensor, temb: Tensor | None) -> Tensor:
    hidden = block.conv1(group_norm_silu(block.norm1, x))
    if block.time_emb_proj is not None and temb is not None:
        temb = block.time_emb_proj(temb if block.skip_time_act else block.nonlinearity(temb))
    if block.time_embedding_norm == "scale_shift":
        assert temb is not None
        scale, shift = torch.chunk(temb, 2, dim=1)
        hidden = group_norm_silu(block.norm2, hidden, scale, shift)
    else:
        hidden = group_norm_silu(block.norm2, hidden if temb is None else hidden + temb[:, :, None, None])
    hidden = block.conv2(block.dropout(hidden))
    straight = x if block.conv_shortcut is None else block.conv_shortcut(x)
    found: Tensor = straight + hidden
    return found if block.output_scale_factor == 1 else found / block.output_scale_factor
