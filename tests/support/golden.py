"""Golden data: numbers of the public originals, in the folder that HALFSTEP_GOLDEN names. Tests skip loudly without."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn


def golden(case: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a case."""
    folder = os.environ.get("HALFSTEP_GOLDEN")
    if not folder:
        pytest.skip("golden data: set HALFSTEP_GOLDEN to the folder that holds them")
    path = Path(folder) / case
    return load_file(path.with_suffix(".safetensors")), json.loads(path.with_suffix(".json").read_text())


def group(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def assert_golden(found: Tensor, expected: Tensor, *, within: float = 1e-5, scale: float = 0.0, name: str = "") -> None:
    """Equal within a share of the largest value: the tensor's own, or `scale` where a group's largest is given."""
    assert found.shape == expected.shape, name
    largest = scale or float(expected.abs().max())
    gap = float((found.detach().double() - expected.double()).abs().max())
    assert gap <= within * largest, f"{name}: off by {gap / largest:.1e} of {largest:.3g}, allowed {within:.0e}"


def assert_golden_gradients(
    model: nn.Module,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    *,
    rename: Callable[[str], str | None] = lambda name: name,
    within: float = 1e-5,
    within_group: float = 1e-5,
) -> None:
    """Compare the gradient of every parameter; some with the largest gradient of all, as the original's rounding is."""
    expected, parameters = group(tensors, "grad/"), dict(model.named_parameters())
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        gradient = parameters[rename(name) or ""].grad
        assert gradient is not None, name
        if f"grad/{name}" in facts["rounding"]["compare_on_group_scale"]:
            assert_golden(gradient, value, within=within_group, scale=largest, name=name)
        else:
            assert_golden(gradient, value, within=within, name=name)
