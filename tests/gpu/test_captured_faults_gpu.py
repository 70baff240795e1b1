"""Faults that captured steps had on a GPU: hangs, crashes, silent differences, and code refused for no good reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from captured_faults import ANNEALED, LOOPS, Loop, Trained, assert_same, assert_same_history, train
from halfstep.fast import compiled_trial
from halfstep.fast import fast_path as fast
from halfstep.fast.parts_trial import Stage
from halfstep.step.randomness import choose_algorithms

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MAY_STAY_EAGER = ("max_norm", "max_norm_set_later")
"""Loops that a GPU captures or not: kernels of Embedding's max_norm wait for the host. They train alike in any case."""


@pytest.fixture(autouse=True)
def _start_afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    torch._dynamo.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Loading a kernel takes longer than many of these steps: a test must not depend on the clock.
    monkeypatch.setattr(fast, "COMPARE_SHARE", float("inf"))
    with choose_algorithms(deterministic=True):
        yield


@pytest.fixture
def _compiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let auto try compiled code at the first replay."""
    monkeypatch.setattr(fast, "LOOK_EVERY", 1)
    monkeypatch.setattr(compiled_trial, "COMPILE_S", -1.0)
    monkeypatch.setattr(compiled_trial, "COMPILE_S_PER_NODE", 0.0)


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ANNEALED])
def test_loops_train_like_eager_ones(name: str) -> None:
    if name in MAY_STAY_EAGER:
        found = train(LOOPS[name], CUDA, "graph")
        assert_same_history(found, train(LOOPS[name], CUDA, "off"))
        assert (found.step.mode in ("eager", "compile")) == bool(found.why_eager)
    else:
        assert_same(name, CUDA)


@pytest.mark.parametrize("bad_at", [4, 5, 8])
@pytest.mark.parametrize("name", ["replaced_buffer", "accumulated_hidden_state"])
def test_a_bad_step_restores_a_replaced_buffer(name: str, bad_at: int) -> None:
    assert_same(name, CUDA, bad_at={bad_at})


# --- floats that change at every step ---


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ANNEALED)
def test_captured_kernels_follow_a_float(name: str, precision: str) -> None:
    assert_same(name, CUDA, precision=precision)


def assert_follows(found: Trained, expected: Trained) -> None:
    """Compare losses: the float grows to twice its first value, so that a frozen one would be far off. Compiled code
    rounds differently, at most by 2**-8 per operation."""
    losses = [[one["loss"] for one in trained.history] for trained in (found, expected)]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.05, atol=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ANNEALED)
def test_compiled_code_follows_a_float(name: str, precision: str) -> None:
    found = train(ANNEALED[name], CUDA, "compile", precision=precision)
    assert_follows(found, train(ANNEALED[name], CUDA, "off", precision=precision))
    if why_eager := ANNEALED[name](CUDA).why_eager:  # then compiled parts are tried
        assert why_eager in found.why_eager or found.step._fast.parts.stage in (Stage.USED, Stage.REFUSED)
    else:
        assert found.step.mode.startswith(("graph", "compile+graph"))


@pytest.mark.usefixtures("_compiles_at_once")
@pytest.mark.parametrize("name", ["annealed_weight", "annealed_lambda"])
def test_trying_compiled_code_with_a_float_does_not_hang(name: str) -> None:
    found = train(ANNEALED[name], CUDA, hs.Fast("auto", num_steps=100_000), precision="bf16")
    assert_follows(found, train(ANNEALED[name], CUDA, "off", precision="bf16"))
    assert found.step.mode.startswith(("graph", "compile+graph"))
    assert found.step._fast.state is not fast.State.UNTRIED


# --- the trial of compiled code ---


@pytest.mark.usefixtures("_compiles_at_once")
@pytest.mark.parametrize("name", ["running_average", "carried_in_dict"])
def test_python_code_runs_once_while_compiled_code_is_tried(name: str) -> None:
    found = train(LOOPS[name], CUDA, hs.Fast("auto", num_steps=100_000))
    assert_follows(found, train(LOOPS[name], CUDA, "off"))
    assert found.step._fast.state is not fast.State.UNTRIED
    kept = found.history[-1]["kept"]
    num_calls = torch.frombuffer(bytearray(kept["num" if "num" in kept else "n"][2]), dtype=torch.float32)
    assert num_calls.item() == len(found.history) * (2 if name == "carried_in_dict" else 1)


class PointNet(nn.Module):
    """Inductor's code of some versions of torch gives NaN gradients for it, where torch's kernels do not."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 64, 64, 64, 128, 1024]
        layers = [
            module
            for width, next_width in zip(sizes, sizes[1:], strict=False)
            for module in (nn.Conv1d(width, next_width, 1), nn.BatchNorm1d(next_width), nn.ReLU())
        ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 40)
        )

    def forward(self, points: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(points).amax(-1))
        return out


