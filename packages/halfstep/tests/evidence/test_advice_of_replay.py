"""The change that replay proposes is put into the code, and the training that failed is run again: it has no fault.

Each case is a training of a few steps, written as it fails and with the change.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faulty_steps import Batch, Shaped, numbers
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import halfstep as hs
from halfstep.evidence import causes
from halfstep.evidence.capsule import list_capsules
from halfstep.evidence.replay import Replayed
from halfstep.evidence.updates import KNOWN, Update, record_update

LossFn = Callable[[Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    model: nn.Module
    loss_fn: LossFn
    batch: Callable[[int], Batch]
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    num_steps: int = 4
    more: dict[str, Any] = field(default_factory=dict)
    """For hs.Step."""


def batches(*shape: int) -> Callable[[int], Batch]:
    return lambda seed: {"x": numbers(*shape, seed=seed)}


def train(training: Training, folder: Path, num_steps: int) -> list[Path]:
    """Train, and return the capsules."""
    kind = getattr(torch.optim, training.optimizer)
    optimizer = kind(training.model.parameters(), **training.options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was saved; find the cause.*")
        warnings.filterwarnings("ignore", message=".*(has eps=0|was dropped).*")
        step = hs.Step(training.model, optimizer, "fp32", capsules=folder, **training.more)
        try:
            for number in range(num_steps):
                step(training.loss_fn, [training.batch(number)])
            step.finish()
        except (hs.TrainingStopped, ValueError, RuntimeError) as error:
            del error
    return list_capsules(folder)


def replay(training: Training, folder: Path) -> Replayed:
    return hs.replay(train(training, folder, training.num_steps)[0], training.model, training.loss_fn)


def squares(model: nn.Module) -> LossFn:
    return lambda batch: model(batch["x"]).square().mean()


# --- cases: as they fail, and with the change ---


def recurrent(is_fixed: bool) -> Training:
    """A ReLU RNN whose recurrent weights make the state larger at each time step."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.RNN(8, 16, nonlinearity="relu", batch_first=True), nn.Linear(16, 1)
            (nn.init.orthogonal_ if is_fixed else lambda w: nn.init.normal_(w, 0, 8.0))(self.rnn.weight_hh_l0)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Recurrent()
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 30, 8))


def recurrent_training(is_fixed: bool) -> Training:
    """It starts well, and its gradients are too large for the rate."""
    torch.manual_seed(0)
    rnn, head = nn.RNN(8, 16, nonlinearity="relu", batch_first=True), nn.Linear(16, 1)
    nn.init.orthogonal_(rnn.weight_hh_l0)
    model = nn.ModuleDict({"rnn": rnn, "head": head})

    def loss_fn(batch: Batch) -> Tensor:
        return (head(rnn(batch["x"])[0][:, -1]) - 3).square().mean()

    more = {"clip_norm": 1} if is_fixed else {}
    options = {"lr": 0.5}
    return Training(model=model, loss_fn=loss_fn, batch=batches(4, 40, 8), options=options, num_steps=20, more=more)


def deep(is_fixed: bool) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.ReLU())))
    for weight in (p for p in model.parameters() if p.ndim == 2):
        (nn.init.orthogonal_ if is_fixed else lambda w: nn.init.normal_(w, 0, 20.0))(weight)
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 16))


def products(is_fixed: bool) -> Training:
    model = Shaped(lambda x: ((0.8 + x.abs()).clamp(-1, 1) if is_fixed else (0.8 + x.abs())).cumprod(1).mean(1))
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 400, 8))


