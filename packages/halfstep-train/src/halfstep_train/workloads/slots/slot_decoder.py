"""The decoder that reconstructs features from slots: a perceptron per slot and position, mixed by alpha masks.

Its hidden maps dominate memory: at MOVi-E's size (256 frames, 15 slots, 576 positions, 1024 channels) one takes 4.5 GB
in bf16. Training therefore streams: a chunk of frames runs forward, is compared with its target, and runs backward at
once, all inside the forward pass. Only the loss and the summed gradients are kept, and the backward pass just
multiplies them by the gradient of the loss. Nothing is computed twice, and memory is proportional to the chunk. The
loop is not compiled; its iterations are (`make_iteration`).

Three rewritings save large products. Each equals the plain form except for rounding:

    W(s + p) = Ws + Wp                              the first layer runs on slots and positions separately
    sum_k m_k (W h_k + b) = W(sum_k m_k h_k) + b    masks sum to 1, so slots are mixed before the last layer
    alpha = w h_k + b                               of the last layer, only the alpha row runs on all slots

Sums and the softmax are fp32. Gradients inside a chunk are scaled by SEED, independently of the loss scale, so that
they neither overflow nor underflow in fp16; the loss scale enters with the final multiplication, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep.recompute import (
    Recompute,
    Recomputing,
    make_iteration,
    run_recomputed,
)
from halfstep_train.models.layers import Checks, accept_any, are_plain, divide_side, has_bias
from halfstep_train.workloads.slots.config import SlotContrastModelConfig, WordsModelConfig
from halfstep_train.workloads.slots.dvae import WORDS_TILE, DVae
from halfstep_train.workloads.slots.slot_attention import Mlp, Processor, SlotAttention, SlotPredictor
from halfstep_train.workloads.slots.word_decoder import WordDecoder, make_linear, words_loss

HIDDEN_BYTES: dict[Recompute, int] = {
    "none": 640 << 20, "pointwise": 160 << 20, "alternate": 120 << 20, "blocks": 80 << 20,
}  # fmt: skip
"""Largest hidden map of a chunk, by recomputation mode; six such maps are alive at once."""
SEED = 2.0**-8
"""Factor of the gradients inside a chunk."""
# Layers that the streamed computation reproduces; anything else runs layer by layer.
KNOWN: Checks = {nn.Linear: has_bias, nn.ReLU: accept_any, nn.Sequential: accept_any, Mlp: lambda mlp: not mlp.residual}


class SlotDecoder(Recomputing):
    """Decode slots (N, K, D) to features (N, P, F) and masks (N, K, P)."""

    def __init__(self, slot_dim: int, hidden: tuple[int, ...], feature_dim: int, *, num_positions: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.mlp = Mlp(slot_dim, hidden, feature_dim + 1)
        self.pos_emb = nn.Parameter(torch.randn(1, 1, num_positions, slot_dim) * slot_dim**-0.5)
        self.chunk = 0
        """Frames per chunk; 0: as many as HIDDEN_BYTES allows."""

    def forward(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return reconstruction and masks, computed layer by layer."""
        parts = [self._decode(rows) for rows in slots.split(self._choose_chunk(slots))]
        return torch.cat([recon for recon, _ in parts]), torch.cat([masks for _, masks in parts])

    def compute_squared_error(self, slots: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of squared errors between reconstruction and target features (N, P, F), and the masks."""
        if not (torch.is_grad_enabled() and self._can_stream()):
            return self._compute_error_by_layers(slots, target)
        first, *hidden, last = (layer for layer in self.mlp.layers if isinstance(layer, nn.Linear))
        with fp32_island():
            # W(s + p) + b = Ws + (Wp + b): two small products instead of one over slots × positions.
            slot_part = F.linear(to_fp32(slots), first.weight)
            position_part = F.linear(self.pos_emb[0, 0], first.weight, first.bias)
        weights = [part for layer in hidden for part in (layer.weight, layer.bias)]
        dtype = _get_compute_dtype(slots)
        inputs = (target, slot_part, position_part, last.weight, last.bias, *weights)
        error, masks = _run_streamed(self._choose_chunk(slots), dtype, torch.compiler.is_compiling(), *inputs)
        return error, masks

    def _can_stream(self) -> bool:
        """True if all layers are as built, so that the streamed computation gives the same result."""
        layers = list(self.mlp.layers)
        return len(layers) > 1 and are_plain((self.mlp, self.mlp.layers, *layers), KNOWN)

    def _choose_chunk(self, slots: Tensor) -> int:
        widest = max(layer.out_features for layer in self.mlp.layers if isinstance(layer, nn.Linear))
        per_frame = slots.shape[1] * self.pos_emb.shape[2] * widest * _get_compute_dtype(slots).itemsize
        return self.chunk or choose_even_chunk(len(slots), max(1, HIDDEN_BYTES[self.recompute] // per_frame))

    def _decode(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return reconstruction and masks of a chunk of frames."""
        out = self.mlp(slots.unsqueeze(2) + self.pos_emb)
        with fp32_island():
            recons, alpha = to_fp32(out).split((self.feature_dim, 1), dim=-1)
            masks = torch.softmax(alpha, dim=1)
            return (recons * masks).sum(1), masks.squeeze(-1)

    def _compute_error_by_layers(self, slots: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the plain form in chunks that backward recomputes: works with hooked or replaced layers."""

        def compute(slots: Tensor, target: Tensor) -> Tensor:
            recon, masks = self._decode(slots)
            with fp32_island():
                error = (recon - to_fp32(target)).square().sum()
            return torch.cat([error.unsqueeze(0), masks.flatten()])  # checkpointing expects a single tensor

        chunk = self._choose_chunk(slots)
        # A single chunk is not recomputed: that would save nothing.
        run = partial(run_recomputed, compute) if chunk < len(slots) and torch.is_grad_enabled() else compute
        found = [run(*pair) for pair in zip(slots.split(chunk), target.split(chunk), strict=True)]
        masks = torch.cat([part[1:] for part in found]).view(*slots.shape[:2], -1).detach()
        return torch.stack([part[0] for part in found]).sum(), masks


def choose_even_chunk(total: int, limit: int) -> int:
    """Return a chunk size of at most `limit`: a divisor of the total if one is larger than half the limit."""
    limit = min(total, limit)
    # Chunks of equal shape are compiled once; otherwise make chunks as equal as possible.
    divisor = next(size for size in range(limit, 0, -1) if total % size == 0)
    return divisor if 2 * divisor > limit else -(-total // -(-total // limit))


def _get_compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_streamed(*inputs: Any) -> Any:
    return _StreamedError.apply(*inputs)  # type: ignore[no-untyped-call]


class _StreamedError(torch.autograd.Function):
    """Sum of squared errors, and masks (N, K, P). Forward also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any, chunk: int, dtype: torch.dtype, is_compiled: bool, target: Tensor, slot_part: Tensor, *weights: Tensor
    ) -> Any:
        step = make_iteration(_run_chunk, is_compiled=is_compiled)
        errors, masks, slot_grads, sums = [], [], [], [torch.zeros_like(weight) for weight in weights]
        with fp32_island():
            for rows, wanted in zip(slot_part.split(chunk), target.split(chunk), strict=True):
                error, decoded, grad_slots, grads = step(rows, wanted, weights, dtype)
                errors.append(error)
                masks.append(decoded)
                slot_grads.append(grad_slots)
                for total, one in zip(sums, grads, strict=True):
                    total += one
        ctx.save_for_backward(torch.cat(slot_grads), *sums)
        mask = torch.cat(masks)
        ctx.mark_non_differentiable(mask)
        return torch.stack(errors).sum(), mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        # Saved gradients belong to SEED times the error.
        factor = grad / SEED
        return None, None, None, None, *(saved * factor for saved in ctx.saved_tensors)


def _run_chunk(
    slot_part: Tensor, target: Tensor, weights: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the error, the masks, and the gradients of `slot_part` and of the weights, scaled by SEED."""
    position_part, last_weight, last_bias, *hidden = weights
    frames, slots, width = slot_part.shape
    positions = len(position_part)
    matrices = [weight.to(dtype) for weight in hidden[::2]]
    # Forward: hidden maps as rows (frames · slots · positions, channels).
    x = torch.relu(slot_part.unsqueeze(2) + position_part).to(dtype).view(-1, width)
    maps = [x]
    for matrix, bias in zip(matrices, hidden[1::2], strict=True):
        x = _multiply_and_relu(bias.to(dtype), x, matrix.t())
        maps.append(x)
    top = x.view(frames, slots, positions, -1)
    alpha_weight, feature_weight = last_weight[-1], last_weight[:-1].to(dtype)
    masks = torch.softmax((top.float() * alpha_weight).sum(-1) + last_bias[-1], dim=1)
    # Slots are mixed before the last layer: masks sum to 1, so its bias passes through unchanged.
    mixed = (top.float() * masks.unsqueeze(-1)).sum(1).to(dtype).view(frames * positions, -1)
    decoded = torch.addmm(last_bias[:-1].to(dtype), mixed, feature_weight.t())
    error = decoded.float().view(target.shape) - target.float()
    # Backward, from the squared error to the first layer.
    grad = (error * (2 * SEED)).to(dtype).view(decoded.shape)
    grad_mixed = torch.mm(grad, feature_weight).view(frames, 1, positions, -1).float()
    grad_masks = (grad_mixed * top.float()).sum(-1)
    # Gradient of a softmax over slots: m (g - Σ m g).
    grad_alpha = masks * (grad_masks - (masks * grad_masks).sum(1, keepdim=True))
    grad_top = masks.unsqueeze(-1) * grad_mixed + grad_alpha.unsqueeze(-1) * alpha_weight
    grad_alpha_weight = (grad_alpha.unsqueeze(-1) * top.float()).sum((0, 1, 2))
    grads = [
        torch.cat([torch.mm(grad.t(), mixed).float(), grad_alpha_weight.unsqueeze(0)]),
        torch.cat([grad.float().sum(0), grad_alpha.sum().unsqueeze(0)]),
    ]
    grad_x = _backpropagate_relu(grad_top.to(dtype), top).view(x.shape)
    grad_hidden: list[Tensor] = []
    for index in reversed(range(len(matrices))):
        grad_hidden = [torch.mm(grad_x.t(), maps[index]).float(), grad_x.sum(0, dtype=torch.float32), *grad_hidden]
        grad_x = torch.mm(grad_x, matrices[index])
        if index > 0:
            grad_x = _backpropagate_relu(grad_x, maps[index])
    # The ReLU mask of the first map is recomputed from its two small summands, which is cheaper than reading the map.
    grad_first = torch.where(
        slot_part.unsqueeze(2) + position_part > 0, grad_x.view(frames, slots, positions, width), 0
    )
    grad_slots = grad_first.sum(2, dtype=torch.float32)
    grad_positions = grad_first.sum((0, 1), dtype=torch.float32)
    return error.square().sum(), masks, grad_slots, [grad_positions, *grads, *grad_hidden]


def _multiply_and_relu(bias: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """Return relu(x @ matrix + bias); on CUDA in one kernel, which saves a pass over the map."""
    if x.is_cuda:
        return torch._addmm_activation(bias, x, matrix)
    return torch.relu(torch.addmm(bias, x, matrix))


def _backpropagate_relu(grad: Tensor, out: Tensor) -> Tensor:
    """Return the gradient where the output is positive, and 0 elsewhere, even if the gradient is NaN there."""
    return torch.ops.aten.threshold_backward(grad, out, 0)


# --- SlotContrast ---
#
# Names are upstream's without the wrappers over time (`processor.module.corrector` is `processor.corrector`). The
# backbone is not part of this model: it is frozen, and its features are the input.
#
# In `SlotContrastWords`, slots also predict the words of a discrete VAE that trains with them. The word decoder is
# causal. The public fork that combines the two models calls it without a mask, so that every position sees the word it
# has to predict, and the loss does not depend on slots.


BACKBONE = "encoder.module.backbone."
"""Prefix of the frozen backbone in upstream's state dict."""


class LearnedSlots(nn.Module):
    """Learned initial slots, the same for every clip."""

    def __init__(self, num_slots: int, dim: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, num_slots, dim) * dim**-0.5)

    def forward(self, batch: int) -> Tensor:
        return self.slots.expand(batch, -1, -1)


class SlotEncoder(nn.Module):
    """Transform the backbone's features into the inputs of slot attention."""

    def __init__(self, feature_dim: int, slot_dim: int) -> None:
        super().__init__()
        self.output_transform = Mlp(feature_dim, (2 * feature_dim,), slot_dim, layer_norm=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.output_transform(features)


class SlotContrast(nn.Module):
    """Compute slots, masks and the reconstruction error of features (B, T, P, F)."""

    def __init__(
        self, settings: SlotContrastModelConfig, feature_dim: int, num_positions: int, *, checkpointing: bool = False
    ) -> None:
        super().__init__()
        dim = settings.slot_dim
        self.initializer = LearnedSlots(settings.slots, dim)
        self.encoder = SlotEncoder(feature_dim, dim)
        corrector = SlotAttention(dim, dim, num_iterations=settings.iterations)
        self.processor = Processor(corrector, SlotPredictor(dim))
        self.decoder = SlotDecoder(dim, settings.decoder_hidden, feature_dim, num_positions=num_positions)
        self.decoder.recompute = "blocks" if checkpointing else "none"

    def forward(self, features: Tensor, is_real: Tensor | None = None) -> dict[str, Tensor]:
        """Return `slots` (B, T, K, D), `masks` and `shares` (B, T, K, P), and `error`: the mean squared error.

        Padding frames, where `is_real` (B, T) is false, do not count.
        """
        batch, frames = features.shape[:2]
        sequence = self.processor(to_fp32(self.initializer(batch)), self.encoder(features))
        slots, target = sequence.slots.flatten(0, 1), features.flatten(0, 1)
        # The streamed form gives only the sum over all frames; with padding, the error of each frame is needed.
        if is_real is None:
            error, masks = self.decoder.compute_squared_error(slots, target)
            error = error / target.numel()
        else:
            reconstruction, masks = self.decoder(slots)
            error = (reconstruction - to_fp32(target)).square().mean((1, 2))
            error = (error * is_real.flatten()).sum() / is_real.sum()
        return {
            "slots": sequence.slots,
            "predicted": sequence.predicted,
            "shares": sequence.shares,
            "masks": masks.unflatten(0, (batch, frames)),
            "error": error,
        }


def rename_upstream(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return upstream's state dict with our names, without the frozen backbone."""
    kept = {name: value for name, value in weights.items() if not name.startswith(BACKBONE)}
    return {name.replace(".module.", ".", 1): value for name, value in kept.items()}


Zooms = tuple[Sequence[tuple[int, int]], Sequence[int]]
WORD_SIDES: dict[int, Zooms] = {4: (((4, 6),), (2, 2)), 14: (((2, 2), (7, 4)), (7, 2))}
"""Down- and upsampling of the VAE, by the side of a word in pixels: 4 as in STEVE; 14 gives one word per patch of
DINOv2."""
NOT_COUNTED = -1
"""Target of words in padding frames, which the loss ignores."""


class SlotContrastWords(SlotContrast):
    """SlotContrast whose slots also predict the words of a discrete VAE."""

    def __init__(
        self,
        settings: WordsModelConfig,
        feature_dim: int,
        num_positions: int,
        image_size: int,
        *,
        checkpointing: bool = False,
    ) -> None:
        """Build the modules; without `words_blocks` there is no word decoder."""
        super().__init__(settings, feature_dim, num_positions, checkpointing=checkpointing)
        side = divide_side(image_size, settings.word_side, WORDS_TILE)
        downs, ups = WORD_SIDES[settings.word_side]
        recomputes_vae = checkpointing or settings.dvae_checkpointing
        self.dvae = DVae(settings.vocabulary, downs=downs, ups=ups, checkpointing=recomputes_vae)
        if not settings.words_blocks:
            return
        self.steve_decoder = WordDecoder(
            settings.vocabulary,
            side**2,
            dim=settings.words_dim,
            num_blocks=settings.words_blocks,
            dropout=settings.words_dropout,
            checkpointing=checkpointing,
        )
        is_wide = settings.slot_dim == settings.words_dim
        self.slot_proj = nn.Identity() if is_wide else make_linear(settings.slot_dim, settings.words_dim, bias=False)

    def compute_word_losses(
        self,
        slots: Tensor,
        video: Tensor,
        tau: Tensor | float,
        *,
        soft_noise: Tensor,
        word_noise: Tensor,
        hard: bool,
        is_real: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return `mse` and `cross_entropy`: sums over a frame, averaged over real frames. Noise is as in
        `DVae.forward`."""
        frames = video.flatten(0, 1)
        coded = self.dvae(frames, tau, soft_noise, word_noise, hard=hard)
        with fp32_island():
            errors = (to_fp32(coded.reconstruction) - to_fp32(frames)).square().sum((1, 2, 3))
            losses = {"mse": _average(errors, is_real)}
        if not hasattr(self, "steve_decoder"):
            return losses
        hidden = self.steve_decoder(coded.words, self.slot_proj(slots).flatten(0, 1))
        targets = coded.words
        if is_real is not None:
            targets = targets.masked_fill(~is_real.view(-1, 1), NOT_COUNTED)
        total = words_loss(hidden, self.steve_decoder.head.weight, targets)
        return losses | {"cross_entropy": total / (len(frames) if is_real is None else is_real.sum())}


def _average(errors: Tensor, is_real: Tensor | None) -> Tensor:
    return errors.mean() if is_real is None else (errors * is_real.flatten()).sum() / is_real.sum()
