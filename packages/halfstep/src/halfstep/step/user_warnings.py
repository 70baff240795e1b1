"""Point warnings from hs.Step at the user's line."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings

import torch

from halfstep import our_code
from halfstep.step.facts import Reading

SKIPPED = (*our_code.OURS, contextlib.__file__, torch.utils._contextlib.__file__)
"""Files whose lines a user cannot change: ours, contextlib's (our `with` blocks) and torch's (our `no_grad`)."""


def warn_user(text: str) -> None:
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SKIPPED):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


class DroppedSteps:
    """Warn of dropped steps: of the first, the 10th, the 100th and so on, and of their number after each pass.

    An overflow of fp16's gradients is routine, and an empty window has nothing to lose: neither counts.
    """

    def __init__(self, *, low_scale: float | None) -> None:
        self.low_scale = low_scale  # of fp16's loss scale: what overflows there does so at any scale
        self.num_dropped = self.num_dropped_before = self.first_step = 0

    def is_overflow(self, reading: Reading) -> bool:
        """True if gradients overflowed because fp16's loss scale is still too high."""
        is_high = self.low_scale is not None and reading.scale > self.low_scale
        return is_high and math.isfinite(reading.loss) and not math.isfinite(reading.grad_norm)

    def observe(self, facts: object, reading: Reading) -> None:
        if not reading.is_bad or reading.is_empty or self.is_overflow(reading):
            return
        self.num_dropped += 1
        if math.log10(self.num_dropped).is_integer():
            so_far = f" ({self.num_dropped} steps so far)" if self.num_dropped > 1 else ""
            warn_user(f"step {reading.attempted} was dropped{so_far}: {reading.reason}. Its batch was not trained on")

    def end_pass(self, attempted: int) -> None:
        """Note the end of a pass over the data, after `attempted` steps in all."""
        num, num_steps = self.num_dropped - self.num_dropped_before, attempted - self.first_step
        self.num_dropped_before, self.first_step = self.num_dropped, attempted
        if num:
            since = f"; {self.num_dropped} since the start" if self.num_dropped > num else ""
            verb = "was" if num == 1 else "were"
            warn_user(f"{num} of the {num_steps} steps of this pass over the data {verb} dropped{since}")


NEWEST_TESTED = (2, 15)
"""`make torch TORCH=2.15.0` runs the tests; benchmarks/results/torch_versions.json has the results."""


@functools.cache
def report_untested_torch(version: str) -> None:
    """Print one line, once per process, if this version of torch is newer than the newest tested one."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        print(
            f"halfstep: torch {version} is newer than {tested}, the newest version that halfstep was tested with",
            file=sys.stderr,
            flush=True,
        )
