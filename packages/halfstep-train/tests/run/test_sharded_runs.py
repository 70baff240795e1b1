"""Runs whose ranks divide the model: the same weights as one rank, exact resume, one file at the end, refusals."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sharded_workload
from half_gather import check_half_gather, train_gathered_in_half
from halfstep.distributed.world import Share
from halfstep.errors import ConfigError, HalfstepError
from halfstep.hardware.gpus import look_up_gpu
from halfstep.precision.plan import Plan
from halfstep.precision.swapped import InFp32, swap_class
from halfstep_train.run import multi_rank
from halfstep_train.run.assemble import build_workload, decide_plan
from halfstep_train.run.checkpoint import is_sharded
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.launch import Launch
from halfstep_train.run.memory import sizing
from halfstep_train.run.multi_rank import MIN_UNITS, _find_own_units, refuse_unfit_gather, refuse_unshardable
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import open_run
from halfstep_train.workloads import load
from ranks_together import free_port, together
from whole_runs import TINY, assert_same_bits, newest, resume, run

WORKLOAD = "sharded_workload:build"
SETTINGS = {**TINY, "train.max_steps": 8, "train.report_every": 1, "schedule.name": "constant",
            "schedule.warmup_steps": 0, "ema.enabled": True, "train.checkpoint_every": 2, "optimizer.lr": 1e-2,
            "train.sample_every": 4}  # fmt: skip
SHARD = {"train.shard": True, "train.rank_timeout_s": 60}
TWICE = {"train.accumulate": 2, "train.max_steps": 4}
DEEP = {"model.options": {"depth": 10}, "train.max_steps": 4}
"""Of so many blocks two are one unit."""
COMPILE, MEASURE_LIMIT = torch.compile, sizing._measure_limit


def several(rank: int, size: int, port: int, ports: list[int], calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One run after another in the same ranks: the error each ended with, and what it printed."""
    torch.compile = functools.partial(_compile, COMPILE)
    ends = {}
    for own_port, (name, call) in zip(ports, calls.items(), strict=True):
        multi_rank.MIN_UNITS = call.get("min_units", MIN_UNITS)
        sizing._measure_limit = call.get("limit", MEASURE_LIMIT)
        num = call.get("size", size)
        if rank >= num:
            continue
        launch = Launch(rank=rank, size=num, local_rank=rank, address="127.0.0.1", port=own_port, by_torchrun=False,
                        restarts=call.get("restarts", 0))  # fmt: skip
        resumed = call.get("resume")
        target = WORKLOAD if resumed is None else str(resumed / "config.yaml")
        overrides = [f"{key}={json.dumps(value)}" for key, value in call["settings"].items()]
        shown, end = io.StringIO(), ""
        with redirect_stdout(shown), redirect_stderr(shown):
            try:
                train(load(target, overrides=overrides), out=call.get("out"), resume=resumed, launch=launch)
            except HalfstepError as error:
                end = str(error)
        ends[name] = end, shown.getvalue()
    return ends


def have_little_memory(plan: Plan, num_ranks: int) -> int:
    return 100


def _compile(compiler: Any, region: Any, dynamic: bool, options: Any) -> Any:
    return compiler(region, dynamic=dynamic, backend="aot_eager")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")

    def new(name: str, **more: Any) -> dict[str, Any]:
        return {"out": folder / name, "settings": {**SETTINGS, **SHARD, **more}}

    calls = {
        "whole": new("whole", **{"log.quiet": False}),
        "half": new("half", **{"train.max_steps": 4}),
        "other half": {"resume": folder / "half", "settings": {"train.max_steps": 8}},
        "poisoned": new("poisoned", **{"model.options": {"poisoned": 2}, "train.max_steps": 4}),
        "compiled": new("compiled", **{"train.fast": "graph", "log.quiet": False}),
        "grouped": new("grouped", **DEEP),
        "last": new("last", **{**TWICE, "log.quiet": False}),
        "each": new("each", **{**TWICE, "log.quiet": False}) | {"limit": have_little_memory},
        "one by one": new("one-by-one", **DEEP) | {"min_units": 100},
        "grouped, compiled": new("grouped-compiled", **DEEP, **{"train.fast": "compile"}),
        "auto": new("auto", **{"train.shard": "auto", "train.max_steps": 2, "log.quiet": False}),
        "other ranks": {"resume": folder / "poisoned", "settings": {"train.max_steps": 8}, "size": 1}
        | {"settings": {"train.max_steps": 8, "train.backend": "gloo"}},
        "fewer": {"resume": folder / "poisoned", "size": 1, "restarts": 1}
        | {"settings": {"train.max_steps": 8, "train.backend": "gloo", "log.quiet": False}},
    }
    ports = [free_port() for _ in calls]
    return folder, together(2, several, folder / "ends", ports, calls)[0]


