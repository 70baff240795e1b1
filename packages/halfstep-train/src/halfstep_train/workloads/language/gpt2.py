"""GPT-2 (Radford et al. 2019) with the names of transformers' GPT2LMHeadModel; `gpt2` has 124,439,808 parameters.

Linear layers are nn.Linear, which precision, kernels and optimizers support; files of Hugging Face hold them transposed
(gpt2_weights.py). The output layer is the token embedding. Its rows are padded to a multiple of 64 for the matmul;
padded rows are zero, have no probability and get no gradient.

With targets, the model returns its loss, computed in chunks without storing logits (kernels/cross_entropy.py). In
captured steps its blocks run as a chain of our kernels between matmuls (kernels/transformer_chain.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, get_matmul_dtype
from halfstep.recompute import Blocks
from halfstep_train.kernels.cross_entropy import linear_cross_entropy
from halfstep_train.kernels.fast_forms import has_room_for_tiles
from halfstep_train.kernels.transformer_chain import Stream, run_blocks
from halfstep_train.kernels.transformer_chain import TransformerBlock as Layers
from halfstep_train.models.initial_values import draw_normal_, make_bare
from halfstep_train.models.layers import (
    Checks,
    accept_any,
    are_plain,
    check_heads,
    consists_of,
    has_bias,
    has_gain_and_bias,
)
from halfstep_train.models.vit import wants_chain

PAD_MULTIPLE = 64
"""Rows of the embedding are padded to a multiple of this, which makes its matmul faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Size:
    """Sizes of a GPT-2 model."""

    depth: int
    heads: int
    dim: int
    context: int = 1024
    vocab: int = 50257


GPT2S = {
    "gpt2": GPT2Size(depth=12, heads=12, dim=768),
    "gpt2_medium": GPT2Size(depth=24, heads=16, dim=1024),
    "gpt2_large": GPT2Size(depth=36, heads=20, dim=1280),
    "gpt2_xl": GPT2Size(depth=48, heads=25, dim=1600),
}


@dataclass(slots=True)
class KeyValueCache:
    """Keys and values of earlier tokens in one block: (N, heads, tokens, channels) each."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return those of all tokens."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class CausalAttention(nn.Module):
    """Attention of each token to itself and to earlier tokens."""

    def __init__(self, size: GPT2Size, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, dropout
        self.c_attn = make_bare(nn.Linear, size.dim, 3 * size.dim, bias=bias)
        self.c_proj = make_bare(nn.Linear, size.dim, size.dim, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.c_attn(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        # Each (N, heads, tokens, head dim).
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(k, v)
        # A single new token attends to everything, and without a past `is_causal` is enough. Several new tokens after a
        # past need a mask.
        mask, past = None, k.shape[2] - tokens
        if tokens > 1 and past:
            mask = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=x.device).tril(past)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=tokens > 1 and mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.resid_dropout(self.c_proj(attended.transpose(1, 2).reshape(batch, tokens, dim)))


class Perceptron(nn.Module):
    """Two linear layers with GELU (tanh approximation) in between."""

    def __init__(self, size: GPT2Size, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.c_fc = make_bare(nn.Linear, size.dim, 4 * size.dim, bias=bias)
        self.c_proj = make_bare(nn.Linear, 4 * size.dim, size.dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a norm before it and a shortcut around it."""

    def __init__(self, size: GPT2Size, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.dim, bias=bias)
        self.attn = CausalAttention(size, dropout=dropout, bias=bias)
        self.ln_2 = nn.LayerNorm(size.dim, bias=bias)
        self.mlp = Perceptron(size, dropout=dropout, bias=bias)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))

    def make_chain_block(self) -> Layers:
        """Return the layers of this block for `run_blocks`, which computes the same as `forward` without a cache."""
        return Layers(
            num_heads=self.attn.heads, norm_1=self.ln_1, in_weight=self.attn.c_attn.weight,
            in_bias=self.attn.c_attn.bias, out=self.attn.c_proj, norm_2=self.ln_2, first=self.mlp.c_fc,
            second=self.mlp.c_proj, is_causal=True, by_tanh=True,
        )  # fmt: skip


