"""Load weights from a file into a model: safetensors, `.pth` state dicts, and the names of other projects.

Other projects name the same weights differently: wrappers add prefixes, and the tables below rename layers of ViT and
ResNet. A table holds (regular expression for the start of a name, our name); the rest of the name stays. All variants
of a file's names are tried, and the one that matches most names of the model is used; so a model with a module called
`backbone` or `model` still loads its own files. ResNet names of timm and DeiT are torchvision's, which are ours.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import ModelError, explain_refused_pickle

BATCH_COUNTER = "num_batches_tracked"
"""BatchNorm's counter. In messages it comes last, as it says the least about a difference."""
NESTS = (
    "state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params",
    "ema_state_dict", "state_dict_ema", "model_ema", "ema", "shadow",
)  # fmt: skip
"""Keys under which training scripts store weights; trained ones before averaged ones."""
SHOWN = 4
"""Names in a message."""
NOT_WEIGHTS = {
    b"version https://git-lfs": ("it is a pointer of Git LFS, not the file itself", "git lfs pull"),
    b"<!DOCTYPE": ("it is a web page", "download the file behind it"),
    b"<html": ("it is a web page", "download the file behind it"),
}
"""First bytes of files that are not weights, with reason and fix."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint by name, and its other entries (such as `model_args`)."""
    if not path.is_file():
        inside = sorted(
            file.name for ending in ("safetensors", "pth", "pt", "bin") for file in path.glob(f"*.{ending}")
        )
        fix = f"give a file in it: {', '.join(inside[:SHOWN])}" if inside else "give a .safetensors or .pth file"
        raise ModelError(f"no weights at {path}" + (": it is a folder" if path.is_dir() else ""), fix=fix)
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _load_tensors(path)
    except Exception as error:  # readers may raise anything for a broken file
        raise _explain_unreadable(path, error) from error
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} contains a {type(content).__name__}, not a state dict", fix="save model.state_dict()")
    others: dict[str, Any] = {}
    # Weights may be nested several levels deep, as in {"model": {"state_dict": …}}.
    while nest := next((key for key in NESTS if isinstance(content.get(key), Mapping) and content[key]), None):
        others |= {name: value for name, value in content.items() if name != nest}
        content = content[nest]
    tensors = {strip_torch_prefixes(str(name)): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(
            f"{path} contains no weights",
            why=f"its keys are {_name_few(map(str, content))}" if content else "it is empty",
            fix="save model.state_dict(), alone or below the key state_dict",
        )
    return tensors, others | {name: value for name, value in content.items() if not isinstance(value, Tensor)}


def _load_tensors(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about plain pickles; the error below explains it
        return torch.load(path, map_location="cpu", weights_only=True)


def load_weights_(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Load weights; raise one ModelError for all that are missing, unknown, of another shape or not finite."""
    own = model.state_dict()
    # The model may be wrapped by torch.compile or DDP, so compare names without their prefixes.
    named = {strip_torch_prefixes(name): name for name in own}
    plain = {name: own[own_name] for name, own_name in named.items()}
    # Files from before torch 0.4.1 have no counters; torch accepts that too.
    counters = {name: tensor for name, tensor in plain.items() if BATCH_COUNTER in name}
    weights = counters | match_names(plain, weights)
    if differences := _list_differences(plain, weights):
        raise ModelError(
            f"the weights of {source} do not fit the model",
            why="; ".join(differences),
            fix="set the model section to what those weights were trained with (architecture, sizes, classes)",
        )
    broken = [name for name in named if not bool(weights[name].isfinite().all())]
    if broken:
        raise ModelError(
            f"the weights of {source} are not finite: {_name_few(broken)}",
            why="NaN or infinity in a weight makes every loss NaN; the run that wrote them had diverged",
            fix="use an earlier checkpoint of that run",
        )
    model.load_state_dict({own_name: weights[name] for name, own_name in named.items()})


Weights = dict[str, Tensor]


def load_weights_file_(model: nn.Module, path: str, rename: Callable[[Weights], Weights] = dict) -> None:
    """Load a weights file; `rename` converts its names to those of the model."""
    load_weights_(model, rename(read_weights(Path(path))[0]), source=path)


def _list_differences(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """List names that only one side has, and tensors of different shapes."""
    missing, unknown = ([name for name in one if name not in other] for one, other in ((own, weights), (weights, own)))
    shapes = [
        f"{name} is {_format_shape(weights[name])} in the file, but {_format_shape(own[name])} here"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    found = [f"the file lacks {_name_few(missing)}"] if missing else []
    found += [f"the model has no {_name_few(unknown)}"] if unknown else []
    return found + shapes[:SHOWN] + ([f"and {len(shapes) - SHOWN} more shapes"] if len(shapes) > SHOWN else [])


def _explain_unreadable(path: Path, error: Exception) -> ModelError:
    """Return an error that says why a file cannot be read."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    # Do not show torch's message: it is very long and advises disabling safety, and that of its unpickler is cryptic.
    writer = "safetensors" if path.suffix == ".safetensors" else "torch.save"
    why = f"it is not a file of {writer}, or it is damaged or incomplete"
    fix = "download or copy it again: a safetensors file, or a .pth that contains only tensors and plain values"
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    if refused := explain_refused_pickle(error):
        why = refused
        fix = (
            "load it in Python where you trust it and save only the weights: torch.save(model.state_dict(), FILE), "
            "or safetensors.torch.save_file(model.state_dict(), FILE)"
        )
    for beginning, known in NOT_WEIGHTS.items():
        if start.startswith(beginning):
            why, fix = known
    return ModelError(f"cannot read the weights in {path}", why=why, fix=fix)


def _name_few(names: Iterable[str]) -> str:
    listed = sorted(names, key=lambda name: BATCH_COUNTER in name)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _format_shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"


WRAPPERS = ("module.", "model.", "net.", "network.", "backbone.", "base_model.")
"""Prefixes of DataParallel and DDP, Lightning, and common names of a script's only module."""
COMPILED = "_orig_mod."
"""Part of the names of modules that torch.compile wrapped, at any level."""

NameTable = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
_LAYER = r"encoder.layers.encoder_layer_\1"
_THIRDS = {"q": "#0", "k": "#1", "v": "#2"}
"""Queries, keys and values, separate tensors in some files, are thirds of one tensor here, in this order."""

RELEASED_VIT: NameTable = (
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.linear_1\.", rf"{_LAYER}.mlp.0."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.linear_2\.", rf"{_LAYER}.mlp.3."),
)
"""torchvision renamed these layers after releasing its ViT weights."""

TIMM_VIT: NameTable = (
    (r"cls_token$", "class_token"),
    (r"pos_embed$", "encoder.pos_embedding"),
    (r"patch_embed\.proj\.", "conv_proj."),
    (r"blocks\.(\d+)\.norm([12])\.", rf"{_LAYER}.ln_\2."),
    (r"blocks\.(\d+)\.attn\.qkv\.", rf"{_LAYER}.self_attention.in_proj_"),
    (r"blocks\.(\d+)\.attn\.proj\.", rf"{_LAYER}.self_attention.out_proj."),
    (r"blocks\.(\d+)\.ls([12])\.", rf"{_LAYER}.ls_\2."),
    (r"blocks\.(\d+)\.mlp\.fc1\.", rf"{_LAYER}.mlp.0."),
    (r"blocks\.(\d+)\.mlp\.fc2\.", rf"{_LAYER}.mlp.3."),
    (r"norm\.", "encoder.ln."),
    (r"head\.", "heads.head."),
)
"""Names of timm, DeiT, DINO and MAE."""

_HF_LAYER = r"(?:(?:vit|dinov2)\.)?(?:encoder\.layer|layers)\.(\d+)"
HF_VIT: NameTable = (
    (r"(?:(?:vit|dinov2)\.)?embeddings\.cls_token$", "class_token"),
    (r"(?:(?:vit|dinov2)\.)?embeddings\.position_embeddings$", "encoder.pos_embedding"),
    (r"(?:(?:vit|dinov2)\.)?embeddings\.patch_embeddings\.projection\.", "conv_proj."),
    (rf"{_HF_LAYER}\.layernorm_before\.", rf"{_LAYER}.ln_1."),
    (rf"{_HF_LAYER}\.layernorm_after\.", rf"{_LAYER}.ln_2."),
    (
        rf"{_HF_LAYER}\.attention\.(?:attention\.)?(?:(q)uery|(k)ey|(v)alue|(q|k|v)_proj)\.(weight|bias)$",
        lambda m: m.expand(rf"{_LAYER}.self_attention.in_proj_\6") + _THIRDS[m[2] or m[3] or m[4] or m[5]],
    ),
    (rf"{_HF_LAYER}\.attention\.(?:output\.dense|o_proj)\.", rf"{_LAYER}.self_attention.out_proj."),
    (rf"{_HF_LAYER}\.(?:intermediate\.dense|mlp\.fc1)\.", rf"{_LAYER}.mlp.0."),
    (rf"{_HF_LAYER}\.(?:output\.dense|mlp\.fc2)\.", rf"{_LAYER}.mlp.3."),
    (r"(?:(?:vit|dinov2)\.)?layernorm\.", "encoder.ln."),
    (r"classifier\.", "heads.head."),
)
"""Names of transformers, in released files and in `state_dict()` since version 5."""

_DINOV2_LAYER = r"(?:dinov2\.)?encoder\.layer\.(\d+)"
HF_DINOV2: NameTable = (
    (rf"{_DINOV2_LAYER}\.norm([12])\.", rf"{_LAYER}.ln_\2."),
    (rf"{_DINOV2_LAYER}\.layer_scale([12])\.lambda1$", rf"{_LAYER}.ls_\2.gamma"),
    (rf"{_DINOV2_LAYER}\.attention\.output\.dense\.", rf"{_LAYER}.self_attention.out_proj."),
    *HF_VIT,
)
"""Names of transformers' DINOv2, whose norms and layer scale differ from those of its ViT."""

_HF_BLOCK = r"(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)"
HF_RESNET: NameTable = (
    (r"(?:resnet\.)?embedder\.embedder\.convolution\.", "conv1."),
    (r"(?:resnet\.)?embedder\.embedder\.normalization\.", "bn1."),
    (rf"{_HF_BLOCK}\.shortcut\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.0."),
    (rf"{_HF_BLOCK}\.shortcut\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.1."),
    (rf"{_HF_BLOCK}\.layer\.(\d+)\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.conv{int(m[3]) + 1}."),
    (rf"{_HF_BLOCK}\.layer\.(\d+)\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.bn{int(m[3]) + 1}."),
    (r"classifier\.1\.", "fc."),
)
NAME_TABLES: tuple[NameTable, ...] = ((), RELEASED_VIT, TIMM_VIT, HF_VIT, HF_DINOV2, HF_RESNET)

UNUSED = re.compile(r"(?:(?:vit|dinov2)\.)?pooler\.dense\.")
"""A layer of Hugging Face's ViT without head, which its classifier does not use either."""


def strip_torch_prefixes(name: str) -> str:
    """Remove the prefixes that torch.compile and DDP add."""
    return name.replace(COMPILED, "").removeprefix("module.")


def match_names(own: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the variant of their names that matches most of `own`."""
    wanted = set(own)
    given = {strip_torch_prefixes(name): tensor for name, tensor in weights.items()}
    inner = (given, _strip_wrappers(given), _strip_shared_prefix(given))
    forms = (_rename_by_table(names, table) for names in inner for table in NAME_TABLES)
    # Of equally good variants the first wins: the names as they are.
    return max(forms, key=lambda form: len(wanted & form.keys()))


def _strip_wrappers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of wrappers, unless a name would then appear twice."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        inner = name
        while prefix := next((prefix for prefix in WRAPPERS if inner.startswith(prefix)), ""):
            inner = inner.removeprefix(prefix)
        found[name if inner in found else inner] = tensor
    return found


def _strip_shared_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefix that all names share, for a file with a submodule of another model (`encoder.conv1.weight`)."""
    shared = ".".join([*os.path.commonprefix([name.split(".")[:-1] for name in weights]), ""])
    return {name.removeprefix(shared): tensor for name, tensor in weights.items()}


def _rename_by_table(weights: dict[str, Tensor], table: NameTable) -> dict[str, Tensor]:
    """Rename weights by a table, and concatenate queries, keys and values."""
    if not table:
        return weights
    found = {rename(name, table): tensor for name, tensor in weights.items() if not UNUSED.match(name)}
    for whole in [name.removesuffix("#0") for name in found if name.endswith("#0")]:
        # Concatenate only complete triples.
        if {f"{whole}#{third}" for third in range(3)} <= found.keys():
            found[whole] = torch.cat([found.pop(f"{whole}#{third}") for third in range(3)])
    return found


def rename(name: str, table: NameTable) -> str:
    """Rename a weight by the first row of a table that matches the start of its name."""
    for theirs, ours in table:
        if match := re.match(theirs, name):
            return (match.expand(ours) if isinstance(ours, str) else ours(match)) + name[match.end() :]
    return name
