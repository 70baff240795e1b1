"""SlotContrast (Manasyan et al. 2025): slots of each frame of a clip reconstruct the features of a frozen backbone.

Names are upstream's without the wrappers over time (`processor.module.corrector` is `processor.corrector`). The
backbone is not part of this model: it is frozen, and its features are the input.

In `SlotContrastWords`, slots also predict the words of a discrete VAE that trains with them. The word decoder is
causal. The public fork that combines the two models calls it without a mask, so that every position sees the word it
has to predict, and the loss does not depend on slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.models.layers import divide_side
from halfstep_train.workloads.slots.config import SlotContrastModelConfig, WordsModelConfig
from halfstep_train.workloads.slots.dvae import WORDS_TILE, DVae
from halfstep_train.workloads.slots.slot_attention import Mlp, Processor, SlotAttention, SlotPredictor
from halfstep_train.workloads.slots.slot_decoder import SlotDecoder
from halfstep_train.workloads.slots.word_decoder import WordDecoder, make_linear, words_loss

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
