"""Captured steps train like fast="off", bit for bit, or stay eager and name the reason: loops that once had a fault,
features of hs.Step, Python values of every kind, and casts of shared weights. tests/gpu has the same on a GPU."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import captured_features
import halfstep as hs
import inner_gradients
import planted_faults
import python_values
import shared_casts
from captured_faults import (
    CHANGED_AT,
    LOOPS,
    Loop,
    Trained,
    assert_same,
    assert_same_history,
    change_once,
    freeze,
    get_loss,
    make_batch,
    make_net,
    train,
)
from fake_driver import make_hardware
from halfstep.fast import certificate, compiled_trial
from halfstep.fast import fast_path as fast
from halfstep.fast.certificate import ReplayDiffers, StateCopy, StepState
from halfstep.fast.dynamo_gaps import TRACES_GRADIENTS
from halfstep.fast.fast_path import FastPath
from halfstep.fast.windows import Promise
from halfstep.own_loop import step as own_step
from planted_faults import WriteOnTheSide, assert_found_before_use, assert_found_by_check, edit_replays
from replay_stand_in import replays_on_cpu, try_compiled_code_at_once
from tiny_training import make_step

CPU = torch.device("cpu")
UNFILLED = pytest.mark.xfail(strict=True, reason="what captured code computes before it raises is lost")


@pytest.fixture(autouse=True)
def _replay_on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with replays_on_cpu():
        yield


@pytest.mark.parametrize("name", LOOPS)
def test_loops_train_like_eager_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = assert_same(name, CPU)
    lines = [line for line in capsys.readouterr().err.splitlines() if "eagerly" in line]
    assert lines == ([f"halfstep: runs eagerly, not captured: {found.why_eager}"] if found.why_eager else [])


@pytest.mark.parametrize("name", captured_features.FEATURES)
def test_features_of_steps_with_a_bad_one_among_them(name: str) -> None:
    captured_features.assert_same(name, CPU)


def test_muon_follows_a_learning_rate_written_by_hand() -> None:
    captured_features.assert_muon_follows_rates(CPU)


@pytest.mark.parametrize("name", python_values.CASES)
def test_captured_steps_follow_python_values(name: str) -> None:
    python_values.assert_same(name, CPU)


@pytest.mark.parametrize("name", shared_casts.CASES)
def test_weights_used_several_times_in_half_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most CPUs emulate bf16, and a plan would fall back to fp32.
    monkeypatch.setattr(own_step, "probe", lambda device: make_hardware("cpu", bf16="native"))
    shared_casts.assert_same(name, CPU)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("is_off", "at"), [(partial(torch.compiler.set_stance, "force_eager"), 0), (Passing, 0), (Passing, CHANGED_AT)]
)
def test_python_code_runs_once_where_torchs_compiler_is_off(is_off: Any, at: int) -> None:
    with contextlib.ExitStack() as stack:

        def make(device: torch.device) -> Loop:
            loop = LOOPS["running_average"](device)
            loop.before = change_once(lambda: stack.enter_context(is_off()), at)
            return loop

        found = train(make, CPU, "graph")
    assert "torch's compiler is off" in found.why_eager
    assert_same_history(found, train(LOOPS["running_average"], CPU, "off"))


@pytest.mark.skipif(not TRACES_GRADIENTS, reason="needs torch 2.11")
@pytest.mark.parametrize("name", inner_gradients.CASES)
def test_losses_that_take_a_gradient_themselves(name: str) -> None:
    inner_gradients.assert_same(name, CPU)


@pytest.mark.skipif(not TRACES_GRADIENTS, reason="needs torch 2.11")
@pytest.mark.parametrize("reason", inner_gradients.LEFT_EAGER)
def test_gradients_that_traced_code_would_take_differently(reason: str) -> None:
    inner_gradients.assert_left_eager(reason, CPU)


@pytest.mark.skipif(not TRACES_GRADIENTS, reason="needs torch 2.11")
def test_a_graph_that_is_not_retained_any_more_raises_as_in_eager_code() -> None:
    model, keeps = make_net(CPU), {"left": 7}
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", fast="graph")

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        (slope,) = torch.autograd.grad(loss, model[0].weight, retain_graph=keeps["left"] > 0)
        return loss + slope.square().sum()

    for _ in range(7):
        step(loss_fn, [make_batch(torch.Generator())])
        keeps["left"] -= 1
    assert step.mode == "graph"
    with pytest.raises(RuntimeError, match="a second time"):
        step(loss_fn, [make_batch(torch.Generator())])


def test_a_loss_that_reads_the_last_gradient_stays_eager_with_a_reason() -> None:
    model = make_net(CPU)
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", fast="graph")

    def loss_fn(batch: Any) -> Tensor:
        last = model[0].weight.grad
        return get_loss(model, batch) + (0.0 if last is None else last.square().sum())

    for _ in range(12):
        step(loss_fn, [make_batch(torch.Generator())])
    assert "what loss_fn reads change at every step" in step._fast.why_eager


@pytest.mark.parametrize(
    ("name", "bad_at"),
    [
        *[("replaced_buffer", number) for number in (2, 3, 4, 5)],  # eager, compared, captured, replayed
        ("hidden_state", 8),
        ("accumulated_hidden_state", 4),
    ],
)
def test_a_bad_step_restores_a_replaced_buffer(name: str, bad_at: int) -> None:
    found = assert_same(name, CPU, bad_at={bad_at})
    assert [one["committed"] for one in found.history] == [number != bad_at for number in range(len(found.history))]


# --- the trial of compiled code ---


@pytest.mark.parametrize(
    "name",
    [
        "running_average",
        "carried_in_dict",
        "carried_through_the_loop",
        "hidden_state",
        "replaced_buffer",
        "weight_moved",
    ],
)
def test_python_code_runs_once_while_compiled_code_is_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try_compiled_code_at_once(monkeypatch)
    found = assert_same(name, CPU, hs.Fast("auto", num_steps=1000))
    assert found.step._fast.state is fast.State.COMPILED


# --- loss_fn raises ---


@pytest.mark.parametrize(
    ("raises_at", "is_captured"),
    [((3, 4), True), pytest.param((8,), False, marks=UNFILLED)],
    ids=["before it is captured", "when it is replayed"],
)
def test_what_loss_fn_kept_before_it_raised_is_there(
    raises_at: tuple[int, ...], is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Promise.make
    # A tensor that nothing fills would hold the right values by chance.
    monkeypatch.setattr(Promise, "make", lambda one: make(one).detach().fill_(7).requires_grad_(one.requires_grad))
    found = []
    for mode in ("off", "graph"):
        torch.manual_seed(0)
        model, kept, seen = make_net(CPU), dict[str, Tensor](), list[Any]()

        def loss_fn(batch: Any, model: Any = model, kept: Any = kept) -> Tensor:
            out = model(batch[0])
            kept["out"] = out.detach()
            return F.cross_entropy(out, batch[1])

        step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32", fast=mode)  # type: ignore
        draws = torch.Generator().manual_seed(1)
        for number in range(10):
            batch = make_batch(draws)
            if number in raises_at:
                batch[1][0] = 3  # there are three classes
            try:
                step(loss_fn, [batch])
            except IndexError as error:
                seen.append(str(error))
            seen.append(freeze([kept, model]))
        assert sum(isinstance(one, str) for one in seen) == len(raises_at)
        found.append(seen)
    assert found[0] == found[1]
    assert (step.mode == "graph") == is_captured


# --- code that knows that it is traced ---


def train_when_traced(difference: float) -> tuple[Trained, Trained]:
    """Train with a loss that differs while torch traces it, in value and not in its gradient."""

    def make(device: torch.device) -> Loop:
        model = make_net(device)

        def loss_fn(batch: Any) -> Tensor:
            return get_loss(model, batch) + (difference if torch.compiler.is_dynamo_compiling() else 0.0)

        return Loop(model, loss_fn)

    return train(make, CPU, "off"), train(make, CPU, "graph")


def test_a_loss_that_rounds_differently_is_named_by_the_certificate() -> None:
    expected, found = train_when_traced(1e-7)
    assert found.step.mode == "graph"
    assert "bit-equal to the eager step up to rounding and its uncaptured code" in str(found.step.certificate)
    for now, then in zip(found.history, expected.history, strict=True):
        assert math.isclose(now.pop("loss"), then.pop("loss"), rel_tol=certificate.ROUNDINGS * 2**-23)
        del now["spikes"], then["spikes"]  # averages of losses
    assert_same_history(found, expected)


def test_a_loss_that_differs_is_refused() -> None:
    expected, found = train_when_traced(1e-3)
    assert found.step.mode == "eager"
    assert "the traced code does not equal the eager step: the loss differs by 0.001" in found.why_eager
    assert_same_history(found, expected)


# --- more shapes than graphs ---


def train_shapes(
    mode: Any, rows: Sequence[int], *, before: Any = lambda step, number: None, accumulate: int = 1, **settings: Any
) -> Trained:
    """Train with batches of these numbers of rows."""
    left = iter(rows)

    def make(device: torch.device) -> Loop:
        model = make_net(device)
        return Loop(
            model,
            lambda batch: get_loss(model, batch),
            settings={"accumulate": accumulate},
            before=before,
            make_batch=lambda draws: make_batch(draws, next(left)),
        )

    return train(make, CPU, mode, length=len(rows) // accumulate, **settings)


@pytest.mark.parametrize(
    "rows",
    [[2] * 5 + [3] * 3 + [4] * 4, [3, 2, 2, 4, 4, 3, 2, 2, 4, 3, 4, 2, 3, 4]],
    ids=["one after the other", "in any order"],
)
def test_as_many_shapes_as_graphs_are_captured(rows: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    found = train_shapes(hs.Fast("graph", max_graphs=2), rows)
    assert_same_history(found, train_shapes("off", rows))
    path = found.step._fast
    num_left_out = sum(shape.left_out_until > 0 for shape in path.shapes.values())
    assert (len(path.level.graphs), num_left_out, path.why_eager) == (2, 1, "")
    lines = [line for line in capsys.readouterr().err.splitlines() if "eagerly" in line]
    assert lines == ["halfstep: there are more shapes than max_graphs=2: the others run eagerly"]


def test_a_graph_that_is_not_used_gives_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "IDLE_STEPS", 6)
    rows = [2, 3] * 4 + [4, 4] + [3, 4] * 6
    found = train_shapes(hs.Fast("graph", max_graphs=2), rows)
    assert_same_history(found, train_shapes("off", rows))
    path = found.step._fast
    captured = [id(graph.shape) for graph in path.level.graphs.values()]
    assert {key[0][0][0][0] for key, shape in path.shapes.items() if id(shape) in captured} == {3, 4}  # type: ignore[index]


# --- the time that comparisons take ---


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([2] * 4 + [3] * 2 + [4] * 12, [4, 5, 16]), ([2, 3, 4] * 7, [4, 5, 18])],
    ids=["one after the other", "in turn"],
)
def test_comparisons_take_a_small_share_of_the_time(
    rows: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take 1 s and comparisons 0.15 s; 0.2 s are allowed in ten steps. So two shapes are compared at once, and
    the third once 15 steps have been made. Until then its steps run eagerly, and those of the others are replayed."""
    now, compared, run = 0.0, list[int](), FastPath._run_gradients

    def compare(path: FastPath, *arguments: Any) -> StateCopy:
        nonlocal now
        now += 0.15
        compared.append(path.step.attempted)
        return run(path, *arguments)

    def take_seconds(step: hs.Step, number: int) -> None:
        step._fast.in_steps_s = number

    monkeypatch.setattr(fast.time, "monotonic", lambda: now)
    monkeypatch.setattr(fast, "COMPARE_SHARE", 0.02)
    monkeypatch.setattr(fast, "COMPARE_STEPS", 10)
    monkeypatch.setattr(FastPath, "_run_gradients", compare)
    found = train_shapes("graph", rows, before=take_seconds)
    assert compared == expected
    assert_same_history(found, train_shapes("off", rows))


