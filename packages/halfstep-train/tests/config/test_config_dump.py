"""A stored config loads back to the very same config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep_train.config.dump import to_yaml
from halfstep_train.config.schema import RunConfig
from halfstep_train.workloads import KINDS, from_dict, load

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text().filter(lambda text: "${" not in text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATTERNS = st.text(alphabet="abz.*?[]0-_", min_size=1, max_size=8)
PRESETS = [
    (name, preset)
    for name in ("unet", "resnet50", "vit_b_16")
    for preset in (None, *KINDS[name].get_schema(name).presets)
]


def reloaded(config: RunConfig, folder: Path) -> RunConfig:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return load(str(path)).config


@pytest.mark.parametrize(("workload", "preset"), PRESETS)
def test_presets_round_trip(workload: str, preset: str | None, tmp_path: Path) -> None:
    words = ["globals.BATCH_SIZE_PER_GPU=3", "optimizer.betas=[0.9, 0.95]"]
    config = load(workload, flags={"preset": preset} if preset else {}, overrides=words).config
    assert config.preset == preset
    assert reloaded(config, tmp_path) == config
    assert config.train.batch_size == 3


def test_a_stored_global_does_not_fight_the_setting_that_overrode_it(tmp_path: Path) -> None:
    config = load("unet", flags={"batch_size": 5}, overrides=["globals.BATCH_SIZE_PER_GPU=3"]).config
    assert reloaded(config, tmp_path).train.batch_size == 5


def test_a_workload_of_the_users_own_round_trips(tmp_path: Path) -> None:
    config = load("tiny_workload:build", overrides=["model.options.a={b: [1, 'no', 1e-3]}"]).config
    assert reloaded(config, tmp_path) == config


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    folder=st.none() | st.text(min_size=1, max_size=20).filter(lambda text: "${" not in text and "\x00" not in text),
    modules=st.dictionaries(PATTERNS, st.sampled_from(["fp32", "bf16", "fp8"]), max_size=3),
    options=st.dictionaries(st.text(min_size=1, max_size=5), JSON, max_size=3),
)
def test_any_config_round_trips_exactly(
    tmp_path: Path, lr: float, folder: str | None, modules: dict[str, str], options: dict[str, Any]
) -> None:
    values = {
        "optimizer": {"lr": lr},
        "data": {"dir": folder},
        "precision": {"modules": modules},
        "model": {"options": options},
    }
    config = from_dict("tiny_workload:build", values).config
    assert (config.optimizer.lr, config.data.dir, config.precision.modules) == (lr, folder, modules)
    assert reloaded(config, tmp_path) == config
