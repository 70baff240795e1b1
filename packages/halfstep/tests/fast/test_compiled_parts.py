"""Loss functions that torch cannot trace whole run compiled with graph breaks, and change nothing where that fails.

AOTAutograd with torch's kernels takes the place of Inductor, so that what is compiled is quick and bit-equal; one test
uses Inductor itself."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.fast import compiled_parts, compiled_trial, parts_trial
from halfstep.fast.fast_path import State
from halfstep.fast.parts_trial import Stage
from halfstep.fast.traced import run_boxed
from halfstep.fast.windows import Code
from replay_stand_in import replays_on_cpu

NUM_STEPS = 16
Edit = Callable[[Code], Code]


@pytest.fixture(autouse=True)
def _compile_quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(parts_trial, "NUM_TIMED", 1)
    compile_with(monkeypatch, lambda code: code)
    set_times(monkeypatch, 2.0, 1.0)
    with replays_on_cpu():
        yield


def compile_with(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """Compile parts with torch's kernels, edited."""

    def compile_part(module: Any, examples: Sequence[Any]) -> Code:
        code = aot_autograd(fw_compiler=lambda graph, inputs: run_boxed(graph))(module, list(examples))
        return edit(code)

    monkeypatch.setattr(compiled_parts, "compile_part", compile_part)


def set_times(monkeypatch: pytest.MonkeyPatch, plain_s: float, compiled_s: float, *, of_steps: float = 0.5) -> None:
    """Set what each part takes with torch's kernels and compiled, and how long compiled steps take, in eager ones."""
    parts, steps = itertools.cycle([plain_s, compiled_s]), itertools.cycle([of_steps, 1.0])
    monkeypatch.setattr(compiled_parts, "measure", lambda run: next(parts))
    monkeypatch.setattr(parts_trial.statistics, "median", lambda seconds: next(steps))


