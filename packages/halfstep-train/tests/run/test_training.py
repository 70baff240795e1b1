"""Whole runs: divergence and rollback, faults, early stopping, plateau, limits, bad input."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import ConfigError, HalfstepError, HardwareError, TrainingStopped
from halfstep.hardware.probe import probe
from halfstep_train.report.metrics_file import read
from halfstep_train.run import train as training
from halfstep_train.run.assemble import assemble, build_workload, decide_plan
from halfstep_train.run.memory.out_of_memory import explain_out_of_memory, split_window
from halfstep_train.run.train import train
from halfstep_train.workloads import from_dict, load
from halfstep_train.workloads.segmentation.demo import write_demo
from whole_runs import events, newest, run


def dotted(**values: Any) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in values.items()}


def validations(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read(folder / "metrics.jsonl") if record["kind"] == "val"]


DIVERGES = dotted(
    optimizer__name="sgd", optimizer__lr=1e30, train__clip_norm=0, schedule__name="constant", train__epochs=40,
    guard__on_fault="rollback", guard__margin=1, guard__snapshot_every=1, guard__max_consecutive=2,
)  # fmt: skip


def test_a_model_that_truly_diverges_rolls_back_and_then_ends(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="after 3 rollbacks") as stopped:
        run(tmp_path / "run", DIVERGES)
    assert len(events(tmp_path / "run", "rollback")) == 3
    assert "learning rate" in stopped.value.fix
    saved = newest(tmp_path / "run")
    assert all(torch.isfinite(value).all() for value in saved.model.values() if value.is_floating_point())


def test_a_rollback_with_a_large_cut_rescues_the_run(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {**DIVERGES, "guard.lr_cut": 1e-32, "train.epochs": 6})
    rolled = events(folder, "rollback")
    assert len(rolled) == 1
    assert rolled[0]["to_committed"] == 0
    rates = [r["lr"] for r in read(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert rates[-1] == pytest.approx(1e-2, rel=1e-3)


def test_faults_are_skipped_reported_with_their_samples_and_leave_finite_metrics(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"model.options.poisoned": [0, 3, 4], "train.epochs": 2})
    found = events(folder, "skipped")
    assert [event["bad_step"] for event in found] == [0, 3, 4]
    assert all(event["reason"] == "loss is nan" and len(event["sample_ids"]) == 4 for event in found)
    last = validations(folder)[-1]
    assert all(math.isfinite(last[name]) for name in ("loss", "accuracy", "train_loss"))


def test_a_run_of_nothing_but_faults_stops_with_the_weights_it_began_with(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="5 bad steps in a row"):
        run(tmp_path / "run", {"model.options.poisoned": list(range(100))})
    saved = newest(tmp_path / "run")
    assert saved.state["step"]["committed"] == 0
    assert saved.model["body.1.num_batches_tracked"] == 0


BAD_INPUT = [
    ({"device": "cuda:7"}, HardwareError, "cuda:7"),
    ({"precision": "fp8", "precision.strict": True}, HalfstepError, "fp8"),
    ({"model.weights": "/no/weights.pth"}, HalfstepError, "/no/weights.pth"),
]


@pytest.mark.parametrize(("values", "kind", "said"), BAD_INPUT)
def test_bad_input_is_a_clear_error_and_leaves_no_run_behind(
    tmp_path: Path, values: dict[str, Any], kind: type[HalfstepError], said: str
) -> None:
    write_demo(tmp_path / "demo", num_images=4, side=16)
    small = {"data.dir": str(tmp_path / "demo"), "data.image_size": 16, "model.base_channels": 2, "model.depth": 1}
    with pytest.raises(kind, match=said):
        train(from_dict("unet", {**small, "train.batch_size": 2, "log.quiet": True, **values}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_window_is_split_for_a_small_memory_without_losing_a_sample() -> None:
    window = [{"image": torch.arange(7.0), "index": torch.arange(7)}, {"image": torch.ones(2), "index": torch.ones(2)}]
    parts = split_window(window, 4)
    assert torch.equal(torch.cat([part["image"] for part in parts]), torch.cat([b["image"] for b in window]))
    assert max(len(part["image"]) for part in parts) == 2


def test_out_of_memory_names_the_ways_out() -> None:
    config = from_dict("unet", {"train.batch_size": 8, "data.dir": "x"}).config
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    error = explain_out_of_memory(cause, config.train, "", 1, torch.device("cpu"))
    assert "batch size 8" in error.what
    assert "Tried to allocate 2 GiB" in error.why
    assert "train.batch_size=4 train.accumulate=2" in error.fix
    assert "bf16" in error.fix
    assert "activation_checkpointing" in error.fix
    assert "train.memory=low" in error.fix
    low = config.train.model_copy(update={"memory": "low"})
    assert "train.memory" not in explain_out_of_memory(cause, low, "", 1, torch.device("cpu")).fix


def test_a_loss_of_nothing_is_an_error_in_words_and_a_loss_alone_counts_by_samples() -> None:
    loaded = load("tiny_workload:build", overrides=["train.epochs=1", "device=cpu", "data.num_workers=0"])
    workload = build_workload(loaded.config)
    batch = {"image": torch.zeros(5, 2, 8, 8), "label": torch.zeros(5, dtype=torch.long)}
    alone = dataclasses.replace(workload, loss=lambda outputs, batch: torch.zeros(()))
    assert alone.compute_loss(None, batch) == (torch.zeros(()), 5)
    parts = assemble(loaded.config, dataclasses.replace(workload, loss=lambda outputs, batch: None),
                     decide_plan(loaded.config, workload, probe("cpu")))  # fmt: skip
    with pytest.raises(ConfigError, match="the loss is None"):
        parts.step(lambda b: parts.eager(b)[:2], [batch])


def test_a_run_does_not_begin_beside_the_model_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    def counted(config: Any, workload: Any, plan: Any, world: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        models.append(weakref.ref(workload.model))
        return assemble(config, workload, plan, world)

    monkeypatch.setattr(training, "assemble", counted)
    gc.disable()  # it might come by chance
    try:
        for name in ("first", "second"):
            run(tmp_path / name, {"train.epochs": 1})
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_a_run_is_compiled_however_often_others_were_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_compiled = 0

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda region, **options: real(region, backend=counted, dynamic=False))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (2, 3, 4):
            run(tmp_path / str(size), {"train.fast": "compile", "train.batch_size": size, "train.max_steps": 1})
    assert num_compiled == 3
