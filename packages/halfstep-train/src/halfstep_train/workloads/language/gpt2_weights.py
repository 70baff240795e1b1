"""Load GPT-2 weights of Hugging Face (whose linear layers are transposed) and nanoGPT; save them for Hugging Face.

Both tie the output layer to the token embedding, as we do. Rows past the vocabulary are padding: they are set to zero
when loading and left out when saving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.disk import parse_json
from halfstep.errors import ModelError
from halfstep.tensor_files import LazyTensors, Recipe, convert, describe, write_tensors
from halfstep_train.models.weights import load_weights_, read_weights
from halfstep_train.workloads.language.gpt2 import GPT2, GPT2Size, pad_vocab

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")
"""Causal masks that older files store as buffers."""
EMBEDDING, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Index files, if the weights are split into several files."""
FUNCTION: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
"""Settings of transformers that change what the model computes, with the values that match ours."""


def load_gpt2_(model: GPT2, path: Path, *, has_its_tokenizer: bool = False) -> None:
    """Load a file or folder of Hugging Face or nanoGPT into a new model.

    If the model uses the tokenizer of the weights, all rows past its tokens are padding. Otherwise more rows than
    padding mean that the weights are for another tokenizer.
    """
    read, description = _read_any(path)
    weights = {_rename(name): tensor for name, tensor in read.items() if not name.endswith(MASKS)}
    if EMBEDDING not in weights and "lm_head.weight" in weights:
        weights[EMBEDDING] = weights["lm_head.weight"]  # safetensors keeps one of two names of a shared tensor
    head = weights.pop("lm_head.weight", None)
    if lacking := [name for name in (EMBEDDING, POSITIONS, _find_first_projection(weights)) if name not in weights]:
        raise ModelError(
            f"{path} contains no GPT-2 weights",
            why=f"it lacks {lacking[0]}; it has {', '.join(list(weights)[:3])}",
            fix="use weights of Hugging Face's GPT2LMHeadModel or of nanoGPT",
        )
    if head is not None and not torch.equal(head, weights[EMBEDDING]):
        raise ModelError(
            f"{path} has a separate output layer, lm_head.weight",
            why="GPT-2 ties its output layer to the token embedding",
            fix="use weights with a tied embedding",
        )
    _refuse_different_network(model, description, path, len(weights[POSITIONS]))
    weights = _to_linear_layers(weights)
    # Rows past the tokenizer's tokens pad the matrix, and no text ever uses them.
    embedding = weights[EMBEDDING][: model.size.vocab] if has_its_tokenizer else weights[EMBEDDING]
    weights[EMBEDDING] = _pad_embedding(embedding, model.size.vocab, path)
    weights[POSITIONS] = _cut_positions(weights[POSITIONS], model.size.context, path)
    load_weights_(model, weights, source=str(path))


def save_gpt2(weights: Mapping[str, Tensor], size: GPT2Size, folder: Path, *, ends_at: int | None = None) -> None:
    """Write `config.json` and `model.safetensors` for transformers' `GPT2LMHeadModel.from_pretrained(folder)`."""
    write_tensors(folder / "model.safetensors", to_transformers(weights, size), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_make_config(size, ends_at), indent=2) + "\n")


def to_transformers(weights: Mapping[str, Tensor], size: GPT2Size) -> LazyTensors:
    """Return the weights in Hugging Face's form: fp32, transposed, without padding, with zeros for missing biases."""

    def convert_one(name: str, source: Mapping[str, Tensor]) -> Tensor:
        exact = source[name].float()
        if name == EMBEDDING:
            exact = exact[: size.vocab]
        # transformers stores these layers as Conv1D: (in, out) instead of (out, in).
        return exact.t().contiguous() if name.endswith(TRANSPOSED) else exact

    recipes: dict[str, Recipe] = {name: partial(convert_one, name) for name in weights}
    for name, tensor in describe(weights).items():
        if name.endswith(".weight") and name not in (EMBEDDING, POSITIONS):
            # transformers' GPT-2 always has biases; zeros leave the function unchanged.
            recipes.setdefault(f"{name.removesuffix('weight')}bias", partial(_make_zeros, len(tensor)))
    return convert(weights, recipes)


def _make_zeros(length: int, source: Mapping[str, Tensor]) -> Tensor:
    return torch.zeros(length)


