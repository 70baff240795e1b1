"""Whatever fails in the fast path, training goes on as with fast="off": an error is raised at every call inside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.fast import certificate, compiled_trial, traced, tuned_trial, windows
from halfstep.fast import fast_path as fast
from replay_stand_in import replays_on_cpu, try_compiled_code_at_once

FILES = {one.__file__ for one in (fast, compiled_trial, traced, windows, certificate)}
NOT_TRIED = {
    # The border itself, and what it does after an error.
    *("run", "explain", "move", "_forget_traces", "make_level", "say", "_make_from_python"),
    *(
        "__init__",
        "is_traced",
        "has_side_effects",
        "mode",
        "certificate",
        "_best",
        "levels",
        "why_eager",
        "observe",
    ),
    # What puts the state back: if that fails, the device has failed.
    *("restore", "_remove_created", "undo_exchanges", "redo_exchanges", "put", "settle_exchanges", "find_exchanges"),
    *("aside", "timed", "run_reference", "fulfil", "list_held", "list_replaced", "are_alike"),
    # Called by the user's own eager step.
    *("look_and_run", "split_results", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"),
}
NUM_STEPS = 7


class Planted(Exception):
    pass


class RaiseAt:
    """Raise at one call of a function of the fast path: the n-th call of it."""

    def __init__(self, name: str = "", number: int = 0) -> None:
        self.name, self.number = name, number
        self.calls: dict[str, int] = {}
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event != "call" or frame.f_code.co_filename not in FILES or name in NOT_TRIED or name.startswith("_call_"):
            return
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self.name and self.calls[name] == self.number:
            self.has_raised = True
            raise Planted(f"at call {self.number} of {name}")


def train(mode: Any, *, is_pure: bool, plant: RaiseAt | None = None) -> tuple[list[Any], hs.Step]:
    """Train, and return losses, weights, what loss_fn kept, and the generator's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    kept = {"average": torch.zeros(())}

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        if not is_pure:
            kept["average"] = 0.9 * kept["average"] + 0.1 * loss.detach()
        return loss

    step = hs.Step(
        model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "fp32", fast=hs.Fast(mode, num_steps=1000)
    )
    sys.setprofile(plant)
    try:
        losses = [step(loss_fn, [torch.randn(5, 3)]).loss for _ in range(NUM_STEPS)]
    finally:
        sys.setprofile(None)
    weights = [p.detach().clone() for p in model.parameters()]
    state = [v.clone() for own in step.optimizers[0].state.values() for v in own.values()]
    return [losses, *weights, *state, kept["average"], torch.get_rng_state()], step


@pytest.fixture(autouse=True)
def _compile_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Try compiled code, and check every replay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try_compiled_code_at_once(monkeypatch)
    monkeypatch.setattr(tuned_trial, "LIKELY_SAVING", 1e9)
    monkeypatch.setattr(fast, "CHECK_SHARE", 1e9)
    monkeypatch.setattr(compiled_trial.CompileHistory, "write", lambda self, *found: None)
    with replays_on_cpu():
        yield


def list_places(is_pure: bool) -> list[tuple[str, int]]:
    """Return each function with the number of a call: its first one, and one in the middle."""
    expected, _ = train("off", is_pure=is_pure)
    plain = RaiseAt()
    found, step = train("auto", is_pure=is_pure, plant=plain)
    assert have_same_bits(found, expected)
    assert step.mode == "compile+graph, tuned"
    assert step._fast.state is fast.State.COMPILED
    assert len(plain.calls) > 30
    return sorted({(name, number) for name, count in plain.calls.items() for number in (1, count // 2 + 1)})


# Each call at which an error is raised needs a training of its own.
@pytest.mark.parametrize(
    "every", [pytest.param(8, marks=pytest.mark.slow, id="some"), pytest.param(1, marks=pytest.mark.soak, id="all")]
)
@pytest.mark.parametrize("is_pure", [True, False], ids=["pure", "with side effects"])
def test_an_error_at_calls_changes_nothing(is_pure: bool, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = train("off", is_pure=is_pure)
    wrong = []
    for name, number in list_places(is_pure)[::every]:
        plant = RaiseAt(name, number)
        capsys.readouterr()
        try:
            found, step = train("auto", is_pure=is_pure, plant=plant)
        except Planted:
            wrong.append(f"{name}, call {number}: raised into the loop")
            continue
        said = capsys.readouterr().err
        if not plant.has_raised or f"at call {number} of {name}" not in said:
            wrong.append(f"{name}, call {number}: not raised, or not reported: {said}")
        if not have_same_bits(found, expected):
            wrong.append(f"{name}, call {number}: another result")
    assert not wrong, "\n".join(wrong)


def have_same_bits(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some[1:], others[1:], strict=True)
    return some[0] == others[0] and all(torch.equal(one, other) for one, other in pairs)
