"""What an iteration of several phases found: the facts of each phase that ran, and of the iteration as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.step.facts import Facts, Reading, to_host


@dataclass(frozen=True, kw_only=True, slots=True)
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
        self._committed = to_host(committed.clone())
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
        return PhasedReading(
            **dataclasses.asdict(first)
            | {
                "is_bad": any(reading.is_bad for reading in own.values()),
                "is_spike": any(reading.is_spike for reading in own.values()),
                "is_empty": all(reading.is_empty for reading in own.values()),
                "is_ruined": any(reading.is_ruined for reading in own.values()),
                "is_asked": any(reading.is_asked for reading in own.values()),
                "committed": int(self._committed),
                "epoch": self.epoch,
                "window": self.window,
            },
            phases=own,
        )


def parts_of(reading: Reading) -> Mapping[str, Reading]:
    """The readings of the phases by name; one without phases is its own, without a name."""
    return reading.phases if isinstance(reading, PhasedReading) else {"": reading}


def reading_from(state: Mapping[str, Any]) -> Reading:
    """What `asdict` made of a reading, after it was stored."""
    own = {
        **state,
        **{name: tuple(state.get(name, ())) for name in ("sample_ids", "faulty_ranks", "waits_s", "fallen_ranks")},
    }
    if "phases" not in own:
        return Reading(**own)
    return PhasedReading(**own | {"phases": {name: reading_from(part) for name, part in own["phases"].items()}})
