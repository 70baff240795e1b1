"""The default number of workers, and the reason that the header of a run gives for it."""

from __future__ import annotations

import pytest

from halfstep.errors import ConfigError
from halfstep_train.config import section
from halfstep_train.config.dump import make_json_schema
from halfstep_train.config.schema import DataConfig
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.config import UNetConfig


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (6, 6), (64, 8)])
def test_auto_is_one_worker_a_core_and_at_most_eight(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(section, "count_cores", lambda: cores)
    assert DataConfig().num_workers == expected
    assert DataConfig(num_workers="auto").num_workers == expected


def test_off_and_numbers_and_nonsense() -> None:
    assert load("unet", overrides=["data.num_workers=null"]).config.data.num_workers == 0
    assert load("unet", overrides=["data.num_workers=auto"]).config.data.num_workers == section.choose_num_workers()
    with pytest.raises(ConfigError, match="data.num_workers = 'many'"):
        load("unet", overrides=["data.num_workers=many"])
    field = make_json_schema(UNetConfig)["$defs"]["UNetDataConfig"]["properties"]["num_workers"]
    assert {"const": "auto"} in field["anyOf"][0]["anyOf"]
