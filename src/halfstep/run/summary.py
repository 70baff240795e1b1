"""`report/summary.json`: what a run came to and what it cost, for whoever compares or shows runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from halfstep.disk import write_whole
from halfstep.measure.memory import peak_memory_bytes
from halfstep.run.folder import RunFolder
from halfstep.run.loop import Loop


def write_summary(folder: RunFolder, loop: Loop, elapsed_s: float, joules: float | None) -> None:
    """`elapsed_s` and energy are of this process; of a run that was resumed they are the last part's."""
    import halfstep

    parts, plan = loop.parts, loop.parts.plan
    best = parts.stopping.best
    record: dict[str, Any] = {
        "workload": parts.config.workload,
        "metric": parts.workload.metric,
        "mode": parts.workload.mode,
        "best": best if math.isfinite(best) else None,
        "steps": parts.step.attempted,
        "epochs": loop.num_samples / max(len(parts.workload.train_samples), 1),
        "samples": loop.num_samples,
        "elapsed_s": elapsed_s,
        "samples_per_s": loop.num_samples / max(elapsed_s, 1e-9),
        "peak_memory_bytes": peak_memory_bytes(parts.device),
        "joules": joules,
        "skipped": loop.journal.num_skipped,
        "trained_s": loop.waiting.trained_s,
        "waited_s": loop.waiting.waited_s,
        "steps_run": loop.engine.mode,
        "precision": plan.granted,
        "simulated": plan.simulated,
        "device": f"{plan.device} ({plan.device_name})",
        "versions": {"halfstep": halfstep.__version__, "torch": torch.__version__},
        "command": ["halfstep", *sys.argv[1:]],
    }
    write_whole(folder.report / "summary.json", json.dumps(record, indent=2) + "\n")


def has_summary(folder: RunFolder) -> bool:
    return (folder.report / "summary.json").is_file()


def read_summary(folder: Path) -> dict[str, Any] | None:
    """None where a run has not ended, or was made by a version without it."""
    path = folder / "report" / "summary.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found
