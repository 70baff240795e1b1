"""The keys of a clip's Gumbel noise, which ride in the batch (models/keyed_noise.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.data import noise
from halfstep.data.loader import Batch

KEY_RANGE = 2**31


def word_keys(video: Tensor, key: tuple[int, ...]) -> Batch:
    """Two separate draws for each frame of clips (B, T, …), by the clips' own key: `soft_keys` and `word_keys`."""

    def keys(stream: str) -> Tensor:
        drawn = noise.integers(key, len(video), KEY_RANGE, video.device, stream=stream, shape=(video.shape[1], 2))
        return drawn.to(torch.int32)

    return {"soft_keys": keys("soft words"), "word_keys": keys("words")}
