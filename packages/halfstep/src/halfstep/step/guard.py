"""The guard. The device drops bad steps itself; the guard decides from their facts whether to continue.

It reads the facts of exactly 2 steps ago, on every device and in every mode, so that runs are reproducible and the host
waits for a step that is long finished, never for the one in flight.

    fp16      an overflow is routine: the scale halves. N in a row with the scale at its floor: STOP.
    the rest  a non-finite step is a fault: skipped, reported with its samples; after `max_consecutive` in a row
              ROLLBACK (weights back, data forward, learning rate cut, a limited number of times) or STOP.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError, format_count
from halfstep.step.facts import Facts, PhasedFacts, Reading, load_reading

LAG = 2  # steps between a step and the guard's look at it: enough for the host to stay ahead of the device


COUNTERS = ("num_faults", "num_at_floor", "num_rollbacks", "num_skipped", "first_fault_committed")


class Action(Enum):
    CONTINUE = "continue"
    ROLLBACK = "rollback"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    action: Action
    reason: str = ""
    fix: str = ""
    first_fault_committed: int = 0
    """Committed steps when the first fault of the series happened: a rollback goes to well before it."""


CONTINUE = Verdict(action=Action.CONTINUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardOptions:
    on_fault: Literal["stop", "rollback"] = "stop"
    max_consecutive: int = 5
    margin: int = 50  # committed steps that a rollback keeps away from the first fault
    max_rollbacks: int = 3
    lr_cut: float = 0.5
    snapshot_every: int = 100  # steps between two copies that a rollback may go back to
    floor_patience: int = 10  # overflows in a row at the smallest loss scale that end an fp16 run

    def __post_init__(self) -> None:
        has_counts = self.max_consecutive >= 1 and self.floor_patience >= 1
        if self.on_fault not in ("stop", "rollback") or not has_counts or not 0 < self.lr_cut <= 1:
            raise ConfigError(
                f"the guard cannot work with these settings: {self}",
                fix="on_fault: stop or rollback, counts of at least 1, and 0 < lr_cut <= 1",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What helps against several bad steps in a row, as settings of runs, arguments of hs.Step or of another trainer,
    which has neither a rollback nor a floor of the scale."""

    overflow: str
    clip: str
    rollback: str = ""
    scale_floor: str = ""
    no_snapshot_reason: str = ""  # follows the reason of a rollback that found no snapshot
    no_snapshot_fix: str = 'a smaller "margin" in guard={...}, or a lower learning rate: no copy is old enough'


ADVICE_FOR_RUNS = Advice(
    overflow="--precision bf16",
    clip="train.clip_norm",
    rollback="guard.on_fault=rollback",
    scale_floor="scaler.min_scale",
    no_snapshot_reason=", and no snapshot is old enough",
    no_snapshot_fix="set a smaller guard.margin, or a lower learning rate",
)
ADVICE_FOR_LOOPS = Advice(
    overflow='precision="bf16"',
    clip="clip_norm=1.0",
    rollback='guard={"on_fault": "rollback"}',
    scale_floor='scaler={"min_scale": ...}',
)


Observer = Callable[[Facts | PhasedFacts | None, Reading], None]
"""Takes a step's facts and their reading. Facts are None if a checkpoint was resumed before the step was judged."""


