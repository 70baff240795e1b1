"""Numbers that change with the steps are tensors from the first moment on."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep_train.workloads.base.scheduled import Scheduled


def test_a_scheduled_value_begins_with_that_of_step_0() -> None:
    tau = Scheduled(lambda step: 1.5 - step / 10)
    assert tau.value.shape == ()
    assert tau.value.dtype == torch.float32
    assert float(tau.value) == 1.5
    assert tau(5) == 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1j])
def test_what_is_no_finite_number_is_refused_with_its_step(wrong: complex) -> None:
    with pytest.raises(ConfigError, match="step 0"):
        Scheduled(lambda step: wrong)  # type: ignore[arg-type, return-value]