pytestmark = pytest.mark.ranks


def test_two_ranks_train_the_weights_of_one(ran: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, ends = ran
    assert ends["whole"][0] == ""
    alone = newest(run(tmp_path / "alone", SETTINGS, WORKLOAD))
    shards = newest(folder / "whole")
    for name, tensor in {**alone.model, **{f"ema {k}": v for k, v in alone.ema.items()}}.items():
        other = shards.ema[name[4:]] if name.startswith("ema ") else shards.model[name]
        assert torch.allclose(tensor, other, atol=1e-5, rtol=1e-5), name
    assert "; in 3 units of 3 x Block (blocks.0 ... blocks.2)" in ends["whole"][1]
    assert is_sharded(next((folder / "whole" / "checkpoints").glob("step-*")))
    plan = RunFolder.open(str(folder / "whole")).read_plan()
    assert plan.shards
    assert plan.shard_blocks == ("blocks.0", "blocks.1", "blocks.2", "extra:0", "extra:1")


def test_blocks_that_share_a_unit_train_the_same_weights(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = ran
    assert [ends[name][0] for name in ("grouped", "one by one", "grouped, compiled")] == [""] * 3
    assert "; in 5 units of 10 x Block" in RunFolder.open(str(folder / "grouped")).read_plan().shard_reason
    assert "; in 10 units of 10 x Block" in RunFolder.open(str(folder / "one-by-one")).read_plan().shard_reason
    grouped, apart, compiled = (newest(folder / name).model for name in ("grouped", "one-by-one", "grouped-compiled"))
    assert_same_bits(grouped, apart)
    assert all(torch.allclose(compiled[name], grouped[name], atol=1e-5) for name in grouped)


def test_gradients_are_reduced_once_per_step_where_whole_ones_fit(
    ran: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, ends = ran
    assert (ends["last"][0], ends["each"][0]) == ("", "")
    why = "(train.accumulate=2): with whole gradients a rank needs"
    assert ends["last"][1].count(f"gradients are reduced once per step {why}") == 1
    assert ends["each"][1].count(f"gradients are reduced after each micro-batch {why}") == 1
    assert [RunFolder.open(str(folder / name)).read_plan().reduces_last for name in ("last", "each")] == [True, False]
    alone = newest(run(tmp_path / "alone", {**SETTINGS, **TWICE}, WORKLOAD)).model
    for name in ("last", "each"):
        shards = newest(folder / name).model
        assert all(torch.allclose(shards[key], value, atol=1e-5, rtol=1e-5) for key, value in alone.items()), name


def test_a_resumed_run_has_the_same_bits(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = ran
    assert [ends[name][0] for name in ("half", "other half")] == ["", ""]
    left, right = newest(folder / "half"), newest(folder / "whole")
    assert_same_bits(left.model, right.model)
    assert_same_bits(left.ema, right.ema)
    assert left.state["position"] == right.state["position"]


def test_the_end_writes_one_file_of_the_whole_model(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = ran
    found = load_file(folder / "whole" / "model" / "model.safetensors")
    opened = open_run(folder / "whole", trust=True)
    assert found.keys() == opened.checkpoint.model.keys()
    for name, tensor in opened.checkpoint.ema.items():
        assert torch.equal(found[name], tensor), name
    assert not (folder / "whole" / ".whole").exists()
    assert len(list((folder / "whole" / "report" / "samples").glob("*/scores.txt"))) == 2


def test_nan_on_one_rank_drops_the_step_everywhere(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = ran
    assert ends["poisoned"][0] == ""
    lines = [json.loads(line) for line in (folder / "poisoned" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line for line in lines if line.get("event") == "skipped"]
    assert [(line["bad_step"], line["reason"]) for line in skipped] == [(2, "loss is nan (rank 1)")]


def test_a_captured_step_falls_back_to_compiled_blocks_with_one_line(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = ran
    assert ends["compiled"][0] == ""
    assert RunFolder.open(str(folder / "compiled")).read_plan().mode == "compile"
    assert ends["compiled"][1].count("a sharded step is not captured; it runs in compile mode") == 1
    compiled, eager = newest(folder / "compiled").model, newest(folder / "whole").model
    assert all(torch.allclose(compiled[name], eager[name], atol=1e-5) for name in eager)


@pytest.mark.parametrize(
    ("setting", "said"),
    [("train.memory=low", "train.memory=low"), ("guard.on_fault=rollback", "guard.on_fault=rollback"),
     ("train.auto_batch=true", "train.auto_batch=true"), ("log.ledger=true", "log.ledger"),
     ("train.channels_last=true", "train.channels_last=true"),
     ("train.activation_checkpointing=true", "train.activation_checkpointing=true in a model without its own support")],
)  # fmt: skip
def test_what_a_sharded_run_does_not_have_is_refused(setting: str, said: str) -> None:
    config = load(WORKLOAD, overrides=["train.shard=true", setting]).config
    with pytest.raises(ConfigError, match=f"train.shard=true does not work with {said}"):
        refuse_unshardable(config, build_workload(config), Share(0, 2))  # type: ignore[arg-type]


def test_gathering_in_bf16_needs_a_step_in_bf16() -> None:
    config = load(WORKLOAD, overrides=["train.shard=true", "train.shard_gather=bf16"]).config
    plan = decide_plan(config, build_workload(config), look_up_gpu("H100"))
    refuse_unfit_gather(config.train, dataclasses.replace(plan, granted="bf16"))
    with pytest.raises(ConfigError, match="train.shard_gather=bf16 does not fit precision tf32"):
        refuse_unfit_gather(config.train, dataclasses.replace(plan, granted="tf32"))
    with pytest.raises(ConfigError, match="simulated bf16"):
        refuse_unfit_gather(config.train, dataclasses.replace(plan, granted="bf16", simulated=True))


def test_norms_are_gathered_by_themselves_where_blocks_are_gathered_in_bf16() -> None:
    block = sharded_workload.Block()
    assert list(_find_own_units([block], gathers_half=True)) == [[block.norm]]
    assert list(_find_own_units([block], gathers_half=False)) == []
    assert list(_find_own_units([block.to(torch.bfloat16)], gathers_half=False)) == []
    block.norm.float()
    assert list(_find_own_units([block], gathers_half=False)) == [[block.norm]]
    norm, island = torch.nn.BatchNorm2d(3), sharded_workload.Block()  # as a layer of a Sequential is a block
    swap_class(island, InFp32)
    [alone] = _find_own_units([norm, island, sharded_workload.Block()], gathers_half=True)
    assert alone[:2] == [norm, island]


def test_one_rank_cannot_shard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.shard=true needs more than one rank"):
        run(tmp_path / "alone", {**SETTINGS, "train.shard": True}, WORKLOAD)


def test_auto_shards_only_what_does_not_fit_and_says_so(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = ran
    assert ends["auto"][0] == ""
    plan = RunFolder.open(str(folder / "auto")).read_plan()
    assert not plan.shards
    assert plan.shard_reason.startswith("train.shard=auto: not sharded, DDP takes")
    assert plan.shard_reason in ends["auto"][1]


def test_another_number_of_ranks_is_refused_unless_torchrun_lost_some(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = ran
    assert "was saved with 2 shards, but this is 1 shard" in ends["other ranks"][0]
    assert ends["fewer"][0] == ""
    assert "it cannot continue bit-exactly" in ends["fewer"][1]
    assert "1 rank instead of 2: each batch is cut into 2 micro-batches" in ends["fewer"][1]
    assert newest(folder / "poisoned").state["step"]["attempted"] == 8
    assert newest(folder / "poisoned").state["pieces"] == 2


def test_a_sharded_run_can_be_resumed_unsharded(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = ran
    resume(folder / "compiled", "train.shard=false", "train.max_steps=9", "train.fast=off", allow_changes=True)
    assert newest(folder / "compiled").state["step"]["attempted"] == 9


def test_blocks_gathered_in_bf16_keep_norms_in_fp32_and_drop_bad_steps(tmp_path: Path) -> None:
    for own in together(2, train_gathered_in_half, tmp_path, "cpu", "eager"):
        check_half_gather(own)
        assert own["reason"] == "loss is nan (rank 1)"
