"""Which candidates are tried, in what time, what is chosen, and what is said of each part."""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfstep_train.run.engine import RunRehearsal
from halfstep_train.tune.fresh_thread import _Errand, run_in_fresh_thread
from halfstep_train.tune.mode_search import FoundMode, ModeSearch, find_fastest_mode
from halfstep_train.tune.trials import (
    CANDIDATES,
    LASTING_S,
    MOST_S,
    ROUNDS,
    TIMED_STEPS,
    CannotRun,
    Cost,
    NotCaptured,
    TrialTime,
    time_lasting_step,
)
from hand_clock import HandClock
from mode_trials import USUAL, Machine, ScriptedRehearsal, made

HOUR = 3600.0


def searched(demo: Path, machine: Machine, run_s: float, **values: object) -> FoundMode:
    """On a GPU, as far as the search can tell, for a run that takes so long eagerly."""
    config, workload, plan = made(demo, **values)
    on_gpu = dataclasses.replace(plan, device="cuda", granted="bf16")
    num_steps = run_s * 1e3 / (machine.step_ms["eager"] or 30.0)
    time = TrialTime(num_steps, most_s=MOST_S, clock=machine.clock)
    return ModeSearch(on_gpu, time, ScriptedRehearsal(config, workload, machine)).search()


@pytest.mark.parametrize(
    ("times", "mode"),
    [
        ({"eager": 30.0, "compile": 20.0, "graph": 15.0}, "graph"),
        ({"eager": 30.0, "compile": 20.0, "graph": 19.9}, "compile"),
        ({"eager": 30.0, "eager NCHW": 20.1, "compile": 20.0}, "eager"),
        ({"eager": 30.0, "graph": 15.0}, "graph"),
        ({"compile": 20.0}, "compile"),
    ],
)
def test_the_simplest_mode_wins_that_is_as_fast_as_the_fastest(times: dict[str, float], mode: str) -> None:
    assert find_fastest_mode({label: Cost(ms, 1) for label, ms in times.items()}) == mode


def test_a_long_run_tries_everything_and_says_what_each_part_gained(demo: Path) -> None:
    machine = Machine(USUAL)
    found = searched(demo, machine, 3 * HOUR)
    assert machine.tried == ["eager", "eager NCHW", "graph", "compile", "graph cudnn", "graph cudnn tuned"]
    expected = {"mode": "graph", "channels_last": True, "cudnn_benchmark": True, "tunes_kernels": True}
    assert {name: found.fields[name] for name in expected} == expected
    assert [str(gain) for gain in found.fields["gains"]] == [
        "channels_last 1.67x, 50.0 -> 30.0 ms",
        "compile 1.50x, 30.0 -> 20.0 ms",
        "graph 1.33x, 20.0 -> 15.0 ms",
        "cudnn.benchmark 1.25x, 15.0 -> 12.0 ms",
        "kernel tuning 1.09x, 12.0 -> 11.0 ms",
    ]
    assert "2.73x eager" in found.fields["mode_reason"]
    assert "not tried" not in found.fields["mode_reason"]
    assert found.is_final
    assert (found.eager_ms, found.ms, found.untried) == (30.0, 11.0, ())


def test_what_gains_nothing_is_measured_told_and_not_taken(demo: Path) -> None:
    same = {**USUAL, "graph": 20.0, "compile cudnn": 19.9, "compile tuned": 19.8, "eager NCHW": 29.8}
    found = searched(demo, Machine(same), 3 * HOUR)
    expected = {"mode": "compile", "channels_last": True, "cudnn_benchmark": False, "tunes_kernels": False}
    assert {name: found.fields[name] for name in expected} == expected
    taken = {gain.part: gain.is_taken for gain in found.fields["gains"]}
    assert taken == {
        "channels_last": True, "compile": True, "graph": False, "cudnn.benchmark": False, "kernel tuning": False,
    }  # fmt: skip


@pytest.mark.parametrize(("run_s", "is_taken"), [(1200.0, False), (3 * HOUR, True)])
def test_cudnns_trials_are_taken_for_little_where_the_run_is_long(demo: Path, run_s: float, is_taken: bool) -> None:
    machine = Machine({**USUAL, "graph cudnn": 14.8, "graph tuned": 14.8})
    found = searched(demo, machine, run_s)  # of 40,000 steps 8 s are saved, of 360,000 72
    assert found.fields["cudnn_benchmark"] is is_taken
    gain = next(gain for gain in found.fields["gains"] if gain.part == "cudnn.benchmark")
    assert gain.is_taken is is_taken


def test_a_short_run_is_not_compiled_for(demo: Path) -> None:
    machine = Machine({**USUAL, "eager cudnn": 10.0}, trial_s=0.1)
    found = searched(demo, machine, 600.0)
    assert machine.tried == ["eager", "eager NCHW", "eager cudnn"]  # 20 s fit into a twentieth, 45 do not
    assert "too short for compiling: about 10 min to go" in found.fields["mode_reason"]
    assert (found.fields["mode"], found.fields["cudnn_benchmark"], found.is_final) == ("eager", True, False)


