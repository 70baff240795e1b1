"""Read a run's folder as plain data. Missing records are empty; a folder that is not a run is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.disk import parse_json
from halfstep.errors import CheckpointError, format_duration, suggest_command
from halfstep_train.config.foreign import flatten_keys
from halfstep_train.config.yaml_source import read_yaml
from halfstep_train.report.config_view import format_setting
from halfstep_train.report.metrics_file import read

PICTURES = (".png", ".jpg", ".jpeg", ".gif")
NOT_METRICS = {"kind", "step", "epoch", "loss", "elapsed_s", "best"}
SAMPLES = "samples_per_s"
MOST_SAMPLES = 12
LARGEST_PICTURE = 4_000_000
"""Bytes; larger pictures are not embedded, to keep the page small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The stored records of a run."""

    name: str
    path: Path
    records: list[dict[str, Any]]
    plan: dict[str, Any]
    summary: dict[str, Any]
    settings: dict[str, tuple[str, str]]
    """Value and source by key."""
    samples: list[Path]
    monitor: list[dict[str, Any]]
    ledger: dict[str, Any]
    capsules: list[dict[str, Any]]

    def select_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("kind") == kind]

    @property
    def metric(self) -> str:
        """Return the headline metric; the first recorded one if the run has not ended."""
        found = (name for record in self.select_kind("val") for name in record if name not in NOT_METRICS)
        return str(self.summary.get("metric") or next(found, ""))

    @property
    def phases(self) -> list[str]:
        """Return the names of alternating phases; empty if there is only one."""
        return list(
            dict.fromkeys(key[5:] for record in self.select_kind("train") for key in record if key[:5] == "loss/")
        )

    @property
    def rate(self) -> str:
        """Return the key of the throughput, in the unit of the workload."""
        return find_rate_key((self.select_kind("train") or [{}])[-1])

    @property
    def has_ended(self) -> bool:
        return bool(self.summary)

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the record of the best validation."""
        found = (record for record in reversed(self.select_kind("val")) if record.get("best") and self.metric in record)
        return next(found, None)

    @property
    def epoch_loss(self) -> float | None:
        """Return the newest mean training loss of an epoch; in a train record it is that of the epoch so far."""
        keys = {"train": "epoch_loss", "val": "train_loss", "epoch": "train_loss"}
        found = (record.get(keys.get(str(record.get("kind")), "")) for record in reversed(self.records))
        return next((loss for loss in found if loss is not None), None)

    @property
    def faults(self) -> list[tuple[float, str]]:
        """Return the step of each event and what happened; an event is recorded two steps after its step."""
        return [
            # `bad_step` counts the steps before that one.
            (float(record["bad_step"] + 1 if "bad_step" in record else record["step"]), str(record["event"]))
            for record in self.select_kind("event")
        ]


def describe_progress(record: Mapping[str, Any]) -> str:
    """Return `1,234 of 20,000, about 1 h 10 min left` for a train record, as far as it is known."""
    whole = f" of {record['total_steps']:,}" if record.get("total_steps") else ""
    left = f", about {format_duration(record['left_s'])} left" if record.get("left_s") else ""
    return f"{record['step']:,}{whole}{left}"


def read_run(path: Path) -> RunRecord:
    """Read all records of a run; a folder without config.yaml is an error."""
    if not (path / "config.yaml").is_file():
        has_runs = any(path.glob("*/config.yaml"))
        runs = f"give one of the runs in it, which `{suggest_command('runs', path)}` lists" if has_runs else ""
        raise CheckpointError(
            f"{path} is not a run",
            why="config.yaml is missing",
            fix=runs or "give a folder that `halfstep train` wrote",
        )
    return RunRecord(
        name=path.resolve().name,
        path=path,
        records=read(path / "metrics.jsonl"),
        plan=_read_json(path / "plan.json"),
        summary=_read_json(path / "report" / "summary.json"),
        settings=_read_settings(path),
        samples=_find_samples(path / "report" / "samples"),
        monitor=read(path / "monitor.jsonl"),
        ledger=_read_json(path / "report" / "ledger.json"),
        capsules=[
            {"name": file.parent.name, **_read_json(file)} for file in sorted(path.glob("capsules/*/capsule.json"))
        ],
    )


def find_rate_key(record: Mapping[str, Any]) -> str:
    """Return the key of a record's throughput in the unit of its workload, such as `tokens_per_s`."""
    return next((key for key in record if key.endswith("s_per_s") and key != SAMPLES), SAMPLES)


def format_rate_unit(key: str) -> str:
    """Format `tokens_per_s` as `tokens/s`."""
    return key.replace("_per_s", "/s")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(parse_json(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", fix="restore it, or remove it to write the page without it"
        ) from error


def _read_settings(path: Path) -> dict[str, tuple[str, str]]:
    """Return value and source of each setting; without report/config.json the values alone."""
    stored = _read_json(path / "report" / "config.json").get("settings", {})
    if stored:
        return {key: (format_setting(one["value"]), _format_source(one["source"])) for key, one in stored.items()}
    return {
        key: (format_setting(value), "") for key, value in flatten_keys(read_yaml(path / "config.yaml").values).items()
    }


def _format_source(source: dict[str, Any]) -> str:
    layer, where = str(source.get("layer", "")), str(source.get("where", ""))
    return where if where.startswith(layer) else f"{layer} {where}".strip()


def _find_samples(folder: Path) -> list[Path]:
    """Return the newest sample pictures and texts, oldest first."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in (*PICTURES, ".txt")]
    return [file for file in files if file.stat().st_size <= LARGEST_PICTURE][-MOST_SAMPLES:]