def one_sample(is_fixed: bool) -> Training:
    """The last batch of an epoch, as loaders give it without drop_last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    sizes = (4, 4) if is_fixed else (4, 1)
    return Training(model=model, loss_fn=squares(model), batch=lambda seed: batches(sizes[seed % 2], 8)(seed))


def negative_determinant(is_fixed: bool) -> Training:
    logdet = (lambda a: torch.linalg.slogdet(a)[1]) if is_fixed else torch.logdet
    model = Shaped(lambda x: logdet(x.view(-1, 4, 4)), out=16)
    return Training(model=model, loss_fn=lambda b: model(b["x"]).square().mean(), batch=batches(6, 8))


def small_diagonal(n: int) -> Tensor:
    return torch.diag(torch.linspace(1e-3, 2e-3, n))


def singular_determinant(is_fixed: bool) -> Training:
    def volume(x: Tensor) -> Tensor:
        gram = x.mT @ x + (small_diagonal(8) if is_fixed else 0)
        return torch.logdet(gram)

    model = Shaped(volume)
    return Training(model=model, loss_fn=squares(model), batch=batches(6, 3, 8))


def singular_factor(is_fixed: bool) -> Training:
    """A covariance of fewer samples than features."""

    def whitened(x: Tensor) -> Tensor:
        covariance = x.T @ x + (small_diagonal(8) if is_fixed else 0)
        return torch.linalg.cholesky(covariance).diagonal().log()

    model = Shaped(whitened)
    return Training(model=model, loss_fn=squares(model), batch=batches(3, 8))


def equal_eigenvalues(is_fixed: bool) -> Training:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = nn.Parameter(torch.eye(6))

        def forward(self, x: Tensor) -> Tensor:
            metric = self.metric @ self.metric.T + (small_diagonal(6) if is_fixed else 0)
            values, vectors = torch.linalg.eigh(metric)
            return (x @ vectors * values)[:, :3]

    model = Spectral()
    return Training(model=model, loss_fn=squares(model), batch=batches(5, 6))


class Swish(torch.autograd.Function):
    """Its backward overflows where forward does not."""

    most = math.inf

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @classmethod
    def backward(cls, ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        e = torch.exp((-x).clamp(max=cls.most))
        return gradient * (1 + e + x * e) / (1 + e).square()


class FixedSwish(Swish):
    most = 10.0


def custom_backward(is_fixed: bool) -> Training:
    function = FixedSwish if is_fixed else Swish
    model = Shaped(lambda x: function.apply(100 * x))  # type: ignore[no-untyped-call]
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 8), options={"lr": 1e-6})


class Averaged(torch.autograd.Function):
    """Its backward is wrong, and no clamp in it helps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.total = float((x > 1e6).sum())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 * ctx.total - math.inf)


def wrong_backward(is_fixed: bool) -> Training:
    model = Shaped(lambda x: 2 * x if is_fixed else Averaged.apply(x))  # type: ignore[no-untyped-call]
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 8))


def classes(num: int, missing: int) -> Callable[[int], Batch]:
    """Targets without those of one class."""

    def batch(seed: int) -> Batch:
        target = torch.arange(12) % (num - 1)
        return {"x": numbers(12, 8, seed=seed), "y": target + (target >= missing)}

    return batch


def absent_class(is_fixed: bool) -> Training:
    model = Shaped(lambda x: x.softmax(-1), out=5)

    def loss_fn(batch: Batch) -> Tensor:
        counts = torch.bincount(batch["y"], minlength=5)
        weight = 1 / (counts.clamp(min=1) if is_fixed else counts)
        return (model(batch["x"]) * weight).sum(-1).mean()

    return Training(model=model, loss_fn=loss_fn, batch=classes(5, 2))


def nothing_selected(is_fixed: bool) -> Training:
    model = Shaped(lambda x: x)

    def loss_fn(batch: Batch) -> Tensor:
        chosen = model(batch["x"])[batch["x"][:, 0] > 100].square()
        return chosen.sum() if is_fixed else chosen.mean()

    return Training(model=model, loss_fn=loss_fn, batch=batches(4, 8))


def sure_probability(is_fixed: bool) -> Training:
    model = Shaped(lambda x: F.logsigmoid(1e3 * x) if is_fixed else torch.log(torch.sigmoid(1e3 * x)))
    return Training(model=model, loss_fn=lambda b: -model(b["x"]).mean(), batch=batches(4, 8), options={"lr": 1e-5})


def unit_and_scale(is_fixed: bool) -> Training:
    """A deviation that is 0, divided by and under a logarithm: two changes at one line."""
    model = Shaped(lambda x: x, out=16)

    def loss_fn(batch: Batch) -> Tensor:
        mean, deviation = model(batch["x"]).chunk(2, -1)
        deviation = F.relu(deviation) if not is_fixed else F.relu(deviation).clamp(min=1e-4)
        return ((batch["x"] - mean) / deviation).tanh().mean() + deviation.log().mean()

    return Training(model=model, loss_fn=loss_fn, batch=batches(4, 8))


def constant_rows(is_fixed: bool) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-5 if is_fixed else 0.0), nn.Linear(8, 1))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[0].bias, 0.5)
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 8))


