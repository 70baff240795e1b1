"""Peers on a tiny model on the CPU. The compiler's light backend `eager` stands for inductor, which would take
minutes here; `tests/gpu/test_peers_gpu.py` runs the real one."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.backend_flags import read_effective_leaves, read_flags
from halfstep.errors import HardwareError
from halfstep_train.bench.peers import PeerRunner, isolate_peer, list_peers
from halfstep_train.bench.problem import Batch, Problem, Runner
from halfstep_train.kernels.fast_forms import FORMS, force, is_wanted
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.scores import segmentation_loss

STEPS = 4
INSTALLED = [
    "plain",
    *(
        pytest.param(name, marks=[] if found else pytest.mark.skip(reason=f"{name} is missing: this was NOT tested"))
        for name, found in ((name, importlib.util.find_spec(name) is not None) for name in ("lightning", "accelerate"))
    ),
]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(image)).relu())
        return y


class Watched:
    """A problem that remembers the models it gave away, and what the loss saw."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, image: model(image)) -> None:
        generator = torch.Generator().manual_seed(0)
        self.models: list[weakref.ref[nn.Module]] = []
        self.forward = forward
        self.problem = Problem(
            config=load("unet").config,
            make_model=self.make_model,
            host_batch={
                "image": torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=generator),
                "mask": torch.randint(2, (2, 8, 8), dtype=torch.uint8, generator=generator),
            },
            prepare=lambda batch: batch | {"image": batch["image"].float() / 255},
            loss=self.loss,
            device=torch.device("cpu"),
            lr=1e-2,
            weight_decay=0.01,
            clip_norm=0.5,
            samples=2,
        )

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = Tiny()
        self.models.append(weakref.ref(model))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return segmentation_loss(self.forward(model, batch["image"]), batch["mask"])


def stated(problem: Problem, *words: str) -> Problem:
    """The same, of a user who set more."""
    return dataclasses.replace(problem, config=load("unet", overrides=words).config)


def runners(name: str, problem: Problem, precision: str = "fp32") -> list[Runner]:
    return list_peers([name], problem, precision, _compiler="eager")


def reference_losses(problem: Problem) -> list[float]:
    """The same training without a compiler, a framework or a scaler."""
    model = problem.make_model().train()
    options = problem.config.optimizer.collect_options()
    optimizer = torch.optim.AdamW(model.parameters(), lr=problem.lr, weight_decay=problem.weight_decay, **options)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = problem.loss(model, problem.prepare(problem.host_batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), problem.clip_norm)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_documented_and_tuned_trains_as_a_loop_written_by_hand_in_strict_fp32(name: str) -> None:
    problem = Watched().problem
    expected = reference_losses(problem)
    assert expected[-1] < expected[0]
    modes: set[str] = set()
    for runner in runners(name, problem):
        # fp32 sums in another order: a few units in the last place of 1.2, grown over four steps of AdamW.
        loss = runner.train(STEPS, lambda: modes.update(read_effective_leaves().values()))
        assert loss == pytest.approx(expected[-1], rel=1e-5), runner.variant
    assert modes == {"ieee"}


@pytest.mark.parametrize("name", INSTALLED)
def test_a_peers_optimizer_has_the_options_that_were_stated(name: str) -> None:
    problem = Watched().problem
    other = stated(problem, "optimizer.betas=[0.3, 0.5]", "optimizer.eps=1e-2")
    expected = reference_losses(other)[-1]
    assert expected != pytest.approx(reference_losses(problem)[-1], rel=1e-3)
    for runner in runners(name, other):
        assert runner.train(STEPS, lambda: None) == pytest.approx(expected, rel=1e-5), runner.variant


@pytest.mark.parametrize("name", INSTALLED)
def test_ctrl_c_ends_a_peer_in_a_thread_of_its_own(name: str) -> None:
    documented, _ = runners(name, Watched().problem)

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.01)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_in_fresh_thread(lambda: documented.train(STEPS, interrupted), torch.device("cpu"))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_in_bf16_stays_near_its_fp32_and_is_not_fp32(name: str) -> None:
    problem = Watched().problem
    expected = reference_losses(problem)[-1]
    for runner in runners(name, problem, "bf16"):
        loss = runner.train(STEPS, lambda: None)
        # bf16 keeps 8 bits: 2**-8 a product, most of it averaged away over 128 pixels.
        assert loss == pytest.approx(expected, rel=2**-6), runner.variant
        assert loss != pytest.approx(expected, rel=1e-6), runner.variant


