"""Replay of steps that raise, spike, ran compiled, or are good when they are run again; and its command."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_capsules_of_runs import run
from torch import Tensor, nn

import halfstep as hs
import halfstep_train
import planted_causes as planted
from halfstep.errors import CheckpointError, TrainingStopped
from halfstep.evidence import capsule, causes
from halfstep.evidence.causes import diagnose
from halfstep.evidence.ranges import FOREIGN
from halfstep.our_code import OURS
from halfstep_train.cli.main import main
from halfstep_train.run.evidence import build_capsule_subject, replay_run

KEPT = pytest.warns(UserWarning, match="was saved; find the cause")


def step_of(model: nn.Module, folder: Path, **more: Any) -> hs.Step:
    return hs.Step(model, torch.optim.SGD(model.parameters(), 0.01, fused=True), "fp32", capsules=folder, **more)


def test_a_spike_is_laid_to_the_sample_that_made_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    step = step_of(model, tmp_path, skip_spikes=True)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean()

    for number in range(70):
        step(loss, [planted.batch_of() | {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(number))}])
    bad = planted.batch_of()
    bad["x"][2] *= 1e4
    step(loss, [bad])
    with KEPT:
        step.finish()
    found = hs.replay(capsule.list_capsules(tmp_path)[0], model, loss)
    assert found.cause == causes.SPIKE
    assert found.diagnosis.rows.keys() == {(0, 2)}
    assert "sample 12" in found.diagnosis.shown[1]
    assert found.remedy is not None
    assert found.remedy.works


def test_the_model_keeps_its_own_weights_and_the_generators_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = planted.Around(nn.Dropout(0.5))
    loss = planted.loss_of(model)
    batch = planted.batch_of()
    batch["x"][0, 0] = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with step_of(model, tmp_path) as step:
            step(loss, [batch])
    with torch.no_grad():
        model.head.weight.fill_(7.0)
    generators = torch.get_rng_state()
    hs.replay(tmp_path / "00000000", model, loss)
    assert (model.head.weight == 7).all()
    assert torch.equal(torch.get_rng_state(), generators)


def test_a_loss_that_falls_without_bound_is_told_from_a_rate_that_is_too_large(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 1.0, fused=True), "fp32", capsules=tmp_path)

    def loss_fn(x: Tensor) -> Tensor:
        return -model(x).square().mean()

    def train() -> None:
        for _ in range(60):
            step(loss_fn, [torch.ones(8, 4)])

    with KEPT, pytest.raises(TrainingStopped):
        train()
    found = hs.replay(capsule.list_capsules(tmp_path)[0], model, loss_fn)
    assert found.cause == causes.DIVERGED
    assert found.remedy is not None
    assert "lower bound" in found.remedy.change


def test_code_that_fails_compiled_and_not_eager_is_a_kernel_or_compiler_fault(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", **{"model.options.poisoned": [2]})
    found = capsule.read_capsule(folder / "capsules" / "00000002")
    subject = build_capsule_subject(found, None)
    subject.window = [{**subject.window[0], "image": torch.zeros_like(subject.window[0]["image"])}]
    eager = subject.loss

    def wrong(batch: Any) -> Any:
        value, *more = eager(batch)
        return value * float("nan"), *more

    subject.variants = {"as it was": wrong, "kernels off": eager}
    diagnosis = diagnose(subject, found)
    assert diagnosis.cause == causes.KERNEL
    assert "our kernels" in diagnosis.shown[0]
    subject.variants = {"as it was": wrong, "kernels off": wrong}
    assert "compiler" in diagnose(subject, found).shown[0]


def test_the_command_says_cause_operation_and_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp16 = {"precision.default": "fp16", "precision.simulate": True, "model.options.loudness": 1e6}
    with pytest.raises(TrainingStopped):
        run(tmp_path / "run", **fp16, **{"scaler.init_scale": 1.0, "guard.floor_patience": 2})
    capsys.readouterr()
    path = tmp_path / "run" / "capsules" / "00000000"
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cause"] == causes.OVERFLOW
    assert found["operation"]["module"] == "body.0"
    assert found["line"].startswith(("precision.modules:", "precision.default:"))
    assert found["tried"][-1]["works"] is True
    with pytest.raises(SystemExit):
        main(["replay", str(path)])
    out = capsys.readouterr().out
    assert "cause: overflow of the format" in out
    assert found["line"] in out


def test_a_capsule_is_replayed_where_it_belongs(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", **{"model.options.poisoned": [2]})
    with pytest.raises(CheckpointError, match="comes from a run of `halfstep train`") as refused:
        hs.replay(folder / "capsules" / "00000002", nn.Linear(1, 1), lambda batch: batch)
    assert "halfstep replay" in refused.value.fix
    model = nn.Linear(8, 2)
    with KEPT, step_of(model, tmp_path / "own") as step:
        step(lambda b: model(b["x"]).sum() * float("nan"), [planted.batch_of()])
    with pytest.raises(CheckpointError, match="comes from a custom loop") as refused:
        replay_run(tmp_path / "own" / "00000000")
    assert "hs.replay" in refused.value.fix


class Averaged(nn.Module):
    """A codebook that forward moves by averages: it grows without any learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("codes", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        loss = (h @ self.codes).square().mean()
        self.codes.mul_(1000.0)
        return loss


def test_a_codebook_that_grew_is_an_overflow_of_the_format_and_no_divergence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Averaged()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)
    step = hs.Step(model, optimizer, hs.Precision("fp16", simulate=True), capsules=tmp_path, scaler={"init_scale": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            step(model, [torch.randn(8, 4)])
        step.finish()
        found = hs.replay(capsule.list_capsules(tmp_path)[0], model, model)
    assert found.cause == causes.OVERFLOW


# --- lines of workloads and models are the user's, other lines are halfstep's ---

ROOT = Path(halfstep_train.__file__).parent


@pytest.mark.parametrize(
    ("room", "is_ours"),
    [("run", True), ("kernels", True), ("tune", True), ("data", True), ("workloads", False), ("models", False)],
)
def test_files_of_every_room_but_models_and_workloads_are_halfstep_s(room: str, is_ours: bool) -> None:
    assert (ROOT / room).is_dir()
    file = str(ROOT / room / "any.py")
    assert file.startswith(FOREIGN) is is_ours
    assert file.startswith(OURS)
