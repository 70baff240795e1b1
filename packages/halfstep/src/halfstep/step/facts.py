"""Facts: what one step found, as device tensors. Reading them is one wait, for this step alone."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.step.flat import get_dtype

if TYPE_CHECKING:
    from halfstep.step.guard import SpikeMeter  # which reads facts


# Not frozen: to make a frozen one takes three times as long, in every step.
@dataclass(kw_only=True, slots=True)
class Reading:
    attempted: int
    loss: float
    grad_norm: float
    is_bad: bool
    is_spike: bool
    is_empty: bool
    is_ruined: bool  # something that forward writes, such as a BatchNorm statistic, was no longer finite
    is_spoiled: bool = False  # an optimizer wrote weights that are not finite, from finite gradients
    scale: float  # the loss scale this step ran with; 1 without scaling
    committed: int  # committed steps after this one
    lr: float
    sample_ids: tuple[int, ...] = ()
    epoch: int | None = None
    """The epoch it belongs to, and its window in that epoch; None in a loop that has none."""
    window: int | None = None
    is_asked: bool = False  # whether a rank was asked to stop
    faulty_ranks: tuple[int, ...] = ()  # ranks whose own loss or buffers were not finite
    holds: bool = False  # whether the steps after it were held (see Hold)
    fell_to: Slower | Literal[""] = ""
    """The slowest mode that a rank fell back to on its own; empty if none did."""
    fallen_ranks: tuple[int, ...] = ()  # the ranks that did
    rates: tuple[float, ...] = ()  # the learning rate of each rank

    @property
    def reason(self) -> str:
        """Return why the step was dropped; empty for a committed one."""
        if not self.is_bad:
            return ""
        where = f" (rank {', '.join(map(str, self.faulty_ranks))})" if self.faulty_ranks else ""
        if self.is_empty:
            return "empty window"
        if self.loss != self.loss or abs(self.loss) == float("inf"):
            return f"loss is {self.loss}{where}"
        if self.grad_norm != self.grad_norm or abs(self.grad_norm) == float("inf"):
            return f"gradient norm is {self.grad_norm}{where}"
        if self.is_spoiled:
            return "the optimizer wrote weights that are not finite, from finite gradients"
        return f"a buffer (BatchNorm statistics) is not finite{where}" if self.is_ruined else "loss spike"


Slower = Literal["compile", "eager"]  # a mode of running that is left where a faster one failed
FELL: dict[Slower, int] = {"compile": 8, "eager": 16}
"""The flag of a rank that fell back to that mode on its own."""
FAULTY = 3  # the flags of a rank that mean a fault: loss or buffers not finite
PER_RANK = 2  # numbers that each rank sends in a step: its flags and its learning rate
VERDICT_FLAGS = ("bad", "spike", "empty", "ruined", "spoiled")
FLAGS = (*VERDICT_FLAGS, "holds")


class Facts:
    """One step's findings as device tensors, and what identifies the step: its samples, its position in the data, and
    the generator states before its forward pass (`rng`). With its facts a step can be repeated.

    A flag that no part of this step can set is `never`, one constant for all of them: it takes no kernels."""

    def __init__(
        self,
        *,
        attempted: int,
        loss: Tensor,
        grad_norm: Tensor,
        scale: Tensor | float,
        never: Tensor,
        spikes: SpikeMeter | None = None,
    ) -> None:
        self.attempted = attempted
        self.loss, self.grad_norm, self.scale = loss, grad_norm, scale
        self.never = self.bad = self.spike = self.empty = self.ruined = self.spoiled = never
        self.held = self.holds = never
        """Not committed because of an earlier fault; at fault itself, so that later ones are held."""
        self.spikes = spikes
        """Finds spikes when the facts are read; None if the device has found them."""
        self.factor: Tensor | None = None
        """The factor that the optimizers still have to apply to gradients: unscaling and clipping in one."""
        self.found_inf: Tensor | None = None  # `bad` as a number, once the step is being committed
        self.ids: tuple[Tensor, ...] = ()
        self.rng: dict[str, Tensor] = {}
        self.epoch: int | None = None
        self.window: int | None = None
        self.said: Tensor | None = None
        """With several ranks: how many were asked to stop, then flags and rates of each (ranks.py)."""
        self.wait: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize
        self.packed: Tensor | None = None  # what the device knows, in one tensor, once the step is committed
        self._fields: tuple[str, ...] = ()  # the entries of `packed`
        self._known: dict[str, float] = {}  # fields that the host knew when it packed
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._reading: Reading | None = None

    def spoil(self, verdict: Tensor) -> None:
        """Take the verdict of the optimizers, which may have written non-finite numbers."""
        self.spoiled = verdict & ~self.bad
        self.holds = self.holds | self.spoiled & ~self.held
        self.bad, self.found_inf = verdict, None

    def pack(self, committed: Tensor, low_bits: Tensor, lr: Tensor | float) -> None:
        """Gather on the device what only it knows, exactly and in few kernels: in fp32, with the low bits of the count
        as they are (enough for 2**31 steps), or in fp64 if a number is wider than fp32."""
        sent, self._known = {"loss": self.loss, "grad_norm": self.grad_norm}, {}
        for name, number in (("scale", self.scale), ("lr", lr)):
            if isinstance(number, Tensor):
                sent[name] = number
            else:
                self._known[name] = number
        is_wide = self.said is not None or torch.float64 in map(get_dtype, sent.values())
        for name in FLAGS:
            if (flag := getattr(self, name)) is not self.never:
                sent[name] = flag
        sent["bad"] = self.bad if self.found_inf is None else self.found_inf
        kind = torch.float64 if is_wide else torch.float32
        values = [value if value.dtype is kind else value.to(kind) for value in sent.values()]
        self._fields = (*sent, "committed")
        self.packed = torch.stack([*values, committed.double() if is_wide else low_bits])
        if self.said is not None:
            self.packed = torch.cat([self.packed, self.said])

    @property
    def is_packed(self) -> bool:
        """True once the step was committed or dropped everywhere."""
        return self.packed is not None

    def copy_for_replay(self, attempted: int) -> Facts:
        """Return the facts of a replayed step, which the graph wrote into these tensors; send them before the next."""
        facts = Facts.__new__(Facts)
        vars(facts).update(vars(self))
        facts.attempted, facts.factor = attempted, None
        return facts

    def send(self, host: Tensor | None = None, event: torch.cuda.Event | None = None) -> None:
        """Start the copy to the host, into pinned memory that the caller may use again after `keep`."""
        assert self.packed is not None
        self._host = start_copy_to_host(self.packed) if host is None else host.copy_(self.packed, non_blocking=True)
        self.ids = tuple(start_copy_to_host(ids.flatten()) for ids in self.ids)
        if self.loss.is_cuda:
            self._event = event or torch.cuda.Event()
            # Of the tensors' device, which need not be the current one; without a number it takes 30 us to look up.
            self._event.record(torch.cuda.current_stream(self.packed.get_device()))
        if self.spikes is not None:
            self.spikes.follow(self)

    def keep(self) -> None:
        """Copy what was sent, if it was not read yet: the host's memory is used again."""
        if self._reading is None and self._host is not None and self._event is not None:
            self.wait(self._event)
            self._host, self._event = self._host.clone(), None

    def read(self) -> Reading:
        """Wait for this step, and for this step only."""
        if self._reading is None:
            is_measured = self.spikes is not None and self.spikes.read_before(self)
            found = self._read_alone()
            if is_measured and self.spikes is not None and self.spikes.observe(found.loss, is_bad=found.is_bad):
                found = dataclasses.replace(found, is_spike=True)
            self._reading = found
        return self._reading

    def _read_alone(self) -> Reading:
        if self._host is None:
            raise ConfigError(
                "these facts cannot be read yet",
                why="they are copied to the host when the step is committed",
                fix="call step.commit(facts) first",
            )
        if self._event is not None:
            self.wait(self._event)
        values = self._host.tolist()
        found = self._known | dict(zip(self._fields, values, strict=False))
        if self._host.dtype is torch.float32:
            found["committed"] = self._host.view(torch.int32).tolist()[-1]
        known: dict[str, Any] = {name: found[name] for name in ("loss", "grad_norm", "scale", "lr")}
        known |= {f"is_{name}": bool(found.get(name)) for name in VERDICT_FLAGS}
        reading = Reading(
            attempted=self.attempted,
            **known,
            committed=int(found["committed"]),
            sample_ids=tuple([int(i) for ids in self.ids for i in ids.tolist()]),
            epoch=self.epoch,
            window=self.window,
            holds=bool(found.get("holds")),
        )
        return reading if self.said is None else _add_ranks(reading, values[len(self._fields) :])


