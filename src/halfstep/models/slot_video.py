"""STEVE's slot attention over the frames of a video: slots of one frame start the next one's, through a predictor.

Upstream's order of things, on which its weights depend: the recurrent cell takes the slots as they were before
normalisation, and the perceptron runs in all iterations but the last.

Slots stay fp32 from frame to frame: rounding them would add up over frames and iterations. The softmax over slots, its
renormalisation over positions (an epsilon of 1e-8 is nothing in half formats, and 0/0 waits where a slot wins nothing),
the weighted mean and the recurrent cell are an island.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep.models.cross_attention import Encoder, linear

EPSILON = 1e-8


class RecurrentCell(nn.GRUCell):
    """`nn.GRUCell` in single operations, which the compiler fuses with what stands around it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        nn.init.xavier_uniform_(self.weight_ih)
        nn.init.orthogonal_(self.weight_hh)
        nn.init.zeros_(self.bias_ih)
        nn.init.zeros_(self.bias_hh)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        assert hx is not None
        own = to_fp32([self.weight_ih, self.bias_ih, self.weight_hh, self.bias_hh])  # stored in bf16 by bf16-true
        from_input = F.linear(input, own[0], own[1]).chunk(3, dim=-1)
        from_state = F.linear(hx, own[2], own[3]).chunk(3, dim=-1)
        reset = torch.sigmoid(from_input[0] + from_state[0])
        update = torch.sigmoid(from_input[1] + from_state[1])
        new = torch.tanh(from_input[2] + reset * from_state[2])
        return new + update * (hx - new)


class SlotAttentionVideo(nn.Module):
    """Features (B, T, positions, dim) and one normal draw (B, slots, slot_dim) to slots and attention of each frame."""

    def __init__(
        self,
        dim: int,
        *,
        num_slots: int,
        slot_dim: int,
        mlp_dim: int,
        num_iterations: int,
        predictor_blocks: int,
        predictor_heads: int,
        predictor_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_slots, self.slot_dim, self.num_iterations = num_slots, slot_dim, num_iterations
        self.slot_mu, self.slot_log_sigma = (nn.Parameter(torch.empty(1, 1, slot_dim)) for _ in range(2))
        nn.init.xavier_uniform_(self.slot_mu)
        nn.init.xavier_uniform_(self.slot_log_sigma)
        self.norm_inputs = nn.LayerNorm(dim)
        self.norm_slots = nn.LayerNorm(slot_dim)
        self.norm_mlp = nn.LayerNorm(slot_dim)
        self.project_q = linear(slot_dim, slot_dim, bias=False)
        self.project_k = linear(dim, slot_dim, bias=False)
        self.project_v = linear(dim, slot_dim, bias=False)
        self.gru = RecurrentCell(slot_dim)
        self.mlp = nn.Sequential(linear(slot_dim, mlp_dim, before_relu=True), nn.ReLU(), linear(mlp_dim, slot_dim))
        self.predictor = Encoder(predictor_blocks, slot_dim, predictor_heads, dropout=predictor_dropout)

    def forward(self, features: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Slots (B, T, slots, slot_dim) in fp32, and which slot each position went to, (B, T, positions, slots)."""
        slots = self.slot_mu + torch.exp(self.slot_log_sigma) * draw
        normed = self.norm_inputs(features)
        keys, values = self.project_k(normed) * self.slot_dim**-0.5, self.project_v(normed)
        all_slots, all_shares = [], []
        for keys_now, values_now in zip(keys.unbind(1), values.unbind(1), strict=True):
            slots, shares = self._corrected(slots, keys_now, to_fp32(values_now))
            all_slots.append(slots)
            all_shares.append(shares)
            slots = to_fp32(self.predictor(slots))
        return torch.stack(all_slots, dim=1), torch.stack(all_shares, dim=1)

    def _corrected(self, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Slots after all iterations on one frame, and the last one's attention."""
        for iteration in range(self.num_iterations):
            logits = keys @ self.project_q(self.norm_slots(slots)).transpose(1, 2)
            with fp32_island():
                shares = torch.softmax(to_fp32(logits), dim=-1)
                weights = shares + EPSILON
                weights = weights / weights.sum(dim=1, keepdim=True)
                slots = self.gru(weights.transpose(1, 2) @ values, slots)
            if iteration < self.num_iterations - 1:
                slots = slots + to_fp32(self.mlp(self.norm_mlp(slots)))
        return slots, shares
