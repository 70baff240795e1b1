"""Translate parameter names of RadioDiff's public checkpoints (UNIC-Lab/RadioDiff) to ours.

The autoencoder's names are the same. Weights that no forward pass uses (`init_conv_carK`, the last norm and the head of
the Swin transformer) and weights of the autoencoder's loss are dropped.
"""

from __future__ import annotations

import re

from halfstep_train.models.weights import NameTable, Weights, rename

UNUSED = re.compile(r"init_conv_carK\.|init_conv_mask\.(norm|head)\.")
UNUSED_IN_VAE = re.compile(r"loss\.|loss_pinn")


def _make_level_rules(blocks: str, relations: str, ours: str) -> NameTable:
    """Return the rules for the levels of the encoder or of a decoder.

    In the public level, modules 0 and 1 are the blocks, 2 the attention, 3 the convolution.
    """
    level = rf"{blocks}\.(\d+)"
    return (
        (rf"{level}\.0\.", rf"{ours}.\1.block1."),
        (rf"{level}\.1\.", rf"{ours}.\1.block2."),
        (rf"{level}\.2\.fn\.norm\.", rf"{ours}.\1.attention.norm."),
        (rf"{level}\.2\.(?:fn\.fn\.)?", rf"{ours}.\1.attention."),
        (rf"{level}\.3\.", rf"{ours}.\1.end."),
        (rf"{relations}\.(\d+)\.attentions\.0\.", rf"{ours}.\1.relation.attention."),
        (rf"{relations}\.(\d+)\.", rf"{ours}.\1.relation."),
    )


RULES: NameTable = (
    (r"init_conv_mask\.first_coonv\.", "condition.features.0."),
    # The public Swin keeps the patch embedding apart from `features`; ours is features.0, as in torchvision.
    (r"init_conv_mask\.features\.(\d+)\.", lambda m: f"condition.features.{int(m[1]) + 1}."),
    (r"init_conv\.", "stem."),
    (r"projects\.", "projections."),
    (r"time_mlp\.0\.W$", "time.W"),
    (r"time_mlp\.1\.", "time.mlp.0."),
    (r"time_mlp\.3\.", "time.mlp.2."),
    # In the public decoders the last level has no upsampling, so its convolution has no index; ours is always second.
    (r"ups\.(\d+)\.3\.(weight|bias)", r"decoders.0.levels.\1.end.1.\2"),
    (r"ups2\.(\d+)\.3\.(weight|bias)", r"decoders.1.levels.\1.end.1.\2"),
    *_make_level_rules("downs", "relation_layers_down", "levels"),
    *_make_level_rules("ups", "relation_layers_up", "decoders.0.levels"),
    *_make_level_rules("ups2", "relation_layers_up2", "decoders.1.levels"),
    (r"mid_attn\.fn\.norm\.", "mid_attention.norm."),
    (r"mid_attn\.(?:fn\.fn\.)?", "mid_attention."),
    (r"decouple([12])\.", lambda m: f"decoders.{int(m[1]) - 1}.filter."),
    (r"final_res_block\.", "decoders.0.final_block."),
    (r"final_res_block2\.", "decoders.1.final_block."),
    (r"final_conv\.", "decoders.0.final_conv."),
    (r"final_conv2\.", "decoders.1.final_conv."),
)


def rename_unet_weights(weights: Weights) -> Weights:
    """Return the weights of the public U-Net by our names."""
    return {rename(name, RULES): value for name, value in weights.items() if not UNUSED.match(name)}


def drop_loss_weights(weights: Weights) -> Weights:
    """Return the weights of the public autoencoder without those of its loss."""
    return {name: value for name, value in weights.items() if not UNUSED_IN_VAE.match(name)}
