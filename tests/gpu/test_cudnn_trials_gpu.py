"""cuDNN's trials on a real GPU: torch keeps their choice for each thread, and a run that was given them makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fast_path_gpu import made
from torch import nn
from torch.profiler import ProfilerActivity, profile

from halfstep.step.randomness import choose_algorithms
from halfstep_train.run.assemble import assemble
from halfstep_train.run.engine import Engine, RunRehearsal
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.tune.modes import UNCAPTURED, allow_cudnn_trials

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SMALL = {"model.depth": 1}


@pytest.fixture(autouse=True)
def any_algorithm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four of them for each convolution, and few convolutions: cuDNN compiles some algorithms to try them."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", 4)
    with choose_algorithms(deterministic=False):
        yield


def kernels_of(work: Callable[[], object]) -> int:
    """How many kernels it launches: trials launch many more than the convolution they are for."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def convolution(channels: int) -> Callable[[], None]:
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False).cuda()
    x = torch.randn(2, channels, 16, 16, device="cuda")
    return lambda: layer(x).sum().backward()


def test_algorithms_are_kept_by_thread_and_a_new_thread_tries_them_anew() -> None:
    """The ground on which each candidate of a trial stands: if torch changes it, this says so."""
    once = convolution(40)
    once()  # chosen by heuristic in this thread, and for backward in autograd's
    plain = kernels_of(once)
    with allow_cudnn_trials(True):
        assert kernels_of(once) == plain
        assert kernels_of(lambda: run_in_fresh_thread(once, CUDA)) > 2 * plain
        assert kernels_of(once) == plain


def test_trials_leave_the_runs_own_thread_without_a_past(tmp_path: Path) -> None:
    values = {**SMALL, "model.base_channels": 24, "train.fast": "off", "train.batch_size": 6}
    loaded, workload, plan = made(tmp_path, **values)
    with RunRehearsal(loaded.config, workload).begin(plan) as trial:
        trial.measure("eager", cudnn_benchmark=False)
        trial.measure("eager", cudnn_benchmark=True)
    parts = assemble(loaded.config, workload, dataclasses.replace(plan, cudnn_benchmark=True))
    engine = Engine(parts, "eager", lambda text, level: pytest.fail(text))
    window = [{name: value.cuda() for name, value in next(parts.train_loader.iterate_epoch(0)).items()}]
    first = kernels_of(lambda: engine(window))
    engine(window)
    assert first > 2 * kernels_of(lambda: engine(window))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_run_with_cudnns_trials_follows_the_eager_loss_curve(tmp_path: Path, mode: str) -> None:
    """Within 3 % of the loss at each step, as without them (test_execution_modes_gpu)."""
    losses = []
    for chosen, tries in (("eager", False), (mode, True)):
        loaded, workload, plan = made(tmp_path, **SMALL, **{"train.fast": {"eager": "off"}.get(chosen, chosen)})
        parts = assemble(loaded.config, workload, dataclasses.replace(plan, cudnn_benchmark=tries))
        engine = Engine(parts, chosen, lambda text, level: pytest.fail(text))  # type: ignore[arg-type]
        window = [{name: value.cuda() for name, value in next(parts.train_loader.iterate_epoch(0)).items()}]
        losses.append([engine(window).read().loss for _ in range(UNCAPTURED + 10)])
        assert bool(engine.graphs) == (chosen == "graph")
    pairs = torch.tensor(losses)
    assert (pairs[0] / pairs[1] - 1).abs().max() < 0.03, pairs
