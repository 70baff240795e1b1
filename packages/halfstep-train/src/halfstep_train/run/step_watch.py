"""Watch the numbers of a run (`log.watch`): records for metrics.jsonl, report/watch.json, warnings.

Eager steps are observed as they are. Compiled and captured ones are not seen by hooks, so their code runs eagerly in a
side step, whose effects are undone. With several ranks all of them measure, and rank 0 writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.disk import write_atomically
from halfstep.evidence.capsule import to_strict_json
from halfstep.evidence.forecast import WatchWarning
from halfstep.evidence.module_hooks import LOGITS
from halfstep.evidence.watch import UPDATE, Observation, Watch, WatchRow
from halfstep.formats import FP16
from halfstep.step.batches import count_samples
from halfstep.step.facts import Facts, PhasedFacts
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.engine import Idle, prepare_window
from halfstep_train.run.journal import Journal
from halfstep_train.run.step_ledger import AnyEngine, drop_outputs, list_engines
from halfstep_train.tune.modes import Batch

NOT_RANGES = ("variance", "loss scale", UPDATE)


class RunWatch:
    """Watch the step of a run, or of each of its phases."""

    def __init__(self, parts: Assembly, engine: AnyEngine, report: Path, journal: Journal, *, writes: bool) -> None:
        self.parts, self.file, self.journal, self.writes = parts, report / "watch.json", journal, writes
        self.watches: dict[str, Watch] = {}
        for phase, own in list_engines(engine):
            warn = partial(journal.notice, level="warning")
            watch = Watch(own.guarded, parts.log.watch, notice=journal.notice, warn=warn)
            watch.on_observation = partial(self._record, phase)
            own.observe = watch.enter_real_step
            self.watches[phase] = watch
        if parts.recorder is not None:
            parts.recorder.watches = self.watches

    def finish(self, engine: AnyEngine, window: list[Batch], facts: Facts | PhasedFacts) -> None:
        """Complete the observation of the step that was made from this window, and read earlier ones."""
        made = facts.phases if isinstance(facts, PhasedFacts) else {"": facts}
        for phase, own in list_engines(engine):
            if phase not in made:
                continue
            watch = self.watches[phase]
            if watch.lacks_activations:
                batch = prepare_window(self.parts, window[:1])[0]
                if not isinstance(batch, Idle):
                    watch.look_aside(drop_outputs(own.parts.eager), batch, num_rows=count_samples(batch))
            watch.finish(made[phase])

    def _record(self, phase: str, seen: Observation, new: Sequence[WatchWarning]) -> None:
        """Write the observation to metrics.jsonl, and its rows to report/watch.json."""
        headroom: dict[str, float] = {}
        for row in seen.rows.values():
            if row.kind not in NOT_RANGES and math.isfinite(row.high):
                bits = round(row.find_headroom(FP16), 1)
                headroom[row.module] = min(bits, headroom.get(row.module, math.inf))
        lost = {row.module: round(row.numbers["lost"], 4) for row in seen.rows.values() if "lost" in row.numbers}
        record = {
            "kind": "watch",
            "step": seen.step,
            **({"phase": phase} if phase else {}),
            "headroom": headroom,
            "lost": lost,
            "warnings": [{"module": w.module, "kind": w.kind, "message": w.message} for w in new],
        }
        self.journal.log(record)
        if self.writes:
            rows = [_to_json(row) for row in seen.rows.values()]
            document = {"step": seen.step, "phase": phase, "rows": rows}
            write_atomically(self.file, json.dumps(to_strict_json(document)) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to forecast as if it had not stopped. Reads everything that was sent."""
        for watch in self.watches.values():
            watch.drain()
        return {phase: watch.state_dict() for phase, watch in self.watches.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for phase, own in state.items():
            if phase in self.watches:
                self.watches[phase].load_state_dict(own)


def _to_json(row: WatchRow) -> dict[str, Any]:
    """Return a row with its histogram: the exponent of the first count, and the counts."""
    found = {"module": row.module, "kind": row.kind, "format": row.format, **row.numbers}
    filled = [int(k) for k in row.counts.nonzero()[0]] if row.counts is not None and row.kind != LOGITS else []
    if filled:
        found["exponent"], found["counts"] = filled[0] - 127, row.counts[filled[0] : filled[-1] + 1].tolist()
    return found