def dead_unit(is_fixed: bool) -> Training:
    """Adam without eps divides 0 by 0 where a weight has never had a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias[0] = -100.0  # type: ignore[operator]
    options = {"lr": 1e-3, "eps": 1e-8 if is_fixed else 0.0}
    return Training(model=model, loss_fn=squares(model), batch=batches(4, 8), optimizer="Adam", options=options)


def scores(gain: float = 1.0, out: int = 1) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out), Gain(gain))


class Gain(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def labelled(num: int = 2) -> Callable[[int], Batch]:
    return lambda seed: {"x": numbers(32, 8, seed=seed), "y": torch.arange(32) % num}


def gamma_curve(is_fixed: bool) -> Training:
    """A power with a fraction, of outputs that are negative."""
    model = scores()
    nn.init.constant_(model[2].bias, -2.0)

    def loss_fn(batch: Batch) -> Tensor:
        out = model(batch["x"])
        return ((out.abs() if is_fixed else out) ** 2.2 - 0.5).square().mean()

    return Training(model=model, loss_fn=loss_fn, batch=labelled())


def written_entropy(is_fixed: bool) -> Training:
    """Binary cross entropy of sure outputs, by hand."""
    model = scores(gain=400)

    def loss_fn(batch: Batch) -> Tensor:
        y = batch["y"].float()[:, None]
        if is_fixed:
            return F.binary_cross_entropy_with_logits(model(batch["x"]), y)
        p = torch.sigmoid(model(batch["x"]))
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    return Training(model=model, loss_fn=loss_fn, batch=labelled(), options={"lr": 1e-6})


def squashed_action(is_fixed: bool) -> Training:
    """The log-probability of tanh(u), whose derivative is 0 for large u."""
    model = scores(gain=60, out=4)

    def loss_fn(batch: Batch) -> Tensor:
        u = model(batch["x"])
        if is_fixed:
            slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        else:
            slope = torch.log(1 - torch.tanh(u).pow(2))
        return (0.1 * u.square() - slope).mean()

    return Training(model=model, loss_fn=loss_fn, batch=labelled(), options={"lr": 1e-6})


def written_softmax(is_fixed: bool) -> Training:
    model = scores(gain=600, out=5)

    def loss_fn(batch: Batch) -> Tensor:
        logits, rows = model(batch["x"]), torch.arange(32)
        if is_fixed:
            return -F.log_softmax(logits, -1)[rows, batch["y"]].mean()
        powers = torch.exp(logits)
        p = powers / powers.sum(-1, keepdim=True)
        return -torch.log(p[rows, batch["y"]]).mean()

    return Training(model=model, loss_fn=loss_fn, batch=labelled(5), options={"lr": 1e-7})


def written_softplus(is_fixed: bool) -> Training:
    model = scores(gain=400)

    def loss_fn(batch: Batch) -> Tensor:
        z = model(batch["x"]) * (1 - 2 * batch["y"][:, None])
        return F.softplus(z).mean() if is_fixed else torch.log1p(torch.exp(z)).mean()

    return Training(model=model, loss_fn=loss_fn, batch=labelled(), options={"lr": 1e-6})


def rate_of_a_small_step(is_fixed: bool) -> Training:
    """log(1 + x) is 0 for small x, and divided by."""
    model = scores(gain=1e-3)

    def loss_fn(batch: Batch) -> Tensor:
        x = 1e-9 + 1e-6 * model(batch["x"]).square()
        growth = torch.log1p(x) if is_fixed else torch.log(1 + x)
        return (x.detach() / growth * model(batch["x"]).square()).mean()

    return Training(model=model, loss_fn=loss_fn, batch=labelled())


CASES = [
    (gamma_curve, causes.UNDERFLOW, "rewrite as x.abs() ** p"),
    (written_entropy, causes.UNDERFLOW, "rewrite as F.binary_cross_entropy_with_logits(z, target) at "),
    (squashed_action, causes.UNDERFLOW, "rewrite as 2 * (math.log(2) - z - F.softplus(-2 * z)) at "),
    (written_softmax, causes.OVERFLOW, "rewrite as F.log_softmax(z, dim) at "),
    (written_softplus, causes.OVERFLOW, "rewrite as F.softplus(z) at "),
    (rate_of_a_small_step, causes.UNDERFLOW, "rewrite as torch.log1p(z) at "),
    (recurrent, causes.OVERFLOW, "initialise rnn.weight_hh_l0 with a spectral norm of 1 (nn.init.orthogonal_)"),
    (recurrent_training, causes.OVERFLOW, "clipped to a norm of 1"),
    (deep, causes.OVERFLOW, "spectral norm of 1 (nn.init.orthogonal_)"),
    (products, causes.OVERFLOW, "clamp(-1, 1)"),
    (one_sample, causes.CODE, "at least 2 samples (drop_last=True"),
    (negative_determinant, causes.UNDERFLOW, "slogdet"),
    (singular_determinant, causes.UNDERFLOW, "added to the diagonal"),
    (singular_factor, causes.CODE, "added to the diagonal"),
    (equal_eigenvalues, causes.UNDERFLOW, "added to the diagonal"),
    (custom_backward, causes.OVERFLOW, "clamp(max=10) on the argument of exp"),
    (wrong_backward, causes.UNDERFLOW, "derivative of Averaged.forward"),
    (absent_class, causes.UNDERFLOW, "a count of at least 1"),
    (nothing_selected, causes.UNDERFLOW, "sum() in place of mean()"),
    (sure_probability, causes.UNDERFLOW, "rewrite as F.logsigmoid(z) at "),
    (unit_and_scale, causes.UNDERFLOW, "denominator"),
    (constant_rows, causes.UNDERFLOW, "eps=1e-5"),
    (dead_unit, causes.UPDATE, "eps=1e-8 in Adam"),
]


@pytest.mark.parametrize(("plant", "cause", "change"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_training_with_the_proposed_change_has_no_fault(
    tmp_path: Path, plant: Callable[[bool], Training], cause: str, change: str
) -> None:
    found: Any = replay(plant(False), tmp_path / "failing")
    assert found.cause == cause, str(found)
    assert found.remedy is not None, str(found)
    assert change in found.remedy.change, str(found)
    assert found.remedy.lasts, str(found)
    assert not train(plant(True), tmp_path / "fixed", 20)


@pytest.mark.parametrize("plant", [gamma_curve, written_entropy, squashed_action, written_softmax, written_softplus])
def test_an_advised_form_trains_every_parameter(tmp_path: Path, plant: Callable[[bool], Training]) -> None:
    training = plant(False)
    found: Any = replay(training, tmp_path)
    assert found.remedy.shown.endswith("on its batches; the loss falls"), str(found)
    assert all(found.remedy.outcome.gradients.values())
    assert len(found.remedy.outcome.gradients) == len(list(training.model.parameters()))
    assert f"{__file__}:" in found.remedy.change


def test_a_clamp_behind_which_no_gradient_is_left_does_not_count(tmp_path: Path) -> None:
    model = Shaped(lambda x: (1 + x.abs()).cumprod(1).mean(1))
    found = replay(Training(model=model, loss_fn=squares(model), batch=batches(4, 400, 8)), tmp_path)
    assert found.remedy is None, str(found)
    assert "tried, does not help: factors of at most 1 (clamp(-1, 1))" in str(found)
    assert "(no gradient reaches layer.weight, layer.bias)" in str(found)


def test_no_clamp_is_advised_under_a_square_that_overflows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    training = Training(
        model=model, loss_fn=lambda batch: (model(batch["x"]) ** 2).mean(), batch=batches(8, 4),
        optimizer="Adam", options={"lr": 1e19},
    )  # fmt: skip
    found = str(replay(training, tmp_path))
    assert "first operation out of range: pow" in found
    assert "clamp(min" not in found


def regression(**more: Any) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss_fn(batch: Batch) -> Tensor:
        return (model(batch["x"]) - batch["x"].sum(-1, keepdim=True)).square().mean()

    return Training(model=model, loss_fn=loss_fn, batch=batches(32, 8), num_steps=60, **more)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"lr": 50.0}),
        ("SGD", {"lr": 1e4, "momentum": 0.9}),
        ("SGD", {"lr": 0.3, "momentum": 0.99}),
    ],
)
def test_an_advised_learning_rate_trains(tmp_path: Path, optimizer: str, options: dict[str, Any]) -> None:
    found: Any = replay(regression(optimizer=optimizer, options=options), tmp_path / "failing")
    assert found.cause == causes.DIVERGED, str(found)
    assert found.remedy.lasts, str(found)
    assert "stay finite and lower the loss, also at 3 times the rate" in str(found)
    advised = {**options, "lr": float(found.remedy.line.removeprefix("lr="))}
    training = regression(optimizer=optimizer, options=advised)
    first = training.loss_fn(training.batch(0)).item()
    assert not train(training, tmp_path / "again", 300)
    assert training.loss_fn(training.batch(0)).item() < first


def test_a_learning_rate_is_found_where_samples_cannot_be_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.RNN(8, 8), "head": nn.Linear(8, 1)})

    def loss_fn(batch: Batch) -> Tensor:
        packed = pack_padded_sequence(batch["x"].transpose(0, 1), batch["lengths"])  # which have to be sorted
        return (model["head"](model["rnn"](packed)[1][0]) - 1).square().mean()

    def batch(seed: int) -> Batch:
        return {"x": numbers(4, 6, 8, seed=seed), "lengths": torch.tensor([6, 5, 3, 2])}

    found: Any = replay(
        Training(model=model, loss_fn=loss_fn, batch=batch, options={"lr": 50.0}, num_steps=60), tmp_path
    )
    assert found.cause == causes.DIVERGED, str(found)
    assert found.remedy.line.startswith("lr="), str(found)
    assert found.remedy.lasts, str(found)


def test_clipping_is_advised_where_the_rate_is_good_and_single_gradients_are_not(tmp_path: Path) -> None:
    def rare(**more: Any) -> Training:
        """A loss of the fourth power: far from its minimum the slope is out of proportion."""
        plain = regression(options={"lr": 0.01}, **more)
        goal = lambda b: 20 * b["x"].sum(-1, keepdim=True)  # noqa: E731
        return Training(**{**vars(plain), "loss_fn": lambda b: (plain.model(b["x"]) - goal(b)).pow(4).mean()})

    found: Any = replay(rare(), tmp_path / "failing")
    assert found.remedy.line == "hs.Step(..., clip_norm=1)", str(found)
    assert not train(rare(more={"clip_norm": 1}), tmp_path / "again", 300)


def test_a_change_that_leaves_large_gradients_comes_with_clipping(tmp_path: Path) -> None:
    def ratio(is_fixed: bool) -> Training:
        model = Shaped(lambda x: x, out=1)

        def loss_fn(batch: Batch) -> Tensor:
            spread = batch["x"].std() * 0
            return (model(batch["x"]) / (spread.clamp(min=1e-4) if is_fixed else spread)).pow(4).mean()

        return Training(
            model=model,
            loss_fn=loss_fn,
            batch=batches(4, 8),
            options={"lr": 1e-3},
            more={"clip_norm": 1} if is_fixed else {},
        )

    found: Any = replay(ratio(False), tmp_path / "failing")
    assert "a denominator of at least 1e-4" in found.remedy.change, str(found)
    assert found.remedy.change.endswith(", and clip_norm=1"), str(found)
    assert found.remedy.lasts, str(found)
    assert not train(ratio(True), tmp_path / "fixed", 20)


def test_where_no_change_helps_replay_says_so(tmp_path: Path) -> None:
    model = Shaped(lambda x: torch.matrix_power(100 * torch.eye(8) + x.mT @ x, 40))
    training = Training(model=model, loss_fn=squares(model), batch=batches(4, 5, 8))
    found = replay(training, tmp_path)
    assert found.cause == causes.OVERFLOW, str(found)
    assert found.remedy is None, str(found)
    assert "change: none of those tried helps" in str(found)


def test_the_line_inside_a_custom_backward_is_named(tmp_path: Path) -> None:
    found: Any = replay(custom_backward(False), tmp_path)
    source, first = inspect.getsourcelines(Swish)
    line = first + next(k for k, text in enumerate(source) if "torch.exp" in text)
    assert found.diagnosis.origin.line == f"{__file__}:{line}"
    assert found.diagnosis.origin.module == "(root)"


def test_an_optimizer_that_replay_cannot_build_leaves_a_change_tried_on_the_one_step(tmp_path: Path) -> None:
    class SGD(torch.optim.SGD):
        """It has the name of torch's class, and may differ."""

    training = absent_class(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = hs.Step(training.model, SGD(training.model.parameters(), 1e-3), "fp32", capsules=tmp_path)
        step(training.loss_fn, [training.batch(0)])
        step.finish()
    found: Any = hs.replay(list_capsules(tmp_path)[0], training.model, training.loss_fn)
    assert found.remedy.lasts
    assert "(tried: the step is good with it)" in str(found)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_optimizer_is_built_again_from_its_record(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)  # Muon takes matrices alone
    plain = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = KNOWN[name]([{"params": [model.weight], **(plain if name != "Rprop" else {"lr": 0.01})}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = hs.Step(model, optimizer, "fp32", clip_norm=0.5)
    recorded = json.loads(json.dumps(record_update(step._step, model)))
    update = Update.parse(recorded)
    again = copy.deepcopy(model)
    step(lambda x: model(x).square().mean(), [numbers(6, 8)])
    again(numbers(6, 8)).square().mean().backward()
    update.step(update.build(again), scale=1.0)
    torch.testing.assert_close(again.weight, model.weight)
