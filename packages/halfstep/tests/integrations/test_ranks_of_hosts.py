"""Two ranks inside Accelerate and the transformers Trainer: a fault of one drops the step on both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from host_faults import FAULTS, Fault, same_bits
from ranks_together import be_rank, together

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def train_on_a_rank(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    be_rank(rank, size, port)
    os.environ.update(ACCELERATE_USE_CPU="true")
    return {"trainer": use_trainer(rank, folder), **{way: use_accelerate(rank, way) for way in ("read", "exact")}}


def use_accelerate(rank: int, way: str) -> dict[str, Any]:
    from test_accelerate import Script

    script = Script(ways=way, accumulate=2)
    script.train(2)
    before = script.state
    found = {}
    for fault in FAULTS:
        script.train(1, fault if rank == 1 else None)  # one rank alone is at fault
        found[fault] = same_bits(script.state, before)
    script.train(1)
    found["moves"] = not same_bits(script.state, before)
    assert script.guard is not None
    script.guard.close()
    return {"found": found, "ranks": script.accelerator.num_processes, "weights": copy_weights(script.net)}


def use_trainer(rank: int, folder: Path) -> dict[str, Any]:
    from test_transformers import train

    faults: dict[int, Fault] = {1: "batch", 3: "statistics"} if rank == 1 else {}
    trainer = train(folder / f"run{rank}", schedule="exact", accumulate=2, faults=faults, steps=5,
                    given={"ddp_backend": "gloo"})  # fmt: skip
    states = trainer.watch.states
    found = [same_bits(before, after) for before, after in zip(states, states[1:], strict=False)]
    return {"found": found, "ranks": trainer.accelerator.num_processes, "weights": copy_weights(trainer.model)}


def copy_weights(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return together(2, train_on_a_rank, folder, folder)


@pytest.mark.parametrize("way", ["read", "exact"])
def test_a_fault_of_one_rank_drops_the_step_of_accelerate_on_both(found: list[dict[str, Any]], way: str) -> None:
    first, second = (one[way] for one in found)
    assert first["ranks"] == second["ranks"] == 2
    assert first["found"] == second["found"] == {**dict.fromkeys(FAULTS, True), "moves": True}
    assert same_bits(first["weights"], second["weights"])


def test_a_fault_of_one_rank_drops_the_step_of_the_trainer_on_both(found: list[dict[str, Any]]) -> None:
    first, second = (one["trainer"] for one in found)
    assert first["ranks"] == second["ranks"] == 2
    assert first["found"] == second["found"] == [True, False, True, False]
    assert same_bits(first["weights"], second["weights"])
