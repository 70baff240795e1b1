"""The 3×3 convolution of our own against cuDNN and the kernels it makes needless, in turns, on a Hopper GPU in bf16.

    python benchmarks/row_convolution.py [--out DIR]

At the sizes of U-Net's first level: forward with BatchNorm's statistics, the input's gradient with BatchNorm's sums;
and a whole U-Net's forward and backward, with it and without. Each is one captured graph, replayed for more than a
second, because a device at its power cap slows down by and by.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from capture import captured
from halfstep.kernels import chain, normalise_triton
from halfstep.kernels.chain import SideStream
from halfstep.kernels.fast_forms import forced
from halfstep.kernels.normalise import gradient_sums, normalisation
from halfstep.kernels.row_convolution import convolved_rows, row_gradient, works_on
from halfstep.measure.nvml import EnergyMeter
from halfstep.models.unet import UNet
from recording import store, time_steps

BATCH, SIDE = 8, 512
LASTING_S, REPLAYS = 1.2, 20
TURNS = 2
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not works_on(torch.device("cuda", 0), torch.bfloat16):
        parser.error("the kernel needs a Hopper GPU (H100, H200), and there is none that runs it")
    rows = {name: in_turns(library, ours) for name, (library, ours) in {**kernels(), "U-Net": whole_model()}.items()}
    store("row_convolution", {"batch": BATCH, "side": SIDE, "rows": rows}, torch.device("cuda", 0), arguments.out)


def kernels() -> dict[str, tuple[Step, Step]]:
    torch.manual_seed(0)
    z, y, gradient = a_map().relu(), a_map(), a_map()
    w = torch.randn(64, 64, 3, 3, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last) / 16
    dy = gradient * (a_map() > 0)  # half of it zeros, as behind a ReLU
    norm = normalisation(y, nn.BatchNorm2d(64).cuda())
    return {
        "forward with statistics": (
            lambda: normalise_triton.statistics(chain.convolved(z, w, 1, 1)),
            lambda: convolved_rows(z, w),
        ),
        "gradient with sums": (
            lambda: gradient_sums(library_gradient(dy, z, w), y, norm),
            lambda: row_gradient(dy, w, y, norm),
        ),
    }


def library_gradient(dy: Tensor, z: Tensor, w: Tensor) -> Tensor:
    dz, _ = chain.convolution_gradients(SideStream(dy.device), dy, z, w, 1, 1, (True, False))
    assert dz is not None
    return dz


def a_map() -> Tensor:
    return torch.randn(BATCH, 64, SIDE, SIDE, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)


def whole_model() -> tuple[Step, Step]:
    model: nn.Module = UNet().to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    image = torch.rand(BATCH, 3, SIDE, SIDE, device="cuda").contiguous(memory_format=torch.channels_last)
    parameters = list(model.parameters())

    def step(without: AbstractContextManager[Any]) -> None:
        with forced(True, "chain"), torch.autocast("cuda", torch.bfloat16, cache_enabled=False), without:
            torch.autograd.grad(model(image).float().square().mean(), parameters)

    library = patch.object(chain, "row_convolution_fits", lambda *_: False)
    return lambda: step(library), lambda: step(nullcontext())


def in_turns(library: Step, ours: Step) -> dict[str, Any]:
    graphs = {name: captured(step)[0] for name, step in (("library", library), ("ours", ours))}
    found: dict[str, list[dict[str, float | None]]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            found[name].append(replayed(graph))
    medians = {name: statistics.median(turn["us"] or 0.0 for turn in turns) for name, turns in found.items()}
    print(f"library {medians['library']:.0f} us, ours {medians['ours']:.0f} us", flush=True)
    return {**found, "speedup": medians["library"] / medians["ours"]}


def replayed(graph: torch.cuda.CUDAGraph) -> dict[str, float | None]:
    """Microseconds and millijoules of one replay."""
    a_window_ms = REPLAYS * time_steps(graph.replay, warmup=1, steps=REPLAYS, windows=1)["ms"]
    windows = max(1, round(1e3 * LASTING_S / a_window_ms))
    meter = EnergyMeter(torch.device("cuda", 0))
    found = time_steps(graph.replay, warmup=0, steps=REPLAYS, windows=windows)
    joules = meter.joules()
    used_mj = None if joules is None else 1e3 * joules / (REPLAYS * windows)
    return {**{f"us{end}": 1e3 * found[f"ms{end}"] for end in ("", "_min", "_max")}, "mj": used_mj}


if __name__ == "__main__":
    main()
