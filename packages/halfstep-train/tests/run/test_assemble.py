"""The composition root: order, layouts, and what the parts get from the config."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.hardware.probe import probe
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.tune.channels_last import match_layout
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.segmentation.demo import write_demo
from whole_runs import assemble_run


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    write_demo(folder, num_images=6, side=16)
    return folder


def config_of(demo: Path, **values: object) -> RunConfig:
    small = {"data.dir": str(demo), "data.image_size": 16, "data.num_workers": 0, "model.base_channels": 2,
             "model.depth": 1, "train.batch_size": 2, "device": "cpu"}  # fmt: skip
    return from_dict("unet", {**small, **{k.replace("__", "."): v for k, v in values.items()}}).config


def assembled(demo: Path, **values: object) -> Assembly:
    return assemble_run(config_of(demo, **values))


@pytest.mark.parametrize("wish", [True, False])
def test_images_come_in_the_layout_of_the_weights(demo: Path, wish: bool) -> None:
    parts = assembled(demo, train__channels_last=wish)
    layout = torch.channels_last if wish else torch.contiguous_format
    batch = next(parts.train_loader.iterate_epoch(0))
    for training in (True, False):
        prepared = match_layout(parts.model, parts.workload.prepare_batch(batch, key=(0, 0, 0), training=training))
        assert prepared["image"].is_contiguous(memory_format=layout)
    assert all(p.is_contiguous(memory_format=layout) for p in parts.model.parameters() if p.ndim == 4)


def test_a_batch_that_is_prepared_into_more_than_tensors_is_refused(demo: Path) -> None:
    parts = assembled(demo)
    batch = next(parts.train_loader.iterate_epoch(0))
    with pytest.raises(ConfigError, match=r"prepare\(\) returned 'scale' as float, 0\.5"):
        match_layout(parts.model, {**batch, "scale": 0.5})  # type: ignore[dict-item]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(demo: Path) -> None:
    weights = [next(assembled(demo, train__seed=seed).model.parameters()) for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_plan_names_the_islands_of_the_workload(demo: Path) -> None:
    islands = [row for row in assembled(demo).plan.rows if row.kind == "island"]
    assert any("dice" in row.module for row in islands)
    assert all(row.compute == "fp32" for row in islands)


def test_steps_count_windows_not_batches(demo: Path) -> None:
    parts = assembled(demo, train__epochs=3, train__accumulate=2, data__val_fraction=0.17)
    assert len(parts.workload.train_samples) == 5
    assert parts.total_steps == 3 * 2  # five samples are three batches, which are two windows


def test_a_simulated_precision_cannot_be_compiled(demo: Path) -> None:
    from halfstep.errors import ConfigError

    with pytest.raises(ConfigError, match="compiled"):
        assembled(demo, precision__default="bf16", precision__simulate=True, train__fast="compile")


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_are_not_chosen_by_the_clock_where_bits_must_repeat(
    demo: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: asked.append(options) or f)
    config = config_of(demo, train__fast="graph", train__deterministic=deterministic)
    workload = build_workload(config)
    plan = dataclasses.replace(decide_plan(config, workload, probe("cpu")), tunes_kernels=True)
    parts = assemble(config, workload, plan)
    batch = parts.workload.prepare_batch(next(parts.train_loader.iterate_epoch(0)), key=(0, 0, 0), training=True)
    parts.region(batch)
    assert asked == [{} if deterministic else {"coordinate_descent_tuning": True}]


def test_what_cannot_be_compiled_is_said_by_us_in_one_line_not_by_inductor_on_a_page(
    demo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("torch._inductor.scheduler")

    def failing(batch: object) -> object:
        log.critical("Error in codegen for %s", "ComputedBuffer(a page)")
        log.critical("something else")
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: failing)
    monkeypatch.setattr(log, "propagate", True)
    with pytest.raises(RuntimeError, match="no compiler"):
        assembled(demo, train__fast="compile").region({})
    assert [record.getMessage() for record in caplog.records] == ["something else"]
