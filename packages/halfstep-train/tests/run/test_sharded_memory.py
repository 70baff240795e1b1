"""The memory plan of several ranks: compared with the tensors that gloo ranks really hold in a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.world import Share
from halfstep.errors import MemoryLimitError
from halfstep.hardware.probe import probe
from halfstep_train.run import multi_rank
from halfstep_train.run.memory.planner import Cell, Layout, MemoryPlanner, find_fits, refuse_nothing_fits
from halfstep_train.run.memory.sharded import ShardUnit
from halfstep_train.run.memory.traceable_step import TraceableStep, build_traceable_step
from halfstep_train.run.multi_rank import UNIT_PARAMETERS, group_blocks, refuse_unshardable
from halfstep_train.tune.trials import NORMAL
from halfstep_train.workloads import load
from ranks_together import together
from tensor_bytes import TensorBytes

GPT2 = ("model.depth=4", "model.heads=5", "model.dim=65", "model.context=15", "model.vocab=301", "model.dropout=0",
        "train.batch_size=6")  # fmt: skip
"""Widths do not divide evenly, and weights take more than activations."""
UNITS = 2
"""So that two blocks are one unit."""


def step_of(*words: str) -> TraceableStep:
    config = load("gpt2", flags={"data_dir": "random"}, overrides=[*GPT2, *words]).config
    return build_traceable_step(config.replace(data={"dir": None}))


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    found = MemoryPlanner(step_of(), probe("cpu"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(multi_rank, "MIN_UNITS", UNITS)
        assert len(found.step.units) == UNITS + 1  # kept from here on
    return found


def measured(rank: int, size: int, port: int) -> dict[str, int]:
    """The peak of a later step of each layout, on this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    multi_rank.MIN_UNITS = UNITS
    found = {}
    for layout in ("ddp", "shard"):
        step = step_of()
        blocks = step.shard_blocks[0]
        workload, model = step.workload, step.workload.model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.normal_(std=0.02)
        run: Any = model
        if layout == "ddp":
            run = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            mesh = init_device_mesh("cpu", (size,))
            for names in group_blocks(model, blocks):
                fully_shard([model.get_submodule(name) for name in names], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        raw = {name: value[:1].expand(6 // size, *value.shape[1:]) for name, value in step.raw.items()}
        batch = workload.prepare_batch(raw, key=(0,) * 6, training=True)
        peaks = []
        with TensorBytes() as live:
            for _ in range(4):  # optimizer state exists from the end of the first step on
                live.peak = 0
                loss: Any = workload.loss(workload.forward(run, batch), batch)
                (loss[0] if isinstance(loss, tuple) else loss).backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(live.peak)
        found[layout] = min(peaks[1:])  # on a busy machine gloo's threads may let go of their buffers late
    dist.destroy_process_group()
    return found


@pytest.mark.ranks
def test_what_ranks_hold_is_within_ten_percent_of_the_plan(planner: MemoryPlanner, tmp_path: Path) -> None:
    peaks = together(2, measured, tmp_path)
    for layout, peak in peaks[0].items():
        predicted = predict(planner, 2, layout)
        # The plan counts batches that are loaded ahead, which this loop does not have.
        assert sum(predicted.values()) - predicted["inputs"] == pytest.approx(peak, rel=0.1), layout


def predict(planner: MemoryPlanner, ranks: int, layout: Layout, precision: str = "fp32", **how: Any) -> dict[str, int]:
    cell = Cell.of(planner.step.config.train, precision, "eager").spread(ranks, layout)
    return dict(planner.predict(dataclasses.replace(cell, **how)).components)


def test_shards_divide_parameters_and_state_but_not_the_batch(planner: MemoryPlanner) -> None:
    whole, shards = predict(planner, 2, "ddp"), predict(planner, 2, "shard")
    # Weights have 65 and 195 rows: the first rank has 33 and 98 of them.
    assert whole["weights"] / 2 < shards["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    assert shards["optimizer"] == pytest.approx(whole["optimizer"] / 2, rel=0.01)
    assert whole["gathered"] == 0 < shards["gathered"]
    assert whole["gradients"] == pytest.approx(whole["weights"], rel=0.02)
    assert shards["gradients"] < whole["gradients"]
    alone = predict(planner, 1, "shard")
    assert alone["weights"] == whole["weights"]
    assert 0 < alone["gathered"] < shards["gathered"]


def test_blocks_that_are_gathered_in_half_take_half_and_are_not_cast(planner: MemoryPlanner) -> None:
    full, half = (predict(planner, 2, "shard", "bf16", gathers_half=way) for way in (False, True))
    assert half["gathered"] < 0.8 * full["gathered"]
    assert half["half copies"] == 0


@pytest.mark.slow
def test_settings_that_fit_shards_can_be_typed(planner: MemoryPlanner) -> None:
    config, ranks = planner.step.config, 2
    shard = planner.predict(Cell.of(config.train, "fp32", "eager").spread(ranks, "shard")).total
    # Too little for a whole model, even if it is recomputed and its optimizer state has 8 bits.
    fits = find_fits(planner, config, int(1.05 * shard), "eager", ("fp32",), ranks=ranks)
    assert {fit.prediction.cell.layout for fit in fits} == {"shard"}
    assert len(fits) > 1
    for fit in fits:
        assert fit.prediction.total <= 1.05 * shard
        assert fit.batch_size * fit.accumulate == 6
        precision, *overrides = fit.arguments[1:2] + fit.arguments[4:]
        assert fit.arguments[2:4] == ["--gpus", "2"]
        asked = load("gpt2", flags={"precision": precision}, overrides=[*GPT2, *overrides]).config
        assert asked.train.shard is True
        refuse_unshardable(asked, planner.step.workload, Share(0, ranks))  # type: ignore[arg-type]
    with pytest.raises(MemoryLimitError, match="sharded"):
        refuse_nothing_fits(planner, config, 1000, "eager", "1 kB", ranks)


def test_whole_gradients_are_kept_where_only_the_last_micro_batch_is_reduced(planner: MemoryPlanner) -> None:
    each = predict(planner, 2, "shard", accumulate=2)
    last = predict(planner, 2, "shard", accumulate=2, reduces_last=True)
    gradients = planner.step.measure_fixed("fp32", NORMAL).weights
    # At the peak a rank has all gradients instead of its half; of a unit it has two copies in any case.
    assert sum(last.values()) - sum(each.values()) == pytest.approx(gradients / 2, rel=0.15)


def test_uneven_and_tiny_parameters_are_padded_to_whole_rows() -> None:
    unit = ShardUnit({"a": torch.empty(5, 3), "b": torch.empty(1, requires_grad=True), "c": torch.empty(0, 4)})
    assert unit.count_shard_bytes(2) == 4 * (3 * 3 + 1)
    assert unit.count_shard_bytes(4, trained=True) == 4
    assert unit.count_shard_bytes(1, itemsize=2) == 2 * 16


def test_units_are_the_called_blocks_and_the_rest(planner: MemoryPlanner) -> None:
    assert planner.step.shard_blocks == [[f"transformer.h.{n}" for n in range(4)]]
    names = [name for unit in planner.step.units for name in unit.parameters]
    assert len(names) == len(set(names)) == len(list(planner.step.workload.model.parameters()))
    assert [unit.is_root for unit in planner.step.units] == [False] * UNITS + [True]


def test_small_blocks_of_one_list_share_a_unit() -> None:
    def group(*sizes: int, dtypes: dict[int, torch.dtype] | None = None) -> list[list[str]]:
        blocks = [torch.nn.Linear(size, 1, bias=False, device="meta") for size in sizes]
        for index, dtype in (dtypes or {}).items():
            blocks[index].to(dtype)
        model = torch.nn.ModuleDict({"a": torch.nn.ModuleList(blocks), "b": torch.nn.ModuleList(blocks[:1])})
        return group_blocks(model, [*(f"a.{n}" for n in range(len(sizes))), "b.0"])

    apart = torch.nn.ModuleDict({name: torch.nn.Linear(9, 1, device="meta") for name in "abcdefghijkl"})
    assert group_blocks(apart, [*apart]) == [[name] for name in apart]  # they need not be called together
    half = UNIT_PARAMETERS // 2
    assert list(map(len, group(*[half] * 20))) == [2] * 10 + [1]  # units of 256 MB; another list is another unit
    assert list(map(len, group(*[2 * half] * 20))) == [1] * 21
    assert list(map(len, group(*[100] * 12))) == [2] * 6 + [1]  # not fewer units for a small model
    assert list(map(len, group(*[100] * 3))) == [1] * 4
    assert list(map(len, group(*[half] * 20, dtypes={1: torch.bfloat16})))[:3] == [1, 1, 2]  # of one format each