def test_windows_that_were_compared_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second micro-batch of a window is new: the window is compared when it comes again, and no other one."""
    compared, run = list[int](), FastPath._run_gradients

    def compare(path: FastPath, *arguments: Any) -> StateCopy:
        compared.append(path.step.attempted)
        return run(path, *arguments)

    monkeypatch.setattr(FastPath, "_run_gradients", compare)
    rows = [2, 2] * 6 + [2, 3, 2, 2] * 4
    found = train_shapes("graph", rows, accumulate=2)
    assert compared == [4, 9]
    assert len(found.step._fast.level.graphs) == 2
    assert_same_history(found, train_shapes("off", rows, accumulate=2))


# --- compiled code that gives NaN ---


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Put torch's kernels in place of Inductor's code, and return a switch that makes them give NaN."""
    from halfstep.fast import traced

    switch = {"gives_nan": False}

    def compile_badly(graph: Any, inputs: Any, settings: Any) -> Any:
        code = traced.run_boxed(graph)

        def run(arguments: list[Any]) -> list[Any]:
            found = code(arguments)
            if not switch["gives_nan"]:
                return list(found)
            return [one * math.nan if isinstance(one, Tensor) and one.is_floating_point() else one for one in found]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(traced, "compile_by_inductor", compile_badly)
    return switch