class Outbox:
    """Send facts to the host through pinned memory and events that are reused: new ones take long to create."""

    NUM_SENT = 4  # facts are read two steps later

    def __init__(self) -> None:
        self.sent: deque[tuple[Facts, Tensor, torch.cuda.Event]] = deque()

    def send(self, facts: Facts) -> None:
        packed = facts.packed
        assert packed is not None
        if not packed.is_cuda:
            return facts.send()
        host: Tensor | None = None
        if len(self.sent) == self.NUM_SENT:
            last, host, event = self.sent.popleft()
            last.keep()
        if host is None or (host.shape, host.dtype) != (packed.shape, packed.dtype):
            host, event = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True), torch.cuda.Event()
        self.sent.append((facts, host, event))
        return facts.send(host, event)


def _add_ranks(reading: Reading, said: Sequence[float]) -> Reading:
    asked, *of_ranks = said
    num_ranks = len(of_ranks) // PER_RANK
    numbers, rates = (of_ranks[k * num_ranks : (k + 1) * num_ranks] for k in range(PER_RANK))
    flags = [int(number) for number in numbers]
    fell_to = find_slowest_mode(flags)
    return dataclasses.replace(
        reading,
        is_asked=asked > 0,
        faulty_ranks=tuple(rank for rank, own in enumerate(flags) if own & FAULTY),
        rates=tuple(rates),
        fell_to=fell_to,
        fallen_ranks=tuple(rank for rank, own in enumerate(flags) if fell_to and own & FELL[fell_to]),
    )


