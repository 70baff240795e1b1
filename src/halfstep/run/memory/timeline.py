"""Memory over the operations of a step, and its highest moment, for any batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from halfstep.run.memory.trace import Trace

Numbers = npt.NDArray[np.int64]
KINDS = ("half copies", "gradients", "activations", "workspaces")


@dataclass(frozen=True, slots=True)
class Life:
    """A piece of memory from one operation to another, both included."""

    num_bytes: int
    first: int
    last: int
    kind: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lives of one step at one batch, and what kernels take for themselves, by operation."""

    lives: tuple[Life, ...]
    workspaces: tuple[int, ...]

    @property
    def num_ops(self) -> int:
        return len(self.workspaces)

    def is_like(self, other: Timeline) -> bool:
        """Whether both are the same step at two batches."""
        shapes = ([(life.first, life.last, life.kind) for life in t.lives] for t in (self, other))
        return self.num_ops == other.num_ops and next(shapes) == next(shapes)

    def scaled(self, factor: float) -> Timeline:
        """With working memory and activations so much larger."""
        lives = (
            replace(life, num_bytes=int(life.num_bytes * (1 if life.kind == "gradients" else factor)))
            for life in self.lives
        )
        return Timeline(tuple(lives), self.workspaces)

    @property
    def gradient_bytes(self) -> int:
        return sum(life.num_bytes for life in self.lives if life.kind == "gradients")

    def _over_ops(self, kinds: tuple[str, ...]) -> Numbers:
        change = np.zeros(self.num_ops + 1, dtype=np.int64)
        for life in self.lives:
            if life.kind in kinds:
                change[life.first] += life.num_bytes
                change[life.last + 1] -= life.num_bytes
        return np.cumsum(change[:-1])

    def peak(self, *, accumulates: bool = False) -> Counter[str]:
        """Bytes by kind at the highest moment.

        While gradients of several micro-batches add up, all of them are there in every forward pass but the first.
        """
        by_kind = {kind: self._over_ops((kind,)) for kind in KINDS}
        by_kind["workspaces"] = by_kind["workspaces"] + np.array(self.workspaces, dtype=np.int64)
        if accumulates:
            by_kind["gradients"] = np.full(self.num_ops, self.gradient_bytes)
        at = int(np.argmax(sum(by_kind.values())))
        return Counter({kind: int(found[at]) for kind, found in by_kind.items()})


def at_batch(batch: int, first: tuple[int, Timeline], second: tuple[int, Timeline], **how: bool) -> Counter[str]:
    """The peak at another batch: every piece of memory is a part that is there anyway and a part for each sample.

    Where the two steps differ (a loop over chunks, another cut), it is the peaks that are taken for straight lines.
    """
    (small, one), (large, other) = first, second
    if one.is_like(other):
        sizes = [
            _line(batch, small, a.num_bytes, large, b.num_bytes) for a, b in zip(one.lives, other.lives, strict=True)
        ]
        pairs = zip(one.workspaces, other.workspaces, strict=True)
        lives = (Life(size, life.first, life.last, life.kind) for size, life in zip(sizes, one.lives, strict=True))
        workspaces = (_line(batch, small, a, large, b) for a, b in pairs)
        return Timeline(tuple(lives), tuple(workspaces)).peak(**how)
    peaks = one.peak(**how), other.peak(**how)
    return Counter({kind: _line(batch, small, peaks[0][kind], large, peaks[1][kind]) for kind in KINDS})


def _line(at: int, x0: int, y0: int, x1: int, y1: int) -> int:
    return max(0, round(y0 + (y1 - y0) * (at - x0) / (x1 - x0)))


def eager_timeline(trace: Trace) -> Timeline:
    """As it was traced: in eager mode what is traced is what runs."""
    last = len(trace.ops) - 1
    turn = next((number for number, op in enumerate(trace.ops) if op.in_backward), last + 1)
    lives = []
    for value in trace.values:
        if value.made_by < 0 or not value.num_bytes:
            continue
        end = last if value.ended_at < 0 else max(value.ended_at, value.made_by)
        is_kept = value.made_by < turn <= end
        kind = value.owner or ("activations" if is_kept else "workspaces")
        lives.append(Life(value.num_bytes, value.made_by, end, kind))
    return Timeline(tuple(lives), tuple(op.workspace_bytes for op in trace.ops))