def test_kernel_tuning_waits_for_a_run_that_its_minutes_are_a_twentieth_of(demo: Path) -> None:
    machine = Machine(USUAL)
    found = searched(demo, machine, HOUR)
    assert machine.tried[-1] == "graph cudnn"
    assert "not tried, the run is too short for its start-up: kernel tuning" in found.fields["mode_reason"]
    assert found.untried == ("kernel tuning",)


def test_slow_starts_use_up_the_share_of_later_ones(demo: Path) -> None:
    machine = Machine(USUAL, start_s={"graph": 170.0})
    found = searched(demo, machine, HOUR)  # 180 s for all starts
    assert found.fields["mode"] == "graph"
    assert found.untried == ("compile", "cudnn.benchmark", "kernel tuning")
    assert [str(gain) for gain in found.fields["gains"]][1:] == ["graph 2.00x, 30.0 -> 15.0 ms"]


def test_the_compiled_step_is_tried_where_there_is_no_graph_though_starts_took_more_than_they_may(demo: Path) -> None:
    no_graph = {"graph": NotCaptured("it waits for the device")}
    machine = Machine(USUAL, start_s={"graph": 200.0}, broken=no_graph)
    found = searched(demo, machine, HOUR)  # 180 s for all starts
    assert found.fields["mode"] == "compile"
    assert "graph not possible: it waits for the device" in found.fields["mode_reason"]
    assert found.untried == ("cudnn.benchmark", "kernel tuning")


def test_candidates_that_the_clock_leaves_untried_are_named(demo: Path) -> None:
    machine = Machine(USUAL, trial_s=25.0)
    found = searched(demo, machine, 10 * HOUR)
    assert machine.tried == ["eager", "eager NCHW", "graph"]  # 75 s: the fourth may not begin after 60
    assert "not tried, out of trial time: compile, cudnn.benchmark, kernel tuning" in found.fields["mode_reason"]
    assert found.fields["mode"] == "graph"


def test_what_fits_only_compiled_runs_compiled(demo: Path) -> None:
    only = {**dict.fromkeys(USUAL, None), "compile": 20.0, "compile cudnn": None, "compile tuned": None}
    found = searched(demo, Machine(only), 3 * HOUR)
    assert found.fields["mode"] == "compile"
    assert found.eager_ms is None
    assert "eager not possible: out of memory" in found.fields["mode_reason"]
    assert "compile + cudnn.benchmark not possible" in found.fields["mode_reason"]


def test_code_that_does_not_compile_for_a_graph_is_not_compiled_again(demo: Path) -> None:
    machine = Machine({**USUAL, "eager cudnn": 30.0}, broken={"graph": CannotRun("no assembler")})
    found = searched(demo, machine, 3 * HOUR)
    assert machine.tried == ["eager", "eager NCHW", "graph", "eager cudnn"]
    assert "graph not possible: no assembler" in found.fields["mode_reason"]
    assert (found.fields["mode"], found.is_final, found.untried) == ("eager", False, ())


def test_what_was_asked_for_outright_is_not_tried_the_other_way(demo: Path) -> None:
    machine = Machine({**USUAL, "compile tuned": 19.0, "graph tuned": 14.0, "eager tuned": 30.0,
                                               "graph cudnn tuned": 13.0})  # fmt: skip
    found = searched(demo, machine, 3 * HOUR, train__channels_last=True, train__tune_kernels=True)
    assert machine.tried == ["eager tuned", "graph tuned", "compile tuned", "graph cudnn tuned"]
    assert found.fields["tunes_kernels"]


def test_a_real_trial_is_timed_for_no_longer_than_its_share(demo: Path) -> None:
    config, workload, plan = made(demo)
    with RunRehearsal(config, workload).begin(plan) as trial:
        before = trial.parts.step.attempted
        assert trial.measure("eager").ms > 0
        whole = trial.parts.step.attempted - before
        before = trial.parts.step.attempted
        short = TrialTime(1, most_s=MOST_S)  # the run is one step: nothing of it may be spent
        assert trial.measure("eager", short).ms > 0
        assert trial.parts.step.attempted - before == whole - ROUNDS * TIMED_STEPS + 1
    assert short.run_s is not None
    assert short.starts_s > 0


# --- time limits of trials ---


def test_the_limit_is_a_minute_until_the_run_is_known_to_be_short() -> None:
    time = TrialTime(1000, most_s=MOST_S)
    assert time.limit_s == 60
    time.expect(0.1)
    assert time.limit_s == pytest.approx(5)
    time.expect(10)
    assert time.limit_s == 60


