"""The kernel of one-byte moments gives its twin's bits; a bad step leaves all of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep.step.optim.adamw8bit import make_state, update
from halfstep.step.optim.adamw_bf16 import Setting
from tiny_training import assert_same_bits

triton_kernel = pytest.importorskip(
    "halfstep.step.optim.adamw8bit_triton", reason="Triton is not installed: NOT tested"
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it, compiled")
# Not bf16, which the interpreter truncates instead of rounding.


def setting(scale: float | None = None, *, bad: bool = False) -> Setting:
    return Setting(
        lr=torch.tensor(1e-2), found_inf=torch.tensor(float(bad)), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1,
        grad_scale=None if scale is None else torch.tensor(scale),
    )  # fmt: skip


def corrections(step: int) -> list[Tensor]:
    return [1 - beta ** torch.tensor(float(step)) for beta in (0.9, 0.999)]


def gradient(step: int, count: int, dtype: torch.dtype) -> Tensor:
    """Blocks of very different size, and one that has no gradient at all."""
    generator = torch.Generator().manual_seed(step)
    blocks = torch.randn(count // 256, 256, generator=generator) * torch.logspace(-9, 3, count // 256)[:, None]
    blocks[1] = 0
    return blocks.flatten().to(dtype)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, None), (torch.float16, 3.0)])
def test_steps_have_the_bits_of_the_twin(dtype: torch.dtype, scale: float | None) -> None:
    torch.manual_seed(0)
    count = 19 * 256  # not a whole number of programs
    weights = torch.randn(count).to(dtype)
    ours, theirs = ({"weights": weights.clone(), **make_state(weights)} for _ in range(2))
    for step in range(1, 4):
        for found, run in ((ours, triton_kernel.update), (theirs, update)):
            found["gradient"] = gradient(step, count, dtype) * (float("nan") if step == 2 else 1)
            run(found["weights"], found["gradient"], found, corrections(step), setting(scale, bad=step == 2))
        assert_same_bits(ours, theirs)
    assert not torch.equal(ours["weights"], weights)
