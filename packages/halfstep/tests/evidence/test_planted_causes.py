"""Planted causes in a user's own model: replay names each, and the change it proposes works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_steps import replay_fault
from torch import nn

import planted_causes as planted
from halfstep.evidence import causes
from halfstep.evidence.replay import Replayed


def replay_around(folder: Path, part: nn.Module, precision: str, batch: Any = None) -> Replayed:
    torch.manual_seed(0)
    model = planted.Around(part)
    return replay_fault(folder, model, planted.loss_of(model), batch or planted.batch_of(), precision)


IN_FP16 = [
    (planted.HalfFft, causes.REFUSED, "part"),
    (planted.LinearAttention, causes.UNDERFLOW, "part"),
    (planted.Attention, causes.OVERFLOW, "part"),
    (planted.TinyEps, causes.UNDERFLOW, "part"),
    (planted.Large, causes.OVERFLOW, "part"),
]


@pytest.mark.parametrize(("part", "cause", "module"), IN_FP16, ids=lambda value: getattr(value, "__name__", ""))
def test_what_fp16_breaks_is_named_and_fp32_for_the_module_mends_it(
    tmp_path: Path, part: type[nn.Module], cause: str, module: str
) -> None:
    found = replay_around(tmp_path, part(), "fp16")
    assert found.cause == cause, str(found)
    assert found.remedy is not None, str(found)
    assert found.remedy.works, str(found)
    assert found.remedy.line == f'hs.Step(..., hs.Precision("fp16", modules={{"{module}": "fp32"}}))'


def test_dice_sums_that_overflow_in_the_loss_get_an_island(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 70000)
    nn.init.constant_(model.bias, 9.0)
    batch = {"x": torch.ones(2, 4), "y": torch.ones(2, 70000)}
    found = replay_fault(tmp_path, model, lambda b: planted.dice(model(b["x"]), b["y"]), batch, "fp16")
    assert found.cause == causes.OVERFLOW, str(found)
    assert "planted_causes.py" in found.diagnosis.origin.line
    assert found.remedy.works, str(found)


@pytest.mark.parametrize(
    ("part", "cause", "change"),
    [
        (planted.Variational, causes.OVERFLOW, "rewrite as F.softplus in place of exp"),
        (planted.Empty, causes.UNDERFLOW, "eps"),
        (planted.NeverWritten, causes.BAD_STATE, "part.shift"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_breaks_in_fp32_as_well_gets_a_change_of_its_code(
    tmp_path: Path, part: type[nn.Module], cause: str, change: str
) -> None:
    found = replay_around(tmp_path, part(), "fp32")
    assert found.cause == cause, str(found)
    assert found.remedy is not None, str(found)
    assert found.remedy.works, str(found)
    assert change in found.remedy.change


def test_a_kernel_that_is_wrong_for_one_shape_is_named(tmp_path: Path) -> None:
    found = replay_around(tmp_path, planted.WrongKernel(), "fp32")
    assert found.cause == causes.KERNEL, str(found)
    assert (found.diagnosis.origin.name, found.diagnosis.origin.module) == ("smooth", "part")


def test_a_nan_pixel_is_named_with_its_sample_and_place(tmp_path: Path) -> None:
    batch = planted.batch_of()
    batch["x"][3, 5] = float("nan")
    found = replay_around(tmp_path, nn.ReLU(), "fp32", batch)
    assert found.cause == causes.BAD_INPUT, str(found)
    assert str(found.diagnosis.places[0]) == "sample 13: ['x'][5] is nan"
    assert found.remedy.works


def test_weights_that_a_rate_a_thousand_times_too_large_threw_out_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = planted.Around(nn.ReLU()), planted.batch_of()
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).square().mean(), batch, lr=1e3, num_steps=60)
    assert found.cause == causes.DIVERGED, str(found)
    assert "learning rate" in found.remedy.change
