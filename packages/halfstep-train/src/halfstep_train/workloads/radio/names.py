"""Translate parameter names of RadioDiff's public checkpoints (UNIC-Lab/RadioDiff) to ours.

The autoencoder's names are the same. Weights that no forward pass uses (`init_conv_carK`, the last norm and the head of
the Swin transformer) and weights of the autoencoder's loss are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

# Index of a module inside a level of the public U-Net: 0 and 1 are the blocks, 2 the attention, 3 the convolution.
_LEVEL = {"0": "block1", "1": "block2"}
_ATTENTION = (("fn.norm.", "norm."), ("fn.fn.", ""))


def _rename_level(match: re.Match[str], prefix: str) -> str:
    """Return our name for a parameter of a U-Net level."""
    index, part, rest = match.groups()
    if part in _LEVEL:
        return f"{prefix}{index}.{_LEVEL[part]}.{rest}"
    if part == "3":
        # Ours is always second, after the upsampling. In the public decoder the last level has no upsampling, so its
        # convolution has no index.
        is_alone = prefix.startswith("decoders") and not rest.startswith("1.")
        return f"{prefix}{index}.end.{'1.' if is_alone else ''}{rest}"
    return f"{prefix}{index}.attention.{_rename_attention(rest)}"


def _rename_attention(rest: str) -> str:
    for theirs, ours in _ATTENTION:
        if rest.startswith(theirs):
            return ours + rest.removeprefix(theirs)
    return rest


def _rename_relation(match: re.Match[str], prefix: str) -> str:
    index, rest = match.groups()
    return f"{prefix}{index}.relation.{rest.replace('attentions.0.', 'attention.')}"


_RULES = (
    (r"init_conv_mask\.first_coonv\.", "condition.features.0."),
    # The public Swin keeps the patch embedding apart from `features`; ours is features.0, as in torchvision.
    (r"init_conv_mask\.features\.(\d+)\.", lambda m: f"condition.features.{int(m[1]) + 1}."),
    (r"init_conv\.", "stem."),
    (r"projects\.", "projections."),
    (r"time_mlp\.0\.W$", "time.W"),
    (r"time_mlp\.1\.", "time.mlp.0."),
    (r"time_mlp\.3\.", "time.mlp.2."),
    (r"downs\.(\d+)\.(\d)\.(.*)", lambda m: _rename_level(m, "levels.")),
    (r"ups\.(\d+)\.(\d)\.(.*)", lambda m: _rename_level(m, "decoders.0.levels.")),
    (r"ups2\.(\d+)\.(\d)\.(.*)", lambda m: _rename_level(m, "decoders.1.levels.")),
    (r"relation_layers_down\.(\d+)\.(.*)", lambda m: _rename_relation(m, "levels.")),
    (r"relation_layers_up\.(\d+)\.(.*)", lambda m: _rename_relation(m, "decoders.0.levels.")),
    (r"relation_layers_up2\.(\d+)\.(.*)", lambda m: _rename_relation(m, "decoders.1.levels.")),
    (r"mid_attn\.(.*)", lambda m: f"mid_attention.{_rename_attention(m[1])}"),
    (r"decouple1\.", "decoders.0.filter."),
    (r"decouple2\.", "decoders.1.filter."),
    (r"final_res_block\.", "decoders.0.final_block."),
    (r"final_res_block2\.", "decoders.1.final_block."),
    (r"final_conv\.", "decoders.0.final_conv."),
    (r"final_conv2\.", "decoders.1.final_conv."),
)
_UNUSED = re.compile(r"init_conv_carK\.|init_conv_mask\.(norm|head)\.")


def rename_weights(rename: Callable[[str], str | None], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename all weights; drop those for which `rename` returns None."""
    return {ours: value for name, value in weights.items() if (ours := rename(name)) is not None}


def rename_unet_weight(theirs: str) -> str | None:
    """Return our name for a parameter of the public U-Net; None if no forward pass uses it."""
    if _UNUSED.match(theirs):
        return None
    for pattern, ours in _RULES:
        if re.match(pattern, theirs):
            return re.sub(f"^{pattern}", ours, theirs)
    return theirs


def rename_vae_weight(theirs: str) -> str | None:
    """Return our name for a parameter of the public autoencoder; None if it belongs to the loss."""
    return None if theirs.startswith(("loss.", "loss_pinn")) else theirs
