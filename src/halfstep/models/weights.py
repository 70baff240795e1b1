"""Weights from a file into a model: safetensors (ours) and `.pth` state dicts (other projects'), or a clear error."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import ModelError

BATCH_COUNTER = "num_batches_tracked"
"""BatchNorm's. Of all that can differ it says the least about which model the weights are of."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint by name, and whatever else stood beside them (such as `mask_values`)."""
    if not path.is_file():
        raise ModelError(f"no weights at {path}", fix="give the path of a .safetensors or .pth file")
    try:
        content: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ModelError(
            f"cannot read the weights in {path}",
            why=str(error).splitlines()[0],
            fix="a safetensors file, or a .pth that holds only tensors and plain values",
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a state dict", fix="save model.state_dict()")
    content = next((content[key] for key in ("state_dict", "model") if isinstance(content.get(key), dict)), content)
    tensors = {_plain(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in content.items() if not isinstance(value, Tensor)}


def load_weights_(model: nn.Module, weights: dict[str, Tensor], *, source: str) -> None:
    """Copy `weights` into `model`; anything missing, unknown or of another shape is one error naming it."""
    own = model.state_dict()
    named = {_plain(name): name for name in own}
    differences = [f"{name} is missing" for name in named if name not in weights]
    differences += [f"{name} is not in this model" for name in weights if name not in named]
    differences += [
        f"{name} is {_shape(weights[name])} there, {_shape(own[own_name])} here"
        for name, own_name in named.items()
        if name in weights and weights[name].shape != own[own_name].shape
    ]
    differences.sort(key=lambda difference: BATCH_COUNTER in difference)
    if differences:
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise ModelError(
            f"the weights of {source} do not fit the model",
            why="; ".join(differences[:4]) + more,
            fix="set the model section to what those weights were trained with (architecture, sizes, classes)",
        )
    model.load_state_dict({own_name: weights[name] for name, own_name in named.items()})


def _plain(name: str) -> str:
    # torch.compile puts `_orig_mod.` before the names of each part it wrapped, DataParallel `module.` before all.
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"
