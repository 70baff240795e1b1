"""Which layers of a run are measured for fp8, at which shapes, and when nothing is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

import pytest

from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape
from halfstep.precision.decide import decide
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import build_workload
from halfstep_train.tune.choose import measure_fp8_gains
from halfstep_train.workloads import load
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.classification.demo import write_demo

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
HOPPER = Hardware(
    kind="cuda",
    device="cuda:0",
    name="H200",
    vendor="NVIDIA",
    support=MappingProxyType(dict.fromkeys(FORMATS, "native")),  # type: ignore[arg-type]
)
VIT = ["model.depth=2", "model.dim=32", "model.heads=2", "model.patch=8", "data.image_size=32", "train.batch_size=4"]


def faster(shapes: Iterable[LayerShape], *_others: object) -> dict[LayerShape, Fp8Gain]:
    return dict.fromkeys(shapes, Fp8Gain(fp8_ms=1.0, bf16_ms=2.0))


def never(*_anything: object) -> dict[LayerShape, Fp8Gain]:
    raise AssertionError("nothing was to be measured")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "demo"
    write_demo(folder, num_train=1, num_val=1, side=32)
    return folder


def run_of(demo: Path, *more: str) -> tuple[RunConfig, Workload]:
    config = load("vit_s_16", overrides=[*VIT, f"data.dir={demo}", *more]).config
    return config, build_workload(config)


def test_linear_layers_are_measured_at_the_runs_batch(demo: Path) -> None:
    config, workload = run_of(demo, "precision=fp8")
    asked: list[LayerShape] = []

    def measure(shapes: Iterable[LayerShape], *others: object) -> dict[LayerShape, Fp8Gain]:
        asked.extend(shapes)
        return faster(asked, HOPPER, demo)

    gains = measure_fp8_gains(config.precision, config.train, workload, HOPPER, measure=measure)
    assert LayerShape(32, 128, 80) in asked  # 4 images of 16 patches and a class token: 68 rows, padded to 80
    plan = decide(config.precision, HOPPER, workload.model, fp8_gains=gains)
    rows = {row.module: row for row in plan.rows}
    assert rows["encoder.layers.encoder_layer_0.mlp.0"].compute == "fp8"
    assert "2.00x" in rows["encoder.layers.encoder_layer_0.mlp.0"].reason
    assert rows["heads.head"].compute == "bf16"


@pytest.mark.parametrize("more", [["precision=bf16"], ["precision=fp8", "precision.simulate=true"]])
def test_nothing_is_measured_where_fp8_does_not_run(demo: Path, more: list[str]) -> None:
    config, workload = run_of(demo, *more)
    assert measure_fp8_gains(config.precision, config.train, workload, HOPPER, measure=never) == {}


def test_forced_fp8_is_not_measured(demo: Path) -> None:
    config, workload = run_of(demo, "precision.default=fp8", "precision.force=true")
    assert measure_fp8_gains(config.precision, config.train, workload, HOPPER, measure=never) == {}
    assert decide(config.precision, HOPPER, workload.model).granted == "fp8"


def test_a_part_asked_for_in_fp8_is_measured_too(demo: Path) -> None:
    more = ["precision.default=bf16", 'precision.modules={"encoder.layers.*": "fp8"}']
    config, workload = run_of(demo, *more)
    assert measure_fp8_gains(config.precision, config.train, workload, HOPPER, measure=faster)
