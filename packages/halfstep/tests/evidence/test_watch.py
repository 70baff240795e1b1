"""hs.Step(watch=...): what it measures, that it changes nothing, and when it warns."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.evidence.forecast import K, Limit, forecast, list_limits
from halfstep.evidence.watch import BIAS, RowMeasures, SentMeasures
from replay_stand_in import replays_on_cpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.block = nn.Linear(6, 8), nn.BatchNorm1d(8), Block(8)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).view(-1, 4, 8)
        return self.head(self.drop(self.block(hidden))).mean(1)  # type: ignore[no-any-return]


class Tiny(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:8])


def train(
    watch: int,
    num_steps: int,
    change: Callable[[nn.Module], None] | None = None,
    make: Callable[[], nn.Module] = Net,
    **settings: Any,
) -> tuple[nn.Module, hs.Step]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    step = hs.Step(model, optimizer, settings.pop("precision", "fp32"), watch=watch, **settings)
    generator = torch.Generator().manual_seed(1)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for _ in range(num_steps):
        batch = torch.randn(32, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        if change is not None:
            with torch.no_grad():
                change(model)
        step(loss_fn, [batch] * settings.get("accumulate", 1))
    step.finish()
    return model, step


def equal_bits(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


FORWARD = {"activation", "activation gradient", "weight", "weight gradient", "update", "variance"}


@pytest.mark.parametrize(
    ("num_steps", "make", "settings"),
    [(120, Tiny, {}), (50, Net, {"accumulate": 2, "clip_norm": 1.0, "ema_decay": 0.9})],
)
def test_eager_weights_have_the_same_bits_with_and_without(
    num_steps: int, make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    plain, _ = train(0, num_steps, make=make, **settings)
    state = torch.get_rng_state()
    watched, step = train(20, num_steps, make=make, **settings)
    assert equal_bits(plain, watched)
    assert torch.equal(state, torch.get_rng_state())
    assert {row.kind for row in step.watched.rows} >= FORWARD | ({"attention logits"} if make is Net else set())
    assert not step.watched.warnings


def test_captured_weights_have_the_same_bits_and_a_side_step_sees_the_modules() -> None:
    with replays_on_cpu():
        plain, _ = train(0, 100, make=Tiny)
        state = torch.get_rng_state()
        watched, step = train(10, 100, make=Tiny)
        assert step.mode == "graph"
    assert equal_bits(plain, watched)
    assert torch.equal(state, torch.get_rng_state())
    assert not step.watched.why_no_activations
    assert len(step.watched.history) == 9
    assert {row.kind for row in step.watched.rows} == FORWARD


def test_the_numbers_are_those_of_the_tensors() -> None:
    seen: dict[str, Tensor] = {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].register_forward_hook(lambda module, args, output: seen.update(output=output.detach()))
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", watch=3)
    for _ in range(4):
        batch = torch.randn(16, 6), torch.randint(0, 3, (16,))
        step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), [batch])
    rows = step.watched.history[-1].rows
    assert step.watched.history[-1].step == 3
    output, row = seen["output"], rows["1", "activation"]
    assert 2**row.high == pytest.approx(float(output.max()), rel=1e-6)
    assert row.numbers["zeros"] == pytest.approx(float((output == 0).float().mean()))
    exponents = torch.frexp(output[output > 0])[1] - 1
    assert {int(e): int((exponents == e).sum()) for e in exponents.unique()} == {
        k - BIAS: int(count) for k, count in enumerate(row.counts) if count and k
    }
    weights = torch.cat([model[2].weight.flatten(), model[2].bias]).detach()  # type: ignore[union-attr, list-item]
    assert 2 ** rows["2", "weight"].high == pytest.approx(float(weights.abs().max()), rel=1e-6)
    gradient = max(float(p.grad.abs().max()) for p in model[2].parameters() if p.grad is not None)
    assert 2 ** rows["2", "weight gradient"].high == pytest.approx(gradient, rel=1e-5)


def test_lost_updates_are_counted_in_the_format_of_the_weights() -> None:
    shares = {}
    for dtype, precision in ((torch.float32, "fp32"), (torch.bfloat16, "bf16-true")):
        torch.manual_seed(0)
        model = nn.Linear(64, 64).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, fused=True)
        step = hs.Step(model, optimizer, hs.Precision(precision, simulate=True), watch=2)
        for _ in range(3):
            step(lambda x, model=model: model(x).float().square().mean(), [torch.randn(8, 64)])
        shares[dtype] = step.watched.history[-1].rows["", "update"].numbers["lost"]
    assert shares[torch.float32] < 0.1
    assert shares[torch.bfloat16] > 0.9


def test_attention_logits_are_those_of_the_products() -> None:
    torch.manual_seed(0)
    found = []

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q(x), self.k(x)
            found.append(float((q @ k.transpose(-2, -1)).detach().max()) * 8**-0.5)
            return F.scaled_dot_product_attention(q, k, x)

    model = Attend()
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", watch=1, fast="off")
    for _ in range(2):
        step(lambda x: model(x).square().mean(), [torch.randn(2, 100, 8)])
    assert 2 ** step.watched.history[-1].rows["", "attention logits"].high == pytest.approx(found[-1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:watch:UserWarning")
def test_a_growing_layer_is_named_before_it_overflows() -> None:
    def grow(model: nn.Module) -> None:
        model[0].weight.mul_(1.03)  # type: ignore[index, union-attr, operator]

    _, step = train(20, 260, grow, Tiny, precision=hs.Precision("fp16", simulate=True))
    first = step.watched.warnings[0]
    assert (first.module, first.kind, first.threshold) == ("0", "activation", "fp16 maximum")
    assert first.low is not None
    assert first.at is not None
    assert first.high is not None
    assert first.low <= first.at <= first.high
    assert first.at > first.step
    assert '{"0": "bf16"}' in first.message
    assert first.message in str(step.watched)


@pytest.mark.filterwarnings("ignore:watch:UserWarning")
@pytest.mark.parametrize(
    ("factor", "kind", "threshold"),
    [(1.05, "activation", "fp16 maximum"), (0.94, "weight gradient", "90 % zeros in fp16")],
)
def test_inputs_that_a_cast_to_fp16_loses_are_reported_as_what_comes_of_it(
    factor: float, kind: str, threshold: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.mul_(0.01)  # type: ignore[operator, union-attr]
    step = hs.Step(
        model,
        torch.optim.SGD(model.parameters(), 1e-3, fused=True),
        hs.Precision("fp16", simulate=True, force=True),
        watch=10,
    )
    for number in range(180):
        batch = torch.randn(16, 6) * factor**number, torch.randint(0, 3, (16,))
        step(lambda batch: F.cross_entropy(model(batch[0]).float(), batch[1]), [batch])
    first = step.watched.warnings[0]
    assert (first.module, first.kind, first.threshold) == ("0", kind, threshold)


@pytest.mark.filterwarnings("ignore:.*holds no position in the data:UserWarning")
def test_a_resumed_step_keeps_its_observations(tmp_path: Path) -> None:
    model, step = train(2, 7, make=Tiny)
    hs.save(tmp_path / "saved.safetensors", step, model)
    model, resumed = train(2, 0, make=Tiny)
    hs.load(tmp_path / "saved.safetensors", resumed, model)
    seen = resumed.watched.history
    assert [one.step for one in seen] == [2, 4, 6]
    assert seen[-1].rows["0", "weight"].numbers == step.watched.history[-1].rows["0", "weight"].numbers


# --- one after the other ---


def fade_then_grow(number: int, x: Tensor) -> dict[str, Tensor]:
    """A weight of the loss is annealed by mistake and then restored; later the inputs are not normalised."""
    return {"weight": torch.tensor(0.6 ** min(number, 22) if number < 30 else 1.0), "x": x * 1.2 ** max(number - 30, 0)}


def explode_then_grow(number: int, x: Tensor) -> dict[str, Tensor]:
    """A weight of the loss grows up to a limit, which clipping makes harmless; later the inputs grow."""
    return {"weight": torch.tensor(2.0 ** (4 * min(number, 28) - 60)), "x": x * 9.0 ** max(number - 30, 0)}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("feed", "precision"), [(fade_then_grow, "fp16"), (explode_then_grow, "fp32")], ids=["fade", "explode"]
)
def test_a_harmless_warning_of_gradients_does_not_silence_an_overflow(
    feed: Callable[[int, Tensor], dict[str, Tensor]], precision: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    given: Any = hs.Precision("fp16", simulate=True, force=True) if precision == "fp16" else precision
    is_half, fixed = precision == "fp16", {"init_scale": 1.0, "growth_interval": 10**9}
    settings: dict[str, Any] = {"scaler": fixed} if is_half else {"clip_norm": 1.0}
    step = hs.Step(model, optimizer, given, watch=2, **settings)
    for number in range(60):
        batch = feed(number, torch.randn(16, 6)) | {"y": torch.randint(0, 3, (16,))}
        step(lambda b: b["weight"] * F.cross_entropy(model(b["x"]).float(), b["y"]), [batch])
    first, *_ = step.watched.warnings
    assert "gradient" in first.kind
    assert first.step < 30
    later = [
        w
        for w in step.watched.warnings
        if (w.module, w.kind, w.threshold) == ("0", "activation", f"{precision} maximum")
    ]
    assert len(later) == 1
    assert later[0].step > 30
    assert later[0].at is not None
    assert later[0].at > later[0].step


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("seed", range(2))
def test_occasional_spikes_of_gradients_are_no_trend_of_the_loss_scale(seed: int) -> None:
    """In healthy runs single batches overflow and lower the scale; it never comes near its floor."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    precision = hs.Precision("fp16", simulate=True, force=True)
    step = hs.Step(model, optimizer, precision, watch=4, clip_norm=1.0)
    scales = []
    for _ in range(90):
        x = torch.randn(16, 6)
        size = 2.0 ** float(torch.empty(()).uniform_(6, 10)) if float(torch.rand(())) < 0.2 else 1.0
        outcome = step(lambda b: F.mse_loss(model(b[0])[:, 0].float(), b[1]), [(x, x[:, 0] * size)])
        scales.append(outcome.scale)
    assert scales[-1] < scales[0]
    assert min(scales) > 16
    assert [warning for warning in step.watched.warnings if warning.kind == "loss scale"] == []