def test_plain_scales_the_loss_in_fp16_and_unscales_before_clipping() -> None:
    problem = Watched().problem
    expected = reference_losses(problem)[-1]
    for runner in runners("plain", problem, "fp16"):
        assert runner.train(STEPS, lambda: None) == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("name", INSTALLED)
def test_only_the_tuned_variant_changes_layout_and_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []
    adamw = torch.optim.AdamW

    def remembered(parameters: Any, **options: Any) -> torch.optim.AdamW:
        parameters = list(parameters)
        last = any(
            p.ndim == 4 and p.shape[2] > 1 and p.is_contiguous(memory_format=torch.channels_last) for p in parameters
        )
        built.append({"fused": options["fused"], "channels_last": last})
        return adamw(parameters, **options)

    monkeypatch.setattr(torch.optim, "AdamW", remembered)
    for runner in runners(name, Watched().problem, "bf16"):
        runner.train(1, lambda: None)
    assert built == [{"fused": None, "channels_last": False}, {"fused": True, "channels_last": True}]


@pytest.mark.parametrize(
    ("device", "precision", "is_last"),
    [
        ("cuda", "fp32", False),
        ("cuda", "tf32", True),
        ("cuda", "bf16", True),
        ("cuda", "fp16", True),
        ("cpu", "fp32", True),
    ],
)
def test_tuned_means_channels_last_but_for_strict_fp32_on_cuda_where_no_gain_is_known(
    device: str, precision: str, is_last: bool
) -> None:
    problem = dataclasses.replace(Watched().problem, device=torch.device(device))
    setup = PeerRunner(name="plain", problem=problem, precision=precision, variant="tuned")
    kernel = max(setup.build_model().parameters(), key=torch.numel)
    assert kernel.is_contiguous(memory_format=torch.channels_last) == is_last
    image = setup.prepare(setup.problem.host_batch)["image"]
    assert image.is_contiguous(memory_format=torch.channels_last) == is_last


@pytest.mark.parametrize("name", INSTALLED)
def test_tf32_is_on_while_a_peer_trains_in_it(name: str) -> None:
    seen: list[set[str]] = []
    for runner in runners(name, Watched().problem, "tf32"):
        runner.train(1, lambda: seen.append(set(read_effective_leaves().values())))
    assert seen == [{"tf32"}, {"tf32"}]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_prints_nothing_releases_its_model_and_leaves_the_process_as_it_was(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        flags = read_flags(), torch.backends.cudnn.benchmark, torch.is_grad_enabled(), torch.get_default_dtype()
        amp = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return *flags, *amp, *handlers, dict(os.environ), logging.root.manager.disable, torch.get_rng_state().tolist()

    watched = Watched()
    made = runners(name, watched.problem, "bf16")
    before = state()
    for runner in made:
        runner.train(2, lambda: None)
        assert state() == before, runner.variant
    assert capfd.readouterr() == ("", "")
    gc.collect()
    assert [model() for model in watched.models] == [None, None]


def broken(model: nn.Module, image: Tensor) -> Tensor:
    raise ArithmeticError("a model that cannot run")


@pytest.mark.parametrize("name", INSTALLED)
def test_a_failure_inside_a_peer_is_raised_and_leaves_flags_alone(name: str) -> None:
    before = read_flags()
    for runner in runners(name, Watched(forward=broken).problem):
        with pytest.raises(Exception, match="a model that cannot run"):
            runner.train(1, lambda: None)
        assert read_flags() == before


def test_cuda_graphs_are_not_pretended_on_a_cpu() -> None:
    [runner] = list_peers(["plain:graphs"], Watched().problem, "fp32")
    with pytest.raises(HardwareError, match="plain graphs needs CUDA"):
        runner.train(1, lambda: None)


@pytest.mark.parametrize("name", INSTALLED[1:])
def test_fp16_on_the_cpu_is_an_error_and_not_another_precision_in_disguise(name: str) -> None:
    for runner in runners(name, Watched().problem, "fp16"):
        with pytest.raises(HardwareError, match="cannot train fp16 on the CPU"):
            runner.train(1, lambda: None)


def test_a_peer_computes_in_the_layers_of_torch_not_in_our_fast_forms() -> None:
    x = torch.zeros(1, 3, 4, 4)
    with force(True):
        with isolate_peer(torch.device("cpu")):
            assert not any(is_wanted(form, x) for form in FORMS)
        assert all(is_wanted(form, x) for form in FORMS)


def test_a_workload_of_several_phases_is_not_timed_against_loops_of_one_step() -> None:
    problem = dataclasses.replace(Watched().problem, num_phases=2)
    with pytest.raises(HardwareError, match="2 phases") as refused:
        runners("plain", problem)
    assert "--against" in refused.value.fix
