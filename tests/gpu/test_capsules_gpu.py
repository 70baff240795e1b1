"""Faults of captured steps: kept, held on request to the bit, and replayed until the cause is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.evidence import capsule, causes
from halfstep_train.run.evidence import replay_run
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from tiny_training import assert_same_bits
from whole_runs import newest, records

pytestmark = pytest.mark.gpu


def faulty_unet(out: Path, **settings: Any) -> Path:
    given = {
        "device": "cuda", "precision.default": "bf16", "log.quiet": True, "train.max_steps": 18,
        "data.num_workers": 0, "train.fast": "graph", "train.deterministic": True, "data.image_size": 64,
        "model.base_channels": 32, "model.depth": 2, "train.batch_size": 4,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }  # fmt: skip
    words = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return train(load("poisoned_unet:KIND", overrides=words), out=out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same captured run without and with hold."""
    folder = tmp_path_factory.mktemp("faulty")
    return faulty_unet(folder / "plain"), faulty_unet(folder / "held", guard__hold=True)


def test_a_captured_run_ends_bit_equal_with_and_without_hold(runs: tuple[Path, Path]) -> None:
    plain, held = runs
    assert_same_bits(dict(newest(plain).model), dict(newest(held).model))
    assert records(plain) == records(held)


def test_its_capsules_are_exact_under_hold_and_say_by_how_much_they_are_not_without(runs: tuple[Path, Path]) -> None:
    commits = [
        [capsule.read_capsule(path).about["commits_after"] for path in capsule.list_capsules(run / "capsules")]
        for run in runs
    ]
    assert commits == [[1, 2], [0, 0]]  # behind step 8 step 9 is bad as well


def test_replay_of_a_captured_step_names_the_pixel(runs: tuple[Path, Path]) -> None:
    for run in runs:
        found = replay_run(run / "capsules" / "00000008")
        assert found.cause == causes.BAD_INPUT
        (place,) = found.diagnosis.places
        assert (place.key, place.index) == ("['image']", (0, 0, 0))
        assert found.remedy is not None
        assert found.remedy.works
