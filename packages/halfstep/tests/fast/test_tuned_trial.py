"""Long runs: kernels chosen by measurement, and compiled code that is tuned once more, used only if it is faster."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.fast import compiled_trial, kernel_choice, tuned_trial
from halfstep.fast.fast_path import State
from halfstep.fast.kernel_choice import DepthwiseConvolution, choose_kernels
from replay_stand_in import replays_on_cpu, try_compiled_code_at_once

CPU = torch.device("cpu")
PACKED, DEPTHWISE = "attend_packed", "convolve_depthwise"


class Net(nn.Module):
    """A depthwise convolution, and attention in a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x.sin() * self.attention.in_proj_weight.mean()).view(2, 8, 8)
        output: Tensor = checkpoint(self.attend, x, use_reentrant=False)
        return output


def make_small() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.fixture(autouse=True)
def _tune_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Compile and tune from the first replay on, with torch's kernels in place of Inductor's. Both are faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try_compiled_code_at_once(monkeypatch)
    monkeypatch.setattr(tuned_trial, "LIKELY_SAVING", 1e9)
    monkeypatch.setattr(tuned_trial, "MOST_COMPILING", 1e9)
    with replays_on_cpu():
        yield


def train(model: nn.Module, num: int = 10, **more: Any) -> tuple[hs.Step, list[float]]:
    torch.manual_seed(0)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "fp32", **more)
    return step, [train_once(step) for _ in range(num)]


def train_once(step: hs.Step) -> float:
    return float(step(lambda x: step.model(x).square().mean(), [torch.randn(2, 4, 4, 4)]).loss)


def prefer(monkeypatch: pytest.MonkeyPatch, *fast: str) -> None:
    """Time calls by their names."""
    monkeypatch.setattr(kernel_choice, "time_call", lambda run, *_: 1.0 if run.__name__ in fast else 2.0)


def set_times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    times = itertools.cycle(seconds)
    monkeypatch.setattr(compiled_trial, "time_replays", lambda replay, device: next(times))


# --- kernels ---


def trace(model: Any, x: Tensor) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        graph.meta["inputs"] = list(inputs)
        graphs.append(graph)
        return graph.forward

    torch.compile(model, backend=keep, fullgraph=True)(x).sum().backward()
    return graphs[0]


def list_targets(graph: GraphModule) -> list[str]:
    return [
        getattr(node.target, "__name__", str(node.target))
        for one in graph.modules()
        if isinstance(one, GraphModule)
        for node in one.graph.nodes
    ]


def test_each_call_gets_its_fastest_kernel_also_in_a_checkpointed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(), torch.randn(2, 4, 4, 4)
    graph = trace(model, x)
    prefer(monkeypatch, PACKED, DEPTHWISE)
    chosen = list_targets(choose_kernels(graph, CPU))
    assert sum(PACKED in one for one in chosen) == 1
    assert sum(DEPTHWISE in one for one in chosen) == 1
    assert not any(PACKED in one or DEPTHWISE in one for one in list_targets(graph))
    prefer(monkeypatch, "nothing")
    assert list_targets(choose_kernels(graph, CPU)) == list_targets(graph)


