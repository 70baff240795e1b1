"""Tiny VAEs, text encoders, pictures and configs of the diffusion family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from halfstep_train.config.load import Loaded
from halfstep_train.workloads import load
from halfstep_train.workloads.diffusion.demo import COLOURS, SHAPES, write_demo
from halfstep_train.workloads.diffusion.diffusers_nets import build_net, make_vae_config

TINY: dict[str, Any] = {
    "device": "cpu",
    "precision.default": "fp32",
    "log.quiet": True,
    "data.num_workers": 0,
    "data.image_size": 8,
    "data.val_fraction": 0.25,
    "train.batch_size": 6,
    "train.epochs": 2,
    "schedule.warmup_steps": 0,
    "optimizer.lr": 2e-3,
    "model.channels": [8, 16],
    "model.layers": 1,
}
DIFFUSION: dict[str, Any] = {
    "noise.steps": 20,
    "noise.beta_end": 0.5,
    "sample.num": 4,
    "sample.steps": 4,
    "model.attention": [1],
}


def pictures(folder: Path, num: int = 24, side: int = 12) -> Path:
    write_demo(folder, num_images=num, side=side)
    return folder


def settings(workload: str, data: Path | str, **changed: Any) -> Loaded:
    """`model__target="v"` is `model.target=v`."""
    values = TINY | (DIFFUSION if workload == "diffusion" else {}) | {"data.dir": str(data)}
    values |= {name.replace("__", "."): value for name, value in changed.items()}
    return load(workload, overrides=[f"{name}={json.dumps(value)}" for name, value in values.items()])


def vae_folder(folder: Path, *, seed: int = 0, scale: float = 1.0) -> Path:
    """A random VAE that halves once, to two channels; `scale` makes its activations large."""
    torch.manual_seed(seed)
    vae = build_net(make_vae_config(channels=(8, 8), layers=1, latent_channels=2, image_size=8))
    with torch.no_grad():
        vae.encoder.conv_in.weight.mul_(scale)
    vae.save_pretrained(folder)
    return folder


def text_folder(folder: Path) -> Path:
    """A random CLIP text model that reads words of the demo's captions letter by letter."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = sorted({letter for word in ("a", *COLOURS, *SHAPES) for letter in word})
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    return folder