def test_attention_logits_are_compared_with_fp16_in_every_format() -> None:
    (limit,) = list_limits("attention logits", "bf16", "block", scales=False)
    assert (limit.threshold, limit.level, limit.is_upper) == ("fp16 maximum", math.log2(65504), True)


# --- the trend ---

LIMIT = Limit("fp16 maximum", 16.0, is_upper=True)


def test_a_straight_line_crosses_where_it_does() -> None:
    steps = [20.0 * k for k in range(K)]
    found = forecast(steps, [8 + 0.05 * t for t in steps], LIMIT)
    assert found.is_sure
    assert found.at == pytest.approx(160)
    assert found.low <= found.at <= found.high


@pytest.mark.parametrize(
    "values",
    [
        [3.0, 5.0, 4.0, 3.5, 5.2, 4.1, 3.3, 4.9],  # noise
        [12.0] * K,
        [4.0, 8.0, 10.0, 11.0, 11.4, 11.5, 11.6, 11.6],  # levels off
        [2.0 + 0.2 * k for k in range(K)],  # too far ahead
        [17.0 + k for k in range(K)],  # has been beyond it all the time
        [10.0, math.nan, *(10.0 + k for k in range(K - 2))],
    ],
)
def test_no_trend_no_warning(values: list[float]) -> None:
    found = forecast([20.0 * k for k in range(K)], values, LIMIT)
    assert found is None or not found.is_sure