def test_measuring_draws_no_random_numbers_and_skips_kernels_that_do_not_run() -> None:
    graph = trace(Net(), torch.randn(2, 4, 4, 4))
    before = torch.get_rng_state()
    choose_kernels(graph, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    x, time_call = torch.zeros(1, 2, 3, 4), kernel_choice.time_call
    assert time_call(torch.conv2d, ((x, torch.zeros(2, 9, 1, 1)), {}), torch.float32, CPU) == kernel_choice.UNTIMED
    assert 0 < time_call(torch.conv2d, ((x, torch.zeros(2, 2, 1, 1)), {}), torch.float32, CPU) < 1


@pytest.mark.parametrize(("num", "is_padded"), [(13, True), (16, False)])
def test_an_unaligned_linear_layer_may_be_padded(num: int, is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(8, num, dtype=torch.bfloat16), torch.randn(3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    graph = trace(model, x)
    prefer(monkeypatch, "multiply_padded")
    padded = choose_kernels(graph, CPU)
    assert ("multiply_padded" in list_targets(padded)) == is_padded
    for usual, own in zip(*(run_traced(one, graph, x, model) for one in (graph, padded)), strict=True):
        torch.testing.assert_close(own, usual, rtol=0, atol=0)


def test_what_follows_a_padded_layer_may_rely_on_its_strides_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(8, 12, dtype=torch.bfloat16), torch.randn(3, 5, 8, dtype=torch.bfloat16, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        named = F.linear(input=x, weight=model.weight, bias=model.bias)
        single = F.linear(x[0, 0], model.weight[0])  # two vectors
        return model(x).view(3, -1, 4).sum() + named.view(-1).sum() + single

    graph = trace(run, x)
    prefer(monkeypatch, "multiply_padded")
    padded = choose_kernels(graph, CPU)
    assert list_targets(padded).count("multiply_padded") == 2
    for usual, own in zip(*(run_traced(one, graph, x, model) for one in (graph, padded)), strict=True):
        torch.testing.assert_close(own, usual, rtol=0, atol=0)


def run_traced(module: GraphModule, graph: GraphModule, x: Tensor, model: nn.Module) -> list[Tensor]:
    """Return the output and the gradients of traced code with the inputs of `graph`."""
    torch.manual_seed(1)
    (output,) = module(*graph.meta["inputs"])
    return [output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        output: Tensor = self.attention(x, x, x, **{"need_weights": False, **options})[0]
        return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"bias": False}, {"batch_first": True, "dropout": 0.5}], ids=str
)
def test_self_attention_without_copies_equals_torchs(
    options: dict[str, Any], is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = SelfAttention(**options), torch.randn(5, 5, 8, requires_grad=True)
    mask = {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True} if is_causal else {}
    graph = trace(functools.partial(model, **mask), x)
    prefer(monkeypatch, PACKED)
    packed = choose_kernels(graph, CPU)
    assert PACKED in list_targets(packed)
    for usual, own in zip(*(run_traced(one, graph, x, model) for one in (graph, packed)), strict=True):
        torch.testing.assert_close(own, usual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": True},
        {"attn_mask": torch.zeros(5, 5)},
        {"key_padding_mask": torch.zeros(3, 5, dtype=torch.bool)},
    ],
    ids=["weights", "mask", "padding"],
)
def test_other_attention_keeps_its_copies(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(functools.partial(SelfAttention(), **options), torch.randn(5, 3, 8))
    prefer(monkeypatch, PACKED)
    assert PACKED not in list_targets(choose_kernels(graph, CPU))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("padding", "dilation"), [((1, 1), (1, 1)), ((0, 2), (1, 1)), ((3, 0), (2, 3))])
def test_a_depthwise_convolution_has_torchs_gradients(
    padding: tuple[int, int], dilation: tuple[int, int], has_bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 9, 8), (5, 1, 3, 3)))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True) if has_bias else None
    given = [one for one in (x, weight, bias) if one is not None]
    outputs = [
        DepthwiseConvolution.apply(x, weight, bias, padding, dilation),
        torch.conv2d(x, weight, bias, 1, padding, dilation, 5),
    ]
    factors = torch.randn_like(outputs[0])
    own, expected = (torch.autograd.grad(one, given, factors) for one in outputs)
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("arguments", [{}, {"stride": 1, "padding": 1}, {"padding": (1,), "dilation": [1, 1]}])
def test_a_depthwise_convolution_is_found_however_it_is_written(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, torch.ones(4, 1, 3, 3), groups=4, **arguments)

    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1), Function()), torch.randn(2, 4, 6, 6))
    prefer(monkeypatch, DEPTHWISE)
    assert DEPTHWISE in list_targets(choose_kernels(graph, CPU))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, 2, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding="same", groups=4),
        nn.Conv2d(4, 4, 1, padding=1, groups=4),
    ],
    ids=["two groups", "two filters", "stride", "same", "wide padding"],
)
def test_other_convolutions_stay_as_they_are(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1), layer), torch.randn(2, 4, 6, 6))
    prefer(monkeypatch, DEPTHWISE)
    assert list_targets(choose_kernels(graph, CPU)) == list_targets(graph)