class Transformer(nn.Module):
    """Compute features (N, T, dim) of token ids (N, T)."""

    def __init__(self, size: GPT2Size, *, dropout: float, bias: bool, checkpointing: bool) -> None:
        super().__init__()
        self.wte = make_bare(nn.Embedding, pad_vocab(size.vocab), size.dim)
        self.wpe = make_bare(nn.Embedding, size.context, size.dim)
        self.drop = nn.Dropout(dropout)
        blocks = {str(number): Block(size, dropout=dropout, bias=bias) for number in range(size.depth)}
        self.h = Blocks(blocks, checkpointing=checkpointing)
        self.ln_f = nn.LayerNorm(size.dim, bias=bias)

    def forward(self, tokens: Tensor, caches: list[KeyValueCache] | None = None, start: int = 0) -> Tensor:
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        if caches is None:
            x = self._run_blocks(x)
        else:
            for block, cache in zip(self.h, caches, strict=True):
                x = block(x, cache)
        return self.ln_f(x)

    def _run_blocks(self, x: Tensor) -> Tensor:
        if not (self.training and wants_chain(self.h, x) and self._can_run_chain()):
            return self.h(x)
        # The chain returns the residual stream and its last branch, not yet added.
        x, branch, bias = self._run_chain(x)
        return x if branch is None or bias is None else x + (branch + bias)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _can_run_chain(self) -> bool:
        """True if all layers are as built and trained, so that the fused kernels compute the same."""
        blocks = list(self.h)
        trains = all(weight.requires_grad for block in blocks for weight in block.parameters())
        are_known = consists_of((self.h, *blocks), Blocks, *[Block] * len(blocks))
        parts = (self.h, *(part for block in blocks for part in block.modules()))
        return trains and are_known and are_plain(parts, CHAINED) and has_room_for_tiles(self.wte.weight.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_chain(self, x: Tensor) -> Stream:
        if not self._can_run_chain():  # compiled code checks only once; a layer may have been replaced since
            return Stream(nn.Sequential(*self.h)(x), None, None)
        layers = [block.make_chain_block() for block in self.h if isinstance(block, Block)]
        return run_blocks(layers, x, get_matmul_dtype(x), keep=False)  # backward recomputes LayerNorm and GELU


def is_whole(block: Block) -> bool:
    """True if the modules of a block have the classes it was built with."""
    attention = consists_of(block.attn.children(), nn.Linear, nn.Linear, nn.Dropout)
    perceptron = consists_of(block.mlp.children(), nn.Linear, nn.Linear, nn.Dropout)
    return attention and perceptron and consists_of(
        block.children(), nn.LayerNorm, CausalAttention, nn.LayerNorm, Perceptron
    )  # fmt: skip


CHAINED: Checks = {
    nn.LayerNorm: has_gain_and_bias,
    nn.Linear: has_bias,
    nn.Dropout: lambda part: part.p == 0,
    CausalAttention: lambda part: part.dropout == 0,
    Block: is_whole,
    **dict.fromkeys((Perceptron, Blocks), accept_any),
}
"""Modules that `kernels.transformer_chain` can replace, each with a check."""


class GPT2(nn.Module):
    """Compute logits (N, T, vocab) of token ids (N, T) or, with targets, the mean cross-entropy per token."""

    def __init__(self, size: GPT2Size, *, dropout: float = 0.0, bias: bool = True, checkpointing: bool = False) -> None:
        super().__init__()
        check_heads(size.dim, size.heads)
        self.size = size
        self.transformer = Transformer(size, dropout=dropout, bias=bias, checkpointing=checkpointing)
        self._initialise()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits or, with targets, the loss; targets below 0 do not count."""
        features = self.transformer(tokens)
        return self.compute_logits(features) if targets is None else self.compute_loss(features, targets)

    def compute_next_logits(self, tokens: Tensor, caches: list[KeyValueCache]) -> Tensor:
        """Return logits (N, vocab) of the token after `tokens`, which follow the tokens in `caches`."""
        past = 0 if caches[0].keys is None else caches[0].keys.shape[2]
        return self.compute_logits(self.transformer(tokens, caches, past)[:, -1])

    def make_caches(self) -> list[KeyValueCache]:
        """Return an empty cache for each block."""
        return [KeyValueCache() for _ in range(self.size.depth)]

    def compute_logits(self, features: Tensor) -> Tensor:
        """Return logits (..., vocab) of features, without padded rows."""
        all_logits: Tensor = F.linear(features, self.transformer.wte.weight)
        return all_logits[..., : self.size.vocab]

    def compute_loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that count; 0 if there are none."""
        dtype = get_matmul_dtype(features)
        with fp32_island():
            summed = _compute_chunked_loss(features, self.transformer.wte.weight, targets, self.size.vocab, dtype)
            return summed / (targets >= 0).sum().clamp(min=1)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise the weights as GPT-2 does."""
        deviation, blocks = 0.02, [block for block in self.transformer.h if isinstance(block, Block)]
        # The residual stream sums two branches per block: their last layers start smaller by sqrt(2 depth), as in
        # GPT-2.
        last = {part.c_proj.weight for block in blocks for part in (block.attn, block.mlp)}
        layers = [module for module in self.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        factor = 1 / math.sqrt(2 * self.size.depth)
        draw_normal_([(layer.weight, deviation * (factor if layer.weight in last else 1)) for layer in layers])
        for layer in layers:
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.transformer.wte.weight[self.size.vocab :] = 0.0


def pad_vocab(vocab: int) -> int:
    """Round the number of rows up to a multiple of PAD_MULTIPLE."""
    return -(-vocab // PAD_MULTIPLE) * PAD_MULTIPLE


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _compute_chunked_loss(features: Tensor, weight: Tensor, targets: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Compute the loss without compiling: it is matmuls and one kernel, and the compiler would unroll its chunks."""
    return linear_cross_entropy(features.flatten(0, 1), weight, targets.flatten(), num_classes=vocab, dtype=dtype)


def get_size(name: str, **given: int) -> GPT2Size:
    """Return the published size of a model; numbers above 0 replace the published ones."""
    return replace(GPT2S[name], **{part: value for part, value in given.items() if value})


def build_gpt2(name: str, *, dropout: float = 0.0, bias: bool = True, checkpointing: bool = False, **size: int) -> GPT2:
    """Build `gpt2` to `gpt2_xl`, with sizes as in `get_size`."""
    return GPT2(get_size(name, **size), dropout=dropout, bias=bias, checkpointing=checkpointing)
