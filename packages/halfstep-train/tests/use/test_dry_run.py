"""A format judged in fp32 says what simulation shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.evidence.attempts import Subject, attempt
from halfstep.evidence.capsule import collect_state
from halfstep.evidence.dry_run import Judgement, Magnitudes, judge_modules, judge_updates
from halfstep.formats import FP16, DryRunTarget
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.step.facts import read_rng_state
from halfstep_train.cli.main import main
from halfstep_train.use.observe_step import dry_run
from halfstep_train.workloads import load


class Scaled(nn.Module):
    """A linear layer whose outputs are as large, or as small, as asked."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(16, 16), size
        with torch.no_grad():
            self.linear.weight.mul_(size)
            self.linear.bias.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float() / self.size


SMALL = ["data.dir=anywhere", "data.num_workers=0", "train.batch_size=4", "device=cpu"]


def net(**sizes: float) -> nn.Sequential:
    torch.manual_seed(0)
    parts = {name: Scaled(size) for name, size in sizes.items()}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def subject_of(model: nn.Module, window: list[Any]) -> Subject:
    def plan_for(precision: str, modules: Any) -> Any:
        return decide(precision or "fp32", probe("cpu"), model, simulate=precision != "fp32")

    return Subject(
        model=model,
        loss=lambda batch: F.mse_loss(model(batch), torch.zeros_like(batch)),
        window=window,
        state={name: value.detach().clone() for name, value in collect_state(model).items()},
        rng=read_rng_state(torch.device("cpu")),
        plan=plan_for("fp32", {}),
        plan_for=plan_for,
    )


def bad(rows: list[Judgement], kind: str) -> set[str]:
    return {row.module for row in rows if row.is_bad and row.kind == kind}


PLANTED = {"calm": 1.0, "loud": 1e6, "quiet": 1e-9, "soft": 1e-2, "high": 3e5, "usual": 3.0}


def test_what_fp16_would_overflow_or_flush_is_what_simulation_does() -> None:
    model = net(**PLANTED)
    window = [torch.randn(8, 16)]
    subject = subject_of(model, window)
    rows = judge_modules(subject, "fp16", [window])
    assert bad(rows, "activations") == {"loud.linear", "quiet.linear", "high.linear"}
    overflows = {row.module for row in rows if row.verdict == "overflows" and row.kind == "activations"}
    assert overflows == {"loud.linear", "high.linear"}
    for name, part in model.named_children():
        with subject.plan_for("fp16", {}).forward():
            made = part.linear(window[0])
        assert (not made.isfinite().all()) == (f"{name}.linear" in overflows)
        assert bool((made == 0).float().mean() > 0.1) == (name == "quiet")


def test_gradients_belong_to_the_layer_that_made_them_and_not_to_the_norm_behind_it() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))  # which counts batches before it normalises
    subject = subject_of(model, [torch.randn(8, 16)])
    trace = attempt(subject, "fp32", traced=True).trace
    assert trace is not None
    products = {op.module for op in trace.operations if op.is_backward and op.name in ("mm", "addmm")}
    assert products == {"0"}


def test_headroom_is_in_bits_and_scaling_saves_small_gradients() -> None:
    magnitudes = Magnitudes()
    magnitudes.add(torch.tensor([1.0, 0.0, 2.0**-26]))
    assert magnitudes.compute_headroom_bits(FP16) == pytest.approx(16, abs=0.01)
    assert magnitudes.compute_flushed_share(FP16) == 0.5
    assert magnitudes.compute_flushed_share(FP16, scale=4.0) == 0.0
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    subject = subject_of(model, [torch.randn(8, 16)])
    subject.loss = lambda batch: model(batch).float().square().mean() * 1e-6
    rows = judge_modules(subject, "fp16", [subject.window])
    (gradients,) = (row for row in rows if row.kind == "gradients" and row.is_bad)
    assert gradients.verdict == "flushes to zero"
    assert gradients.remedy.startswith("loss scaling helps")


def test_updates_that_bf16_weights_would_not_feel_are_counted() -> None:
    before = {"a.weight": torch.ones(8), "b.weight": torch.ones(8)}
    after = {"a.weight": torch.ones(8) + 1e-4, "b.weight": torch.ones(8) + 0.1}
    rows = {row.module: row for row in judge_updates(before, after)}
    assert (rows["a"].verdict, rows["a"].lost) == ("loses updates", 1.0)
    assert (rows["b"].verdict, rows["b"].lost) == ("fits", 0.0)
    assert not rows["a"].is_saved


@pytest.mark.parametrize(("rounding", "code"), [("split", 0), ("nearest", 1)])
def test_updates_that_a_run_keeps_do_not_fail(rounding: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*SMALL, "optimizer.name=adamw", "optimizer.lr=1e-7", f"precision.rounding={rounding}")
    with pytest.raises(SystemExit) as end:
        main(["dry-run", "--target", "bf16-true", "tiny_workload:build", *settings])
    assert int(end.value.code or 0) == code
    said = capsys.readouterr().out
    assert "loses updates" in said
    assert ("precision.rounding=split helps" in said) == (rounding == "split")


def test_the_model_is_left_as_it_was() -> None:
    model = net(calm=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    window = [torch.randn(8, 16)]
    judge_modules(subject_of(model, window), "fp8", [window])
    assert attempt(subject_of(model, window), "fp32").is_good
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(type(module).__name__ in ("Sequential", "Scaled", "Linear") for module in model.modules())


@pytest.mark.parametrize("target", ["fp16", "bf16-true", "fp8"])
def test_a_workload_is_judged_in_each_format(target: DryRunTarget) -> None:
    rows = dry_run("tiny_workload:build", load("tiny_workload:build", overrides=[*SMALL, "precision=fp32"]), target)
    assert {row.module for row in rows} >= {"head"}
    if target == "bf16-true":
        assert {row.kind for row in rows} == {"activations", "gradients", "weights", "updates"}


def test_the_command_prints_json_and_ends_with_1_if_something_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loud = "model.options.loudness=1e9"
    words = ["dry-run", "--target", "fp16", "tiny_workload:build", *SMALL, loud, "--json"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    rows = json.loads(capsys.readouterr().out)
    assert any(row["verdict"] == "overflows" and row["headroom_bits"] < 0 for row in rows)


def test_a_step_that_is_bad_in_fp32_judges_no_format() -> None:
    model = net(plain=1.0)
    subject = subject_of(model, [torch.full((4, 16), float("nan"))])
    with pytest.raises(PrecisionError, match="fails even without fp16: fp32: loss nan"):
        judge_modules(subject, "fp16", [subject.window])


def test_an_operation_that_refuses_the_format_is_a_row_of_its_own() -> None:
    model = net(plain=1.0)
    subject = subject_of(model, [torch.randn(4, 16)])
    subject.loss = lambda batch: F.binary_cross_entropy(model(batch).sigmoid(), torch.zeros_like(batch))
    row = judge_modules(subject, "fp16", [subject.window])[-1]
    assert (row.verdict, row.is_bad, row.is_saved) == ("refuses the format", True, False)
    assert "binary_cross_entropy" in row.remedy
    assert "fp32_island" in row.remedy
