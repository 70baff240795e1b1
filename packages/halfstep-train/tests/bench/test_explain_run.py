"""A tiny model on the CPU, explained from end to end."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from halfstep.errors import ConfigError, HardwareError
from halfstep_train.bench.explain import Explanation, StepFacts, explain, render_explanation
from halfstep_train.bench.problem import AfterStep
from halfstep_train.bench.step_profile import WARM_UP_STEPS, OpKind

STEPS = 4

FACTS = StepFacts(
    channels_last=True,
    device=torch.device("cpu"),
    device_name="a small CPU",
    floor_ms=0.1,
    bandwidth_gb_s=10.0,
)


class TinyRunner:
    """A plain loop over convolution, norm, pooling, a linear layer and AdamW."""

    name, variant, precision = "tiny", "eager", "fp32"

    def __init__(self) -> None:
        self.num_steps = 0

    def train(self, steps: int, after_step: AfterStep) -> float:
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        model = nn.Sequential(*layers, nn.Linear(8 * 8 * 8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
        loss = torch.tensor(0.0)
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.num_steps += 1
            after_step()
        return float(loss.detach())


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(TinyRunner(), steps=STEPS, facts=FACTS)


def test_it_warms_up_times_and_then_profiles_as_many_steps() -> None:
    runner = TinyRunner()
    explain(runner, steps=STEPS, facts=FACTS)
    assert runner.num_steps == WARM_UP_STEPS["cpu"] + STEPS + 1 + STEPS


def test_kinds_add_up_to_the_whole(explanation: Explanation) -> None:
    assert sum(row.ms for row in explanation.kinds) == pytest.approx(explanation.kernel_ms)
    assert sum(row.share for row in explanation.kinds) == pytest.approx(1.0)
    assert sum(row.launches for row in explanation.kinds) == pytest.approx(explanation.launches)


def test_what_the_model_is_made_of_is_found(explanation: Explanation) -> None:
    found = {row.kind: row.ms for row in explanation.kinds}
    for kind in (
        OpKind.CONV_FORWARD,
        OpKind.CONV_BACKWARD,
        OpKind.MATMUL,
        OpKind.NORMALISATION,
        OpKind.ELEMENTWISE,
    ):
        assert found[kind] > 0
    assert found.get(OpKind.OTHER, 0.0) < 0.1 * explanation.kernel_ms
    assert explanation.optimizer_share > 0


def test_each_step_has_the_same_whole_number_of_launches_of_a_convolution(explanation: Explanation) -> None:
    launches = {row.kind: row.launches for row in explanation.kinds}
    assert launches[OpKind.CONV_BACKWARD] == 1


def test_a_step_takes_time_by_the_clock(explanation: Explanation) -> None:
    assert explanation.step_ms > 0
    assert 0 <= explanation.launch_gap_ms <= explanation.step_ms
    assert explanation.floor_ms == pytest.approx(0.1)


def test_json_is_plain_and_complete(explanation: Explanation) -> None:
    content = json.loads(json.dumps(explanation.to_json()))
    assert {field.name for field in dataclasses.fields(explanation)} == set(content)
    assert content["kinds"][0]["kind"] == explanation.kinds[0].kind
    assert content["top_kernels"][0]["kind"] in set(OpKind)
    assert len(content["top_kernels"]) == 10


def test_the_console_shows_kinds_findings_and_notes(explanation: Explanation) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(render_explanation(explanation))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("tiny eager fp32 on a small CPU", "convolution backward", "memory-bound", "launch gaps", "floor"):
        assert words in shown
    assert f"note: {explanation.notes[0]}"[:60] in shown


def test_too_few_steps_are_refused_before_any_is_made() -> None:
    runner = TinyRunner()
    with pytest.raises(ConfigError, match="--steps 2 is too few"):
        explain(runner, steps=2, facts=FACTS)
    assert runner.num_steps == 0


def test_a_device_without_known_kernels_is_refused() -> None:
    with pytest.raises(HardwareError, match="mps"):
        explain(TinyRunner(), steps=STEPS, facts=dataclasses.replace(FACTS, device=torch.device("mps")))
