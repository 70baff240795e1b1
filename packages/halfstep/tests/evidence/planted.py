"""Models with one thing planted that runs otherwise than the plan says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs


@torch.library.custom_op("planted::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


mix.register_autograd(_gradients, setup_context=_keep)


class Unaware(torch.autograd.Function):
    """Its backward multiplies in fp32, whatever forward did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        return (gradient.float() @ weight.t()).to(ctx.saved_tensors[0].dtype), x.t() @ gradient.float()


class Aware(torch.autograd.Function):
    """The same with the fix."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        return (gradient.float() @ weight.t()).to(ctx.saved_tensors[0].dtype), x.t() @ gradient.float()


class Planted(nn.Module):
    """A part whose forward is one of the ways below."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.kind)(x)

    def nothing(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def custom_op(self, x: Tensor) -> Tensor:
        return mix(x.float(), self.inner.weight)

    def autocast_off(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.to(self.inner.weight.dtype))

    def island(self, x: Tensor) -> Tensor:
        with hs.fp32_island():
            return self.inner(x.float())

    def unaware(self, x: Tensor) -> Tensor:
        return Unaware.apply(x, self.inner.weight)  # type: ignore[no-untyped-call]

    def aware(self, x: Tensor) -> Tensor:
        return Aware.apply(x, self.inner.weight)  # type: ignore[no-untyped-call]

    def tf32_on(self, x: Tensor) -> Tensor:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Planted(kind)])
        self.stats = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.stats(x))


def window(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    return [{"x": x, "y": y}]


def loss_of(model: nn.Module) -> Any:
    return lambda batch: F.cross_entropy(model(batch["x"]).float(), batch["y"])


def step_of(model: nn.Module, precision: str = "bf16", modules: Any = None, **more: Any) -> hs.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return hs.Step(
        model, optimizer, hs.Precision(precision, modules=modules or {}, simulate=precision != "fp32"), **more
    )
