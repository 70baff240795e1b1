"""train.memory=low: the decision on made-up costs, and on real ones: bytes alive and time of real steps on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep_train.tune.trials import (
    NORMAL,
    CannotRun,
    Cost,
    Measure,
    MemoryChoice,
    MemorySetting,
    choose_memory,
    list_levers,
    make_optimizer,
)
from halfstep_train.workloads.segmentation.demo import write_demo
from tiny_runs import unet_run
from whole_runs import final_state, resume

POINTWISE, BLOCKS = MemorySetting(recompute="pointwise"), MemorySetting(recompute="blocks")
SMALL = MemorySetting(optimizer_bits=8)
BUDGETS = [MemorySetting(activation_budget=share) for share in (0.9, 0.7, 0.5, 0.3)]
LEVERS = [[POINTWISE, BLOCKS], [SMALL], BUDGETS]
GB = 10**9
Levers = list[list[MemorySetting]]
Costs = dict[MemorySetting, tuple[float, float]]


def fake(costs: Costs) -> tuple[Callable[[MemorySetting], Cost], list[MemorySetting]]:
    """Milliseconds and gigabytes by setting; what is not listed runs out of memory."""
    asked: list[MemorySetting] = []

    def measure(setting: MemorySetting) -> Cost:
        asked.append(setting)
        if setting not in costs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ms, gigabytes = costs[setting]
        return Cost(ms, int(gigabytes * GB))

    return measure, asked


def memory_choice(measure: Measure, levers: Levers, *, time_limit: float = 1.09, **options: Any) -> MemoryChoice:
    return choose_memory(measure, levers, time_limit=time_limit, **options)


def test_the_least_memory_within_nine_percent_wins() -> None:
    measure, _ = fake({NORMAL: (20, 6), POINTWISE: (21.7, 4), BLOCKS: (21.9, 3), BUDGETS[0]: (20.5, 5)})
    choice = memory_choice(measure, [[POINTWISE, BLOCKS], BUDGETS[:1]])
    assert choice.setting == POINTWISE
    assert choice.reason == "4.00 GB instead of 6.00 GB, -33% memory, +8% time"


def test_the_small_optimizer_joins_the_best_activation_lever() -> None:
    both = MemorySetting(recompute="pointwise", optimizer_bits=8)
    measure, _ = fake({NORMAL: (20, 6), POINTWISE: (21, 4), SMALL: (20.2, 5.8), both: (21.3, 3.8)})
    assert memory_choice(measure, [[POINTWISE], [SMALL]]).setting == both


def test_together_they_may_be_too_slow() -> None:
    both = MemorySetting(recompute="pointwise", optimizer_bits=8)
    measure, _ = fake({NORMAL: (20, 6), POINTWISE: (21.5, 4), SMALL: (21.5, 5.8), both: (23, 3.8)})
    choice = memory_choice(measure, [[POINTWISE], [SMALL]])
    assert choice.setting == POINTWISE
    assert list(choice.trials)[-1] == both


def test_a_lever_is_not_pulled_further_once_it_is_too_slow() -> None:
    measure, asked = fake({NORMAL: (20, 6), BUDGETS[0]: (21, 5), BUDGETS[1]: (23, 4), BUDGETS[2]: (24, 3)})
    assert memory_choice(measure, [BUDGETS]).setting == BUDGETS[0]
    assert BUDGETS[2] not in asked


def test_a_lever_without_a_hold_on_the_model_is_left_after_its_second_position() -> None:
    measure, asked = fake({NORMAL: (20, 6), **dict.fromkeys(BUDGETS, (20.1, 5.99))})
    choice = memory_choice(measure, [BUDGETS])
    assert asked == [NORMAL, *BUDGETS[:2]]
    assert choice.notes == (
        "activation budget 0.5, activation budget 0.3: activation budget 0.7 already saves nothing",
    )


def test_nothing_gained_is_said() -> None:
    measure, _ = fake({NORMAL: (20, 6), POINTWISE: (21, 5.98), SMALL: (30, 5)})
    choice = memory_choice(measure, [[POINTWISE], [SMALL]])
    assert choice.setting == NORMAL
    assert choice.reason == (
        "nothing lowers the peak of 6.00 GB within +9% time; "
        "too slow: 8-bit optimizer with 5.00 GB, -17% memory, +50% time"
    )


def test_the_best_saving_refused_for_its_time_is_named_with_the_setting_that_takes_it() -> None:
    measure, _ = fake({NORMAL: (20, 6), POINTWISE: (23, 4), SMALL: (30, 5), BUDGETS[0]: (40, 5.99)})
    reason = memory_choice(measure, [[POINTWISE, BLOCKS], [SMALL], BUDGETS[:1]]).reason
    assert "too slow: recompute pointwise with 4.00 GB, -33% memory, +15% time" in reason
    assert "train.activation_checkpointing=true" in reason


def test_a_normal_step_that_does_not_fit_is_replaced_by_one_that_does() -> None:
    measure, _ = fake({POINTWISE: (25, 40), BLOCKS: (27, 30)})
    choice = memory_choice(measure, [[POINTWISE, BLOCKS], BUDGETS])
    assert choice.setting == BLOCKS
    assert "does not fit" in choice.reason
    assert "activation budget 0.5: ran out of memory" in "\n".join(choice.format_lines())


def test_where_nothing_fits_the_user_hears_of_memory() -> None:
    measure, _ = fake({})
    with pytest.raises(CannotRun, match="no setting could be measured: ran out of memory"):
        memory_choice(measure, LEVERS)


def test_trials_end_when_their_time_is_up() -> None:
    measure, asked = fake({NORMAL: (20, 6), POINTWISE: (21, 4)})
    choice = memory_choice(measure, LEVERS, may_go_on=lambda: len(asked) < 2)
    assert asked == [NORMAL, POINTWISE]
    assert choice.setting == POINTWISE
    assert "time for trials was used up" in choice.notes[-1]


def test_levers_that_a_run_lacks_are_named() -> None:
    levers = list_levers((), "sgd", is_compiled=False)
    assert levers.positions == []
    assert len(levers.notes) == 2
    levers = list_levers(("pointwise", "blocks"), "adamw", is_compiled=True)
    assert (len(levers.positions), levers.notes) == (3, [])
    assert MemorySetting(optimizer_bits=8) not in sum(
        map(list, list_levers((), "adamw", 8, is_compiled=True).positions), []
    )


def test_the_optimizer_is_the_runs_own_unless_bits_are_saved() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(4))]}]
    assert isinstance(make_optimizer(NORMAL, "adamw", groups, lr=1e-3, options={"eps": 1e-6}), torch.optim.AdamW)
    small = make_optimizer(SMALL, "adamw", [{"params": [nn.Parameter(torch.zeros(4))]}], lr=1e-3, options={"eps": 1e-6})
    assert isinstance(small, AdamW8bit)
    assert small.defaults["eps"] == 1e-6


def test_a_run_with_one_byte_moments_and_recomputing_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = MemorySetting(recompute="pointwise", optimizer_bits=8)
    choice = MemoryChoice(setting=both, reason="set by the test")
    monkeypatch.setattr("halfstep_train.tune.choose.choose_memory", lambda *_args, **_options: choice)
    data = tmp_path / "demo"
    write_demo(data, num_images=20, side=16)
    small = {"train.memory": "low", "model.base_channels": 8, "data.num_workers": 0, "schedule.name": "constant",
             "data.dir": str(data), "data.image_size": 16, "train.batch_size": 4, "train.max_steps": 3,
             "log.quiet": False}  # fmt: skip
    whole = unet_run(tmp_path / "whole", small)
    cut = unet_run(tmp_path / "cut", {**small, "train.max_steps": 2})
    assert "memory low:" in capsys.readouterr().err
    monkeypatch.undo()
    resume(cut, "train.max_steps=3")
    assert "memory low:" not in capsys.readouterr().err  # a resumed run follows its plan
    one, other = (final_state(run)[0] for run in (whole, cut))
    moments = [name for name in one if "exp_avg_codes" in name]
    assert moments
    assert all(torch.equal(value, other[name]) for name, value in one.items() if name in moments or "model." in name)
    assert json.loads((cut / "plan.json").read_text())["memory"] == dataclasses.asdict(both)