def test_one_odd_observation_does_not_move_the_trend() -> None:
    steps = [20.0 * k for k in range(K)]
    values = [8 + 0.05 * t for t in steps]
    values[3] += 4
    found = forecast(steps, values, LIMIT)
    assert found.at == pytest.approx(160, abs=8)


def test_tensors_of_many_kinds_are_counted() -> None:
    measures = RowMeasures(4, torch.device("cpu"))
    measures.add(0, torch.tensor([0.0, 1.5, -3.0, math.inf]))
    measures.add(1, torch.tensor([1.0], dtype=torch.float16))
    measures.add(1, torch.tensor([448.0]).to(torch.float8_e4m3fn))
    measures.add(2, torch.tensor([3 + 4j]))
    measures.add(3, torch.randn(300, 400).t())
    counts, largest, scalars = SentMeasures(measures.pack([torch.tensor(2.0), 5.0]), 4, None).read()
    assert counts[0][0] == 1
    assert counts[0][BIAS] == 1
    assert counts[0][BIAS + 1] == 1
    assert counts[0][255] == 1
    assert counts[1][BIAS] == 1
    assert counts[1][BIAS + 8] == 1
    assert counts[2].sum() == 2
    assert 8000 <= counts[3].sum() <= 8192
    assert scalars == [2.0, 5.0]
    assert largest[1] == 448
    assert largest[2] == 4


def test_a_step_without_a_watch_says_how_to_get_one() -> None:
    model = nn.Linear(2, 2)
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32")
    with pytest.raises(Exception, match="watches nothing"):
        step.watched  # noqa: B018
    with pytest.raises(Exception, match="watch="):
        hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", watch=-3)


@pytest.mark.filterwarnings("ignore:watch:UserWarning")
@pytest.mark.filterwarnings("ignore:step .* was (dropped|saved):UserWarning")
def test_a_capsule_tells_what_grew_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)
    step = hs.Step(model, optimizer, "fp32", watch=2, capsules=tmp_path)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    for number in range(24):
        with torch.no_grad():
            model[2].weight.mul_(math.inf if number == 20 else 2.0)  # type: ignore[operator, union-attr]
        step(loss_fn, [torch.randn(16, 6)])
    step.finish()
    (folder,) = tmp_path.iterdir()
    found = hs.replay(folder, model, loss_fn)
    assert "2, weight: grew for 16 steps before, from " in str(found)
    assert found.to_json()["before"]


def test_a_watch_survives_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(0, 30, make=Tiny)

    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(RowMeasures, "add", fail)
    with pytest.warns(UserWarning, match="weights and gradients only, activations are not watched: memory is short"):
        watched, step = train(10, 30, make=Tiny)
    assert equal_bits(plain, watched)
    assert {row.kind for row in step.watched.rows} == {"weight", "weight gradient", "variance"}


def test_a_compiled_model_is_not_hooked() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    compiled = torch.compile(model, backend="eager")
    step = hs.Step(compiled, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", watch=2)  # type: ignore[arg-type]

    def train() -> None:
        for _ in range(4):
            step(lambda x: compiled(x).square().mean(), [torch.randn(8, 6)])

    with pytest.warns(UserWarning, match="is compiled"):
        train()
    assert {row.kind for row in step.watched.rows} == {"weight", "weight gradient", "update"}