def make_squares(device: torch.device) -> Loop:
    """A loop whose bits Inductor's decompositions do not change."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    return Loop(model, lambda batch: model(batch[0]).square().sum())


def test_compiled_code_that_gives_nan_is_refused_before_it_is_used(
    inductor: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    inductor["gives_nan"] = True
    found = train(make_squares, CPU, "compile")
    assert (found.step.mode, found.why_eager) == ("graph", "")
    reason = "the compiled code's gradients are not finite, but those of torch's kernels are"
    assert f"halfstep: not compiled: {reason}" in capsys.readouterr().err.splitlines()
    assert_same_history(found, train(make_squares, CPU, "off"))


@pytest.mark.usefixtures("inductor")
def test_the_certificate_of_compiled_code_names_what_was_compared() -> None:
    def make_drawing(device: torch.device) -> Loop:
        loop = make_squares(device)
        get_loss = loop.loss_fn
        loop.loss_fn = lambda batch: get_loss((F.dropout(batch[0]), *batch[1:]))
        return loop

    known, drawn = (str(train(make, CPU, "compile").step.certificate) for make in (make_squares, make_drawing))
    assert "bit-equal to its uncaptured code; compiled gradients within" in known
    assert "compiled gradients not compared, because Inductor and torch draw different random numbers" in drawn
    assert "eager step" not in known + drawn


def test_compiled_code_that_gives_nan_later_is_given_up(
    inductor: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bad steps are dropped, and seen two steps later; two in a row would stop the training."""
    said: list[str] = []
    monkeypatch.setattr(compiled_trial, "warn_user", said.append)

    def make(device: torch.device) -> Loop:
        loop = make_squares(device)
        loop.before = lambda step, number: inductor.update(gives_nan=number >= 8)
        return loop

    found = train(make, CPU, "compile", length=16, guard={"max_consecutive": 2})
    assert found.modes == ["eager"] * 4 + ["compile+graph"] * 7 + ["graph"] * 5
    assert len(said) == 1
    assert "compiled code gives values that are not finite where torch's kernels do not" in said[0]
    expected = train(make_squares, CPU, "off", bad_at={8, 9, 10}, length=16)
    for history in (found.history, expected.history):
        for number in (8, 9, 10):
            assert not history[number].pop("committed")
            del history[number]["loss"], history[number]["grad_norm"]
    assert_same_history(found, expected)


