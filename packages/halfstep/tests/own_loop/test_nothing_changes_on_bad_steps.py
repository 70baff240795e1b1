"""A bad, broken-off or interrupted step of hs.Step changes nothing, whatever the user's model and optimizer do."""

from __future__ import annotations

import copy
import gc
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfstep as hs
from halfstep.backend_flags import read_flags, write_flags
from halfstep.errors import ModelError, TrainingStopped
from halfstep.step import forward_writes

NAN = torch.full((8, 4), float("nan"))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def guard(model: nn.Module) -> tuple[hs.Step, Callable[[Tensor], Tensor]]:
    """Return a step and a loss function of the model."""
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32")
    return step, lambda x: model(x).square().mean()


def bits(tree: Any) -> Any:
    """A copy that compares equal only bit for bit."""
    if isinstance(tree, Tensor):
        dense = tree.detach().to_dense() if tree.layout is not torch.strided else tree.detach()
        return str(tree.dtype), tuple(tree.shape), dense.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, (list, tuple)) else repr(tree)


# --- what forward writes ---


class Spectral(nn.Module):
    """Keeps unit phases, which are 0 / 0 for a silent batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("spectrum", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        phases = torch.fft.rfft(x.detach()).mean(0)
        phases = phases / phases.abs()
        self.spectrum.mul_(0.9).add_(phases.to(self.spectrum.dtype), alpha=0.1)
        return self.inner(x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_nan_in_a_complex_buffer_drops_the_step(dtype: torch.dtype) -> None:
    model = Spectral(dtype)
    step, loss_fn = guard(model)
    assert step(loss_fn, [batch()]).committed
    before = bits(model.state_dict())
    assert not step(loss_fn, [torch.zeros(8, 4)]).committed
    assert bits(model.state_dict()) == before


class Graph(nn.Module):
    """Writes its sparse adjacency in place, or replaces it."""

    def __init__(self, write: Callable[[Graph], None], layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        self.inner, self.write = nn.Linear(4, 4), write
        self.register_buffer("adjacency", torch.eye(8).to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return torch.sparse.mm(self.adjacency, self.inner(x))


def double(graph: Graph) -> None:
    with torch.no_grad():
        graph.adjacency.mul_(2)


def replace(graph: Graph) -> None:
    graph.adjacency = (graph.adjacency * 2).detach()


def spoil(graph: Graph) -> None:
    with torch.no_grad():
        graph.adjacency._values()[0] = float("nan")
        graph.adjacency.mul_(0)  # counted as a write
        graph.inner(torch.zeros(1, 4))


@pytest.mark.parametrize("write", [double, replace])
def test_a_sparse_buffer_moves_on_good_steps_only(write: Callable[[Graph], None]) -> None:
    model = Graph(write)
    step, loss_fn = guard(model)
    for values, diagonal in ((batch(), 2.0), (NAN, 2.0), (batch(1), 4.0), (NAN, 4.0)):
        step(loss_fn, [values])
        assert model.adjacency.to_dense().diagonal().tolist() == [diagonal] * 8


def test_nan_in_a_sparse_buffer_drops_the_step() -> None:
    model = Graph(spoil)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32")
    assert not step(
        lambda x: model.inner(x).square().mean() + 0 * model(x.detach()).nan_to_num().sum(), [batch()]
    ).committed


class Cached(nn.Module):
    """Makes a sparse buffer when it is first used, and writes into it from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("adjacency", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.adjacency is None:
            self.adjacency = torch.eye(8).to_sparse()
        double(self)  # type: ignore[arg-type]
        return torch.sparse.mm(self.adjacency, self.inner(x))


def test_a_buffer_that_becomes_sparse_is_put_back_from_then_on() -> None:
    model = Cached()
    step, loss_fn = guard(model)
    assert not step(loss_fn, [NAN]).committed
    assert model.adjacency is None
    for values, diagonal in ((batch(), 2.0), (batch(1), 4.0), (NAN, 4.0), (batch(2), 8.0)):
        step(loss_fn, [values])
        assert model.adjacency.to_dense().diagonal().tolist() == [diagonal] * 8


def test_a_model_with_a_sparse_buffer_leaves_capsules(tmp_path: Path) -> None:
    model = Graph(double)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32", capsules=tmp_path)
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    step(loss_fn, [NAN])
    with pytest.warns(UserWarning, match="was saved"):
        step.finish()
    assert "cause: bad input" in str(hs.replay(next(tmp_path.iterdir()), model, loss_fn))


class Holding(nn.Module):
    """Holds a buffer that nothing may write into, or not as others are."""

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.held.abs().sum()


def read_only(folder: Path) -> Tensor:
    np.save(folder / "features.npy", np.ones(16, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is read-only
        return torch.from_numpy(np.load(folder / "features.npy", mmap_mode="r"))[::2]  # with gaps


def made_in_inference(folder: Path) -> Tensor:
    with torch.inference_mode():
        return torch.ones(8)


@pytest.mark.parametrize(
    "make", [read_only, made_in_inference, lambda folder: torch.polar(torch.ones(8), torch.ones(8)).conj()]
)
def test_buffers_that_cannot_be_written_are_left_alone(make: Callable[[Path], Tensor], tmp_path: Path) -> None:
    model = Holding(make(tmp_path))
    step, loss_fn = guard(model)
    assert [step(loss_fn, [values]).committed for values in (batch(), NAN, batch(1))] == [True, False, True]
    assert float(model.held.abs().sum()) == pytest.approx(8)


class Ranged(nn.Module):
    """Widens a range, and clamps a weight, when it meets a large number; then it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            with torch.no_grad():
                self.scale.mul_(2)
            raise ValueError("out of range")
        return self.inner(x) * self.scale


def raise_after_a_write() -> tuple[Ranged, dict[str, Any], ValueError]:
    model = Ranged()
    step = hs.Step(model, torch.optim.AdamW(model.inner.parameters(), fused=True), "fp32")
    for seed in range(3):
        step(lambda x: model(x).square().mean(), [batch(seed)])
    before = bits(model.state_dict())
    with pytest.raises(ValueError, match="out of range") as error:
        step(lambda x: model(x).square().mean(), [batch() * 1000])
    return model, before, error.value


def test_a_parameter_first_written_by_a_forward_that_raises_is_put_back() -> None:
    model, before, _ = raise_after_a_write()
    assert bits(model.state_dict()) == before


def test_of_a_large_one_the_exception_says_that_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_writes, "SMALL_BYTES", 0)
    model, before, error = raise_after_a_write()
    assert bits(model.state_dict()) != before
    assert "forward wrote scale for the first time" in error.__notes__[0]
    assert "also=" in error.__notes__[0]


# --- what runs in the optimizer's step() ---

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
}


def move_all(model: nn.Module, teacher: nn.Module) -> None:
    with torch.no_grad():
        for follower, leader in zip(teacher.parameters(), model.parameters(), strict=True):
            leader.mul_(0.99)
            follower.lerp_(leader, 0.1)


@pytest.mark.filterwarnings("ignore:.*runs a hook")
@pytest.mark.parametrize("how", ["hook", "global hook", "patched", "hook after the step was made"])
@pytest.mark.parametrize("kind", KINDS)
def test_code_in_an_optimizers_step_runs_for_good_steps_only(kind: str, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer, calls = KINDS[kind](model.parameters()), list[int]()

    def after(*arguments: Any) -> None:
        calls.append(1)
        move_all(model, teacher)

    if how == "patched":
        real = optimizer.step
        optimizer.step = lambda closure=None: (real(closure), after())[0]  # type: ignore[method-assign]
    handle = register_optimizer_step_post_hook(after) if how == "global hook" else None
    if how == "hook":
        optimizer.register_step_post_hook(after)
    try:
        step = hs.Step(model, optimizer, "fp32", also=[teacher])
        if how.endswith("made"):
            optimizer.register_step_post_hook(after)
        loss_fn = lambda x: F.mse_loss(model(x), teacher(x) + 1)  # noqa: E731
        for seed in range(3):
            assert step(loss_fn, [batch(seed)]).committed
        before = bits([model.state_dict(), teacher.state_dict(), optimizer.state_dict()])
        assert not step(loss_fn, [NAN]).committed
    finally:
        if handle is not None:
            handle.remove()
    assert len(calls) == 3
    assert bits([model.state_dict(), teacher.state_dict(), optimizer.state_dict()]) == before


def test_torchs_schedulers_which_replace_step_cost_no_wait() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert "step" in vars(optimizer)
    step = hs.Step(model, optimizer, "fp32", schedule=hs.per_step(scheduler))
    assert [method for _, method, _ in step.describe()] == ["found_inf"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Adam", {"eps": 0.0}), ("Adam", {"eps": 0.0, "fused": True}), ("RMSprop", {"eps": 0.0})],
)
@pytest.mark.filterwarnings("ignore:.*eps=0")
def test_nan_that_the_optimizer_itself_writes_is_put_back(kind: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias[0] = -100  # a dead unit: its gradient is 0
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    step = hs.Step(model, optimizer, "fp32", ema_decay=0.9, guard={"max_consecutive": 3})
    before = bits(model.state_dict())
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    for seed in range(4):
        outcome = step(loss_fn, [batch(seed)])
        assert not outcome.committed
        assert "the optimizer wrote weights" in outcome.reason
    with pytest.raises(TrainingStopped, match="wrote weights that are not finite") as error:
        step(loss_fn, [batch(4)])
    assert "eps above 0" in error.value.fix
    with step.averaged():
        assert bits(model.state_dict()) == before
    assert bits(model.state_dict()) == before
    assert not any(optimizer.state.values())


@pytest.mark.filterwarnings("ignore:.*eps=0")
def test_eps_of_0_is_no_fault_where_every_weight_has_a_gradient() -> None:
    model, other = (nn.Linear(4, 2) for _ in range(2))
    other.load_state_dict(model.state_dict())
    step = hs.Step(model, torch.optim.Adam(model.parameters(), eps=0.0), "fp32")
    plain = torch.optim.Adam(other.parameters(), eps=0.0)
    for seed in range(4):
        assert step(lambda x: model(x).square().mean(), [batch(seed)]).committed
        plain.zero_grad()
        other(batch(seed)).square().mean().backward()
        plain.step()
    assert bits(model.state_dict()) == bits(other.state_dict())


class Counting(torch.optim.SGD):
    """Counts in its groups, as LAMB does, and keeps lists of tensors, as SOAP does."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("factors", [torch.zeros(2)])[0].add_(1)


class Spoiling(torch.optim.SGD):
    """A foreign optimizer that writes NaN, or raises, in its third step."""

    raises = False

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.made = getattr(self, "made", 0) + 1
        if self.made == 3:
            if self.raises:
                raise KeyError("mine")
            self.param_groups[0]["params"][0].data.fill_(float("nan"))


@pytest.mark.parametrize("kind", ["RMSprop", "custom"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_parameter_without_elements_is_no_fault(kind: str) -> None:
    model = nn.ModuleList([nn.Linear(0, 4), nn.Linear(4, 4)])
    make = {**KINDS, "custom": lambda p: Counting(p, 0.1)}[kind]
    step = hs.Step(model, make(model.parameters()), "fp32")
    assert step(lambda x: (model[1](x) + model[0](x[:, :0])).square().mean(), [batch()]).committed


@pytest.mark.parametrize("first", ["fused AdamW", "AdamW", "RMSprop", "custom"])
@pytest.mark.parametrize("raises", [True, False])
def test_an_optimizer_that_stepped_is_put_back_where_the_next_one_fails(first: str, raises: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    failing = Spoiling(model[1].parameters(), 0.1)
    failing.raises = raises
    kinds = {**KINDS, "custom": lambda p: Counting(p, 0.1)}
    optimizers = [kinds[first](model[0].parameters()), failing]
    step = hs.Step(model, optimizers, "fp32")
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    for seed in range(2):
        step(loss_fn, [batch(seed)])
    before = bits([model[0].state_dict(), optimizers[0].state_dict(), step.attempted, step.committed])
    error, text = (KeyError, "mine") if raises else (ModelError, r"Spoiling.step\(\) produced non-finite weights")
    with pytest.raises(error, match=text) as caught:
        step(loss_fn, [batch(2)])
    assert bits([model[0].state_dict(), optimizers[0].state_dict(), step.attempted, step.committed]) == before
    assert [note.startswith("halfstep: Spoiling may have") for note in getattr(caught.value, "__notes__", ())] == (
        [True] if raises else []
    )


@pytest.mark.filterwarnings("ignore:.*eps=0")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_optimizer_that_writes_nan_drops_the_step_of_all(order: tuple[int, int]) -> None:
    """RMSprop without a memory divides 0 by 0 for a feature that is 0 in a batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [
        torch.optim.AdamW(model[1].parameters(), fused=True),
        torch.optim.RMSprop(model[0].parameters(), alpha=0.0, eps=0.0),
    ]
    step = hs.Step(model, [optimizers[k] for k in order], "fp32", guard={"max_consecutive": 100})
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    for seed in range(2):
        assert step(loss_fn, [batch(seed)]).committed
        before = bits([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)])
        assert not step(loss_fn, [batch(seed) * torch.tensor([0.0, 1.0, 1.0, 1.0])]).committed
        assert bits([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]) == before


# --- signals ---


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as Ctrl-C does. Python drops what is raised inside a callback of the garbage
    collector, as hypothesis has one: it waits meanwhile. One that comes when Python enters an `__exit__` skips it, so
    torch's flags are restored here."""
    old, flags = signal.signal(signal.SIGALRM, signal.default_int_handler), read_flags()
    gc.disable()
    yield
    write_flags(flags)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)
    gc.enable()


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["fused AdamW", "RMSprop"])
def test_ctrl_c_at_any_moment_leaves_a_whole_step_or_none(kind: str) -> None:
    def made() -> tuple[nn.Module, Optimizer, hs.Step]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = KINDS[kind](model.parameters())
        return model, optimizer, hs.Step(model, optimizer, "fp32", ema_decay=0.9, clip_norm=1.0, accumulate=2)

    def state() -> Any:
        with step.averaged():
            averaged = bits(model.state_dict())
        return bits([model.state_dict(), optimizer.state_dict()["state"]]), averaged

    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    windows = [[batch(2 * k), batch(2 * k + 1)] for k in range(8)]
    model, optimizer, step = made()
    expected = [state()]
    for window in windows:
        began = time.perf_counter()
        step(loss_fn, window)
        took = time.perf_counter() - began
        expected.append(state())
    rng, num_interrupts = random.Random(1), 0
    while num_interrupts < 60:
        if step.committed >= 7:
            model, optimizer, step = made()
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, took * 1.2))
            step(loss_fn, windows[step.committed])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            num_interrupts += 1
            assert state() == expected[step.committed]
    assert signal.getsignal(signal.SIGALRM) is signal.default_int_handler


@pytest.mark.usefixtures("alarm")
def test_ctrl_c_while_on_commit_runs_comes_after_the_step() -> None:
    model = nn.Linear(4, 4)
    arrived = list[str]()

    def slow(module: nn.Module) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.1)
        arrived.append("the end of on_commit")

    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32", on_commit=slow)
    with pytest.raises(KeyboardInterrupt):
        step(lambda x: model(x).square().mean(), [batch()])
    assert arrived
    assert (step.attempted, step.committed) == (1, 1)


# --- what is said of dropped steps ---


def test_dropped_steps_are_reported_and_counted() -> None:
    model = nn.Linear(4, 4)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32")
    batches = [NAN if k % 2 else batch(k) for k in range(40)]
    with pytest.warns(UserWarning, match="dropped") as seen:  # noqa: PT031
        for window in step.windows(batches):
            step(lambda x: model(x).square().mean(), window)
    texts = [str(warning.message) for warning in seen]
    assert [text.partition(":")[0] for text in texts] == [
        "step 1 was dropped",
        "step 19 was dropped (10 steps so far)",
        "20 of the 40 steps of this pass over the data were dropped",
    ]
    assert {Path(warning.filename).name for warning in seen} == {Path(__file__).name}


def test_a_fault_in_every_pass_is_reported_in_every_pass() -> None:
    model = nn.Linear(4, 4)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # which shows a text once for each line
        for _ in range(3):
            for window in step.windows([batch(), NAN, batch(1)]):
                step(lambda x: model(x).square().mean(), window)
    passes = [str(warning.message) for warning in seen if "of this pass" in str(warning.message)]
    assert len(passes) == 3
    assert passes[0] == "1 of the 3 steps of this pass over the data was dropped"


def test_capsules_of_an_earlier_process_stay_and_do_not_count(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    for number in range(5):  # more than one process keeps
        step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32", capsules=tmp_path)
        with pytest.warns(UserWarning, match="was saved"):  # noqa: PT031
            step(lambda x: model(x).square().mean(), [NAN + number])
            step.finish()
    names = ["00000000", "00000000-1", "00000000-2", "00000000-3", "00000000-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert "bad input" in str(hs.replay(tmp_path / names[-1], model, lambda x: model(x).square().mean()))


@pytest.mark.parametrize("scale", [1.0, 2.0**30])
def test_overflows_of_fp16_are_reported_at_a_low_scale_only(scale: float, recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = hs.Step(model, optimizer, hs.Precision("fp16", simulate=True), scaler={"init_scale": scale})
    for window in step.windows([batch(k) for k in range(4)]):
        step(lambda x: (model(x) * 0).sum(1).sqrt().sum() if scale == 1 else 100 * model(x).square().sum(), window)
    assert step.committed < 4
    texts = [str(warning.message) for warning in recwarn if "dropped" in str(warning.message)]
    assert bool(texts) == (scale == 1)
    assert not texts or texts[0].startswith("step 0 was dropped: gradient norm is nan")