def test_a_graph_of_torch_func_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Conv2d(4, 4, 3, groups=4)

    class Gradients(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            own = dict(self.model.named_parameters())
            run = lambda one: torch.func.functional_call(self.model, own, (one[None],)).sum()  # noqa: E731
            return torch.func.vmap(torch.func.grad(run))(x).sum() + self.model(x).sum()

    graph = trace(Gradients(), torch.randn(2, 4, 6, 6))
    prefer(monkeypatch, DEPTHWISE)
    assert list_targets(choose_kernels(graph, CPU)) == list_targets(graph)


def test_double_precision_under_autocast_stays_double(monkeypatch: pytest.MonkeyPatch) -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(self.first(x).double(), torch.ones(4, 1, 3, 3, dtype=torch.float64), groups=4)

    asked: list[torch.dtype] = []
    monkeypatch.setattr(kernel_choice, "time_call", lambda run, given, dtype, device: asked.append(dtype) or 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(Double(), torch.randn(2, 4, 6, 6))
    choose_kernels(graph, CPU)
    assert set(asked) == {torch.float64}


# --- the trial ---


def test_a_faster_tuned_step_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prefer(monkeypatch, PACKED, DEPTHWISE)
    torch.manual_seed(1)
    step, losses = train(Net())
    said = capsys.readouterr().err
    assert "halfstep: tunes the compiled step for at most about 600 s, which pays off in a long run" in said
    assert "halfstep: tuned: 1e+03 ms per step, 2e+03 ms without; " in said
    assert step.mode == "compile+graph, tuned"
    assert not step._fast.compiled.graphs
    torch.manual_seed(1)
    expected = train(Net(), fast="off")[1]
    torch.testing.assert_close(losses, expected)


def test_a_slower_tuned_step_is_not_used_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_times(monkeypatch, 2.0, 1.0, 1.0, 1.1)
    step, _ = train(make_small())
    assert capsys.readouterr().err.count("not tuned: 1.1e+03 ms per step, 1e+03 ms without") == 1
    assert step._fast.state is State.COMPILED
    assert list(step._fast.compiled.graphs)
    step.optimizers[0].load_state_dict(step.optimizers[0].state_dict())
    [train_once(step) for _ in range(4)]
    assert list(step._fast.compiled.graphs)  # captured again, and not from the code that was refused
    train(make_small())  # nor in the next run, which reads what was stored
    assert "tunes" not in capsys.readouterr().err


def test_code_that_cannot_be_tuned_leaves_the_compiled_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr("halfstep.fast.traced.choose_kernels", fail)
    torch.manual_seed(1)
    step, losses = train(make_small())
    assert "halfstep: not tuned: out of registers" in capsys.readouterr().err
    train(make_small())
    assert "tunes" not in capsys.readouterr().err  # a later run does not try again
    assert step._fast.state is State.COMPILED
    torch.manual_seed(1)
    torch.testing.assert_close(losses, train(make_small(), fast="off")[1])


def test_a_lost_graph_is_captured_again_from_tuned_code(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = train(make_small())
    step.optimizers[0].load_state_dict(step.optimizers[0].state_dict())
    monkeypatch.setattr("halfstep.fast.traced.choose_kernels", None)  # compiling again would fail
    for _ in range(4):
        train_once(step)
    assert step._fast.state is State.COMPILED
    assert len(step._fast.tuned.graphs) == 1


def test_a_bad_step_of_tuned_code_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = train(make_small())
    tuned = next(iter(step._fast.tuned.graphs.values()))
    is_broken, capture = [False], tuned.replay.loss_fn  # type: ignore[attr-defined]

    def break_replay(batch: Any) -> Any:
        loss, weight = capture(batch)
        return loss * float("nan") if is_broken[0] else loss, weight

    tuned.replay.loss_fn = break_replay  # type: ignore[attr-defined]
    is_broken[0] = True
    with pytest.warns(UserWarning, match="compiled code gives values that are not finite"):
        [train_once(step) for _ in range(5)]
    assert step._fast.state is State.GRAPH
    assert not step._fast.tuned.graphs


def test_a_short_run_is_not_tuned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tuned_trial, "MOST_COMPILING", 0.0)
    train(make_small())
    said = capsys.readouterr().err
    assert "compiled: " in said
    assert "tune" not in said


def test_what_was_tried_is_not_expected_of_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand steps of milliseconds do not take 100 seconds because one of them also timed replays for a second."""
    times = itertools.cycle([2.0, 1.0])
    monkeypatch.setattr(compiled_trial, "time_replays", lambda *_: time.sleep(0.5) or next(times))
    monkeypatch.setattr(tuned_trial, "MOST_COMPILING", 0.0)
    step, _ = train(make_small(), 8, fast=hs.Fast("auto", num_steps=1000))
    path = step._fast
    assert path.compiled.num_replays >= 2
    assert compiled_trial.measure_rest(path, path.compiled) < 100


# --- Inductor's part ---


def test_no_kernel_is_tuned_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    monkeypatch.setattr(CachingAutotuner, "coordinate_descent_tuning", lambda self, launcher: "tuned")
    launcher, tuner = SimpleNamespace(config=SimpleNamespace()), object.__new__(CachingAutotuner)
    with tuned_trial.limit_tuning(time.monotonic() + 60):
        assert tuner.coordinate_descent_tuning(launcher) == "tuned"  # type: ignore[comparison-overlap]
    with tuned_trial.limit_tuning(time.monotonic() - 1):
        assert tuner.coordinate_descent_tuning(launcher) is launcher
    assert launcher.config.found_by_coordesc  # Inductor does not ask again
    assert tuner.coordinate_descent_tuning(launcher) == "tuned"  # type: ignore[comparison-overlap]


def test_what_was_found_is_kept_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loaded = tmp_path / "cache" / "tuned.bin", list[bytes]()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    tuned_trial.load_cache(path)
    assert not loaded
    assert tuned_trial.save_cache(path) == ""
    tuned_trial.load_cache(path)
    assert loaded == [b"artifacts"]
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file in place of the folder")
    assert tuned_trial.save_cache(path) == " (not kept for later runs: File exists)"


def test_a_damaged_file_counts_as_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tuned.bin").write_bytes(b"damaged")
    tuned_trial.load_cache(tmp_path / "tuned.bin")
    assert capfd.readouterr().err == ""
