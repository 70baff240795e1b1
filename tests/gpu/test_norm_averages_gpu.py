"""BatchNorm's running statistics in the first steps on a GPU: the same in eager, compiled and captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfstep.step.graph import GraphedStep
from halfstep.step.norm_averages import NormAverages
from halfstep.step.randomness import choose_algorithms
from halfstep.step.step import GuardedStep
from halfstep_train.run.train import train
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.segmentation.demo import write_demo
from no_waiting import no_host_wait
from tiny_training import assert_same_bits, batch, everything, loss_of, make_step, poisoned
from whole_runs import newest

pytestmark = pytest.mark.gpu


def averaging(precision: str = "fp32") -> GuardedStep:
    step = make_step("adamw", precision, device="cuda")
    step.norms = NormAverages(step.model)
    return step


def test_a_captured_step_gives_the_bits_of_eager_ones_and_drops_bad_steps() -> None:
    with choose_algorithms(deterministic=True):
        eager, captured = averaging(), averaging()
        for number in range(3):  # the graph is captured while the averages still move
            for own in (eager, captured):
                own(loss_of(own.model), [batch(number, device="cuda")])
        graph = GraphedStep(
            captured, loss_of(captured.model), [batch(0, device="cuda")], torch.cuda.graph_pool_handle()
        )
        for number in range(3, 14):
            window = [poisoned(device="cuda") if number == 5 else batch(number, device="cuda")]
            eager(loss_of(eager.model), window)
            graph(window)
        assert_same_bits(everything(eager), everything(captured))


def test_averaging_makes_no_host_synchronisation() -> None:
    step = averaging("bf16")
    batches = [batch(number, device="cuda") for number in range(8)]
    for number in range(3):  # the first commit is decided on the host, by design
        step(loss_of(step.model), [batches[number]])
    with no_host_wait():
        for number in range(3, 8):
            step(loss_of(step.model), [batches[number]])


def test_runs_in_all_modes_have_the_same_statistics(tmp_path: Path) -> None:
    write_demo(tmp_path / "data", num_images=20, side=64)
    found = {}
    for mode in ("off", "compile", "graph"):
        settings = {
            "data.dir": str(tmp_path / "data"), "data.image_size": 64, "data.num_workers": 0, "train.batch_size": 4,
            "train.max_steps": 5, "precision": "fp32", "log.quiet": True, "device": "cuda", "model.base_channels": 8,
            "model.depth": 2, "train.fast": mode, "optimizer.lr": 1e-6, "train.deterministic": mode == "off",
        }  # fmt: skip
        run = train(from_dict("unet", settings), out=tmp_path / mode)
        checkpoint = newest(run)
        found[mode] = {name: value for name, value in checkpoint.model.items() if "running" in name}
    for mode in ("compile", "graph"):
        for name, value in found["off"].items():
            # Sums over a batch in another order, in fp32.
            torch.testing.assert_close(found[mode][name], value, rtol=1e-3, atol=1e-4)
