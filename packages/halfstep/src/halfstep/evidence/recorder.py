"""Record the step of a fault as a capsule, for runs and for hs.Step.

The recorder observes the guard. A good step costs the memory of its window for `LAG` steps and one entry in a list on
the host: its facts were read anyway. Only a fault copies and writes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError, suggest_command, summarise_error
from halfstep.evidence import capsule
from halfstep.evidence.ranges import has_fractions
from halfstep.evidence.updates import record_update
from halfstep.evidence.watch import Watch
from halfstep.step.facts import Facts, PhasedFacts, Reading, read_rng_state, split_phases
from halfstep.step.guard import LAG
from halfstep.step.phases import PhasedStep
from halfstep.step.step import GuardedStep

MOST_CAPSULES = 4
TRAIL = 32
"""Steps before the fault whose losses are recorded."""

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapsuleContext:
    """Facts about the training that its steps do not hold; hs.Step sets only the first two fields."""

    about: Mapping[str, Any]
    """The plan and, for runs, what replay needs to rebuild the model."""
    rank: int | None = None
    """The number of this rank; None without several ranks."""
    is_whole: Callable[[Reading], bool] = lambda reading: False
    """Whether to store the batches of all ranks, each of which has its own generators, instead of this rank's."""
    load_window: Callable[[Reading], Sequence[Any] | None] = lambda reading: None
    """Load the batches of a step whose window is not kept: it ran before a resume, or on other ranks."""
    find_names: Callable[[Sequence[int]], list[str]] = lambda ids: []
    """Names of samples, such as their files."""
    describe_share: Callable[[Reading], Mapping[str, Any]] = lambda reading: {}
    """This rank's part of the batch: its number, the number of ranks, the batch sizes over all."""
    config: str = ""
    find_checkpoint: Callable[[], str] = lambda: ""
    """The newest checkpoint, for weights that are too large for a capsule."""


