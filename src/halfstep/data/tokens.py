"""Token ids on disk, read through memory maps, and the samples that are cut from them.

An epoch of training goes once over the tokens in windows of `context`, whose first one starts at a place drawn from
(seed, epoch): windows differ from epoch to epoch, and a sample is a pure function of (seed, epoch, index). Validation
starts at the first token and predicts every other one exactly once; the last window is filled up with targets of -1,
which do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.data.seeds import generator_for
from halfstep.errors import DataError

Array = np.ndarray[Any, Any]

UNCOUNTED = -1
PHASE_STREAM = 0x7068617365
"""Sets the draw of an epoch's first token apart from others with its key ("phase" in ASCII)."""


class Tokens:
    """Several arrays of ids, such as the shards of a data set, read as one."""

    def __init__(self, parts: Sequence[Array], *, paths: Sequence[Path] = ()) -> None:
        self.parts, self.paths = [part for part in parts if len(part)], tuple(paths)
        self.ends = np.cumsum([len(part) for part in self.parts]).tolist()

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.ends else 0

    def read(self, start: int, count: int) -> Array:
        """`count` ids from `start` on, as int64."""
        found = []
        while count > 0:
            number = bisect_right(self.ends, start)
            part, inside = self.parts[number], start - (self.ends[number - 1] if number else 0)
            piece = np.asarray(part[inside : inside + count], dtype=np.int64)
            found.append(piece)
            start, count = start + len(piece), count - len(piece)
        return found[0] if len(found) == 1 else np.concatenate(found)


class TokenSamples:
    """Windows of `context` tokens, each with the ones that follow them."""

    def __init__(self, tokens: Tokens, *, context: int, vocab: int, is_training: bool) -> None:
        self.tokens, self.context, self.vocab, self.is_training = tokens, context, vocab, is_training
        num_targets = len(tokens) - 1
        # A training epoch may start up to context - 1 tokens late, and has as many windows whenever it starts.
        self.num = (num_targets - context + 1) // context if is_training else -(-num_targets // context)
        if is_training and num_targets >= context:
            self.num = max(self.num, 1)
        self.num = max(self.num, 0)

    def __len__(self) -> int:
        return self.num

    def files(self) -> Iterable[Path]:
        return self.tokens.paths

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return self._cut(self._phase(key[0], key[1]) + index * self.context)

    def batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        phase = self._phase(seed, epoch)
        rows = [self._cut(phase + index * self.context) for index in indices.tolist()]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _phase(self, seed: int, epoch: int) -> int:
        room = min(self.context, len(self.tokens) - self.num * self.context)
        if not self.is_training or room <= 1:
            return 0
        return int(torch.randint(room, (), generator=generator_for(seed, epoch, PHASE_STREAM)))

    def _cut(self, start: int) -> dict[str, Tensor]:
        ids = self.tokens.read(start, min(self.context + 1, len(self.tokens) - start))
        refuse_past_vocabulary(ids, self.vocab, start=start)
        missing = self.context + 1 - len(ids)
        tokens, targets = ids[:-1], ids[1:]
        if missing:
            tokens, targets = np.pad(tokens, (0, missing)), np.pad(targets, (0, missing), constant_values=UNCOUNTED)
        return {"tokens": torch.from_numpy(tokens.copy()), "targets": torch.from_numpy(targets.copy())}


def refuse_past_vocabulary(ids: Array, vocab: int, *, start: int = 0, source: str = "the data") -> None:
    if len(ids) and int(ids.max()) >= vocab:
        at = int(np.argmax(ids >= vocab))
        raise DataError(
            f"{source} has token {int(ids[at]):,} at position {start + at:,}, past the vocabulary of {vocab:,}",
            why="the ids come from another tokenizer, or the file holds something else than 16-bit ids",
            fix="data.tokenizer: the one these ids were made with; model.vocab where there is none",
        )