def find_slowest_mode(said: Sequence[int]) -> Slower | Literal[""]:
    """Return the slowest mode that a rank fell back to, by the ranks' flags."""
    modes: tuple[Slower, ...] = ("eager", "compile")
    return next((mode for mode in modes if any(flags & FELL[mode] for flags in said)), "")


def start_copy_to_host(values: Tensor) -> Tensor:
    """Start an asynchronous copy; wait for an event recorded after it before reading."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def read_rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the generators that a forward pass draws from, without a wait."""
    state = {"cpu": torch.default_generator.get_state()}
    if device.type == "cuda":
        is_ready = torch.cuda.is_initialized() and device.index is not None
        # The generator itself: torch.cuda.get_rng_state takes several times as long to find it.
        generator = torch.cuda.default_generators[device.index] if is_ready else None
        state["cuda"] = torch.cuda.get_rng_state(device) if generator is None else generator.get_state()
    return state


def restore_rng(state: dict[str, Tensor], device: torch.device) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# --- an iteration of several phases ---


@dataclass(kw_only=True, slots=True)
class PhasedReading(Reading):
    """An iteration on the host: numbers of the first phase that ran, verdicts of any."""

    phases: Mapping[str, Reading]
    """Those that ran, in their order; `attempted` counts iterations, `committed` the steps of the phase."""

    @property
    def reason(self) -> str:
        return "; ".join(f"{own.reason} ({name})" for name, own in self.phases.items() if own.is_bad)


class PhasedFacts:
    """The facts of the phases that were due in one iteration, sent to the host with its counter."""

    def __init__(self, attempted: int, committed: Tensor, phases: Mapping[str, Facts]) -> None:
        self.attempted, self.phases = attempted, phases
        self.epoch: int | None = None
        self.window: int | None = None
        self._committed = start_copy_to_host(committed.clone())
        self._event: torch.cuda.Event | None = None
        if committed.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> PhasedReading:
        """Wait for this iteration, and for this one only."""
        if self._event is not None:
            next(iter(self.phases.values())).wait(self._event)
        own = {name: dataclasses.replace(f.read(), attempted=self.attempted) for name, f in self.phases.items()}
        first = next(iter(own.values()))
        merged = dataclasses.asdict(first)
        for name in ("is_bad", "is_spike", "is_ruined", "is_spoiled", "is_asked"):
            merged[name] = any(getattr(reading, name) for reading in own.values())
        merged["is_empty"] = all(reading.is_empty for reading in own.values())
        merged |= {"committed": int(self._committed), "epoch": self.epoch, "window": self.window}
        return PhasedReading(**merged, phases=own)


def split_phases(reading: Reading) -> Mapping[str, Reading]:
    """Return the readings of the phases by name; a reading without phases as one with an empty name."""
    return reading.phases if isinstance(reading, PhasedReading) else {"": reading}


def load_reading(state: Mapping[str, Any]) -> Reading:
    """Return a reading from its stored `asdict` form."""
    lists = ("sample_ids", "faulty_ranks", "fallen_ranks", "rates")
    own = {**state, **{name: tuple(state[name]) for name in lists}}
    if "phases" not in own:
        return Reading(**own)
    return PhasedReading(**own | {"phases": {name: load_reading(part) for name, part in own["phases"].items()}})


# --- hold ---
# After a fault nothing commits until the host has seen it, so that a capsule holds the exact state of that step. The
# host learns of a step two steps later. While this device flag is set, those two are dropped like bad ones, and leave
# the loss scale unchanged as well. The host then clears the flag and repeats them.


class Hold:
    """The sticky flag of one step."""

    def __init__(self, device: torch.device, *, low: float | None = None) -> None:
        self.low = low  # with loss scaling an overflow above this scale is routine and sets no hold
        self.flag = torch.zeros((), dtype=torch.bool, device=device)

    def judge(self, facts: Facts, fault: Tensor) -> None:
        """Hold this step where an earlier one was at fault; note whether this one is."""
        facts.held = self.flag.clone()
        is_fault = fault & ~facts.empty
        if self.low is not None:
            is_fault = is_fault & (facts.scale <= self.low)
        facts.holds = is_fault & ~facts.held
        facts.bad = facts.bad | facts.held

    def remember(self, facts: Facts) -> None:
        self.flag.logical_or_(facts.holds)

    def release(self) -> None:
        self.flag.zero_()
