"""Measure whether fp8 pays off, layer by layer: forward and backward of a Linear layer in fp8 and bf16, at its shape.

Timing the matmul alone is not enough. An fp8 layer finds the largest magnitude of both operands, scales and casts them,
in forward and again in backward, which costs more than small matmuls gain. So the whole layer is timed as it would run:
torchao's, compiled, fp32 weights, bf16 input and output.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep.errors import PrecisionError, suggest_install
from halfstep.hardware.cache import make_cache_key, read_json, write_json
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.driver import Driver

MANY_SHAPES = 64
"""Compiled variants that torch keeps of one function; its default of 8 would stop the measurement after four shapes."""


class LayerShape(NamedTuple):
    """The sides of a Linear layer, and its number of input rows per step."""

    in_features: int
    out_features: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.in_features}x{self.out_features}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Gain:
    """Time of one layer's forward and backward in both formats."""

    fp8_ms: float
    bf16_ms: float

    @property
    def ratio(self) -> float:
        """Return the speedup of fp8 over bf16."""
        return self.bf16_ms / self.fp8_ms

    def __str__(self) -> str:
        return f"fp8 {self.fp8_ms:.3f} ms, bf16 {self.bf16_ms:.3f} ms, {self.ratio:.2f}x"


def convert_to_float8(layer: nn.Linear, recipe: str = "tensorwise", *, emulate: bool = False) -> Any:
    """Return torchao's fp8 layer with this layer's weights. `emulate` multiplies in fp32, on hardware without fp8.

    torchao's public function is used because it also fixes inductor where Triton writes wrong fp8 bytes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on import torchao warns of its own docstrings and enums
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PrecisionError(
            "fp8 was requested, but torchao is not installed",
            why=f"halfstep runs fp8 matmuls through torchao ({error})",
            fix=f"{suggest_install('torchao')}, or --precision bf16; --simulate gives fp8's numerics without it",
        ) from error
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(layer, config=config)


def measure_fp8_gain(
    in_features: int,
    out_features: int,
    tokens: int,
    device: str,
    recipe: str = "tensorwise",
    *,
    driver: Driver | None = None,
) -> Fp8Gain:
    """Time one layer in both formats; takes a few seconds, mostly compilation."""
    driver = driver or Driver()
    shape, place = LayerShape(in_features, out_features, tokens), driver.get_device(device)
    plain, other = (nn.Linear(in_features, out_features, device=place) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=MANY_SHAPES):
        fp8_s = _time_layer(convert_to_float8(other, recipe), shape, device, driver, work="linear fp8")
        # The bf16 layer runs under autocast, as in training: casting its fp32 weight is part of its cost.
        with torch.autocast(place.type, torch.bfloat16):
            bf16_s = _time_layer(plain, shape, device, driver, work="linear bf16")
    return Fp8Gain(fp8_ms=1e3 * fp8_s, bf16_ms=1e3 * bf16_s)


def _time_layer(layer: nn.Module, shape: LayerShape, device: str, driver: Driver, *, work: str) -> float:
    place = driver.get_device(device)
    x = torch.randn(shape.tokens, shape.in_features, device=place, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(shape.tokens, shape.out_features, device=place, dtype=torch.bfloat16)
    compiled = torch.compile(layer, dynamic=False)

    def forward_and_backward() -> None:
        torch.autograd.grad(compiled(x), (x, *layer.parameters()), grad)

    forward_and_backward()  # compiles; the driver would treat such a long first run as the measurement
    return driver.time_run(forward_and_backward, device, work=work)


def measure_gains_once(
    shapes: Iterable[LayerShape],
    hardware: Hardware,
    directory: Path,
    recipe: str = "tensorwise",
    *,
    measure: Callable[[int, int, int, str, str], Fp8Gain] = measure_fp8_gain,
) -> dict[LayerShape, Fp8Gain]:
    """Return the gains of these shapes: stored ones, and new measurements, which are stored."""
    convert_to_float8(nn.Linear(16, 16, device="meta"), recipe)  # a stored number must not hide that torchao is missing
    path = directory / f"fp8-{recipe}-torchao-{version('torchao')}-{make_cache_key(hardware)}"
    stored = _read_stored(path)
    missing = [shape for shape in dict.fromkeys(shapes) if str(shape) not in stored]
    for shape in missing:
        stored[str(shape)] = measure(*shape, hardware.device, recipe)
    if missing:
        write_json(path, {name: dataclasses.asdict(gain) for name, gain in stored.items()})
    return {shape: stored[str(shape)] for shape in dict.fromkeys(shapes)}


def _read_stored(path: Path) -> dict[str, Fp8Gain]:
    """Read stored gains; an unreadable file counts as empty, so its shapes are measured again."""
    try:
        return {name: Fp8Gain(**times) for name, times in read_json(path).items()}
    except (OSError, json.JSONDecodeError, TypeError, AttributeError):
        return {}
