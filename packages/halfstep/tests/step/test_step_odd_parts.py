"""Odd optimizers, odd parameters, odd buffers: the promise holds for them, too, or they are refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep.precision.plan import PlanRow
from halfstep.step import user_warnings
from halfstep.step.ema import Ema
from halfstep.step.flat import Snapshot, became_non_finite
from halfstep.step.schedule import ScheduleOptions, build_schedule
from halfstep.step.step import GuardedStep
from halfstep.step.user_warnings import NEWEST_TESTED, report_untested_torch
from tiny_training import Queue, assert_same_bits, batch, everything, loss_of, make_model, make_step, plan, poisoned


class Homemade(torch.optim.Optimizer):
    """Keeps a Python counter and replaces its state tensor instead of writing into it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                own = self.state[p]
                own["m"] = 0.9 * own.get("m", torch.zeros_like(p)) + p.grad
                p.sub_(own["m"], alpha=group["lr"])


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_parameters_with_gaps_in_memory_are_put_back(optimizer: str) -> None:
    class Gappy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])

        def forward(self, x):
            return x @ self.weight.t()

    model = Gappy()
    made = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[optimizer](model.parameters(), lr=0.1)
    step = GuardedStep(model, made, plan(), ema=Ema(model, decay=0.5))
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    for _ in range(2):
        step(loss_fn, [torch.ones(2, 3)])
    before = everything(step)
    step(loss_fn, [torch.full((2, 3), float("nan"))])
    assert_same_bits(before, everything(step))
    assert torch.isfinite(step.ema.state_dict()["weight"]).all()


def test_a_parameter_in_two_optimizers_is_unscaled_once() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0, fused=True) for _ in range(2)]
    step = GuardedStep(model, optimizers, plan("fp16"))
    norm = step(lambda x: model(x).sum() / 4, [torch.ones(1, 2)]).read().grad_norm
    assert norm == pytest.approx(2**0.5 / 4, rel=1e-3)


