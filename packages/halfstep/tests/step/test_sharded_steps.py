"""Models that fully_shard has sharded over ranks with gloo: every promise of a step on one device is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import HalfstepError
from halfstep.step.optim.adamw8bit import AdamW8bit
from ranks_together import join, together

pytestmark = pytest.mark.ranks

NUM_STEPS = 20
ROWS = torch.randn(NUM_STEPS, 12, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Blocks with rows that two and four ranks cannot share evenly, tied and frozen weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 7, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2))
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return (self.frozen(self.norm(x)) + self.shift) @ self.head.weight


def make_net(shard: bool, mesh: Any = None, *, only_blocks: bool = False, **more: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    net.norm.train(False)  # its statistics are those of a rank's own batch
    if shard:
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block, mesh=mesh, **more)
        if not only_blocks:
            fully_shard(net, mesh=mesh, **more)
    return net


def loss_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (net(x) - x).pow(2).mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "AdamW8bit": lambda p: AdamW8bit(p, lr=1e-2),
}


def trained_of(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def make_step(net: nn.Module, optimizer: str = "fused AdamW", precision: str = "fp32", **more: Any) -> hs.Step:
    made = OPTIMIZERS[optimizer](trained_of(net))
    return hs.Step(net, made, precision, **{"clip_norm": 0.5, "fast": "off", **more})


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([whole(p).flatten() for p in net.state_dict().values()])


def rows_of(rank: int, size: int, num_parts: int = 1) -> list[list[Tensor]]:
    """This rank's rows of every global batch, in micro-batches."""
    return [list(batch.chunk(size)[rank].chunk(num_parts)) for batch in ROWS]


def train(net: nn.Module, step: hs.Step, windows: list[list[Tensor]]) -> dict[str, Any]:
    outcomes = [step(loss_of(net), window) for window in windows]
    return {
        "weights": weights(net),
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "reasons": [outcome.reason for outcome in outcomes],
    }


def train_sharded(
    windows: list[list[Tensor]], name: str = "fused AdamW", mesh: Any = None, **more: Any
) -> dict[str, Any]:
    net = make_net(True, mesh, only_blocks=more.pop("only_blocks", False))
    found = train(net, make_step(net, name, **more), windows)
    assert net.head.weight is net.embed.weight
    return found


def train_alone(optimizer: str = "fused AdamW", **more: Any) -> dict[str, Any]:
    net = make_net(False)
    return train(net, make_step(net, optimizer, **more), [[batch] for batch in ROWS])


def read_all(net: nn.Module, step: hs.Step) -> list[Tensor]:
    """Everything that a dropped step must leave as it is, of this rank."""
    state = step.state_dict()
    held: list[Any] = [*net.parameters(), *net.buffers(), *state["ema"].values()]
    held += [value for own in step.optimizers[0].state.values() for value in own.values()]
    found = [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in held]
    return [*found, torch.tensor([state["committed"]])]


def drop_one(rank: int, mesh: Any = None, optimizer: str = "fused AdamW", **more: Any) -> dict[str, Any]:
    """Train two good steps, one that is NaN on the last rank alone, and a good one."""
    net = make_net(True, mesh)
    net.norm.train()
    scheduler = {"schedule": lambda number: 1 / (1 + number)}
    step = make_step(net, optimizer, ema_decay=0.9, **scheduler, **more)
    rows = rows_of(rank, dist.get_world_size())
    train(net, step, rows[:2])
    before = read_all(net, step)
    is_last = rank == dist.get_world_size() - 1
    bad = step(loss_of(net), [rows[2][0] * (float("nan") if is_last else 1)])
    after = read_all(net, step)
    good = step(loss_of(net), rows[3])
    same = all(
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(before, after, strict=True)
    )
    moved = any(not torch.equal(a, b) for a, b in zip(before, read_all(net, step), strict=True))
    return {
        "same": same,
        "moved": moved,
        "reason": bad.reason,
        "scale": (bad.scale, good.scale),
        "good": good.reason,
        "lr": (bad.lr, good.lr),
    }


def ruin_gradient(rank: int) -> tuple[str, bool]:
    """Ruin one number of the last rank's gradient shards, after finite losses."""
    net = make_net(True)

    def ruin(model: nn.Module) -> None:
        if rank == dist.get_world_size() - 1:
            model.blocks[0][0].weight.grad._local_tensor.view(-1)[0] = float("inf")  # type: ignore[index,union-attr]

    before = weights(net)
    outcome = make_step(net, on_gradients=ruin)(loss_of(net), rows_of(rank, dist.get_world_size())[0])
    return outcome.reason, torch.equal(before, weights(net))


