"""Each fast form alone, at the shapes of the big models, against torch's layer: forward + backward, compiled, bf16.

    python benchmarks/fast_forms.py [--out DIR]

Between neighbours a model has there (BatchNorm + ReLU before the pool, concatenation after upsampling), since a form is
worth what the compiler can fuse. CUDA events, median of windows of one captured graph, so launches cost nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from capture import captured
from halfstep.kernels.fast_forms import Form, forced
from halfstep.models.layers import BatchNorm2d, CentredConv2d, DoublingConvTranspose2d, HalvingMaxPool2d, PatchConv2d
from halfstep.models.unet import DoubleConv
from halfstep.models.vit import VITS, EncoderBlock
from recording import store

DEVICE = torch.device("cuda")
WINDOWS, STEPS = 5, 10


class Up(nn.Module):
    """U-Net's topmost upsampling, concatenation and the convolution that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = DoublingConvTranspose2d(128, 64), CentredConv2d(128, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        out: Tensor = self.conv(torch.cat([y.relu(), y], dim=1))
        return out


def normed(channels: int, pool: int) -> nn.Module:
    return nn.Sequential(BatchNorm2d(channels), nn.ReLU(), HalvingMaxPool2d(pool))


CASES: dict[str, tuple[Form, Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "ResNet-50 stem, 256 x 224": ("few_channels", lambda: CentredConv2d(3, 64, 7, 2), (256, 3, 224, 224), False),
    "BatchNorm 64 x 112, 256": ("batch_norm", lambda: BatchNorm2d(64), (256, 64, 112, 112), True),
    "BatchNorm 256 x 56, 256": ("batch_norm", lambda: BatchNorm2d(256), (256, 256, 56, 56), True),
    "BatchNorm 1024 x 14, 256": ("batch_norm", lambda: BatchNorm2d(1024), (256, 1024, 14, 14), True),
    "BatchNorm 64 x 512, 8": ("batch_norm", lambda: BatchNorm2d(64), (8, 64, 512, 512), True),
    "ResNet-50 max-pool 3, 256": ("max_pool", lambda: normed(64, 3), (256, 64, 112, 112), True),
    "U-Net max-pool 2, 8 x 512": ("max_pool", lambda: normed(64, 2), (8, 64, 512, 512), True),
    "ViT-L/16 patches, 64": ("patches", lambda: PatchConv2d(3, 1024, 16), (64, 3, 224, 224), False),
    "ViT-L/16 last block, 64": ("class_token", lambda: last_block(), (64, 197, 1024), True),
    "U-Net upsampling, 8 x 256": ("upsampling", Up, (8, 128, 256, 256), True),
    "U-Net double convolution, 8 x 512": ("batch_norm", lambda: DoubleConv(64, 64), (8, 64, 512, 512), True),
}


def last_block() -> nn.Module:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = EncoderBlock(VITS["vit_l_16"], 0.0, is_last=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)[:, 0]  # type: ignore[no-any-return]

    return Read()


def graph_of(make: Callable[[], nn.Module], shape: tuple[int, ...], needs_gradient: bool) -> torch.cuda.CUDAGraph:
    """Forward and backward of the compiled module as one graph."""
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    model = make().to(DEVICE)
    model = model.to(memory_format=layout) if len(shape) == 4 else model  # type: ignore[call-overload]
    dtype = torch.bfloat16 if needs_gradient else torch.float32  # an image arrives in fp32
    x = torch.randn(*shape, device=DEVICE, dtype=dtype).contiguous(memory_format=layout).requires_grad_(needs_gradient)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        gradient = torch.randn_like(compiled(x))
    inputs = [x] * needs_gradient + list(model.parameters())

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = compiled(x)
        torch.autograd.grad(y, inputs, gradient, allow_unused=True)

    return captured(step)[0]


def milliseconds(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    times = []
    graph.replay()
    for _ in range(WINDOWS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


def measured(form: Form, make: Callable[[], nn.Module], shape: tuple[int, ...], needs_gradient: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"form": form}
    for name, on in (("plain", False), ("fast", True)):
        with forced(on, form):
            found[name] = milliseconds(graph_of(make, shape, needs_gradient))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the JSON; default benchmarks/results")
    arguments = parser.parse_args()
    results = {}
    for name, case in CASES.items():
        results[name] = measured(*case)
        plain, fast = results[name]["plain"]["ms"], results[name]["fast"]["ms"]
        print(f"{name:36} plain {plain:7.3f} ms   fast {fast:7.3f} ms   {plain / fast:5.2f}x", flush=True)
    store("fast_forms", {"windows": WINDOWS, "steps": STEPS, "cases": results}, DEVICE, arguments.out)


if __name__ == "__main__":
    main()
