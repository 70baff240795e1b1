"""Two processes with a loop of their own: one verdict, gradients of the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.errors import ConfigError, ModelError
from halfstep.evidence.capsule import list_capsules
from halfstep.step.step import GuardedStep
from ranks_together import join, together
from tiny_training import plan

pytestmark = pytest.mark.ranks

ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
SPLITS: dict[str, list[list[slice]]] = {
    "one and seven": [[slice(0, 1)], [slice(1, 8)]],
    "windows of two": [[slice(0, 5), slice(5, 6)], [slice(6, 9), slice(9, 16)]],
    "windows of two and one": [[slice(0, 5), slice(5, 9)], [slice(9, 16)]],
}
"""By case, the micro-batches of each rank."""


def made(wrap: bool = True, static: bool = False, **more: Any) -> tuple[nn.Module, hs.Step]:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(net, static_graph=static) if wrap else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    precision = more.pop("precision", "fp32")
    return model, hs.Step(model, optimizer, precision, clip_norm=0.5, **more)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(window: list[Tensor], *, wrap: bool, **more: Any) -> tuple[Tensor, float, float]:
    model, step = made(wrap, accumulate=2, **more)
    for _ in range(3):
        outcome = step(lambda x: (model(x) - x).pow(2).mean(), window)
    return weights(model), outcome.loss, outcome.grad_norm


def after(losses: Any, **more: Any) -> tuple[Tensor, list[str]]:
    """Weights after one step for each loss function, and why steps were dropped."""
    model, step = made(**more)
    reasons = [step(lambda x, f=f: f(model, x), [ROWS[:4]]).reason for f in losses]
    return weights(model), reasons


def good(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).pow(2).mean()


def around(model: nn.Module, x: Tensor) -> Tensor:
    return good(model.module, x)


def unsummed(model: nn.Module, x: Tensor) -> Tensor:
    with model.no_sync():
        return good(model, x)


def refused(rank: int) -> dict[str, str]:
    """What ranks would part over, in words."""

    def partly_wrapped() -> None:
        parts = nn.ModuleList([DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 2)])
        hs.Step(parts, torch.optim.SGD(parts.parameters(), lr=0.1, fused=True), "fp32")

    def other_rates() -> None:
        model, step = made()
        step.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 + rank)
        with step:
            step(lambda x: good(model, x), [ROWS[:4]])

    def empty() -> None:
        made()[1](lambda x: x, [])

    def of_some() -> None:
        alone = [dist.new_group([member]) for member in range(2)][rank]
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=alone)
        hs.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), "fp32")

    cases: dict[str, Any] = {
        "around": lambda: after([around]),
        "unsummed": lambda: after([unsummed]),
        "partly wrapped": partly_wrapped,
        "other settings": lambda: made(accumulate=1 + rank),
        "other rates": other_rates,
        "empty": empty,
        "of some": of_some,
    }
    found = {}
    for name, case in cases.items():
        with pytest.raises((ConfigError, ModelError)) as error:
            case()
        found[name] = error.value.what
    return found


def kept_by(rank: int, folder: Path) -> list[str]:
    """Capsules of a rank, where a loss of the second is bad."""
    own = folder / f"capsules {rank}"
    after([good, lambda m, x: good(m, x * float("nan") if rank else x), good, good], capsules=own)
    return [path.name for path in list_capsules(own)]


def scenario(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    join(rank, size, port)
    found: dict[str, Any] = {case: trained([ROWS[s] for s in split[rank]], wrap=True) for case, split in SPLITS.items()}
    fp16 = {"precision": hs.Precision("fp16", simulate=True)}
    window = [ROWS[s] for s in SPLITS["windows of two"][rank]]
    found["static"] = trained(window, wrap=True, static=True)
    found["refused"], found["kept"] = refused(rank), kept_by(rank, folder)
    _, step = made(precision=hs.Precision("bf16", modules={"0": "fp32"}, simulate=True))
    found["parts"] = [row.module for row in step.plan.rows if row.kind == "module"]
    found["waits_s"] = step._step.ranks.world.limit_s
    found["fp16"] = trained([ROWS[s] for s in SPLITS["one and seven"][rank]], wrap=True, **fp16)
    found["nan"] = after([good, lambda m, x: good(m, x * float("nan") if rank else x), good])
    found["nothing"] = after([lambda m, x: (good(m, x), 0 if rank else 4)])
    found["nothing anywhere"] = after([lambda m, x: (good(m, x), 0)])
    found["nothing, on the device"] = after([lambda m, x: (good(m, x), torch.tensor(0.0 if rank else 4.0))])
    found["overflow"] = after([lambda m, x: good(m, x) * (1e38 if rank else 1)], **fp16)
    unused = nn.ModuleDict({"used": nn.Linear(4, 4), "left": nn.Linear(4, 4)})

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = unused

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["used"](x)

    model = DistributedDataParallel(Part())
    step = hs.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), "fp32")
    with pytest.raises(ModelError, match="left.weight"):
        step(lambda x: good(model, x), [ROWS[:4]])
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return together(2, scenario, folder, folder)


@pytest.mark.parametrize(
    ("case", "fact"),
    [
        ("around", "bypassed DistributedDataParallel"),
        ("unsummed", "bypassed DistributedDataParallel"),
        ("partly wrapped", "2 trained parameters are not wrapped in DistributedDataParallel: 1.weight, 1.bias"),
        ("other settings", "rank 0 and rank 1 differ in accumulate: 1 and 2"),
        ("other rates", "0.1 on rank 0, 0.2 on rank 1"),
        ("empty", "has an empty window"),
        ("of some", "covers 1 of 2 ranks"),
    ],
)
def test_what_ranks_would_part_over_is_refused_on_every_one(
    case: str, fact: str, found: list[dict[str, Any]]
) -> None:  # fmt: skip
    assert all(fact in ranks["refused"][case] for ranks in found)


def test_the_rank_at_fault_keeps_its_step_as_a_capsule(found: list[dict[str, Any]]) -> None:
    assert [ranks["kept"] for ranks in found] == [[], ["00000001"]]


def test_parts_are_named_as_in_the_model_that_ddp_wraps(found: list[dict[str, Any]]) -> None:
    assert found[0]["parts"] == ["module.0"]


def test_a_lost_rank_is_waited_for_as_long_as_the_process_group_says(found: list[dict[str, Any]]) -> None:
    assert found[0]["waits_s"] == 60


@pytest.mark.parametrize("case", [*SPLITS, "fp16", "static"])
def test_gradients_are_those_of_the_global_batch(case: str, found: list[dict[str, Any]]) -> None:
    split = SPLITS.get(case, SPLITS["windows of two" if case == "static" else "one and seven"])
    whole = torch.cat([ROWS[s] for window in split for s in window])
    more = {"precision": hs.Precision("fp16", simulate=True)} if case == "fp16" else {}
    expected, loss, norm = trained([whole], wrap=False, **more)
    tolerance = 1e-2 if case == "fp16" else 1e-5  # fp16 rounds the products of other batches otherwise
    for own, own_loss, own_norm in (ranks[case] for ranks in found):
        torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance / 10)
        assert own_loss == pytest.approx(loss, rel=tolerance)
        assert own_norm == pytest.approx(norm, rel=tolerance)


@pytest.mark.parametrize("case", [*SPLITS, "fp16", "static", "nan", "nothing", "overflow"])
def test_ranks_keep_the_same_bits(case: str, found: list[dict[str, Any]]) -> None:
    assert torch.equal(found[0][case][0], found[1][case][0])
    assert found[0][case][1:] == found[1][case][1:]


def test_a_nan_of_one_rank_drops_the_step_everywhere_and_names_the_rank(found: list[dict[str, Any]]) -> None:
    for ranks in found:
        values, reasons = ranks["nan"]
        assert values.isfinite().all()
        assert reasons == ["", "loss is nan (rank 1)", ""]


def test_an_fp16_overflow_of_one_rank_is_everybodys(found: list[dict[str, Any]]) -> None:
    for ranks in found:
        assert ranks["overflow"][1][0].startswith("gradient norm is")


@pytest.mark.parametrize("case", ["nothing", "nothing, on the device"])
def test_a_rank_without_weight_takes_part_and_counts_nothing(case: str, found: list[dict[str, Any]]) -> None:
    model, step = made(wrap=False)
    step(lambda x: good(model, x), [ROWS[:4]])
    for ranks in found:
        torch.testing.assert_close(ranks[case][0], weights(model), rtol=1e-6, atol=1e-7)
        assert ranks[case][1] == [""]


def test_a_window_that_is_empty_everywhere_is_dropped(found: list[dict[str, Any]]) -> None:
    assert [ranks["nothing anywhere"][1] for ranks in found] == [["empty window"]] * 2


RATES: dict[str, Any] = {
    "numbers": [0.1, 0.05, 1],
    "tensors": [torch.tensor(0.1), torch.tensor(0.05, dtype=torch.float64), torch.tensor([0.025])],
}


@pytest.mark.parametrize("kind", RATES)
def test_each_step_tells_the_learning_rate_that_it_had(kind: str, tmp_path: Path) -> None:
    """It is kept in one tensor, which later steps write before the facts of earlier ones are read. That tensor is
    filled: made from a number on the host, or copied from there, it would let a GPU's host wait in every step."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = GuardedStep(model, optimizer, plan())
        address, facts = step._rate.data_ptr(), []
        for lr in RATES[kind]:
            optimizer.param_groups[0]["lr"] = lr
            facts.append(step(lambda x: good(model, x), [ROWS[:4]]))
        expected = [pytest.approx((float(lr),), rel=1e-6) for lr in RATES[kind]]
        assert [one.read().rates for one in facts] == expected
        assert step._rate.data_ptr() == address
    finally:
        dist.destroy_process_group()
