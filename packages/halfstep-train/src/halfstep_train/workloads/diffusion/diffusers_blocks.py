"""Forward passes of diffusers' residual blocks and attention with our kernels, used in captured steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep_train.kernels.group_norm import (
    add_branch,
    apply_group_norm_silu,
    can_fuse_group_norm,
    convolve_group_norm_silu,
    is_plain_norm,
)
from halfstep_train.workloads.diffusion.diffusers_nets import Net


def find_blocks(net: Net) -> Mapping[type[nn.Module], Callable[..., Any] | None]:
    """Map the classes of repeated blocks to their replacement forwards, for `Workload.blocks`.

    These are residual blocks and attention or, with text, residual blocks and transformers; None: compiled unchanged.
    """
    from diffusers.models.attention_processor import Attention
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    original: Any = ResnetBlock2D.forward

    def forward(block: Any, input_tensor: Tensor, temb: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
        if rest or more or not is_plain(block, input_tensor, temb):
            return original(block, input_tensor, temb, *rest, **more)
        return run_residual_block(block, input_tensor, temb)

    found: dict[type[nn.Module], Callable[..., Any] | None] = {ResnetBlock2D: forward}
    if any(isinstance(module, Transformer2DModel) for module in net.modules()):
        return found | {Transformer2DModel: None}
    return found | {Attention: make_attention_forward(Attention.forward)}


def is_plain(block: Any, x: Tensor, temb: Tensor | None) -> bool:
    """True if a residual block has the form of all published networks, and our fused GroupNorm supports its input."""
    resizes = block.upsample is not None or block.downsample is not None
    # Blocks of a VAE's decoder have time_embedding_norm "group", but no time embedding.
    has_known_time = temb is None or block.time_embedding_norm in ("default", "scale_shift")
    has_silu = isinstance(block.nonlinearity, nn.SiLU)
    is_convolution = is_plain_convolution(block.conv1) and is_plain_convolution(block.conv2)
    is_block = has_known_time and has_silu and is_convolution and not resizes
    return is_block and can_fuse_group_norm(x, block.norm1) and is_plain_norm(block.norm2)


def run_residual_block(block: Any, x: Tensor, temb: Tensor | None) -> Tensor:
    """Run a ResnetBlock2D with fused GroupNorm, SiLU and convolution."""
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
    shortcut = x if block.conv_shortcut is None else block.conv_shortcut(x)
    found = add_branch(shortcut, hidden, block.conv2.bias)
    return found if block.output_scale_factor == 1 else found / block.output_scale_factor


def is_plain_convolution(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return layer.bias is not None and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


WIDEST_HEAD = 256
"""Largest head size for which flash attention has kernels. Beyond it, as in a VAE, the backend that torch chooses takes
five times as long as plain matmuls."""
MOST_SCORES = 2**25
"""Limit of attention scores that are stored for backward: 128 MiB in fp32."""


def make_attention_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an attention forward: use torch's math backend for wide heads, for which flash attention has no kernel."""

    def forward(layer: Any, hidden_states: Tensor, *rest: Any, **more: Any) -> Tensor:
        # Images are (N, C, H, W), sequences (N, tokens, C).
        tokens = hidden_states[0, 0].numel() if hidden_states.ndim == 4 else hidden_states.shape[1]
        is_wide = layer.inner_dim // layer.heads > WIDEST_HEAD
        if is_wide and len(hidden_states) * layer.heads * tokens**2 <= MOST_SCORES:
            with sdpa_kernel(SDPBackend.MATH):
                return original(layer, hidden_states, *rest, **more)
        return original(layer, hidden_states, *rest, **more)

    return forward