class Net(nn.Module):
    """Reads a number on the host, branches on it, counts its calls, writes buffers, draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)
        self.num_calls, self.keeps = 0, False
        self.seen: list[float] = []
        self.branches = {"low": 0, "high": 0}
        self.fails_at = -1

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        hidden = self.drop(F.gelu(self.norm(self.first(x))))
        size = hidden.abs().mean().item()
        if self.keeps:
            self.seen.append(size)
            self.branches["high" if size > 0.45 else "low"] += 1
        if size > 0.45:
            hidden = hidden * 0.9
        if self.num_calls == self.fails_at:
            raise ValueError("of the user")
        print("a call")
        result: Tensor = self.last(hidden.tanh())
        return result


class Training:
    def __init__(self, mode: Any = "compile", make: Callable[[], nn.Module] = Net, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = make()
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=True)
        precision = settings.pop("precision", "fp32")
        self.step = hs.Step(self.model, optimizer, precision, fast=hs.Fast(mode, max_graphs=2), **settings)
        self.number, self.rng = 0, torch.get_rng_state()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def make_batch(self, number: int, *, is_bad: bool = False) -> Any:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(6, 4, generator=generator)
        return torch.full_like(x, float("nan")) if is_bad else x, torch.randint(0, 3, (6,), generator=generator)

    def run(self, num_steps: int = NUM_STEPS, bad: Sequence[int] = (), num_batches: int = 1) -> list[float]:
        losses = []
        torch.set_rng_state(self.rng)
        for _ in range(num_steps):
            is_bad = self.number in bad
            window = [self.make_batch(100 * self.number + k, is_bad=is_bad) for k in range(num_batches)]
            losses.append(self.step(self.loss, window).loss)
            self.number += 1
            self.rng = torch.get_rng_state()
        return losses

    @property
    def stage(self) -> Stage:
        return self.step._fast.parts.stage

    def is_at(self, stage: Stage) -> bool:
        return self.stage is stage

    def read(self) -> list[Tensor]:
        states = self.step.optimizers[0].state.values()
        own = [value for state in states for value in state.values()]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *own, self.rng)]


def assert_same(one: Training, other: Training) -> None:
    assert all(map(torch.equal, one.read(), other.read()))


def train_both(
    num_steps: int = NUM_STEPS, make: Callable[[], nn.Module] = Net, kind: type[Training] = Training, **options: Any
) -> tuple[Training, Training]:
    """Train with compiled parts and with fast="off"."""
    run = {name: options.pop(name) for name in ("bad", "num_batches") if name in options}
    found, expected = kind(make=make, **options), kind("off", make=make, **options)
    found.run(num_steps, **run)
    expected.run(num_steps, **run)
    return found, expected


def test_python_code_runs_once_and_the_steps_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Net:
        net = Net()
        net.keeps = True
        return net

    class Again(Training):
        """Batches from a list: the same tensors again."""

        batches = [Training().make_batch(number) for number in range(3)]

        def make_batch(self, number: int, *, is_bad: bool = False) -> Any:
            return self.batches[number // 100 % 3]

    found, expected = train_both(24, make, Again)
    assert (found.step.mode, found.stage, found.step._fast.state) == ("compile", Stage.USED, State.PARTS)
    assert "compiled parts compared with torch's kernels" in str(found.step.certificate)
    printed, said = capsys.readouterr()
    assert printed.count("a call") == 2 * 24
    assert all(line.startswith("halfstep: ") for line in said.splitlines())
    assert "halfstep: runs eagerly, not captured: " in said
    num_parts = said.count("halfstep: compiled in parts: its parts take ")
    assert num_parts == 1
    assert found.model.num_calls == expected.model.num_calls == 24
    assert found.model.seen == pytest.approx(expected.model.seen)
    assert found.model.branches == expected.model.branches
    assert min(found.model.branches.values()) > 0
    parts = found.step._fast.parts.parts
    assert parts is not None
    assert any(part.was_used for part in parts.parts)
    assert_same(found, expected)


def test_accumulation_and_average() -> None:
    found, expected = train_both(num_batches=2, accumulate=2, ema_decay=0.9, clip_norm=0.5)
    assert found.is_at(Stage.USED)
    assert found.model.num_calls == 2 * NUM_STEPS
    assert_same(found, expected)


def test_bad_steps_change_nothing() -> None:
    bad = (5, 13)  # while parts are compared, and when they are used
    found, expected = train_both(bad=bad)
    assert found.is_at(Stage.USED)
    assert found.step.committed == NUM_STEPS - len(bad)
    assert_same(found, expected)


def test_an_exception_of_the_user_passes_through() -> None:
    found, expected = Training(), Training("off")
    for each in (found, expected):
        each.run(10)
        each.model.fails_at = 11
        before = each.read()
        with pytest.raises(ValueError, match="of the user"):
            each.run(1)
        assert all(map(torch.equal, before, each.read()))
        each.number += 1
        each.run(4)
    assert found.is_at(Stage.USED)
    assert_same(found, expected)


def test_state_that_is_loaded_modes_that_change_and_weights_that_are_frozen() -> None:
    found, expected = Training(), Training("off")
    for each in (found, expected):
        each.run(10)
        kept = {name: value.clone() for name, value in each.model.state_dict().items()}
        each.model.eval()
        each.run(2)
        each.model.train()
        each.model.load_state_dict(kept)
        each.model.first.requires_grad_(False)
        each.run(2)
        each.model.first.requires_grad_(True)
        each.model.last = nn.Linear(8, 3)
        each.model.last.load_state_dict({"weight": kept["last.weight"], "bias": kept["last.bias"]})
        each.step.optimizers[0].param_groups[0]["params"][-2:] = list(each.model.last.parameters())
        each.run(3)
    assert found.is_at(Stage.USED)
    assert_same(found, expected)


def test_an_operation_that_raises_costs_no_other_step() -> None:
    class Labelled(Training):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1] + (9 if self.number == 12 else 0))

    found, expected = Labelled(), Labelled("off")
    for each in (found, expected):
        each.run(12)
        with pytest.raises(IndexError, match="out of bounds"):
            each.run(1)
        each.number += 1
        each.run(6)
    assert found.is_at(Stage.USED)
    assert_same(found, expected)


def test_an_error_of_backward_is_the_users_while_parts_are_compared() -> None:
    class Overwriting(Training):
        def loss(self, batch: Any) -> Tensor:
            hidden = self.model[0](batch[0])
            print(end="")
            result = self.model[1](hidden)
            print(end="")
            if self.number == 6:
                hidden.detach().add_(1)
            return F.cross_entropy(result, batch[1])

    found = Overwriting(make=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.run(10)
    assert (found.number, found.step.attempted) == (6, 6)


def edit_tensors(edit: Callable[[Tensor], Tensor], outputs: Sequence[Any]) -> list[Any]:
    return [edit(one) if isinstance(one, Tensor) else one for one in outputs]


class Broken:
    """Whether compiled code raises, or gives NaN, from now on."""

    is_now = False


def raise_in_forward(code: Code) -> Code:
    def run(*inputs: Any) -> Any:
        if Broken.is_now:
            raise RuntimeError("out of order")
        return code(*inputs)

    return run


class EditGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edit: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.edit = edit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.edit(gradient), None


def edit_gradients(code: Code, edit: Callable[[Tensor], Tensor]) -> Code:
    return lambda *inputs: edit_tensors(
        lambda one: EditGradient.apply(one, edit) if one.requires_grad else one,  # type: ignore[no-untyped-call]
        code(*inputs),
    )


def raise_in_backward(code: Code) -> Code:
    def fail(gradient: Tensor) -> Tensor:
        if Broken.is_now:
            torch.autograd.grad(torch.zeros(()), gradient)  # raised by torch's Python code
        return gradient

    return edit_gradients(code, fail)


@pytest.mark.parametrize("edit", [raise_in_forward, raise_in_backward])
def test_compiled_code_that_raises_costs_one_step(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, edit)
    found = Training()
    found.run(12)
    assert found.is_at(Stage.USED)
    monkeypatch.setattr(Broken, "is_now", True)
    with pytest.warns(UserWarning, match="the step is dropped"):
        losses = found.run(4)
    assert found.is_at(Stage.REFUSED)
    assert (found.step.mode, found.step.committed) == ("eager", 15)
    assert [loss != loss for loss in losses] == [True, False, False, False]
    assert found.model.num_calls == 16, "the user's code ran once in every step"


def make_wrong(code: Code) -> Code:
    return lambda *inputs: edit_tensors(lambda o: o * 1.01 if o.is_floating_point() else o, code(*inputs))


def make_wrong_backward(code: Code) -> Code:
    return edit_gradients(code, lambda gradient: gradient * 1.01)


def draw_more(code: Code) -> Code:
    return lambda *inputs: (code(*inputs), torch.rand(1))[0]


def make_nan(code: Code) -> Code:
    return lambda *inputs: edit_tensors(lambda o: o * float("nan") if o.is_floating_point() else o, code(*inputs))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (make_wrong, "are off by 0.01"),
        (make_wrong_backward, "the compiled code's gradients are off by 0.01"),
        (draw_more, "draws different random numbers"),
        (make_nan, "are not finite where those of torch's kernels are"),
    ],
)
def test_wrong_code_is_never_used(
    edit: Edit, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_with(monkeypatch, edit)
    found, expected = train_both(8)
    assert found.step.mode == "eager"
    assert "runs eagerly, not compiled in parts: " in (said := capsys.readouterr().err)
    assert reason in said
    assert_same(found, expected)


def test_a_compiler_that_raises_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(module: Any, examples: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiled_parts, "compile_part", fail)
    found, expected = train_both(8)
    assert "not compiled in parts: no compiler" in capsys.readouterr().err
    assert_same(found, expected)


def test_what_is_not_faster_is_not_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Code that rounds in another way shows that no step was made by it."""
    compile_with(monkeypatch, lambda code: lambda *inputs: edit_tensors(round_apart, code(*inputs)))
    set_times(monkeypatch, 1.0, 0.95)
    found, expected = train_both()
    assert found.step.mode == "eager"
    assert "not compiled in parts: its parts take " in capsys.readouterr().err
    assert_same(found, expected)