# --- noise of atomics ---


def test_two_runs_that_agree_by_luck_do_not_refuse_noise_of_atomics() -> None:
    state = StepState(make_step())
    before = state.copy()
    number = state.names.index("head.weight")

    def move(distance: float) -> StateCopy:
        """Return the state with one weight moved."""
        moved = [tensor.clone() for tensor in before.tensors]
        moved[number][0] += distance
        return StateCopy(moved, before.committed, before.rng, before.attempted, before.spikes, before.loss)

    runs = [move(1e-2), move(1e-2)]
    exact, noisy = state.compare(move(1e-2 + 6e-8), runs, before, uses_atomics=True)
    assert (exact, noisy) == (len(before.tensors) - 1, ["head.weight"])
    with pytest.raises(ReplayDiffers, match="where two uncaptured runs differ by 0"):
        state.compare(move(1e-2 + 6e-8), runs, before, uses_atomics=False)
    with pytest.raises(ReplayDiffers):  # a tenth of what the step changes is no rounding
        state.compare(move(1.1e-2), runs, before, uses_atomics=True)


# --- imports ---


@pytest.mark.slow
def test_an_eager_step_imports_nothing_more_of_torchs_compiler() -> None:
    script = """
        import sys

        import torch

        def list_compiler():
            return {name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))}

        def make():
            model = torch.nn.Linear(4, 2)
            return model, torch.optim.AdamW(model.parameters(), fused=True)

        model, optimizer = make()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        before = list_compiler()

        import halfstep as hs

        model, optimizer = make()
        step = hs.Step(model, optimizer, "fp32")
        for _ in range(5):
            step(lambda batch: model(batch).square().mean(), [torch.randn(3, 4)])
        print(*sorted(list_compiler() - before))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == []


# --- faults are found before a graph is used, or by a check while training goes on ---


def test_without_a_fault_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = planted_faults.train(CPU, monkeypatch, planted_faults.get_loss, dropout=0.3)
    assert (step.mode, said) == ("graph", [])
    assert step.certificate.num_checks >= 3
    assert "checked" in str(step.certificate)


def test_python_code_that_no_guard_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_TEST_FACTOR", "1.0")

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return planted_faults.get_loss(model, batch) * float(os.environ["HALFSTEP_TEST_FACTOR"])

    change = lambda model: monkeypatch.setenv("HALFSTEP_TEST_FACTOR", "3.0")  # noqa: E731
    step, said = planted_faults.train(CPU, monkeypatch, loss_of, change)
    if said:
        assert_found_by_check(step, said)
        return
    # This version of torch guards the variable: then the replays must have followed it.
    monkeypatch.setenv("HALFSTEP_TEST_FACTOR", "1.0")
    captures = fast.CAPTURES.pop("cpu")
    eager, _ = planted_faults.train(CPU, monkeypatch, loss_of, change)
    fast.CAPTURES["cpu"] = captures
    assert (step.mode, eager.mode) == ("graph", "eager")
    assert all(map(torch.equal, step._step.model.parameters(), eager._step.model.parameters()))


def test_random_numbers_at_a_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    with edit_replays(monkeypatch, CPU, lambda replay: torch.rand(3)):
        assert_found_before_use(*planted_faults.train(CPU, monkeypatch, planted_faults.get_loss, dropout=0.5))


def test_a_tensor_changed_on_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with edit_replays(monkeypatch, CPU, WriteOnTheSide()):
        step, said = planted_faults.train(CPU, monkeypatch, planted_faults.get_loss)
    assert_found_by_check(step, said)


def test_a_declared_operator_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = planted_faults.train(CPU, monkeypatch, planted_faults.get_scaled_loss)
    assert (step.mode, said) == ("graph", [])