def test_time_is_over_when_steps_took_it_and_starts_are_counted_apart() -> None:
    hands = HandClock()
    time = TrialTime(1000, most_s=MOST_S, clock=hands)
    time.expect(1.0)
    with time.count_start():
        hands.now_s += 40
    assert (time.starts_s, time.spent_s, time.is_over) == (40, 0, False)
    hands.now_s += 49.9
    assert not time.is_over
    hands.now_s += 0.1
    assert time.is_over
    assert time.for_one_s == 0


def test_all_starts_together_fit_into_a_twentieth_of_the_run() -> None:
    hands = HandClock()
    time = TrialTime(1000, most_s=MOST_S, clock=hands)
    assert time.has_room_for(1e6)  # nothing is known yet
    time.expect(1.0)
    assert time.has_room_for(50)
    assert not time.has_room_for(51)
    with time.count_start():
        hands.now_s += 30
    assert time.has_room_for(20)
    assert not time.has_room_for(21)


def test_one_candidate_does_not_use_up_what_the_others_need() -> None:
    hands = HandClock()
    time = TrialTime(1000, most_s=MOST_S, clock=hands)
    assert time.for_one_s == MOST_S / CANDIDATES
    hands.now_s += 50
    assert time.for_one_s == 10


class HotDevice:
    """Steps of 20 ms that take 22 once it has worked for half a second."""

    def __init__(self, hands: HandClock) -> None:
        self.hands, self.began, self.steps = hands, hands.now_s, 0

    def round(self, num_steps: int) -> float:
        began = self.hands.now_s
        for _ in range(num_steps):
            self.hands.now_s += 0.020 if self.hands.now_s - self.began < 0.5 else 0.022
        self.steps += num_steps
        return (self.hands.now_s - began) / num_steps


def test_a_step_is_timed_until_its_device_is_hot() -> None:
    hands = HandClock()
    device = HotDevice(hands)
    assert time_lasting_step(device.round, TrialTime(clock=hands), LASTING_S) == pytest.approx(0.022)
    assert device.steps * 0.020 < 2 * LASTING_S


def test_a_device_that_does_not_get_hot_is_timed_for_a_few_rounds() -> None:
    hands = HandClock()
    device = HotDevice(hands)
    assert time_lasting_step(device.round, TrialTime(clock=hands), 0.0) == pytest.approx(0.020)
    assert device.steps == 1 + ROUNDS * TIMED_STEPS


def test_a_short_run_has_no_time_for_a_hot_device() -> None:
    hands = HandClock()
    device, time = HotDevice(hands), TrialTime(200, most_s=MOST_S, clock=hands)  # 4 s, so 0.2 for trials
    assert time_lasting_step(device.round, time, LASTING_S) == pytest.approx(0.020)
    assert time.spent_s <= 0.020 + 0.2 / CANDIDATES + 0.020  # one to begin with, and one begun in time


def test_a_device_that_rests_between_rounds_rests_seldom() -> None:
    hands = HandClock()
    began = hands.now_s

    def a_round(num_steps: int) -> float:
        """Steps of 22 ms, and two of 20 after a rest."""
        took = sum(0.020 if step < 2 else 0.022 for step in range(num_steps))
        hands.now_s += took
        return took / num_steps

    assert 0.0216 < time_lasting_step(a_round, TrialTime(clock=hands), LASTING_S) < 0.022
    assert hands.now_s - began < 2 * LASTING_S


# --- trials in a fresh thread ---

CPU = torch.device("cpu")


def test_backward_runs_in_the_same_thread_and_context_variables_of_the_caller_hold() -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")
    setting.set("callers")
    threads: list[int] = []

    def work() -> tuple[int, str, bool]:
        x = torch.ones(2, requires_grad=True)

        def seen(grad: Tensor) -> None:
            threads.append(threading.get_ident())

        (x * 2).register_hook(seen)
        y = x * 2
        y.register_hook(seen)
        y.sum().backward()
        return threading.get_ident(), setting.get(), torch.autograd.is_multithreading_enabled()

    ident, value, is_multithreaded = run_in_fresh_thread(work, CPU)
    assert threads == [ident]
    assert value == "callers"
    assert not is_multithreaded
    assert torch.autograd.is_multithreading_enabled()


class CutOff(_Errand[None]):
    """As if an interrupt came right before it would say that it has ended."""

    def run(self) -> None:
        pass


def test_a_thread_that_could_not_say_that_it_ended_is_not_waited_for() -> None:
    errand = CutOff(lambda: None, CPU)
    errand.start()
    waiting = threading.Thread(target=errand.wait, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()


def test_code_is_compiled_after_a_thread_that_compiled_is_gone() -> None:
    def compiled() -> float:
        torch.compiler.reset()
        return float(torch.compile(lambda x: x * 2, backend="eager")(torch.ones(())))

    assert [run_in_fresh_thread(compiled, torch.device("cpu")) for _ in range(2)] == [2.0, 2.0]
    assert compiled() == 2.0