def round_apart(one: Tensor) -> Tensor:
    return one * (1 + 1e-6) if one.is_floating_point() else one


def test_parts_whose_gradients_are_not_finite_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's gradient of the square root does not enter the loss, that of a random sign is infinite."""
    monkeypatch.setattr(parts_trial, "MOST_STEPS", 4)

    class Rooted(Training):
        def loss(self, batch: Any) -> Tensor:
            self.root = (self.model[0].weight * 0).sqrt()
            print(end="")
            return F.cross_entropy(self.model(batch[0]), batch[1]) + self.root.detach().sum()

    found, expected = Rooted(make=make_layers), Rooted("off", make=make_layers)
    found.run(), expected.run()
    assert "give no finite gradients to compare with" in found.step._fast.why_eager
    assert_same(found, expected)


def make_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_steps_that_are_not_faster_as_a_whole_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_times(monkeypatch, 2.0, 1.0, of_steps=1.1)
    found, expected = train_both()
    assert found.step.mode == "eager"
    assert "as 1 compiled steps have shown, which were rounded differently" in capsys.readouterr().err
    assert_same(found, expected)


def test_code_that_becomes_wrong_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code gives NaN from some step on: the steps that are dropped for it stop nothing."""
    compile_with(monkeypatch, lambda code: lambda *inputs: (make_nan(code) if Broken.is_now else code)(*inputs))
    found = Training(guard={"max_consecutive": 3})
    found.run(12)
    assert found.is_at(Stage.USED)
    monkeypatch.setattr(Broken, "is_now", True)
    with pytest.warns(UserWarning, match="it, not your model, caused the last dropped steps"):
        losses = found.run(8)
    assert found.step.mode == "eager"
    assert 1 <= sum(loss != loss for loss in losses) <= 3
    assert found.step.committed == 20 - sum(loss != loss for loss in losses)


class Derived(Training):
    """A loss that takes a gradient itself, from some step on."""

    first, is_second, num_calls = 12, False, 0

    def loss(self, batch: Any) -> Tensor:
        self.num_calls += 1
        x = batch[0].detach().requires_grad_()
        print(end="")
        out = self.model(x)
        print(end="")
        loss = F.cross_entropy(out, batch[1])
        if self.number < self.first:
            return loss
        (gradient,) = torch.autograd.grad(loss, x, create_graph=self.is_second, retain_graph=True)
        if self.is_second:
            (gradient,) = torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)
        return loss * (1 + gradient.norm().detach())


def test_a_gradient_that_is_taken_later_is_followed() -> None:
    found, expected = Derived(make=make_layers), Derived("off", make=make_layers)
    found.run(12), expected.run(12)
    assert found.is_at(Stage.USED)
    found.run(8), expected.run(8)
    assert_same(found, expected)


def test_a_second_derivative_that_is_taken_later_costs_one_step() -> None:
    found = Derived(make=make_layers)
    found.is_second = True
    with pytest.warns(UserWarning, match="the step is dropped"):
        losses = found.run(16)
    assert [number for number, loss in enumerate(losses) if loss != loss] == [12]
    assert (found.step.mode, found.num_calls) == ("eager", 16)


def test_a_gradient_that_is_taken_at_every_step_stays_eager() -> None:
    class Penalty(Training):
        def loss(self, batch: Any) -> Tensor:
            print(end="")
            x = batch[0].clone().requires_grad_()
            gradient = self.step.grad(self.model(x).square().sum(), x)
            return super().loss(batch) + gradient.square().mean()

    found, expected = train_both(make=make_layers, kind=Penalty)
    assert found.step.mode == "eager"
    assert "loss_fn takes a gradient itself" in found.step._fast.why_eager
    assert_same(found, expected)


class TwoHeads(nn.Module):
    """The loss may use one of two outputs of a part: autograd gives the other head no gradient, compiled code zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.pooler = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        return self.last(hidden), self.pooler(hidden)


