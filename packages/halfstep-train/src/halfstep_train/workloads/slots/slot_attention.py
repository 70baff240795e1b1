"""Slot attention over the frames of a clip, as in SlotContrast (Manasyan et al. 2025).

The slots of one frame, passed through a predictor, initialise the next frame. Upstream's weights depend on its order of
operations: the recurrent cell takes the *normalised* slots as its state, and the perceptron runs in every iteration.

Slots stay fp32 from frame to frame, since rounding errors would add up over frames and iterations. The softmax over
slots, its renormalisation over positions and the weighted mean are an fp32 island: an epsilon of 1e-8 is 0 in fp16 and
too small to change a bf16 softmax, so a slot that wins no position would be 0/0. Keys and values of all frames are
computed by one product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.models.layers import check_heads

EPSILON = 1e-8
HEADS = 4
"""Attention heads of predictors and decoders in all published configs."""


class Mlp(nn.Module):
    """Linear layers with ReLU in between, optionally with a LayerNorm first and a residual connection."""

    def __init__(
        self, dim: int, hidden: tuple[int, ...], out_dim: int, *, layer_norm: bool = False, residual: bool = False
    ) -> None:
        super().__init__()
        sizes = (dim, *hidden)
        layers: list[nn.Module] = [nn.LayerNorm(dim)] if layer_norm else []
        for before, after in zip(sizes, hidden, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], out_dim))
        self.residual = residual
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.residual else out


def update_recurrently(cell: nn.GRUCell, update: Tensor, state: Tensor) -> Tensor:
    """Apply an `nn.GRUCell`: matrix products in the plan's format, gates and state in fp32."""
    from_update = to_fp32(F.linear(update, cell.weight_ih, cell.bias_ih))
    return apply_gates(from_update, to_fp32(F.linear(state, cell.weight_hh, cell.bias_hh)), state)


def apply_gates(from_input: Tensor, from_state: Tensor, state: Tensor) -> Tensor:
    """Return the next state of a GRU from its input and state products."""
    # torch orders the gates of a GRU as reset, update (here `keep`), new.
    inputs, states = from_input.chunk(3, dim=-1), from_state.chunk(3, dim=-1)
    reset = torch.sigmoid(inputs[0] + states[0])
    keep = torch.sigmoid(inputs[1] + states[1])
    new = torch.tanh(inputs[2] + reset * states[2])
    return new + keep * (state - new)


class SlotAttention(nn.Module):
    """The corrector: slots (B, K, D) attend to the features of one frame for some iterations."""

    def __init__(self, feature_dim: int, slot_dim: int, *, num_iterations: int) -> None:
        super().__init__()
        self.to_k = nn.Linear(feature_dim, slot_dim, bias=False)
        self.to_v = nn.Linear(feature_dim, slot_dim, bias=False)
        self.to_q = nn.Linear(slot_dim, slot_dim, bias=False)
        self.gru = nn.GRUCell(slot_dim, slot_dim)
        self.mlp = Mlp(slot_dim, (4 * slot_dim,), slot_dim, layer_norm=True, residual=True)
        self.norm_features = nn.LayerNorm(feature_dim)
        self.norm_slots = nn.LayerNorm(slot_dim)
        self.num_iterations = num_iterations
        self.scale = slot_dim**-0.5

    def compute_keys_and_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all frames at once."""
        normed = self.norm_features(features)
        return self.to_k(normed), self.to_v(normed)

    def forward(self, slots: Tensor, keys: Tensor, values: Tensor, *, is_first: bool) -> tuple[Tensor, Tensor]:
        """Return the corrected slots in fp32, and the shares (B, K, P): how much of each position each slot takes."""
        shares = keys.new_empty(0)
        for _ in range(self.num_iterations + int(is_first)):
            slots, shares = self._iterate(slots, keys, values)
        return slots, shares

    def _iterate(self, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots and shares after one iteration."""
        state = to_fp32(self.norm_slots(slots))
        queries = self.to_q(state)
        with fp32_island():
            # Softmax over slots (dim 1): slots compete for each position.
            shares = torch.softmax(to_fp32(queries) @ to_fp32(keys).transpose(1, 2) * self.scale, dim=1)
            weights = shares + EPSILON
            # Weighted mean over positions. EPSILON keeps a slot that wins no position from being 0/0.
            update = (weights / weights.sum(-1, keepdim=True)) @ to_fp32(values)
        slots = update_recurrently(self.gru, update, state)
        return to_fp32(self.mlp(slots)), shares


class PredictorAttention(nn.Module):
    """Self-attention among the slots of a clip, with upstream's names.

    Upstream divides by the scale d^-0.5 where attention multiplies by it, so scores are d times the usual ones. Its
    weights and published results depend on that, so it is reproduced here.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_heads(dim, HEADS)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        for third in self.qkv.weight.chunk(3):
            nn.init.xavier_uniform_(third)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** 0.5)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class PredictorBlock(nn.Module):
    """Attention and a perceptron, each with a norm before it and a shortcut around it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn = PredictorAttention(dim)
        self.linear1, self.linear2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(F.relu(self.linear1(self.norm2(x))))


class SlotPredictor(nn.Module):
    """Predict the initial slots of the next frame from the slots of a frame."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PredictorBlock(dim)])

    def forward(self, slots: Tensor) -> Tensor:
        return to_fp32(self.blocks[0](slots))


class SlotSequence(NamedTuple):
    """Slots (B, T, K, D) as corrected and as predicted for the next frame, and shares (B, T, K, P)."""

    slots: Tensor
    predicted: Tensor
    shares: Tensor


class Processor(nn.Module):
    """Run corrector and predictor over the frames of a clip."""

    def __init__(self, corrector: SlotAttention, predictor: SlotPredictor) -> None:
        super().__init__()
        self.corrector, self.predictor = corrector, predictor

    def forward(self, slots: Tensor, features: Tensor) -> SlotSequence:
        keys, values = self.corrector.compute_keys_and_values(features)
        found = []
        for t in range(features.shape[1]):
            corrected, shares = self.corrector(slots, keys[:, t], values[:, t], is_first=t == 0)
            slots = self.predictor(corrected)
            found.append((corrected, slots, shares))
        return SlotSequence(*(torch.stack(part, dim=1) for part in zip(*found, strict=True)))
