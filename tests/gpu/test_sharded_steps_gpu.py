"""A world of one by NCCL: a sharded step on CUDA trains what the unsharded one does, drops a NaN, and never waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from halfstep.distributed.sharding import get_local
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from no_waiting import no_host_wait
from tiny_training import assert_same_bits

pytestmark = pytest.mark.gpu

ROWS = torch.randn(12, 32, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("world") / "meeting"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(*, shard: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(3)]
    net = nn.Sequential(*blocks, nn.Linear(64, 64)).to("cuda", dtype)
    if shard:
        for block in net[:3]:
            fully_shard(block)
        fully_shard(net)
    return net


OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW8bit": lambda p: AdamW8bit(p, lr=1e-2),
    "AdamWBf16": lambda p: AdamWBf16(p, lr=1e-2),
}


def train(net: nn.Module, optimizer: str, precision: str, rows: Tensor, **more: Any) -> tuple[hs.Step, list[Any]]:
    made = OPTIMIZERS[optimizer](net.parameters())
    step = hs.Step(net, made, precision, clip_norm=0.5, ema_decay=0.9, **more)
    outcomes = [step(lambda x: (net(x) - x).float().pow(2).mean(), [batch]) for batch in rows.cuda()]
    return step, [(outcome.loss, outcome.grad_norm, outcome.committed, outcome.scale) for outcome in outcomes]


def read_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: get_local(tensor).detach().clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_sharded_step_trains_as_the_unsharded_one_and_drops_a_nan(optimizer: str, precision: str) -> None:
    rows = ROWS.clone()
    rows[5] *= float("nan")
    plain, sharded = make(shard=False), make(shard=True)
    _, expected = train(plain, optimizer, precision, rows, fast="off")
    step, found = train(sharded, optimizer, precision, rows, fast="off")
    assert [committed for *_, committed, _ in found].count(False) >= 1
    assert repr(found) == repr(expected)
    assert_same_bits(read_state(plain), read_state(sharded))
    assert not found[5][2]
    assert step.mode == "eager"


def test_a_sharded_step_makes_no_host_synchronisation() -> None:
    net = make(shard=True)
    step, _ = train(net, "fused AdamW", "fp16", ROWS, fast="off")
    batches = list(ROWS.cuda())

    def loss_fn(x: Tensor) -> Tensor:
        return (net(x) - x).float().pow(2).mean()

    step(loss_fn, [batches[0]])  # a new loss function is looked at
    with no_host_wait():
        for batch in batches:
            step(loss_fn, [batch])


def test_compiled_blocks_train_alike_within_rounding() -> None:
    plain, sharded = make(shard=False), make(shard=True)
    _, expected = train(plain, "fused AdamW", "bf16", ROWS, fast="off")
    step, found = train(sharded, "fused AdamW", "bf16", ROWS, fast="compile")
    assert step.mode == "compile"
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=0.02)  # bf16 rounds to 8 bits