def test_compiled_code_that_gives_nan_does_not_stop_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = PointNet().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    step = hs.Step(model, optimizer, "bf16", clip_norm=1.0, fast="compile")
    batches = [(torch.randn(32, 3, 1024, device=CUDA), torch.randint(0, 40, (32,), device=CUDA)) for _ in range(6)]
    outcomes = [step(lambda b: F.cross_entropy(model(b[0]), b[1]), [batches[k % 6]]) for k in range(40)]
    assert all(outcome.committed for outcome in outcomes)
    assert step._fast.why_eager == ""
    refused = [line for line in capsys.readouterr().err.splitlines() if "not compiled" in line]
    if step.mode == "graph":
        assert len(refused) == 1
        assert "are not finite, but those of torch's kernels are" in refused[0]
    else:  # this version's code is right
        assert (step.mode, refused) == ("compile+graph", [])


# --- batches of many lengths ---


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True)
        self.embed, self.out = nn.Embedding(1000, 64, padding_idx=0), nn.Linear(64, 2)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0)[:, 0])
        return out


@pytest.mark.parametrize("num_lengths", [3, 8, 12])
def test_many_lengths_are_captured(num_lengths: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.use_deterministic_algorithms(False)  # attention with a mask has no deterministic backward
    torch.manual_seed(0)
    model = Classifier().to(CUDA)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), "bf16", fast="graph")
    batches = [
        (torch.randint(1, 1000, (8, 16 + 8 * k), device=CUDA), torch.randint(0, 2, (8,), device=CUDA))
        for k in range(num_lengths)
    ]
    for number in range(6 * num_lengths):
        assert step(lambda b: F.cross_entropy(model(b[0]), b[1]), [batches[number % num_lengths]]).committed
    path = step._fast
    assert (path.why_eager, step.mode) == ("", "graph")
    assert len(path.level.graphs) == min(num_lengths, 8)
    said = "there are more shapes than max_graphs=8: the others run eagerly" in capsys.readouterr().err
    assert said == (num_lengths > 8)


def make_pooled(device: torch.device) -> Loop:
    """Classify the mean of embedded tokens, in batches of twelve lengths."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 3)).to(device)
    lengths = [4 + number % 12 for number in range(60)]

    def draw(draws: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 50, (6, lengths.pop()), generator=draws)
        return tokens, torch.randint(0, 3, (6,), generator=draws)

    return Loop(model, lambda b: F.cross_entropy(model(b[0]).mean(1), b[1]), make_batch=draw)


def test_lengths_beyond_the_graphs_train_like_eager_steps() -> None:
    found = train(make_pooled, CUDA, "graph", length=60)
    assert_same_history(found, train(make_pooled, CUDA, "off", length=60))
    assert len(found.step._fast.level.graphs) == 8


# --- noise of atomics ---


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, "gelu", batch_first=True, norm_first=True)
        self.embed, self.out = nn.Embedding(2000, 128), nn.Linear(128, 2000)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.embed(tokens)))
        return out


def test_two_runs_that_agree_by_luck_do_not_refuse_compiled_code() -> None:
    torch.use_deterministic_algorithms(False)
    for seed in range(5):
        torch.manual_seed(seed)
        model = Encoder().to(CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        step = hs.Step(model, optimizer, "bf16", clip_norm=1.0, fast="compile")
        batches = [torch.randint(0, 2000, (2, 32, 128), device=CUDA) for _ in range(6)]

        def loss_fn(batch: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        for number in range(20):
            step(loss_fn, [batches[number % 6]])
        assert step.mode.startswith("compile+graph"), (seed, step._fast.state, step._fast.reason)


# --- code that torch cannot trace ---


@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_a_detector_that_cannot_be_traced_trains_eagerly(mode: Any) -> None:
    detection = pytest.importorskip("torchvision.models.detection", reason="torchvision's RetinaNet is what is trained")
    torch.use_deterministic_algorithms(False)  # RetinaNet's backward has no deterministic kernels
    losses = []
    for way in ("off", mode):
        torch.manual_seed(0)
        model = detection.retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=128, max_size=128
        ).to(CUDA)
        images, labels = torch.rand(2, 3, 128, 128, device=CUDA), torch.ones(2, 1, dtype=torch.long, device=CUDA)
        boxes = torch.tensor([[[10.0, 10, 60, 60]], [[20.0, 30, 90, 100]]], device=CUDA)

        def loss_fn(batch: Any, model: Any = model) -> Any:
            targets = [{"boxes": box, "labels": label} for box, label in zip(batch[1], batch[2], strict=True)]
            return sum(model(list(batch[0]), targets).values())

        step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-5, fused=True), "fp32", fast=way)
        outcomes = [step(loss_fn, [(images, boxes, labels)]) for _ in range(8)]
        assert all(outcome.committed for outcome in outcomes)
        losses.append(torch.tensor([outcome.loss for outcome in outcomes]))
    assert (step.mode in ("eager", "compile")) == bool(step._fast.why_eager)
    # Small updates from one start: noise of atomics grows little in eight steps.
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.0)
