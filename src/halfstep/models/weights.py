"""Weights from a file into a model: safetensors (ours) and `.pth` state dicts (other projects'), or a clear error."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import ModelError, explain_refused_pickle
from halfstep.models.foreign_names import in_names_of, plain

BATCH_COUNTER = "num_batches_tracked"
"""BatchNorm's. Of all that can differ it says the least about which model the weights are of."""
NESTS = (
    "state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params",
    "ema_state_dict", "state_dict_ema", "model_ema", "ema", "shadow",
)  # fmt: skip
"""Keys below which training scripts keep weights; as trained before averaged."""
SHOWN = 4
TORCH_PROTOCOL = 2  # of the pickles that torch.save writes; pickle.dump's is newer
NOT_WEIGHTS = {
    b"version https://git-lfs": ("it is a pointer of Git LFS, not the file itself", "git lfs pull"),
    b"<!DOCTYPE": ("it is a web page", "download the file behind it"),
    b"<html": ("it is a web page", "download the file behind it"),
}
"""How files begin that are not what their names say: why, and what helps."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint by name, and whatever else stood beside them (such as `model_args`)."""
    if not path.is_file():
        inside = sorted(
            file.name for ending in ("safetensors", "pth", "pt", "bin") for file in path.glob(f"*.{ending}")
        )
        fix = f"name a file in it: {', '.join(inside[:SHOWN])}" if inside else "give a .safetensors or .pth file"
        raise ModelError(f"no weights at {path}" + (": it is a folder" if path.is_dir() else ""), fix=fix)
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _load_tensors(path)
    except Exception as error:  # a foreign file can break a reader in any way
        raise _unreadable(path, error) from error
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a state dict", fix="save model.state_dict()")
    beside: dict[str, Any] = {}
    while nest := next((key for key in NESTS if isinstance(content.get(key), Mapping) and content[key]), None):
        beside |= {name: value for name, value in content.items() if name != nest}
        content = content[nest]
    tensors = {plain(str(name)): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(
            f"{path} holds no weights",
            why=f"its keys are {_few(map(str, content))}" if content else "it is empty",
            fix="save model.state_dict(), alone or below the key state_dict",
        )
    return tensors, beside | {name: value for name, value in content.items() if not isinstance(value, Tensor)}


def _load_tensors(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about a plain pickle: the error to come says it
        return torch.load(path, map_location="cpu", weights_only=True)


def load_weights_(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Copy `weights` into `model`; anything missing, unknown, of another shape or not finite is one error naming it."""
    own = model.state_dict()
    named = {plain(name): name for name in own}
    # Files from before torch 0.4.1 have no counters; torch loads them without, too.
    weights = {name: own[own_name] for name, own_name in named.items() if BATCH_COUNTER in name} | in_names_of(
        named, weights
    )
    if differences := _differences({name: own[own_name] for name, own_name in named.items()}, weights):
        raise ModelError(
            f"the weights of {source} do not fit the model",
            why="; ".join(differences),
            fix="set the model section to what those weights were trained with (architecture, sizes, classes)",
        )
    broken = [name for name in named if not bool(weights[name].isfinite().all())]
    if broken:
        raise ModelError(
            f"the weights of {source} are not finite: {_few(broken)}",
            why="NaN or infinity in a weight makes every loss NaN; the run that wrote them had diverged",
            fix="an earlier checkpoint of that run",
        )
    model.load_state_dict({own_name: weights[name] for name, own_name in named.items()})


Weights = dict[str, Tensor]


def load_file_(model: nn.Module, path: str, named: Callable[[Weights], Weights] = dict) -> None:
    """Copy a file's weights into `model`, under the names that `named` gives them."""
    load_weights_(model, named(read_weights(Path(path))[0]), source=path)


def _differences(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """What each side has that the other has not, and tensors of other shapes."""
    missing, unknown = ([name for name in one if name not in other] for one, other in ((own, weights), (weights, own)))
    shapes = [
        f"{name} is {_shape(weights[name])} there, {_shape(own[name])} here"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    found = [f"the file lacks {_few(missing)}"] if missing else []
    found += [f"the model has no {_few(unknown)}"] if unknown else []
    return found + shapes[:SHOWN] + ([f"and {len(shapes) - SHOWN} more shapes"] if len(shapes) > SHOWN else [])


def _unreadable(path: Path, error: Exception) -> ModelError:
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    for beginning, (why, fix) in NOT_WEIGHTS.items():
        if start.startswith(beginning):
            return ModelError(f"cannot read the weights in {path}", why=why, fix=fix)
    text = str(error)
    if why := explain_refused_pickle(error):
        return ModelError(
            f"cannot read the weights in {path}",
            why=why,
            fix="load it in Python where you trust it and save only the weights: torch.save(model.state_dict(), FILE), "
            "or safetensors.torch.save_file(model.state_dict(), FILE)",
        )
    if start[:1] == pickle.PROTO and start[1:2] > bytes([TORCH_PROTOCOL]):
        return ModelError(
            f"cannot read the weights in {path}",
            why=f"it is a plain pickle (protocol {start[1]}), not a file of torch.save",
            fix="where it was saved: torch.save(model.state_dict(), FILE)",
        )
    # torch's own words go on for screens and advise to switch safety off; its unpickler's mean nothing to anybody.
    writer = "safetensors" if path.suffix == ".safetensors" else "torch.save"
    why = f"it is not a file of {writer}, or it is damaged or incomplete"
    why = "it is a TorchScript program, not a state dict" if "TorchScript" in text else why
    return ModelError(
        f"cannot read the weights in {path}",
        why=f"{error.strerror}" if isinstance(error, OSError) and error.strerror else why,
        fix="download or copy it again: a safetensors file, or a .pth that holds only tensors and plain values",
    )


def _few(names: Iterable[str]) -> str:
    listed = sorted(names, key=lambda name: BATCH_COUNTER in name)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"
