"""Every feature of hs.Step on a sharded model: in a world of one it trains bit-exactly like the same model unsharded.

packages/halfstep/tests/step/test_sharded_steps.py trains on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import halfstep as hs
from halfstep.distributed.sharding import get_local
from halfstep.errors import ConfigError, HalfstepError
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from tiny_training import assert_same_bits

ROWS = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


def make(*, shard: bool, width: int = 8, dtype: torch.dtype = torch.float32, **more: Any) -> Net:
    torch.manual_seed(0)
    net = Net(width).to(dtype)
    if shard:
        for block in net.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)), **more)
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)), **more)
    return net


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def loss_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (net(x) - x).pow(2).mean()


def read_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: get_local(tensor).detach().clone() for name, tensor in net.state_dict().items()}


def read_optimizer(step: hs.Step) -> dict[str, Tensor]:
    states = step.optimizers[0].state.values()
    return {f"{n} {key}": get_local(v) for n, own in enumerate(states) for key, v in own.items()}


Run = Callable[[nn.Module], object]


def assert_alike(run: Run, **more: Any) -> None:
    """Run on the model as it is and sharded: what `run` returns, and weights and buffers afterwards, must be equal."""
    plain, sharded = make(shard=False, **more), make(shard=True, **more)
    assert repr(run(plain)) == repr(run(sharded))  # a NaN equals nothing, but looks like itself
    assert_same_bits(read_state(plain), read_state(sharded))


def train(net: nn.Module, step: hs.Step, rows: Tensor = ROWS) -> list[tuple[float, float, str]]:
    outcomes = [step(loss_of(net), [batch]) for batch in rows]
    return [(o.loss, o.grad_norm, o.reason.removesuffix(" (rank 0)")) for o in outcomes]


def test_a_watch_measures_shards_as_whole_tensors() -> None:
    found = []
    for shard in (False, True):
        net = make(shard=shard)
        step = hs.Step(net, adamw(net), "fp32", fast="off", clip_norm=0.5, watch=3)
        train(net, step)
        found.append(step.watched.history[-1].rows)
    plain, sharded = found
    assert sharded.keys() == plain.keys()
    for key, row in plain.items():
        assert sharded[key].numbers == pytest.approx(row.numbers, abs=1e-3), key


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.1, "clip_type": "inf"},
        {"clip_norm": 1e-3, "clip_type": "value"},
        {"precision": hs.Precision("fp16", simulate=True), "clip_norm": 0.5},
        {"precision": hs.Precision("bf16", simulate=True)},
        {"skip_spikes": True},
        {"watch": 3},
        {"memory": "low"},
        {"schedule": lambda number: 1 / (1 + number)},
        {"on_gradients": lambda net: [p.grad.mul_(0.5) for p in net.parameters()]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_of_a_step_work_alike(settings: dict[str, Any]) -> None:
    def run(net: nn.Module) -> object:
        step = hs.Step(net, adamw(net), **{"precision": "fp32", "fast": "off", **settings})
        spiked = ROWS.clone()
        spiked[6] *= float("nan")
        return train(net, step, spiked)

    assert_alike(run)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    def run(net: nn.Module) -> object:
        step = hs.Step(net, adamw(net), "fp32", ema_decay=0.9, fast="off")
        found: list[Any] = []
        for batch in ROWS:
            found.append(step(loss_of(net), [batch]).loss)
            net.eval()
            with torch.no_grad():
                found.append(loss_of(net)(ROWS[0]).item())
                with step.averaged():
                    found.append(loss_of(net)(ROWS[0]).item())
                found.append(loss_of(net)(ROWS[0]).item())
            net.train()
        averages = step.state_dict()["ema"]
        return found, [get_local(average).tolist() for average in averages.values()]

    assert_alike(run)


@pytest.mark.parametrize("where", ["after forward", "inside a block", "in backward"])
def test_a_step_whose_loss_raises_leaves_no_trace(where: str) -> None:
    def run(net: nn.Module) -> object:
        step = hs.Step(net, adamw(net), "fp32", fast="off")
        train(net, step, ROWS[:2])

        def raise_error(*given: object) -> None:
            raise ValueError("no labels")

        def fail(batch: Tensor) -> Tensor:
            loss = loss_of(net)(batch)
            loss.register_hook(raise_error)
            if where == "after forward":
                raise_error()
            return loss

        hook = net.blocks[1][0].register_forward_hook(raise_error) if where == "inside a block" else None
        with pytest.raises(ValueError, match="no labels"):
            step(fail, [ROWS[0]])
        if hook is not None:
            hook.remove()
        return train(net, step, ROWS[2:])

    assert_alike(run)


def test_a_rollback_restores_shards() -> None:
    def run(net: nn.Module) -> object:
        guard = {"on_fault": "rollback", "snapshot_every": 2, "margin": 1, "max_consecutive": 2}
        step = hs.Step(net, adamw(net), "fp32", guard=guard, ema_decay=0.9, fast="off")
        rows = torch.cat([ROWS[:5], ROWS[:3] * float("nan"), ROWS[5:]])
        with pytest.warns(UserWarning, match="rolled back"):
            return [why for *_, why in train(net, step, rows)]

    assert_alike(run)


def test_a_micro_batch_of_weight_0_runs_and_counts_nothing() -> None:
    def run(net: nn.Module) -> object:
        net.norm.eval()  # which would count it
        step = hs.Step(net, adamw(net), "fp32", accumulate=2, fast="off")
        weights = iter([0, 1, 1, 0, 1, 1, 0, 0])
        return [step(lambda x: (loss_of(net)(x), next(weights)), list(two)).loss for two in ROWS[:6].split(2)]

    assert_alike(run)


def test_a_teacher_moved_by_on_commit_is_put_back() -> None:
    def run(net: nn.Module) -> object:
        teacher = make(shard=any(hasattr(p, "full_tensor") for p in net.parameters())).requires_grad_(False)

        @torch.no_grad()
        def move(student: nn.Module) -> None:
            for own, new in zip(teacher.parameters(), student.parameters(), strict=True):
                own.lerp_(new, 0.1)

        step = hs.Step(net, adamw(net), "fp32", on_commit=move, also=teacher, fast="off")
        train(net, step, ROWS[:3])
        before = read_state(teacher)
        assert step(loss_of(net), [ROWS[0] * float("nan")]).reason
        assert_same_bits(before, read_state(teacher))
        return [tensor.tolist() for tensor in before.values()]

    assert_alike(run)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_optimizers_step_shards(kind: Any, dtype: torch.dtype) -> None:
    def run(net: nn.Module) -> object:
        precision = "bf16-true" if dtype is torch.bfloat16 else "fp32"
        step = hs.Step(
            net, kind(net.parameters(), lr=1e-2), hs.Precision(precision, simulate=precision != "fp32"), fast="off"
        )
        rows = ROWS.to(dtype, copy=True)
        rows[3] *= float("nan")
        found = train(net, step, rows)
        return found, {name: value.tolist() for name, value in read_optimizer(step).items() if value.numel() < 99}

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    plain, sharded = make(shard=False, width=64, dtype=dtype), make(shard=True, width=64, dtype=dtype, mp_policy=policy)
    assert repr(run(plain)) == repr(run(sharded))
    assert_same_bits(read_state(plain), read_state(sharded))
    if kind is AdamW8bit:
        assert any(get_local(p).numel() == 64 * 64 for p in sharded.parameters())  # large enough for codes


@pytest.mark.parametrize("fast", ["graph", "auto"])
def test_a_step_that_cannot_be_captured_says_so_in_one_line(fast: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net = make(shard=True)
    step = hs.Step(net, adamw(net), "fp32", fast=fast)
    train(net, step)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "runs eagerly: the model is sharded" in said[0]
    assert step.mode == "eager"


@pytest.mark.parametrize("is_one_unit", [False, True])
def test_blocks_are_compiled_in_place_and_train_alike(is_one_unit: bool) -> None:
    plain, sharded = make(shard=False), make(shard=not is_one_unit)
    if is_one_unit:
        fully_shard([*sharded.blocks], reshard_after_forward=False)
        fully_shard(sharded)
    losses = train(plain, hs.Step(plain, adamw(plain), "fp32", fast="off"))
    step = hs.Step(sharded, adamw(sharded), "fp32", fast="compile")
    assert step.mode == "compile"
    assert [name for name, module in sharded.named_modules() if module._compiled_call_impl] == [
        f"blocks.{number}" for number in range(3)
    ]
    for mine, theirs in zip(train(sharded, step), losses, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5)


def test_a_custom_policy_is_followed_and_half_sums_are_reported() -> None:
    net = make(shard=False)
    for block in net.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(net)
    with pytest.warns(UserWarning, match="sums gradients over the ranks in bf16"):
        step = hs.Step(net, adamw(net), hs.Precision("bf16", simulate=True), fast="off")
    assert all(get_local(p).dtype == torch.float32 for p in net.parameters())
    assert train(net, step)[-1][0] < 1


def test_the_ledger_is_refused() -> None:
    net = make(shard=True)
    step = hs.Step(net, adamw(net), "fp32", fast="off")
    with pytest.raises(ConfigError, match="hs.ledger does not support a sharded model"), hs.ledger(step):
        pass


# --- what is refused before the first step ---


def _shard(shard: Callable[[Net], nn.Module], *, is_optimizer_first: bool = False) -> Callable[[], hs.Step]:
    def make_step() -> hs.Step:
        net = make(shard=False)
        optimizer = adamw(net)
        sharded = shard(net)
        return hs.Step(sharded, optimizer if is_optimizer_first else adamw(sharded), "fp32")

    return make_step


def _shard_one_block(net: Net) -> Net:
    fully_shard(net.blocks[0], mesh=init_device_mesh("cpu", (1,)))
    return net


def _shard_over_two_meshes(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(_shard_one_block(net), mesh=mesh)


def _shard_by_fsdp1(net: Net) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def _make(precision: str = "fp32", dtype: torch.dtype = torch.float32, **more: Any) -> Callable[[], hs.Step]:
    def make_step() -> hs.Step:
        capsules = more.pop("capsules", None)
        net = make(shard=True, dtype=dtype, **more)
        return hs.Step(net, adamw(net), hs.Precision(precision, simulate=True), capsules=capsules)

    return make_step


HALF = MixedPrecisionPolicy(param_dtype=torch.float16)
REFUSED: dict[str, tuple[Callable[[], hs.Step], str]] = {
    "an optimizer created before sharding": (
        _shard(fully_shard, is_optimizer_first=True),
        "AdamW trains no parameter of this",
    ),
    "an optimizer created before some blocks": (
        _shard(_shard_one_block, is_optimizer_first=True),
        "2 of 12 trained parameters do not belong to",
    ),
    "several meshes": (_shard(_shard_over_two_meshes), "sharded over several meshes"),
    "FSDP1": (_shard(_shard_by_fsdp1), "sharded by FullyShardedDataParallel"),
    "bf16 weights in a mixed precision": (_make("bf16", torch.bfloat16), "is stored in bfloat16"),
    "fp16 gradients without scaling": (_make(mp_policy=HALF), "sharded with MixedPrecisionPolicy"),
    "capsules": (_make(capsules="bad"), "capsules='bad' cannot be used with a sharded model"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_what_cannot_be_sharded_is_refused_with_the_reason(case: str) -> None:
    make_step, what = REFUSED[case]
    with pytest.raises(HalfstepError) as refused:
        make_step()
    assert what in refused.value.what
    assert refused.value.fix
