"""Translate names of RadioDiff's public checkpoints (UNIC-Lab/RadioDiff) to ours.

The autoencoder has the same names. Weights that no forward pass uses (`init_conv_carK`, the Swin's last norm and head)
and those of its loss are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

_LEVEL = {"0": "block1", "1": "block2"}
_ATTENTION = (("fn.norm.", "norm."), ("fn.fn.", ""))


def _rename_level(match: re.Match[str], prefix: str) -> str:
    place, part, rest = match.groups()
    if part in _LEVEL:
        return f"{prefix}{place}.{_LEVEL[part]}.{rest}"
    if part == "3":
        # The last level up has a convolution alone where the others have it second.
        is_alone = prefix.startswith("decoders") and not rest.startswith("1.")
        return f"{prefix}{place}.end.{'1.' if is_alone else ''}{rest}"
    return f"{prefix}{place}.attention.{_rename_attention(rest)}"


def _rename_attention(rest: str) -> str:
    for theirs, ours in _ATTENTION:
        if rest.startswith(theirs):
            return ours + rest.removeprefix(theirs)
    return rest


def _rename_relation(match: re.Match[str], prefix: str) -> str:
    place, rest = match.groups()
    return f"{prefix}{place}.relation.{rest.replace('attentions.0.', 'attention.')}"


def _rename_swin(match: re.Match[str]) -> str:
    return f"condition.features.{int(match[1]) + 1}."


_RULES = (
    (r"init_conv_mask\.first_coonv\.", "condition.features.0."),
    (r"init_conv_mask\.features\.(\d+)\.", _rename_swin),
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


def rename_weights(name_of: Callable[[str], str | None], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {ours: value for name, value in weights.items() if (ours := name_of(name)) is not None}


def rename_unet_weight(theirs: str) -> str | None:
    """Return our name of a parameter of the public U-Net; None if nothing uses it."""
    if _UNUSED.match(theirs):
        return None
    for pattern, ours in _RULES:
        if re.match(pattern, theirs):
            return re.sub(f"^{pattern}", ours, theirs)
    return theirs


def rename_vae_weight(theirs: str) -> str | None:
    """Return our name of a parameter of the public autoencoder; None if it belongs to the loss."""
    return None if theirs.startswith(("loss.", "loss_pinn")) else theirs
