"""The classifiers by name, and weights of other projects into them: head, layer names and image size may differ."""

from __future__ import annotations

import math

from torch import Tensor

from halfstep.errors import ModelError, format_count
from halfstep.models.foreign_names import in_names_of
from halfstep.models.vit import ViT, resized_positions
from halfstep.models.weights import load_weights_
from halfstep.workloads.classification.resnet import ResNet

Classifier = ResNet | ViT


def load_classifier_(model: Classifier, weights: dict[str, Tensor], *, source: str, replace_head: bool) -> None:
    """Copy weights into the model, all but the head with `replace_head`; what does not fit is an error naming it."""
    weights = in_names_of(model.state_dict(), weights)
    if isinstance(model, ViT) and "encoder.pos_embedding" in weights:
        weights["encoder.pos_embedding"] = _positions_for(model, weights["encoder.pos_embedding"])
    head = {name: value for name, value in model.state_dict().items() if name.startswith(f"{model.head_name}.")}
    if replace_head:
        weights |= head
    own, theirs = head[f"{model.head_name}.weight"], weights.get(f"{model.head_name}.weight")
    if theirs is not None and len(theirs) != len(own):
        raise ModelError(
            f"the weights of {source} are for {format_count(len(theirs), 'class', 'classes')}, "
            f"the data have {len(own)}",
            fix="model.replace_head=true starts a new head on the loaded body",
        )
    load_weights_(model, weights, source=source)


def _positions_for(model: ViT, positions: Tensor) -> Tensor:
    """Position embeddings on the model's grid; other than square grids fail the comparison of shapes."""
    num_patches = positions.shape[1] - 1
    is_square = positions.ndim == 3 and math.isqrt(max(num_patches, 0)) ** 2 == num_patches > 0
    return resized_positions(positions, model.grid, model.grid) if is_square else positions