def _make_config(size: GPT2Size, ends_at: int | None) -> dict[str, Any]:
    """Return the config.json of transformers for a model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_layer": size.depth,
        "n_head": size.heads,
        "n_embd": size.dim,
        "n_positions": size.context,
        "vocab_size": size.vocab,
        "tie_word_embeddings": True,
        "bos_token_id": ends_at,  # null if there is none: without the key, transformers would use 50256
        "eos_token_id": ends_at,
    }


def _read_any(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and the description of the model: config.json, or `model_args` of a nanoGPT checkpoint."""
    if path.name in INDEXES:
        return _read_shards(path), _read_config(path.parent)
    if not path.is_dir():
        weights, other_entries = read_weights(path)
        args = other_entries.get("model_args")
        return weights, dict(args) if isinstance(args, Mapping) else _read_config(path.parent)
    # safetensors first: they cannot run code. An index lists the shards of a file that is split.
    for name in (INDEXES[0], "model.safetensors", INDEXES[1], "pytorch_model.bin", "ckpt.pt"):
        if (path / name).is_file():
            return _read_any(path / name)
    raise ModelError(
        f"no weights in {path}",
        why="there is no model.safetensors, pytorch_model.bin or ckpt.pt",
        fix="give a folder that save_pretrained() wrote, or a file of weights",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder, or an empty dict if there is none of GPT-2."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {file}",
            why=f"{error}; it contains the number of heads, which the shapes of the weights do not show",
            fix="download it again",
        ) from error
    return found if isinstance(found, dict) and found.get("model_type", "gpt2") == "gpt2" else {}


def _refuse_different_network(model: GPT2, description: Mapping[str, Any], path: Path, context: int) -> None:
    """Refuse weights that differ in ways that shapes do not show, such as the number of heads or the activation."""
    size, has_bias = model.size, model.transformer.ln_f.bias is not None
    own = {
        "n_layer": ("model.depth", size.depth),
        "n_head": ("model.heads", size.heads),
        "n_embd": ("model.dim", size.dim),
        "bias": ("model.bias", has_bias),
    }
    theirs = {key: (*mine, description[key]) for key, mine in own.items() if key in description}
    if other := [(setting, mine, value) for setting, mine, value in theirs.values() if value != mine]:
        settings = {setting: value for setting, _, value in theirs.values()}
        if context < size.context:
            settings["model.context"] = context
        raise ModelError(
            f"{path} has a different size: "
            + ", ".join(f"{setting} {value}, here {mine}" for setting, mine, value in other),
            why="its config.json has these values",
            fix=" ".join(f"{setting}={str(value).lower()}" for setting, value in settings.items()),
        )
    for key, ours in {**FUNCTION, "n_inner": (4 * size.dim, None)}.items():
        if description.get(key, ours[0]) not in ours:
            raise ModelError(
                f"{path} has {key}={description[key]!r}",
                why=f"halfstep's GPT-2 uses {ours[0]}, so these weights would give different results",
                fix="use weights of the published GPT-2, or a custom workload",
            )


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Read weights that are split into several files."""
    try:
        names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"cannot read {index}", why=str(error), fix="download it again") from error
    return {name: tensor for file in names for name, tensor in read_weights(index.parent / file)[0].items()}


def _rename(name: str) -> str:
    """Add the prefix `transformer.`, which files of GPT2Model and the released files lack."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _find_first_projection(weights: Mapping[str, Tensor]) -> str:
    return next((name for name in weights if name.endswith("attn.c_attn.weight")), "attn.c_attn.weight")


def _to_linear_layers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transpose linear layers if they are Hugging Face's. One layer that is not square decides for all."""
    rows, columns = weights[_find_first_projection(weights)].shape
    if rows > columns:
        return dict(weights)
    return {name: tensor.t() if name.endswith(TRANSPOSED) else tensor for name, tensor in weights.items()}


def _pad_embedding(embedding: Tensor, vocab: int, path: Path) -> Tensor:
    """Return the embedding padded to a multiple of 64 rows; refuse that of another tokenizer."""
    rows = len(embedding)
    if not vocab <= rows <= pad_vocab(vocab):
        raise ModelError(
            f"{path} has {rows:,} tokens, but this tokenizer has {vocab:,}",
            why="a token id selects a row of the embedding: with another tokenizer the rows do not match",
            fix="set data.tokenizer to the tokenizer.json of these weights",
        )
    filled = embedding.new_zeros(pad_vocab(vocab), embedding.shape[1])
    filled[:vocab] = embedding[:vocab]
    return filled


def _cut_positions(positions: Tensor, context: int, path: Path) -> Tensor:
    """Return the position embeddings of the context; refuse weights with fewer positions."""
    if len(positions) < context:
        raise ModelError(
            f"model.context={context} exceeds the context of {path}, {len(positions)} tokens",
            why="these weights have position embeddings for that many tokens only",
            fix=f"model.context={len(positions)} or less",
        )
    return positions[:context]
