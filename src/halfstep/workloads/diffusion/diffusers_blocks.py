"""Forward passes of diffusers' residual block and attention with our kernels, which captured steps use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.kernels.group_norm import (
    add_branch,
    apply_group_norm_silu,
    can_fuse_group_norm,
    convolve_group_norm_silu,
    is_plain_norm,
)
from halfstep.workloads.diffusion.diffusers_nets import Net


def find_blocks(net: Net) -> Mapping[type[nn.Module], Callable[..., Any] | None]:
    """Map the repeated block classes of a network to their replacement forwards.

    These are residual blocks and attention. With text they are residual blocks and transformers; None: compiled as they
    are.
    """
    from diffusers.models.attention_processor import Attention
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    own: Any = ResnetBlock2D.forward

    def forward(block: Any, input_tensor: Tensor, temb: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
        if rest or more or not is_plain(block, input_tensor, temb):
            return own(block, input_tensor, temb, *rest, **more)
        return run_residual_block(block, input_tensor, temb)

    found: dict[type[nn.Module], Callable[..., Any] | None] = {ResnetBlock2D: forward}
    if any(isinstance(module, Transformer2DModel) for module in net.modules()):
        return found | {Transformer2DModel: None}
    return found | {Attention: make_attention_forward(Attention.forward)}


def is_plain(block: Any, x: Tensor, temb: Tensor | None) -> bool:
    """True if this residual block has the form of all published networks and our fused GroupNorm supports its input."""
    resizes = block.upsample is not None or block.downsample is not None
    # The blocks of a VAE's decoder have another kind ("group") and no time embedding.
    told = temb is None or block.time_embedding_norm in ("default", "scale_shift")
    knows = told and isinstance(block.nonlinearity, nn.SiLU)
    convolves = is_plain_convolution(block.conv1) and is_plain_convolution(block.conv2)
    return knows and convolves and not resizes and can_fuse_group_norm(x, block.norm1) and is_plain_norm(block.norm2)


def run_residual_block(block: Any, x: Tensor, temb: Tensor | None) -> Tensor:
    # conv1 runs without its bias: the bias joins the time embedding, and the next normalisation adds both.
    hidden, added = convolve_group_norm_silu(block.norm1, block.conv1, x), block.conv1.bias.expand(len(x), -1)
    if block.time_emb_proj is not None and temb is not None:
        temb = block.time_emb_proj(temb if block.skip_time_act else block.nonlinearity(temb))
    between: tuple[Tensor | None, ...] = (added, None, None)
    if block.time_embedding_norm == "scale_shift":
        assert temb is not None
        between = (added, *torch.chunk(temb, 2, dim=1))
    elif temb is not None:
        between = (added + temb, None, None)
    if block.training and block.dropout.p > 0:
        dropped = block.dropout(apply_group_norm_silu(block.norm2, hidden, *between))
        hidden = block.conv2._conv_forward(dropped, block.conv2.weight, None)
    else:
        hidden = convolve_group_norm_silu(block.norm2, block.conv2, hidden, *between)
    straight = x if block.conv_shortcut is None else block.conv_shortcut(x)
    found = add_branch(straight, hidden, block.conv2.bias)
    return found if block.output_scale_factor == 1 else found / block.output_scale_factor


def is_plain_convolution(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return layer.bias is not None and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


WIDEST_HEAD = 256
"""Channels per head up to which flash attention has kernels. Beyond it, as in a VAE, torch's choice takes five times as
long as matmuls."""
MOST_SCORES = 2**25
"""The most attention scores that are kept for backward: 128 MiB in fp32."""


def make_attention_forward(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention forward that uses torch's math backend for wide heads, where flash attention has no
    kernel."""

    def forward(layer: Any, hidden_states: Tensor, *rest: Any, **more: Any) -> Tensor:
        # Images are (N, C, H, W), sequences (N, tokens, C).
        tokens = hidden_states[0, 0].numel() if hidden_states.ndim == 4 else hidden_states.shape[1]
        is_wide = layer.inner_dim // layer.heads > WIDEST_HEAD
        if is_wide and len(hidden_states) * layer.heads * tokens**2 <= MOST_SCORES:
            with sdpa_kernel(SDPBackend.MATH):
                return own(layer, hidden_states, *rest, **more)
        return own(layer, hidden_states, *rest, **more)

    return forward