class Recorder:
    """Write capsules: one for each cause in a row, at most `most`."""

    replay = "hs.replay({!r}, model, loss_fn)"  # the call that names the cause, for a message

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        step: GuardedStep | PhasedStep,
        context: CapsuleContext,
        *,
        notice: Notice,
        most: int = MOST_CAPSULES,
        spikes: bool = False,
    ) -> None:
        self.folder, self.model, self.step, self.context = folder, model, step, context
        self.notice, self.most, self.spikes = notice, most, spikes
        self._trail: deque[dict[str, Any]] = deque(maxlen=TRAIL)
        self._windows: deque[tuple[int, list[Any]]] = deque(maxlen=LAG + 1)
        """The last windows as they were loaded: a step is read `LAG` steps later, and its batches would be gone."""
        self._row = ""
        """The kind of the current series of faults; empty after a good step."""
        self._newest = -1
        """The last recorded step: no step is recorded twice."""
        # A folder that a loop is given may have capsules of earlier processes: they stay, and do not count.
        self._num_earlier = 0 if context.config else len(capsule.list_capsules(folder))
        self.watches: Mapping[str, Watch] = {}
        """By phase, if the training is watched: capsules hold the last observations."""
        # Measured once, when training begins: replay compares grown weights with it.
        self._start = _measure_sizes(model)

    @contextmanager
    def watch(self, window: Sequence[Any]) -> Iterator[None]:
        """Keep the window of the step that runs inside, and record the step if the user's code raises."""
        self.keep(self.step.attempted, window)
        try:
            yield
        except Exception as error:
            self._record_exception(error, window)
            raise

    def keep(self, attempted: int, window: Sequence[Any]) -> None:
        """Keep the window of a step until its outcome is known; once, however often it is called."""
        if not self._windows or self._windows[-1][0] != attempted:
            self._windows.append((attempted, list(window)))

    def observe(self, facts: Facts | PhasedFacts | None, reading: Reading) -> None:
        """Process the values of one step, in order, once they are on the host."""
        self._row = self._record_fault(facts, reading, self._row)
        _, own, _ = self._find_fault(reading)
        self._trail.append({key: getattr(own, key) for key in ("attempted", "loss", "grad_norm", "lr", "scale")})

    def look_early(self, seen: Sequence[tuple[Any, Reading]]) -> None:
        """Record faults among steps that are observed later, before the weights change."""
        row = self._row
        for facts, reading in seen:
            row = self._record_fault(None if isinstance(facts, Reading) else facts, reading, row)

    def _record_fault(self, facts: Facts | PhasedFacts | None, reading: Reading, row: str) -> str:
        """Write a capsule for the first fault of its kind in a row, and return its kind."""
        phase, own, cause = self._find_fault(reading)
        is_new = cause != row and reading.attempted > self._newest
        # The first faulty rank writes; rank 0 if only the summed gradients are not finite.
        is_writer = self.context.rank in (None, min(own.faulty_ranks, default=0))
        if cause and is_new and is_writer:
            self._newest = reading.attempted
            found = facts.phases[phase] if isinstance(facts, PhasedFacts) else facts
            rng = {} if found is None or self.context.is_whole(own) else found.rng
            kept = None if self.context.is_whole(reading) else dict(self._windows).get(reading.attempted)
            window = self.context.load_window(reading) if kept is None else kept  # None if that is not possible
            self._write(cause, own, phase, window=window, rng=rng)
        return cause

    def _record_exception(self, error: Exception, window: Sequence[Any]) -> None:
        """Write a capsule of a step that raised. It was undone: weights and generators are those it began with."""
        if isinstance(error, (HalfstepError, torch.OutOfMemoryError)):  # their messages state the cause
            return
        reading = Reading(attempted=self.step.attempted, loss=float("nan"), grad_norm=float("nan"), is_bad=True,
                          is_spike=False, is_empty=False, is_ruined=False, scale=float(self.step.scaler.value),
                          committed=int(self.step.committed), lr=float("nan"))  # fmt: skip
        self._write("exception", reading, "", window=window, rng=read_rng_state(self.step.device),
                    reason=f"{type(error).__name__}: {summarise_error(error)}")  # fmt: skip

    def _find_fault(self, reading: Reading) -> tuple[str, Reading, str]:
        """Return the first phase at fault, its reading, and the kind of fault; empty for a good step or a routine
        overflow."""
        parts = split_phases(reading)
        kinds = {name: self._classify(part) for name, part in parts.items()}
        phase = next((name for name, kind in kinds.items() if kind), next(iter(parts)))
        return phase, parts[phase], kinds[phase]

    def _classify(self, reading: Reading) -> str:
        if reading.is_spike:
            return "spike" if self.spikes else ""
        if not reading.is_bad or reading.is_empty:
            return ""
        scaler = self.step.scaler
        if not scaler.enabled:
            return "non-finite"
        # The scaler lowers the scale after an overflow: routine while the scale is high.
        if reading.scale > scaler.low:
            return ""
        return "overflow at the floor" if reading.scale <= scaler.options.min_scale else "overflow at a low scale"

    def _write(
        self,
        kind: str,
        reading: Reading,
        phase: str,
        *,
        window: Sequence[Any] | None,
        rng: Mapping[str, Tensor],
        reason: str = "",
    ) -> None:
        # The first faults matter most, and later ones are their consequence.
        if window is None or len(capsule.list_capsules(self.folder)) - self._num_earlier >= self.most:
            return None
        fits = capsule.count_state_bytes(self.model) <= capsule.MOST_BYTES
        ids, ema = list(reading.sample_ids), self.step.ema
        # The current weights, not those of the step: `commits_after` counts the commits between them.
        state = capsule.collect_state(self.model)
        bad_averages = [] if ema is None else [f"average of {name}" for name in find_non_finite(ema.state_dict())]
        own = next(iter(self.step.steps.values())) if isinstance(self.step, PhasedStep) else self.step
        own = self.step.steps[phase] if isinstance(self.step, PhasedStep) and phase else own
        committed = (own if phase else self.step).committed
        about = {
            "reason": reason or reading.reason or f"the loss jumped to {reading.loss:.4g}",
            "kind": kind,
            "step": reading.attempted,
            "phase": phase,
            **{k: getattr(reading, k) for k in ("epoch", "window", "loss", "grad_norm", "scale", "lr", "committed")},
            "sample_ids": ids,
            "sample_names": self.context.find_names(ids),
            "commits_after": max(int(committed) - reading.committed, 0) + (not reading.is_bad),
            "weights": "state.safetensors" if fits else self.context.find_checkpoint(),
            "trail": list(self._trail),
            "start": self._start,
            "not_finite": find_non_finite(state) + bad_averages,
            "layout": {name: list(value.shape) for name, value in state.items()},  # to recognise a changed model
            "update": record_update(own, self.model),
            **({"watch": self.watches[phase].to_json()} if phase in self.watches else {}),
            **self.context.describe_share(reading),
            **self.context.about,
        }
        name = f"{reading.attempted:08d}"
        # A resumed run repeats steps after its checkpoint, and replaces their capsules; a loop takes a free name.
        paths = (self.folder / (f"{name}-{n}" if n else name) for n in itertools.count())
        path = next(one for one in paths if self.context.config or not one.exists())
        try:
            held = state if fits else {}
            capsule.write_capsule(path, about, window=window, rng=rng, state=held, config=self.context.config)
        except HalfstepError as error:  # a by-product: the run itself goes on
            return self.notice(f"{error.what} ({error.why})")
        is_run = bool(self.context.config)
        replay = suggest_command("replay", path) if is_run else self.replay.format(str(path))
        return self.notice(f"step {reading.attempted} was saved; find the cause with: {replay}")


def find_non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with NaN or inf; -inf alone is a mask."""
    numbers = ((name, value) for name, value in tensors.items() if has_fractions(value))
    return [name for name, value in numbers if not ((value == -math.inf) | value.isfinite()).all()]


@torch.no_grad()
def _measure_sizes(model: nn.Module) -> dict[str, float]:
    """Return the root mean square of each weight and buffer when training began."""
    numbers = {name: value for name, value in capsule.collect_state(model).items() if has_fractions(value)}
    if not numbers:
        return {}
    sizes = torch.stack([value.abs().float().square().mean().sqrt().cpu() for value in numbers.values()])
    return dict(zip(numbers, sizes.tolist(), strict=True))
