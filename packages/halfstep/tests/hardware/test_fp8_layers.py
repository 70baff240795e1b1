"""Gains of fp8 layers: measured once a shape, kept on disk, timed on real layers where torchao is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_driver import FakeDriver
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, measure_gains_once
from halfstep.hardware.probe import probe

pytest.importorskip("torchao.float8", reason="torchao is not installed: NOT tested against it")

SMALL, LARGE = LayerShape(16, 32, 48), LayerShape(64, 32, 48)


def hardware() -> Hardware:
    return probe("cpu", driver=FakeDriver())


def test_each_shape_is_measured_once(tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    def measure(in_features: int, out_features: int, tokens: int, _device: str, _recipe: str) -> Fp8Gain:
        asked.append((in_features, out_features, tokens))
        return Fp8Gain(fp8_ms=1.0, bf16_ms=float(in_features))

    first = measure_gains_once([SMALL, SMALL], hardware(), tmp_path, measure=measure)
    both = measure_gains_once([SMALL, LARGE], hardware(), tmp_path, measure=measure)
    assert asked == [SMALL, LARGE]
    assert both[SMALL] == first[SMALL]
    assert both[LARGE].ratio == 64


def test_a_broken_file_is_measured_again(tmp_path: Path) -> None:
    def measure(*_shape: object) -> Fp8Gain:
        return Fp8Gain(fp8_ms=1.0, bf16_ms=2.0)

    measure_gains_once([SMALL], hardware(), tmp_path, measure=measure)
    (path,) = tmp_path.glob("fp8-tensorwise-torchao-*.json")
    path.write_text("{")
    assert measure_gains_once([SMALL], hardware(), tmp_path, measure=measure)[SMALL].ratio == 2