def test_a_group_added_later_is_unscaled_too() -> None:
    model, more = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    both = nn.ModuleList([model, more])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    step = GuardedStep(both, optimizer, plan("fp16"))
    optimizer.add_param_group({"params": more.parameters()})
    norm = step(lambda x: (model(x).sum() + more(x).sum()) / 4, [torch.ones(1, 2)]).read().grad_norm
    assert norm == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_parameter_used_later_begins_its_momentum_as_torchs_unfused_sgd_would(dampening: float) -> None:
    def trained(*, fused: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
        step = GuardedStep(model, optimizer, plan())
        for k in range(4):
            used = model if k >= 2 else model[:1]
            step(lambda x, used=used: sum(part(x).square().mean() for part in used), [torch.ones(3, 2)])
        return model

    for name, value in trained(fused=True).state_dict().items():
        torch.testing.assert_close(value, trained(fused=False).state_dict()[name])


class Odd(nn.Module):
    """Its buffer is replaced, made on first use, or resized, as the flag says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(2, 2), kind
        self.register_buffer("seen", None if kind == "made" else torch.zeros(2))

    def forward(self, x):
        total = x.detach().sum(0)
        if self.kind == "resized":
            self.seen = torch.cat([self.seen, total])
        else:
            self.seen = total if self.seen is None else self.seen + total
        return self.inner(torch.nan_to_num(x, posinf=1.0) if self.kind == "hidden" else x)


@pytest.mark.parametrize("kind", ["replaced", "made", "resized"])
@pytest.mark.parametrize("good_before", [0, 2])
def test_buffers_that_are_not_written_in_place_are_put_back(kind: str, good_before: int) -> None:
    model = Odd(kind)
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan())
    loss_fn = lambda x: model(x).mean()  # noqa: E731
    for _ in range(good_before):
        step(loss_fn, [torch.ones(3, 2)])
    before = None if model.seen is None else model.seen.clone()
    step(loss_fn, [torch.full((3, 2), float("nan"))])
    assert (model.seen is None) if before is None else torch.equal(model.seen, before)


def test_a_replaced_buffer_that_became_infinite_behind_a_finite_loss_is_a_bad_step() -> None:
    model = Odd("hidden")
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan())
    loss_fn = lambda x: model(x).mean()  # noqa: E731
    step(loss_fn, [torch.ones(3, 2)])
    reading = step(loss_fn, [torch.full((3, 2), float("inf"))]).read()
    assert reading.is_ruined
    assert model.seen.tolist() == [3.0, 3.0]


def test_the_average_follows_a_buffer_that_the_module_replaces() -> None:
    model = Odd("replaced")
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), ema=Ema(model, decay=0.0))
    for _ in range(3):
        step(lambda x: model(x).mean(), [torch.ones(3, 2)])
    assert torch.equal(step.ema.state_dict()["seen"], model.seen)
    with step.ema.swap_in():
        assert model.seen.tolist() == [9.0, 9.0]


def test_one_part_in_fp16_is_enough_for_loss_scaling() -> None:
    row = PlanRow(module="head", storage="fp32", compute="fp16", reason="asked for", kind="module", precision="fp16")
    assert not plan("bf16").needs_loss_scaling
    assert dataclasses.replace(plan("bf16"), rows=(row,)).needs_loss_scaling


def test_steps_that_say_nothing_about_the_scale_leave_it_alone() -> None:
    step = make_step("adamw", "fp16")
    loss_fn = loss_of(step.model)
    for _ in range(3):
        assert step(lambda b: (loss_fn(b), 0), [batch(0)]).read().is_empty
    assert step.scaler.growth_tracker.item() == 0
    assert step.scaler.value.item() == 65536


def test_gradients_of_weights_that_no_optimizer_holds_do_not_pile_up() -> None:
    model = make_model()
    step = GuardedStep(model, torch.optim.AdamW(model.head.parameters(), fused=True), plan())
    loss_fn = loss_of(model)
    norms = []
    for _ in range(2):
        step(loss_fn, [batch(0)])
        norms.append(model.conv.weight.grad.norm().item())
    assert norms[1] < 1.5 * norms[0]


def test_facts_carry_the_generator_state_of_their_step() -> None:
    step = make_step()
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    facts = step(loss_of(step.model), [batch(0)])
    assert torch.equal(facts.rng["cpu"], expected)


def test_a_loss_that_the_user_writes_into_later_is_reported_as_it_was() -> None:
    step = make_step("sgd", accumulate=2)
    seen: list[torch.Tensor] = []

    def loss_fn(b: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = 0 * loss_of(step.model)(b) + b["wanted"]
        seen[:] = [seen[0].add_(loss.detach())] if seen else [loss.detach()]
        return loss

    window = [{**batch(k), "wanted": torch.tensor(wanted)} for k, wanted in enumerate((1.0, 5.0))]
    assert step(loss_fn, window).read().loss == 3.0


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float64], ids=str)
def test_a_number_of_any_format_that_stops_being_finite_is_found(dtype: torch.dtype) -> None:
    before = torch.tensor([1.0, float("inf"), 2.0]).to(dtype)
    assert not became_non_finite(before, torch.tensor([3.0, float("nan"), 4.0]).to(dtype))
    assert became_non_finite(before, torch.tensor([3.0, 1.0, float("inf")]).to(dtype))


@pytest.mark.parametrize("is_bad", [True, False])
def test_a_joined_copy_of_many_dtypes_selects_the_bits_of_each(is_bad: bool) -> None:
    """`select` is what a GPU runs. Odd lengths, gaps, a conjugate, -0.0 and NaN; saved twice, into the same memory."""
    kinds = (torch.int64, torch.bfloat16, torch.float32, torch.bool, torch.complex64, torch.float64, torch.float32)
    tensors = [torch.tensor([1.0, 0.0, 3.0]).to(dtype) for dtype in kinds]
    tensors += [
        torch.tensor(7),
        torch.arange(8.0)[::2],
        torch.ones(2, 3).T,
        torch.ones(3, dtype=torch.complex64).conj(),
    ]
    snapshot = Snapshot(tensors)
    snapshot.save()
    for tensor in tensors:
        tensor.add_(tensor.clone())
    snapshot.save()
    then = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.copy_(torch.tensor(float("nan")) if tensor.is_floating_point() else tensor * 0)
    tensors[2][0] = -0.0
    now = [tensor.clone() for tensor in tensors]
    pairs = snapshot.pair_floats()
    assert {saved.dtype for saved, _ in pairs} == {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    assert sum(int((new != new).sum()) for _, new in pairs) == sum(int((t != t).sum()) for t in tensors)
    for group in snapshot.groups:
        group.select(torch.tensor(is_bad))
    found, wanted = ([one.resolve_conj() for one in own] for own in (tensors, then if is_bad else now))
    assert_same_bits(dict(enumerate(found)), dict(enumerate(wanted)))


def test_a_short_onecycle_has_a_peak_too() -> None:
    schedule = build_schedule(ScheduleOptions(name="onecycle", total_steps=10, peak_share=0.1))
    assert max(schedule(k) for k in range(10)) == pytest.approx(1.0)


# --- several optimizers of the same parameters ---


SHARED = {
    "unfused": lambda p: [torch.optim.SGD(p, lr=0.01, momentum=0.9), torch.optim.Adam(p, lr=1e-3)],
    "fused first": lambda p: [torch.optim.AdamW(p, fused=True), torch.optim.SGD(p, lr=0.01, momentum=0.9)],
    "fused last": lambda p: [torch.optim.SGD(p, lr=0.01, momentum=0.9), torch.optim.AdamW(p, fused=True)],
    "decided on the host": lambda p: [torch.optim.RMSprop(p), Homemade(p)],
    "three, some of them": lambda p: [torch.optim.SGD(p[:1], lr=0.1), torch.optim.Adam(p), torch.optim.Rprop(p[1:])],
}


@pytest.mark.parametrize("kind", SHARED)
def test_optimizers_that_share_parameters_leave_every_bit_alone(kind: str) -> None:
    """With finite gradients: those of NaN would show, those of a skipped spike move weights silently."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = GuardedStep(model, SHARED[kind](list(model.parameters())), plan())
    for _ in range(3):
        step(lambda x: model(x).square().mean(), [torch.randn(8, 4)])
    before = everything(step)
    for _ in range(2):
        facts = step.compute(lambda x: model(x).square().mean(), [torch.randn(8, 4) * 1e4])
        facts.bad = torch.tensor(True)
        step.commit(facts)
        assert_same_bits(before, everything(step))
    assert not step(lambda x: model(x).square().mean(), [torch.randn(8, 4)]).read().is_bad


# --- buffers in odd memory ---


MEMORY = {
    "every second": lambda: torch.zeros(8)[::2],
    "every second int64": lambda: torch.zeros(8, dtype=torch.int64)[::2],
    "every second bf16": lambda: torch.zeros(8, dtype=torch.bfloat16)[::2],
    "one of eight": lambda: torch.zeros(8, dtype=torch.int64)[3::8],
    "a column": lambda: torch.zeros(4, 3)[:, 1],
    "a plane with gaps": lambda: torch.zeros(4, 8)[:, ::2],
    "transposed": lambda: torch.zeros(3, 4).t(),
    "channels_last": lambda: torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.zeros(1).expand(4),
    "sliding windows": lambda: torch.zeros(6).unfold(0, 3, 1),
    "no dimension": lambda: torch.zeros(4)[2],
    "no elements": lambda: torch.zeros(0, 4).t(),
    "imaginary part": lambda: torch.zeros(4, dtype=torch.complex64).imag,
    "negated lazily": lambda: torch.zeros(4, dtype=torch.complex64).conj().imag,
    "conjugated lazily": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
}


class Counting(nn.Module):
    """Writes the number of its calls into the first row of its buffers."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.inner, self.norm, self.calls = nn.Linear(4, 3), nn.BatchNorm1d(3), 0
        self.kinds = kinds
        for number, kind in enumerate(kinds):
            self.register_buffer(f"odd{number}", MEMORY[kind]())

    def forward(self, x):
        self.calls += 1
        for number in range(len(self.kinds)):
            odd = getattr(self, f"odd{number}")
            if odd.numel():
                odd[(0,) * odd.ndim] = self.calls
        return self.norm(self.inner(x)).square().mean()


@pytest.mark.parametrize("kinds", [*([kind] for kind in MEMORY), list(MEMORY)], ids=[*MEMORY, "all together"])
def test_buffers_in_odd_memory_are_put_back(kinds: list[str]) -> None:
    model = Counting(kinds)
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), ema=Ema(model, decay=0.5))
    for _ in range(2):
        step(model, [torch.randn(8, 4)])
    before = {name: value.resolve_conj().resolve_neg() for name, value in everything(step).items()}
    views = [(b.shape, b.stride(), b.data_ptr()) for b in model.buffers()]

    def is_unchanged() -> bool:
        now = {name: value.resolve_conj().resolve_neg() for name, value in everything(step).items()}
        assert_same_bits(before, now)
        return views == [(b.shape, b.stride(), b.data_ptr()) for b in model.buffers()]

    assert step(model, [torch.full((8, 4), float("nan"))]).read().is_bad
    assert is_unchanged()
    with pytest.raises(ZeroDivisionError):
        step(lambda x: model(x) * (1 / 0), [torch.randn(8, 4)])
    assert is_unchanged()


# --- averages of buffers that change ---


def test_the_average_of_a_buffer_that_grows_is_its_value() -> None:
    torch.manual_seed(0)
    model, plain = Queue(), Queue()
    plain.load_state_dict(model.state_dict())
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), ema=Ema(model, decay=0.5))
    other = GuardedStep(
        plain, torch.optim.AdamW(plain.parameters(), fused=True), plan(), ema=Ema(plain.norm, decay=0.5)
    )
    for rows in (8, 8, 2):
        batch = torch.randn(rows, 4)
        facts = [step(model, [batch]), other(plain, [batch])]
        assert not any(one.read().is_bad for one in facts)
    assert_same_bits({"seen": model.seen}, {"seen": step.ema.state_dict()["seen"]})
    assert model.seen.shape == (18, 4)
    averages = step.ema.state_dict()
    assert_same_bits({name: averages[f"norm.{name}"] for name in other.ema.state_dict()}, other.ema.state_dict())

    before = everything(step)
    assert step(model, [torch.full((8, 4), float("nan"))]).read().is_bad
    assert_same_bits(before, everything(step))
    with step.ema.swap_in():
        assert torch.equal(model.norm.running_mean, averages["norm.running_mean"])
        model.eval()(torch.randn(3, 4))
        model.train()
    assert_same_bits(before, everything(step))
    assert step.attempted == 4


@pytest.mark.parametrize("order", ["model first", "step first"])
def test_the_average_of_a_buffer_that_has_grown_is_loaded(order: str) -> None:
    torch.manual_seed(0)
    model = Queue()
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), ema=Ema(model, decay=0.5))
    step(model, [torch.randn(8, 4)])
    state, weights = copy.deepcopy(step.state_dict()), copy.deepcopy(model.state_dict())
    expected = everything(step)
    fresh = Queue()
    resumed = GuardedStep(fresh, torch.optim.AdamW(fresh.parameters(), fused=True), plan(), ema=Ema(fresh, decay=0.5))
    if order == "step first":
        resumed.load_state_dict(state)
    fresh.seen = torch.zeros(8, 4)
    fresh.load_state_dict(weights)
    if order == "model first":
        resumed.load_state_dict(state)
    assert_same_bits(expected, everything(resumed))


def test_the_average_follows_a_buffer_that_is_none_at_times() -> None:
    model = Queue()
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), ema=Ema(model, decay=0.5))
    for number in range(4):
        model.seen = None if number % 2 else torch.full((2, 3), float(number))
        step(lambda x: model.norm(model.inner(x)).square().mean(), [torch.randn(8, 4)])
        with step.ema.swap_in():
            assert (model.seen is None) == bool(number % 2)
        found = step.ema.state_dict().get("seen")
        assert (found is None) if number % 2 else torch.equal(found, model.seen)


def test_the_average_keeps_its_values_when_weights_change_their_memory_format() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    ema = Ema(model, decay=0.5)
    expected = model.weight.detach().clone()
    model.to(memory_format=torch.channels_last)
    ema.update(torch.tensor(10), torch.tensor(False))
    torch.testing.assert_close(ema.state_dict()["weight"], expected)
    with ema.swap_in():
        torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1]), torch.tensor([[0.1]], dtype=torch.float64)])
def test_a_learning_rate_in_a_tensor_of_one_element_is_reported(lr: torch.Tensor) -> None:
    model = make_model()
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), lr=lr, foreach=False), plan())
    assert step(loss_of(model), [batch(0)]).read().lr == pytest.approx(0.1)
    assert step.attempted == 1


# --- models spread differently from DDP and FSDP2, and a torch that is newer than the newest tested one ---


@contextmanager
def world_of(size: int, folder: Path) -> Iterator[None]:
    if size == 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_of(model: nn.Module) -> hs.Step:
    return hs.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), "fp32", clip_norm=1.0)


def test_a_plain_model_among_two_processes_is_refused_with_the_lines_to_add(tmp_path: Path) -> None:
    with world_of(2, tmp_path), pytest.raises(ConfigError, match="2 ranks") as refused:
        step_of(make_model())
    assert "DistributedDataParallel(model)" in refused.value.fix


def test_in_a_world_of_one_a_wrapped_model_trains_to_the_same_bits(tmp_path: Path) -> None:
    plain, wrapped = make_model(), make_model()
    with world_of(1, tmp_path):
        ddp = DistributedDataParallel(wrapped)
        steps = [(step_of(plain), plain), (step_of(ddp), ddp)]
        for made in ([batch(0)], [batch(1)], [poisoned()], [batch(2)]):
            outcomes = [step(loss_of(model), made).committed for step, model in steps]
            assert outcomes[0] == outcomes[1]
            assert_same_bits(plain.state_dict(), wrapped.state_dict())


def test_models_spread_over_devices_are_refused_by_name() -> None:
    spread = nn.DataParallel(make_model())
    spread.device_ids = [0, 1]
    with pytest.raises(ConfigError, match="DataParallel spreads the model over 2 devices"):
        step_of(spread)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ConfigError, match="the model is on cpu, meta"):
        GuardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), plan())


# --- a newer torch than the newest tested one is reported once per process ---


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The one line for the installed torch, if no version were tested."""
    monkeypatch.setattr(user_warnings, "NEWEST_TESTED", (1, 99))
    report_untested_torch.cache_clear()
    yield f"halfstep: torch {torch.__version__} is newer than 1.99, the newest version that halfstep was tested with\n"
    report_untested_torch.cache_clear()


def test_steps_report_an_untested_torch_once_per_process(untested: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        model = nn.Linear(2, 1)
        hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32")
    assert capsys.readouterr().err == untested


@pytest.mark.parametrize("suffix", [".0", ".1", ".0+cu132", ".0.dev20261101", ".0a0+git0123abc"])
def test_only_versions_after_the_newest_tested_one_are_reported(
    suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    major, minor = NEWEST_TESTED
    for tested in ("2.10.0", f"{major}.{minor}{suffix}"):
        report_untested_torch(tested)
    assert capsys.readouterr().err == ""
    for newer in (f"{major}.{minor + 1}{suffix}", f"{major + 1}.0{suffix}"):
        report_untested_torch(newer)
        assert f"torch {newer} is newer" in capsys.readouterr().err
