"""SlotContrast with STEVE's other half: its slots also predict the words of a discrete VAE that trains beside it.

The decoder of words is causal. The public fork that joined the two calls its decoder without a mask, so that every
position sees its own answer and the loss says nothing about slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from halfstep.islands import fp32_island, to_fp32
from halfstep.models.cross_attention import linear
from halfstep.models.dvae import DVae, words_grid
from halfstep.models.slotcontrast import SlotContrast, SlotContrastSize
from halfstep.models.word_decoder import WordDecoder
from halfstep.models.words_loss import words_loss

Zooms = tuple[Sequence[tuple[int, int]], Sequence[int]]
WORD_SIDES: dict[int, Zooms] = {4: (((4, 6),), (2, 2)), 14: (((2, 2), (7, 4)), (7, 2))}
"""By a word's side in pixels, how the VAE goes down and up: STEVE's own, and one of a word for a patch of DINOv2."""
NOT_COUNTED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsSize:
    """Sizes of the VAE and of the decoder of words; without blocks there is no decoder."""

    image_size: int
    word_side: int = 14
    vocabulary: int = 512
    dim: int = 128
    num_blocks: int = 4
    heads: int = 4
    dropout: float = 0.1
    dvae_checkpointing: bool = False
    checkpointing: bool = False


class SlotContrastWords(SlotContrast):
    """Features and frames to what SlotContrast gives, and both losses of the words."""

    def __init__(self, size: SlotContrastSize, words: WordsSize) -> None:
        super().__init__(size)
        rows, columns = words_grid(words.image_size, words.image_size, words.word_side)
        downs, ups = WORD_SIDES[words.word_side]
        self.dvae = DVae(words.vocabulary, downs=downs, ups=ups, checkpointing=words.dvae_checkpointing)
        if not words.num_blocks:
            return
        self.steve_decoder = WordDecoder(
            words.vocabulary,
            rows * columns,
            dim=words.dim,
            num_blocks=words.num_blocks,
            heads=words.heads,
            dropout=words.dropout,
            checkpointing=words.checkpointing,
        )
        is_wide = size.slot_dim == words.dim
        self.slot_proj = nn.Identity() if is_wide else linear(size.slot_dim, words.dim, bias=False)

    def words_losses(
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
        """`mse` and `cross_entropy`: sums over a frame, averaged over real frames. Noise as in `DVae.forward`."""
        frames = video.flatten(0, 1)
        coded = self.dvae(frames, tau, soft_noise, word_noise, hard=hard)
        with fp32_island():
            errors = (to_fp32(coded.reconstruction) - to_fp32(frames)).square().sum((1, 2, 3))
            losses = {"mse": _averaged(errors, is_real)}
        if not hasattr(self, "steve_decoder"):
            return losses
        hidden = self.steve_decoder(coded.words, self.slot_proj(slots).flatten(0, 1))
        targets = coded.words
        if is_real is not None:
            targets = targets.masked_fill(~is_real.view(-1, 1), NOT_COUNTED)
        total = words_loss(hidden, self.steve_decoder.head.weight, targets)
        return losses | {"cross_entropy": total / (len(frames) if is_real is None else is_real.sum())}


def _averaged(errors: Tensor, is_real: Tensor | None) -> Tensor:
    return errors.mean() if is_real is None else (errors * is_real.flatten()).sum() / is_real.sum()
