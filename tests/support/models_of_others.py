"""Small models as other people write them, none of which knows of recomputing; each with a batch that it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep_train.workloads.base.workload import Workload
from tiny_workload import build as build_tiny

DIM = 16


class Block(nn.Module):
    """Attention with dropout of its own and a mask by keyword; returns a tuple."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = F.dropout((q @ k.transpose(-2, -1) * DIM**-0.5 + mask).softmax(-1), self.dropout, self.training)
        x = x + self.out(weights @ v)
        return x + self.mlp(x), {"weights": weights}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(DIM, 3)

    def run_layer(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Any:
        return layer(x, mask=mask)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(2).transpose(1, 2).repeat(1, 1, DIM // 2)
        mask = torch.zeros(64, 64, device=image.device).triu(1)
        entropy = image.new_zeros(())
        for layer in self.layers:
            x, more = self.run_layer(layer, x, mask)
            entropy = entropy + more["weights"].square().mean()
        return self.head(x.mean(1)) + entropy


class BasicBlock(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(channels, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Stages of blocks, as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8), BasicBlock(8))
        self.layer2 = nn.Sequential(BasicBlock(8, 2), BasicBlock(8))
        self.fc = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(image))).mean((2, 3)))


def double_conv(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True))


class Down(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv = double_conv(channels_in, channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        return F.max_pool2d(x, 2), x


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(channels, channels, 2, 2), double_conv(2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([self.up(x), skip], 1))


class SkipNet(nn.Module):
    """A U-Net whose blocks are attributes and give tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = Down(2, 8), Down(8, 8)
        self.up1, self.up2, self.head = Up(8), Up(8), nn.Conv2d(8, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, one = self.down1(image)
        x, two = self.down2(x)
        return self.head(self.up2(self.up1(x, two), one)).mean((2, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(DIM, DIM, batch_first=True), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.lstm(x, state)
        return x + self.norm(out), state


class RecurrentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"first": Recurrent(), "second": Recurrent()})
        self.head = nn.Linear(DIM, 3)

    def forward(self, image: Tensor) -> Tensor:
        x, state = image.flatten(2).transpose(1, 2)[:, :8].repeat(1, 1, DIM // 2), None
        for stage in self.stages.values():
            x, state = stage(x, state)
        return self.head(x[:, -1])


class SharedNet(nn.Module):
    """One block, four times."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        self.blocks, self.head = nn.Sequential(block, block, block, block), nn.Linear(128, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(image.flatten(1)))


class Writing(nn.Module):
    """`how` it keeps state of its own that a second forward would change."""

    def __init__(self, how: str = "buffer") -> None:
        super().__init__()
        self.fc, self.out, self.how, self.count, self.seen = nn.Linear(128, 128), nn.Linear(128, 128), how, 0, []  # type: ignore[var-annotated]
        self.register_buffer("mean", torch.zeros(128))
        if how == "spectral":
            nn.utils.parametrizations.spectral_norm(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "buffer":
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            x = x - self.mean
        elif self.how == "count":
            self.count += 1
        elif self.how == "list":
            self.seen.append(0)
        elif self.how == "input":
            x += 1
        elif self.how == "python":
            import random

            x = x * random.uniform(0.5, 1.5)
        elif self.how == "weight":
            self.out.weight.data.mul_(0.99)
        return x + self.out(torch.tanh(self.fc(x)))


class WritingNet(nn.Module):
    """Two blocks that must not run twice, and two that may."""

    def __init__(self, how: str = "buffer") -> None:
        super().__init__()
        self.first = nn.ModuleList(Writing(how) for _ in range(2))
        self.second = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(128, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(1)
        for block in self.first:
            x = block(x * 1.0)
        return self.head(self.second(x))


class CheckpointedNet(Transformer):
    """Recomputes by itself."""

    def run_layer(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Any:
        return checkpoint(layer, x, mask=mask, use_reentrant=False)


class UncalledNet(nn.Module):
    """Its blocks are taken apart: their own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BasicBlock(8) for _ in range(2))
        self.stem, self.fc = nn.Conv2d(2, 8, 1), nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer in self.layers:
            x = x + layer.downsample(x)
        return self.fc(x.mean((2, 3)))


class GPT2Net(nn.Module):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 32}
        self.lm = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))

    def forward(self, image: Tensor) -> Tensor:
        tokens = image.flatten(1)[:, :32].abs().mul(8).long() % 32
        return self.lm(input_ids=tokens).logits.mean(1)[:, :3]


class ViTNet(nn.Module):
    def __init__(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        shape = {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}
        self.vit = ViTForImageClassification(ViTConfig(attention_probs_dropout_prob=0.1, **sizes, **shape))

    def forward(self, image: Tensor) -> Tensor:
        return self.vit(pixel_values=image).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "resnet": ResNet,
    "skips": SkipNet,
    "recurrent": RecurrentNet,
    "shared": SharedNet,
    "gpt2": GPT2Net,
    "vit": ViTNet,
}
NETS = {**MODELS, "writing": WritingNet, "checkpointed": CheckpointedNet, "uncalled": UncalledNet}
BLOCKS = {
    "transformer": ["layers.0", "layers.1", "layers.2"],
    "resnet": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    "skips": ["down1", "down2", "up1", "up2"],
    "recurrent": ["stages.first", "stages.second"],
    "shared": ["blocks.0"],
    "gpt2": ["lm.transformer.h.0", "lm.transformer.h.1"],
    "vit": ["vit.vit.layers.0", "vit.vit.layers.1"],
}


def images(count: int = 4) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(count, 2, 8, 8)


def build(config: Any, store: Any = None) -> Workload:
    """The tiny workload with the model that `model.options.net` names."""
    options = dict(config.model.options)
    made = NETS[options.pop("net", "transformer")](**options)
    return dataclasses.replace(build_tiny(config.replace(model={"options": {}}), store), model=made)
