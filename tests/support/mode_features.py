"""The table of docs/modes.md, and a tiny run for each of its features with what shows that the feature was at work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tiny_workload
from halfstep_train.report.metrics_file import read
from halfstep_train.run.launch import Launch
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from whole_runs import TINY, newest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modes.md"
MODES = ("eager", "compile", "graph", "ranks")
FAST = {"eager": "off", "compile": "compile", "graph": "graph"}
WORDS = ("works", "falls back", "refused")


def table() -> dict[str, dict[str, str]]:
    """Feature -> mode -> what the page says of runs; hs.Step has another table below."""
    runs, _, _ = PAGE.read_text().partition("\n## hs.Step")
    lines = [line for line in runs.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0][1:]) == MODES
    return {name: dict(zip(MODES, cells, strict=True)) for name, *cells in rows[2:]}


def cells(*modes: str) -> Iterator[tuple[str, str, str]]:
    for name, row in table().items():
        for mode in modes:
            word = next(word for word in WORDS if row[mode].startswith(word))
            yield name, mode, word


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read(out / "metrics.jsonl") if record["kind"] == kind]


def is_exact(out: Path) -> bool:
    """Whether nothing committed between the fault and its capsule."""
    (kept,) = (out / "capsules").iterdir()
    return json.loads((kept / "capsule.json").read_text())["commits_after"] == 0


def hooked(config: Any, store: Any = None) -> Any:
    """A hook that doubles what the head gives."""
    workload = tiny_workload.build(config, store)
    workload.model.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    return workload


@dataclass(frozen=True)
class Feature:
    settings: dict[str, Any] = field(default_factory=dict)
    workload: str = "tiny_workload:build"
    shows: Callable[[Path], bool] = lambda out: True
    """Whether the run shows the feature at work."""


FEATURES: dict[str, Feature] = {
    "accumulation": Feature(
        {"train.accumulate": 2}, shows=lambda out: newest(out).state["position"] == {"epoch": 1, "batch": 2}
    ),
    "average (EMA)": Feature({"ema.enabled": True}, shows=lambda out: bool(newest(out).ema)),
    "skipped bad steps": Feature(
        {"model.options.poisoned": [1]}, shows=lambda out: records(out, "event")[0]["bad_step"] == 1
    ),
    "capsule of a fault": Feature(
        {"model.options.poisoned": [1]}, shows=lambda out: any((out / "capsules").glob("*/capsule.json"))
    ),
    "rollback": Feature(
        {
            "guard.on_fault": "rollback",
            "guard.max_consecutive": 2,
            "guard.margin": 0,
            "guard.snapshot_every": 1,
            "model.options.poisoned": [2, 3],
            "train.max_steps": 8,
        },
        shows=lambda out: any(record["event"] == "rollback" for record in records(out, "event")),
    ),  # fmt: skip
    "hold after a fault": Feature({"guard.hold": True, "model.options.poisoned": [1]}, shows=lambda out: is_exact(out)),
    "spikes": Feature({"guard.skip_spikes": True}, shows=lambda out: "spikes" in newest(out).state["step"]),
    "validation every N steps": Feature(
        {"train.validate_every_steps": 2}, shows=lambda out: [r["step"] for r in records(out, "val")] == [2, 4]
    ),
    "samples": Feature(
        {"train.sample_every": 2},
        "drawing_workload:build_sampling",
        shows=lambda out: len(list((out / "report" / "samples").iterdir())) == 2,
    ),  # fmt: skip
    "frozen parts": Feature({}, "frozen_workload:build"),
    "parameter groups": Feature({"model.options.groups": True}, "frozen_workload:build"),
    "scheduled values": Feature({}, "frozen_workload:build"),
    # Without dropout: compiled code draws other numbers for it.
    "phases": Feature({"model.options.dropout": 0.0}, "phased_workload:build"),
    "phase whose loss computes gradients": Feature(
        {"model.options": {"penalty": True, "critic": {"compiles": False}, "dropout": 0.0}}, "phased_workload:build"
    ),
    "forward hooks": Feature({}, "mode_features:hooked"),
    # With torch's momentum, 0.66 of the initial variance, 1, would be left after four steps.
    "cumulative BatchNorm statistics": Feature(
        {"train.cumulative_norms": True}, shows=lambda out: bool((newest(out).model["body.1.running_var"] < 0.66).all())
    ),
    "activation checkpointing": Feature({"train.activation_checkpointing": True}),
    "simulated precision": Feature({"precision.default": "bf16", "precision.simulate": True}),
    "deterministic": Feature({"train.deterministic": True}),
    "ledger": Feature({"log.ledger": True}, shows=lambda out: (out / "report" / "ledger.json").is_file()),
    "watch": Feature({"log.watch": 2}, shows=lambda out: "body.0" in records(out, "watch")[0]["headroom"]),
}


def run_with(feature: Feature, mode: str, out: Path, launch: Launch | None = None, **more: Any) -> Path:
    settings = {**TINY, "train.max_steps": 4, "train.report_every": 1, "log.quiet": False, "train.fast": FAST[mode]}
    settings |= feature.settings | more
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return train(load(feature.workload, overrides=words), out=out, launch=launch)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return newest(out).model


def assert_close(left: Path, right: Path, *, apart: float = 1e-4) -> None:
    """Compiled code sums in another order: a few steps apart by no more than fp32's rounding, a thousandfold."""
    other = weights(right)
    for name, value in weights(left).items():
        torch.testing.assert_close(
            value, other[name], rtol=1e-3, atol=apart, msg=lambda text, name=name: f"{name}: {text}"
        )
