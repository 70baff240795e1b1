"""The engine of several phases: one window through each that is due, in the fastest mode that works for it.

Each phase has an engine of its own, with its own compiled code and graphs; the graphs share one memory pool. Which
phases are due is decided on the host, by the number of iterations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfstep.run.assemble import Assembly
from halfstep.run.engine import FROM_FASTEST, Count, Engine, Graphs, prepared_window
from halfstep.run.phases import AssembledPhase
from halfstep.step.facts import PhasedFacts, Reading, split_phases
from halfstep.step.phases import PhasedStep
from halfstep.tune.modes import Batch, Level, Mode, Notice

UNCOMPILED = "runs eager: its loss takes gradients itself, which the compiler cannot follow"


class PhasedEngine:
    def __init__(
        self,
        parts: Assembly,
        mode: Mode,
        notice: Notice,
        count: Count = lambda outputs, batch: None,
        before_compiling: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts, self.asked, self.notice = parts, mode, notice
        self.graphs = Graphs()
        self.counts = any(phase.is_counted for phase in parts.phases)
        self.engines = {
            own.phase.name: self._engine_of(own, count if own.is_counted else (lambda outputs, batch: None),
                                            before_compiling)
            for own in parts.phases
        }  # fmt: skip
        self._has_said = False

    def _engine_of(self, own: AssembledPhase, count: Count, before_compiling: Callable[[], None]) -> Engine:
        parts = dataclasses.replace(self.parts, step=own.step, region=own.region, eager=own.eager, phases=())
        mode: Mode = self.asked if own.phase.compiles else "eager"
        return Engine(parts, mode, self._notice_of(own.phase.name), count, before_compiling, self.graphs)

    def _notice_of(self, name: str) -> Notice:
        def say(text: str, level: Level) -> None:
            self.notice(f"{name}: {text}", level)

        return say

    @property
    def step_of_all(self) -> PhasedStep:
        assert isinstance(self.parts.step, PhasedStep)
        return self.parts.step

    @property
    def mode(self) -> Mode:
        """The slowest that a phase has come to run in; those that are never compiled do not count."""
        modes = [self.engines[own.phase.name].mode for own in self.parts.phases if own.phase.compiles]
        return max(modes, key=FROM_FASTEST.index, default=self.asked)

    @property
    def pieces(self) -> int:
        return max(engine.pieces for engine in self.engines.values())

    def __call__(self, window: list[Batch], sizes: Sequence[int] = ()) -> PhasedFacts:
        return self.step(prepared_window(self.parts, window, sizes), sizes)

    def step(self, prepared: list[Batch], sizes: Sequence[int] = ()) -> PhasedFacts:
        self._say_once()
        iteration = self.parts.step.attempted
        due = [own.phase.name for own in self.parts.phases if own.phase.is_due(iteration)]
        return self.step_of_all.close({name: self.engines[name].step(prepared, sizes) for name in due})

    def follow(self, reading: Reading) -> None:
        """Each phase what one process could not compile or capture of it."""
        for name, own in split_phases(reading).items():
            self.engines[name].follow(own)

    def forget_graphs(self) -> None:
        for engine in self.engines.values():
            engine.forget_graphs()

    def stored(self) -> dict[str, Any]:
        own = {name: engine.stored() for name, engine in self.engines.items()}
        return {"pieces": self.pieces, "mode": self.mode, "compiled_shapes": [], "phases": own}

    def go_on(self, state: Mapping[str, Any], *, is_same: bool) -> None:
        for name, engine in self.engines.items():
            engine.go_on(state["phases"][name], is_same=is_same)

    def _say_once(self) -> None:
        if not self._has_said and self.asked != "eager":
            for own in self.parts.phases:
                if not own.phase.compiles:
                    self._notice_of(own.phase.name)(UNCOMPILED, "info")
        self._has_said = True


def engine_for(parts: Assembly, mode: Mode, notice: Notice, *hooks: Any) -> Engine | PhasedEngine:
    return (PhasedEngine if parts.phases else Engine)(parts, mode, notice, *hooks)