def count_reductions(rank: int) -> list[list[int]]:
    """Return the sizes of what each of three steps reduces by itself; gathering a whole tensor is an error."""
    from torch.distributed.tensor import DTensor

    def refuse(*given: Any, **more: Any) -> Any:
        raise AssertionError("a step gathered a whole tensor")

    sizes: list[int] = []
    reduce, whole_tensor = dist.all_reduce, DTensor.full_tensor

    def count(tensor: Tensor, *given: Any, **more: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *given, **more)

    net = make_net(True)
    step = make_step(net, ema_decay=0.9)
    dist.all_reduce, DTensor.full_tensor = count, refuse  # type: ignore[assignment]
    try:
        found = []
        for window in rows_of(rank, dist.get_world_size())[:3]:
            sizes.clear()
            step(loss_of(net), window)
            found.append(list(sizes))
    finally:
        dist.all_reduce, DTensor.full_tensor = reduce, whole_tensor  # type: ignore[assignment]
    return found


def spoil_one() -> tuple[str, bool]:
    """Let an optimizer divide 0 by 0 in the last rank's shard alone: its rows get no gradient."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = fully_shard(nn.Linear(6, 4, bias=False))
    before = whole(net.weight)
    step = hs.Step(net, torch.optim.AdamW(net.parameters(), eps=0.0), "fp32", fast="off")
    outcome = step(lambda x: net(x)[:, :2].pow(2).mean(), [ROWS[0]])
    return outcome.reason, torch.equal(before, whole(net.weight))


def refused(rank: int) -> list[str]:
    """Give ranks different settings, and shards to some of the ranks only."""
    from torch.distributed.device_mesh import DeviceMesh

    def make_over_one() -> hs.Step:
        return make_step(make_net(True, DeviceMesh("cpu", [[0], [1]][rank])))

    def make_other_rates() -> hs.Step:
        net = make_net(True)
        return hs.Step(net, torch.optim.AdamW(net.parameters(), lr=1e-2 * (1 + rank), fused=True), "fp32")

    cases: list[Callable[[], hs.Step]] = [
        lambda: make_step(make_net(True), ema_decay=0.5 + 0.1 * rank),
        lambda: make_step(make_net(True), clip_norm=1.0 + rank, guard={"max_consecutive": 3 + rank}),
        lambda: make_step(make_net(True), precision=hs.Precision(("fp32", "bf16")[rank], simulate=True)),
        make_other_rates,
        make_over_one,
    ]
    found = []
    for case in cases:
        with pytest.raises(HalfstepError) as error:
            case()
        found.append(error.value.what)
    return found


def scenario(rank: int, size: int, port: int) -> dict[str, Any]:
    join(rank, size, port)
    rows, halves = rows_of(rank, size), rows_of(rank, size, 2)
    found: dict[str, Any] = {name: train_sharded(rows, name) for name in OPTIMIZERS}
    found["again"] = train_sharded(rows)
    found["accumulated"] = train_sharded(halves, accumulate=2)
    found["reduced last"] = train_sharded(halves, accumulate=2, shard_reduce="last")
    found["only blocks"] = train_sharded(rows, only_blocks=True)
    for precision in ("bf16", "fp16"):
        found[precision] = train_sharded(rows, precision=hs.Precision(precision, simulate=True))
    found["low memory"] = train_sharded(rows, memory="low")
    for name in ("fused AdamW", "AdamW", "AdamW8bit"):
        found[f"dropped {name}"] = drop_one(rank, optimizer=name)
    found["overflow"] = drop_one(rank, precision=hs.Precision("fp16", simulate=True))
    found["spoiled"], found["refused"] = spoil_one(), refused(rank)
    found["ruined gradient"], found["reductions"] = ruin_gradient(rank), count_reductions(rank)
    return found


def scenario_of_four(rank: int, size: int, port: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    join(rank, size, port)
    rows = rows_of(rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for name, over in {"shards": None, "replicas of shards": mesh}.items():
        found[name] = train_sharded(rows, mesh=over)
        found[f"dropped by {name}"] = drop_one(rank, over)
    found["only blocks"] = train_sharded(rows, mesh=mesh, only_blocks=True)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(2, scenario, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("case", [*OPTIMIZERS, "accumulated", "reduced last", "only blocks", "low memory"])
def test_weights_are_those_of_one_process_with_the_global_batch(case: str, found: list[dict[str, Any]]) -> None:
    alone = train_alone(case if case in OPTIMIZERS else "fused AdamW")
    for own in found:
        torch.testing.assert_close(own[case]["weights"], alone["weights"], rtol=0, atol=1e-5)
        assert own[case]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert own[case]["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_two_launches_and_all_ranks_have_the_same_bits(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert torch.equal(first["fused AdamW"]["weights"], first["again"]["weights"])
    assert torch.equal(first["fused AdamW"]["weights"], second["fused AdamW"]["weights"])
    assert first["fused AdamW"]["norms"] == second["fused AdamW"]["norms"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_simulated_half_precision_trains(precision: str, found: list[dict[str, Any]]) -> None:
    losses = found[0][precision]["losses"]
    assert losses[-1] < losses[0]
    assert losses == found[1][precision]["losses"]
    alone = train_alone(precision=hs.Precision(precision, simulate=True))
    assert losses == pytest.approx(alone["losses"], rel=0.02)  # bf16 rounds to 8 bits


@pytest.mark.parametrize("case", ["dropped fused AdamW", "dropped AdamW", "dropped AdamW8bit", "overflow"])
def test_a_nan_of_one_rank_drops_the_step_on_all(case: str, found: list[dict[str, Any]]) -> None:
    for own in found:
        assert own[case]["same"]
        assert own[case]["moved"]
        assert own[case]["reason"] == "loss is nan (rank 1)"
        assert own[case]["good"] == ""
        assert own[case]["lr"][0] == own[case]["lr"][1] == pytest.approx(1e-2 / 3)
    if case == "overflow":
        before, after = found[0][case]["scale"]
        assert after == before / 2


def test_a_shard_that_an_optimizer_ruins_drops_the_step_on_all(found: list[dict[str, Any]]) -> None:
    for own in found:
        reason, is_same = own["spoiled"]
        assert "the optimizer wrote weights that are not finite" in reason
        assert is_same


def test_a_number_of_one_shard_of_a_gradient_drops_the_step_on_all(found: list[dict[str, Any]]) -> None:
    assert [own["ruined gradient"] for own in found] == [("gradient norm is inf", True)] * 2


def test_a_step_reduces_a_few_numbers_and_gathers_nothing(found: list[dict[str, Any]]) -> None:
    unit, sums, norms = 1, 3 + 2 * 2, 2
    assert [own["reductions"] for own in found] == [[[unit, sums, norms]] * 3] * 2


def test_ranks_with_different_settings_are_refused_before_the_first_step(found: list[dict[str, Any]]) -> None:
    for own in found:
        average, clip, precision, rate, mesh = own["refused"]
        assert clip == "rank 0 and rank 1 differ in clip_norm: 1.0 and 2.0; guard.max_consecutive: 3 and 4"
        assert average == "rank 0 and rank 1 differ in ema_decay: 0.5 and 0.6"
        assert precision.startswith("rank 0 and rank 1 differ in precision: fp32 and bf16")
        assert rate == "rank 0 and rank 1 differ in lr: [0.01] and [0.02]"
        assert mesh == "the model is sharded over a mesh of 1, but 2 ranks train it"


@pytest.mark.soak
def test_four_ranks_train_as_one_process_also_as_replicas_of_shards(tmp_path: Path) -> None:
    launches = [together(4, scenario_of_four, tmp_path / f"launch {number}") for number in range(2)]
    alone = train_alone()
    for case in ("shards", "replicas of shards", "only blocks"):
        for first, second in zip(*launches, strict=True):
            torch.testing.assert_close(first[case]["weights"], alone["weights"], rtol=0, atol=1e-5)
            assert first[case]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
            assert torch.equal(first[case]["weights"], second[case]["weights"])
            assert torch.equal(first[case]["weights"], launches[0][0][case]["weights"])
    for case in ("dropped by shards", "dropped by replicas of shards"):
        for own in launches[0]:
            assert own[case]["same"]
            assert own[case]["moved"]
            assert own[case]["reason"] == "loss is nan (rank 3)"