class Guard:
    def __init__(
        self,
        options: GuardOptions | None = None,
        *,
        scaling: bool,
        min_scale: float = 1.0,
        advice: Advice = ADVICE_FOR_RUNS,
    ) -> None:
        self.options = options or GuardOptions()
        self.scaling, self.min_scale, self.advice = scaling, min_scale, advice
        self.observers: list[Observer] = []
        """Called with each step in order, before it is judged. The values are on the host, so there is no wait."""
        self.complete: Callable[[Reading], Reading] = lambda reading: reading
        """Add what other ranks know of a step."""
        self.pending: deque[Facts | PhasedFacts | Reading] = deque()
        self.make_again: Callable[[list[Any]], list[Any]] | None = None
        """With a hold (facts.py): clear it, repeat the steps of these facts, and return their new facts."""
        self.look_early: Callable[[list[tuple[Any, Reading]]], None] = lambda seen: None
        """See steps up to a fault before it is judged, if held steps have to be repeated sooner."""
        self._let_go = -1  # the last step whose hold was cleared
        self.num_faults = self.num_at_floor = self.num_rollbacks = self.num_skipped = 0
        self.first_fault_committed = 0
        self._pardoned = 0

    def watch(self, facts: Facts | PhasedFacts) -> Verdict:
        """Take the facts of the newest step; judge those of `LAG` steps ago."""
        self.pending.append(facts)
        return self._judge_oldest() if len(self.pending) > LAG else CONTINUE

    def drain(self) -> Verdict:
        while self.pending:
            verdict = self._judge_oldest()
            if verdict.action is not Action.CONTINUE:
                return verdict
        return CONTINUE

    def note_rollback(self) -> None:
        """Count a rollback, and forget steps in flight: they belong to the abandoned path."""
        self.num_rollbacks += 1
        self.acknowledge()

    def acknowledge(self) -> None:
        """Start counting faults again from the next step, after a verdict was acted on."""
        self.num_faults = self.num_at_floor = 0
        self.pending.clear()

    def pardon(self, attempted: int) -> None:
        """Do not count bad steps before this number: not the training is at fault, but the code that made them."""
        self.num_faults, self._pardoned = 0, attempted

    @property
    def rate_factor(self) -> float:
        return self.options.lr_cut**self.num_rollbacks

    def _judge_oldest(self) -> Verdict:
        oldest = self.pending.popleft()
        found = self.complete(oldest if isinstance(oldest, Reading) else oldest.read())
        # `holds` is internal: observers see the same with and without a hold.
        reading = replace(found, holds=False) if found.holds else found
        for observe in self.observers:
            observe(None if isinstance(oldest, Reading) else oldest, reading)
        self._make_held_again(found)
        return self.judge(reading)

    def release_held(self) -> None:
        """Repeat all held steps now, before the state is stored, copied or read. Nothing is judged yet."""
        if self.make_again is None:
            return
        seen: list[Facts | PhasedFacts | Reading] = []
        while self.pending:
            seen.append(self.pending.popleft())
            readings = [item if isinstance(item, Reading) else item.read() for item in seen]
            if self._is_held_for(readings[-1]):
                self.look_early(list(zip(seen, readings, strict=True)))
                self._make_held_again(readings[-1])
        self.pending = deque(seen)

    def _is_held_for(self, reading: Reading) -> bool:
        return self.make_again is not None and reading.holds and reading.attempted > self._let_go

    def _make_held_again(self, reading: Reading) -> None:
        if self.make_again is not None and self._is_held_for(reading):
            self._let_go = reading.attempted
            self.pending = deque(self.make_again(list(self.pending)))

    def judge(self, reading: Reading) -> Verdict:
        if not reading.is_bad:
            self.num_faults = self.num_at_floor = 0
            return CONTINUE
        self.num_skipped += 1
        if reading.is_empty or reading.attempted < self._pardoned:
            return CONTINUE
        is_overflow = self.scaling and not (reading.is_spike or reading.is_spoiled)
        return self._judge_overflow(reading) if is_overflow else self._judge_fault(reading)

    def _judge_overflow(self, reading: Reading) -> Verdict:
        self.num_at_floor = self.num_at_floor + 1 if reading.scale <= self.min_scale else 0
        if self.num_at_floor < self.options.floor_patience:
            return CONTINUE
        return Verdict(
            action=Action.STOP,
            reason=f"{format_count(self.num_at_floor, 'step')} in a row overflowed with the loss scale at its floor of "
            f"{self.min_scale:g} (step {reading.attempted}: {reading.reason})",
            fix=f"{self._explain_floor(reading)} {self.advice.overflow} or a lower learning rate"
            f"{_format_samples(reading)}",
        )

    def _explain_floor(self, reading: Reading) -> str:
        if math.isfinite(reading.loss):
            lower = f"let the scale fall further ({self.advice.scale_floor}), which a loss summed over pixels needs"
            lower = lower if self.advice.scale_floor else "use the mean over pixels or tokens as loss, not the sum"
            return f"the loss is finite, but its gradients are not: {lower}; or try"
        return "the model itself produces infinities: try"

    def _judge_fault(self, reading: Reading) -> Verdict:
        if self.num_faults == 0:
            self.first_fault_committed = reading.committed
        self.num_faults += 1
        if self.num_faults < self.options.max_consecutive:
            return CONTINUE
        faults = format_count(self.num_faults, "bad step")
        reason = f"{faults} in a row, the last one in step {reading.attempted}: {reading.reason}"
        if self.options.on_fault == "rollback" and self.num_rollbacks < self.options.max_rollbacks:
            return Verdict(action=Action.ROLLBACK, reason=reason, first_fault_committed=self.first_fault_committed)
        tried = f" after {self.num_rollbacks} rollbacks" if self.num_rollbacks else ""
        if reading.is_spoiled:
            fix = "give the optimizer an eps above 0 (1e-8 is usual): 0 / 0 is NaN wherever a gradient stays 0"
            return Verdict(action=Action.STOP, reason=reason + tried, fix=fix)
        can_go_back = self.options.on_fault == "stop" and self.advice.rollback
        going_back = f", or let halfstep roll back automatically with {self.advice.rollback}" if can_go_back else ""
        return Verdict(
            action=Action.STOP,
            reason=reason + tried,
            fix=f"lower the learning rate, clip gradients ({self.advice.clip}){going_back}{_format_samples(reading)}",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return counters and facts not yet judged, as numbers: a resumed run judges them at the same step."""
        pending = [item if isinstance(item, Reading) else item.read() for item in self.pending]
        # let_go() came before, and a request to stop ends with this process: it must not stop the resumed run.
        plain = [asdict(replace(reading, holds=False, is_asked=False)) for reading in pending]
        return {"pending": plain, **{name: getattr(self, name) for name in COUNTERS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in ("pending", *COUNTERS) if name not in state]
        if missing:
            raise CheckpointError(
                f"the guard's stored state lacks {', '.join(missing)}", fix="pass what state_dict() returned"
            )
        self.pending, self._pardoned = deque(map(load_reading, state["pending"])), 0
        for name in COUNTERS:
            setattr(self, name, int(state[name]))


def _format_samples(reading: Reading, most: int = 8) -> str:
    """Return the sample ids of a step for a message, if its batches hold them."""
    ids = reading.sample_ids
    shown = ", ".join(map(str, ids[:most])) + (", ..." if len(ids) > most else "")
    return f"; samples of the last step: {shown}" if ids else ""


# --- loss spikes ---


MAD_TO_SIGMA = 1.4826  # for normal data the standard deviation is 1.4826 times the median absolute deviation
FLOOR = 0.01  # of the deviation, as a share of the median


MOST_UNREAD = 64  # steps whose facts nothing has read


class SpikeMeter:
    """Median and MAD of the last `size` committed losses: robust, so that one spike does not hide the next.

    If spikes are dropped, the device judges them. If they are only reported, the host judges them when it reads the
    facts, in the order of the steps: that saves about 20 small kernels per step.
    """

    def __init__(self, device: torch.device, *, threshold: float = 10.0, size: int = 64, skips: bool = False) -> None:
        self.threshold, self.size, self.skips = threshold, size, skips
        self.ring = torch.zeros(size, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.on_host = HostRing([0.0] * size, 0)
        self.unread: deque[Facts] = deque()  # steps that the host's ring does not know yet

    # --- on the device ---

    def judge(self, loss: Tensor) -> Tensor:
        """Return whether the loss is more than `threshold` robust deviations above the median of a full ring."""
        median = self.ring.median()
        deviation = MAD_TO_SIGMA * (self.ring - median).abs().median()
        # Without a floor of 1 % a loss that has converged to the last digit would make every small change a spike.
        far = loss - median > self.threshold * torch.maximum(deviation, FLOOR * median.abs())
        return far & (self.count >= self.size)

    def remember(self, loss: Tensor, bad: Tensor) -> None:
        slot = torch.remainder(self.count, self.size).view(1)
        kept = self.ring.index_select(0, slot)
        self.ring.index_copy_(0, slot, torch.where(bad, kept, loss.detach().float()))
        self.count.add_(~bad)

    # --- on the host ---

    def follow(self, facts: Facts) -> None:
        """Take a step that was sent to the host. Steps that are long over are read, so that few are kept."""
        self.unread.append(facts)
        if len(self.unread) > MOST_UNREAD:
            self.unread[0].read()

    def read_before(self, facts: Facts) -> bool:
        """Read unread steps before this one: each loss is compared with those before it. Return False for a step that
        is not part of the history any more, since a state was loaded."""
        if facts not in self.unread:
            return False
        while self.unread[0] is not facts:
            self.unread[0].read()
        self.unread.popleft()
        return True

    def observe(self, loss: float, *, is_bad: bool) -> bool:
        """Return whether a step's loss is a spike, and remember it unless the step was dropped."""
        if is_bad:
            return False
        is_spike = self.on_host.count >= self.size and self.on_host.is_far(loss, self.threshold)
        self.on_host.remember(loss)
        return is_spike

    # --- state ---

    def state_dict(self) -> dict[str, Tensor]:
        if self.skips:
            return {"ring": self.ring.clone(), "count": self.count.clone()}
        if self.unread:
            self.unread[-1].read()
        return {"ring": self.ring.new_tensor(self.on_host.losses), "count": self.count.new_tensor(self.on_host.count)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.unread.clear()
        if state["ring"].shape != self.ring.shape:  # another guard.spike_window: the meter starts over
            state = {"ring": torch.zeros(self.size), "count": torch.tensor(0)}
        if self.skips:
            self.ring.copy_(state["ring"])
            self.count.copy_(state["count"])
        else:
            self.on_host = HostRing(state["ring"].tolist(), int(state["count"]))


class HostRing:
    """The last losses in the order of steps, and sorted."""

    def __init__(self, losses: list[float], count: int) -> None:
        self.losses, self.count, self.ordered = losses, count, sorted(losses)

    def is_far(self, loss: float, threshold: float) -> bool:
        median = self.ordered[(len(self.ordered) - 1) // 2]  # as torch's: the lower one of two
        above = loss - median
        if above <= threshold * FLOOR * abs(median):
            return False
        deviations = sorted(abs(known - median) for known in self.ordered)
        return above > threshold * MAD_TO_SIGMA * deviations[(len(deviations) - 1) // 2]

    def remember(self, loss: float) -> None:
        position = self.count % len(self.losses)
        del self.ordered[bisect_left(self.ordered, self.losses[position])]
        insort(self.ordered, loss)
        self.losses[position] = loss
        self.count += 1