@pytest.mark.parametrize("num_pooled", [0, 14])
def test_weights_without_a_gradient_get_no_decay(num_pooled: int) -> None:
    class Pooled(Training):
        def loss(self, batch: Any) -> Tensor:
            logits, pooled = self.model(batch[0])
            self.kept = pooled.flatten()  # a view: autograd reaches the compiled backward through it
            print(end="")
            loss = F.cross_entropy(logits, batch[1])
            return loss + self.kept.square().mean() if self.number < num_pooled else loss

    found, expected = train_both(20, make=TwoHeads, kind=Pooled)
    assert found.is_at(Stage.USED)
    assert found.model.pooler.weight.grad is None
    assert_same(found, expected)


class Lengths(Training):
    """More lengths than graphs."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def make_batch(self, number: int, *, is_bad: bool = False) -> Any:
        generator = torch.Generator().manual_seed(number)
        length = 3 + number // 100 % 6
        x = torch.randn(2, length, 4, generator=generator)
        return torch.full_like(x, float("nan")) if is_bad else x, torch.randint(0, 3, (2, length), generator=generator)


def test_more_lengths_than_graphs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled_trial, "COMPILED", "aten")
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))  # noqa: E731
    found, expected = train_both(50, make, Lengths, bad=[46])
    assert "shapes without a graph are compiled in parts" in capsys.readouterr().err
    assert (found.step.mode, found.stage) == ("graph", Stage.USED)
    parts = found.step._fast.parts.parts
    assert parts is not None
    assert len(parts.parts) <= 2, "one part takes all lengths"
    assert_same(found, expected)


class Pythonic(Training):
    """What Dynamo traces to something else than Python does."""

    def __init__(self, mode: Any, kind: str) -> None:
        super().__init__(mode, make=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)))
        self.kind, self.kept, self.recent = kind, list[Any](), collections.deque[float](maxlen=3)
        self.table = functools.lru_cache(lambda: self.kept.append("table") or torch.rand(6))  # type: ignore[func-returns-value]
        self.draws = random.Random(0)

    def loss(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        if self.kind == "deque":
            self.recent.append(loss.item())
            loss = loss * sum(self.recent) / len(self.recent)
        elif self.kind == "format":
            self.kept.append(f"loss {loss.item():.4f} and {loss.item()!r:>30}")
        elif self.kind == "cache":
            loss = loss + self.table().sum() * self.model[0].weight.sum()
        elif self.kind == "operator":
            loss = loss + count_calls(batch[0].detach(), id(self.kept)).mean()
            COUNTS[id(self.kept)] = self.kept
        elif self.kind == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda one: self.kept.append(0) or one, lambda one: one):  # type: ignore[func-returns-value]
                print(end="")
                loss = F.cross_entropy(call_as_user(self.model, batch[0]), batch[1])
        elif self.kind == "checkpoint":
            loss = F.cross_entropy(checkpoint(self.model, batch[0], use_reentrant=False), batch[1])
        elif self.kind == "warnings":
            loss = loss * (1 + self.draws.random())
        print(end="")
        return loss * 2


def call_as_user(model: nn.Module, x: Tensor) -> Any:
    return model(x).tanh()


COUNTS: dict[int, list[Any]] = {}


@torch.library.custom_op("halfstep_test::count_calls", mutates_args=())
def count_calls(x: Tensor, key: int) -> Tensor:
    COUNTS.setdefault(key, []).append(0)
    return x * 2


count_calls.register_fake(lambda x, key: torch.empty_like(x))


@pytest.mark.parametrize("kind", ["deque", "format", "cache", "operator", "hooks", "checkpoint", "warnings"])
def test_python_runs_what_would_be_traced_to_something_else(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, expected = Pythonic("compile", kind), Pythonic("off", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.run(12), expected.run(12)
    assert "compiles the parts of loss_fn" in capsys.readouterr().err
    assert (found.kept, found.recent) == (expected.kept, expected.recent)
    assert_same(found, expected)


def test_graph_and_off_are_never_compiled() -> None:
    for mode in ("graph", "off"):
        found = Training(mode)
        found.run(8)
        assert (found.step.mode, found.stage) == ("eager", Stage.REFUSED)


def test_auto_waits_until_it_is_likely_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Training("auto")
    monkeypatch.setattr(parts_trial, "LOOK_EVERY", 1)
    found.run(8)
    assert found.is_at(Stage.EAGER)
    monkeypatch.setattr(compiled_trial, "COMPILE_S", -100.0)
    found.run(8)
    assert (found.step.mode, found.stage) == ("compile", Stage.USED)


def test_a_model_that_the_user_compiled_is_left_alone() -> None:
    found = Training(make=lambda: torch.compile(Net(), backend="eager"))  # type: ignore[arg-type, return-value]
    found.run(6)
    assert (found.step.mode, found.step._fast.state) == ("eager", State.EAGER)


def test_models_with_recurrent_layers_stay_eager() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Linear(4, 8), nn.LSTM(8, 8, 2, dropout=0.1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.lstm(F.gelu(self.embed(x)))[0].relu())

    found, expected = train_both(make=Tagger)
    assert (found.step.mode, found.step._fast.state, found.step._fast.parts.is_open) == ("eager", State.EAGER, False)
    assert_same(found, expected)


@pytest.mark.slow  # Inductor takes seconds for each part
def test_inductor_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(AttributeError):
        monkeypatch.undo()
    monkeypatch.setattr(parts_trial, "NUM_TIMED", 1)
    set_times(monkeypatch, 2.0, 1.0)
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh())  # noqa: E731

    class Read(Training):
        def loss(self, batch: Any) -> Tensor:
            loss: Tensor = self.model(batch[0]).square().mean()
            return loss * 0.5 if loss.item() > 100 else loss

    found, expected = train_both(12, make=make, kind=Read)
    assert (found.step.mode, found.step.committed) == ("compile", 12)
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)  # AdamW divides by gradients near 0
