"""Arguments of the fast path: wrong values are refused, memory="low" recomputes, a CPU runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.backend_flags import read_flags, write_flags
from halfstep.fast import compiled_trial
from halfstep.fast import fast_path as fast_path
from halfstep.fast.fast_path import FastPath
from replay_stand_in import replays_on_cpu, try_compiled_code_at_once


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


def train(length: int = 10, **settings: Any) -> tuple[list[Tensor], hs.Step, int]:
    """Train three blocks; return the weights, the step, and the bytes that the last forward pass kept."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "fp32", **settings)
    kept = 0

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    for _ in range(length):
        step(loss_fn, [torch.randn(64, 8)])

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_fn(torch.randn(64, 8))
    return [parameter.detach() for parameter in model.parameters()], step, kept


def make(fast: Any, **settings: Any) -> tuple[nn.Module, hs.Step, Callable[[Tensor], Tensor]]:
    """Return one block, its step and its loss function."""
    torch.manual_seed(0)
    model = Block()
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "fp32", fast=fast, **settings)
    return model, step, lambda batch: model(batch).square().mean()


def assert_as_eager(model: nn.Module, batches: list[Tensor], **settings: Any) -> None:
    """Compare a model that was trained with these batches with one that eager steps train."""
    expected, step, loss_fn = make("off", **settings)
    for batch in batches:
        step(loss_fn, [batch])
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


def test_low_memory_recomputes_blocks_and_trains_to_the_same_bits() -> None:
    normal, _, kept = train()
    low, _, kept_low = train(memory="low")
    assert all(map(torch.equal, normal, low))
    assert kept_low < kept / 2


def test_low_memory_recomputes_twice_for_a_gradient_penalty() -> None:
    """With batch norm, whose statistics no recomputation may change."""
    found = []
    for memory in ("normal", "low"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*blocks, nn.Linear(4, 1))
        step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", memory=memory)

        def loss_fn(x: Tensor, model: nn.Module = model, step: hs.Step = step) -> Tensor:
            x = x.detach().requires_grad_()
            return (step.grad(model(x), x).norm(dim=1) - 1).square().mean()

        for batch in torch.randn(3, 6, 4):
            step(loss_fn, [batch])
        found.append(model.state_dict())
    assert all(map(torch.equal, found[0].values(), found[1].values()))


def test_low_memory_without_blocks_warns() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="found no repeated blocks in Linear"):
        hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32", memory="low")


def test_recomputed_blocks_are_captured() -> None:
    normal, _, _ = train(fast="off")
    with replays_on_cpu():
        low, step, _ = train(memory="low", fast="graph")
    assert step.mode == "graph"
    assert all(map(torch.equal, normal, low))


def test_a_cpu_runs_eagerly_and_says_why_only_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    _, step, _ = train()
    assert (step.mode, str(step.certificate), capsys.readouterr().err) == ("eager", "nothing is captured", "")
    train(length=1, fast="graph")
    assert "runs eagerly: a CUDA graph needs a CUDA device, not cpu" in capsys.readouterr().err


def test_the_usual_shape_is_compiled_and_others_stay_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try_compiled_code_at_once(monkeypatch)
    with replays_on_cpu():
        model, step, loss_fn = make(hs.Fast(num_steps=1000))
        batches = [torch.randn(2 if number % 4 == 3 else 4, 8) for number in range(24)]
        for batch in batches:
            step(loss_fn, [batch])
        path = step._fast
        usual = fast_path.describe_window([batches[0]])
        assert [key for key, shape in path.shapes.items() if shape.is_compiled] == [usual]
        assert len(path.compiled.graphs) == 1
        assert len(path.level.graphs) == 1  # of the short batch
        _, saving = compiled_trial.CompileHistory(step._step, usual).expect(0)
        assert saving == 0.5  # 1 s instead of 2 s: the next run knows it
    assert_as_eager(model, batches)


@pytest.mark.parametrize("is_inside", [True, False], ids=["in steps", "between steps"])
def test_time_between_steps_pays_for_no_check(is_inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def read_clock() -> float:
        nonlocal now
        now += 1e-3
        return now

    def pass_time(*_: object) -> None:
        nonlocal now
        now += 100.0

    monkeypatch.setattr(fast_path.time, "monotonic", read_clock)
    with replays_on_cpu():
        _, step, loss_fn = make("graph", on_outcome=pass_time if is_inside else None)
        for _ in range(3 * fast_path.LOOK_EVERY):
            step(loss_fn, [torch.randn(4, 8)])
            pass_time()
        assert step.mode == "graph"
        assert step.certificate.num_checks == (2 if is_inside else 0)


@pytest.mark.parametrize(("number", "method"), [(3, "_run_gradients"), (4, "try_calls")], ids=["compared", "captured"])
def test_an_interrupt_while_a_graph_is_checked_leaves_whole_steps(
    number: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replays_on_cpu():
        model, step, loss_fn = make("graph", ema_decay=0.9)
        batches = [torch.randn(4, 8) for _ in range(8)]
        for batch in batches[:number]:
            step(loss_fn, [batch])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        run = getattr(FastPath, method)

        def interrupt(*arguments: Any) -> None:
            run(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(FastPath, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(loss_fn, [batches[number]])
        is_made = number == 3  # the comparison follows the eager step
        assert step.attempted == number + is_made
        assert all(map(torch.equal, before, model.parameters())) != is_made
        monkeypatch.setattr(FastPath, method, run)
        for batch in batches[number + is_made :]:
            step(loss_fn, [batch])
    assert_as_eager(model, batches, ema_decay=0.9)


def test_a_bad_step_is_no_certificate() -> None:
    with replays_on_cpu():
        _, step, loss_fn = make("graph")
        modes = []
        for number in range(9):
            is_bad = number in (3, 5)  # when it is compared with the eager step, and when it is captured
            batch = torch.full((4, 8), float("nan")) if is_bad else torch.randn(4, 8)
            outcome = step(loss_fn, [batch])
            assert outcome.committed != is_bad
            modes.append(step.mode)
    assert modes == ["eager"] * 6 + ["graph"] * 3


def test_the_certificate_names_optimizers_in_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU has such forms: tests/gpu trains with each."""
    monkeypatch.setattr("halfstep.own_loop.arguments.make_capturable", lambda *_: ["AdamW"])
    with replays_on_cpu():
        _, step, _ = train(fast="graph")
    assert str(step.certificate).endswith("; AdamW in the form for graphs, whose last bits may differ from fast='off'")


def test_flags_that_torch_refuses_to_read_do_not_end_a_step() -> None:
    """torch's old switch cannot be read once the new ones of convolutions and RNNs differ."""
    before = read_flags()
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cudnn.rnn.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch._C._get_cudnn_allow_tf32()
        with replays_on_cpu():
            _, step, _ = train(fast="graph")
        assert step.mode == "graph"
    finally:
        write_flags(before)
