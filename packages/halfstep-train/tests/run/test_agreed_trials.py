"""Trials and fallbacks of two ranks: both do the same afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tiny_workload
from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import assemble, build_workload, decide_plan
from halfstep_train.run.ending import describe_rank_effects
from halfstep_train.run.engine import Engine, LeadingRehearsal, make_engine
from halfstep_train.run.launch import Launch, join_world
from halfstep_train.run.multi_rank import refuse_differences
from halfstep_train.tune.mode_search import ModeSearch
from halfstep_train.tune.trials import Rehearsal, TrialTime, load_first_batch
from ranks_together import together
from whole_runs import TINY, config_of

pytestmark = pytest.mark.ranks

MOST_S = 20.0


def config_with(**more: Any) -> RunConfig:
    return config_of({**TINY, "train.rank_timeout_s": 60, **more}, "rank_workload:build")


def searched(world: World) -> Plan:
    """The plan of a search for the fastest mode, which rank 0 makes."""
    config = config_with(**{"train.batch_size": 2})
    workload = build_workload(config)
    plan = decide_plan(config, workload, probe("cpu"))

    def make(rehearsal: Rehearsal) -> Plan:
        assert world.is_first
        time = TrialTime(1e6, most_s=MOST_S)
        return dataclasses.replace(plan, **ModeSearch(plan, time, rehearsal).search().fields)

    return LeadingRehearsal(config, workload, world, "cpu", 0).plan(make)


def refused(world: World) -> str:
    """The error of a search that rank 0 refuses."""

    def make(rehearsal: Rehearsal) -> Plan:
        raise ConfigError("no plan")

    config = config_with()
    with pytest.raises(ConfigError) as error:
        LeadingRehearsal(config, build_workload(config), world, "cpu", 0).plan(make)
    return error.value.what


def uncaptured(world: World) -> list[str]:
    """The modes of steps, where a capture fails in the second process at the third."""
    config = config_with()
    workload = build_workload(config)
    parts = assemble(config, workload, decide_plan(config, workload, probe("cpu")), world)
    engine = make_engine(parts, "graph", lambda text, level: None)
    assert isinstance(engine, Engine)
    parts.guard.observers.append(lambda facts, reading: engine.follow(reading))
    batch = load_first_batch(config.train.model_copy(update={"batch_size": 2}), workload)
    modes = []
    for number in range(7):
        if number == 2 and world.rank == 1:
            engine._stay_uncaptured("no memory for it")
        parts.guard.watch(engine([batch], [4]))
        modes.append(engine.mode)
    return modes


def notes(world: World) -> list[str]:
    """On a model with BatchNorm."""
    config = config_with()
    workload = tiny_workload.build(config)
    parts = assemble(config, workload, decide_plan(config, workload, probe("cpu")), world)
    return describe_rank_effects(parts, lacks_capsules=False)


def find_differences(world: World, *, resumes: bool) -> str:
    """With weights that differ between the ranks, as memory does that a resumed run has not loaded into yet."""
    config = config_with()
    workload = tiny_workload.build(config)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.fill_(world.rank)
    try:
        refuse_differences(config, workload, world, resumes=resumes)
    except ConfigError as error:
        return str(error)
    return ""


def scenario(rank: int, size: int, port: int) -> dict[str, Any]:
    compile_by = torch.compile
    torch.compile = lambda region, dynamic, options: compile_by(region, dynamic=dynamic, backend="aot_eager")
    launch = Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port, by_torchrun=False)
    config = config_with()
    with join_world(config.device, config.train, launch) as world:
        assert world is not None
        found: dict[str, Any] = {"searched": searched(world), "refused": refused(world)}
        found |= {"uncaptured": uncaptured(world), "notes": notes(world)}
        return found | {key: find_differences(world, resumes=key == "resumed") for key in ("started", "resumed")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(2, scenario, tmp_path_factory.mktemp("trials"))


def test_a_small_batch_for_batch_norm_is_named_with_what_helps(found: list[dict[str, Any]]) -> None:
    (note,) = found[0]["notes"]
    assert "BatchNorm computes its statistics over the 2 samples of one rank" in note
    assert "train.sync_batch_norm=true" in note


def test_rank_0_tries_modes_and_all_ranks_have_its_plan_or_its_error(found: list[dict[str, Any]]) -> None:
    first, second = (own["searched"] for own in found)
    assert first == second
    assert "compile" in first.mode_reason
    assert first.channels_last is not None
    assert [own["refused"] for own in found] == ["no plan"] * 2


def test_a_capture_that_fails_in_one_process_makes_all_run_compiled_from_the_same_step_on(
    found: list[dict[str, Any]],
) -> None:
    first, second = (own["uncaptured"] for own in found)
    assert second == ["graph"] * 2 + ["compile"] * 5
    assert first == ["graph"] * 4 + ["compile"] * 3  # the guard looks two steps later


def test_weights_are_compared_at_a_start_and_not_before_a_resumed_run_has_loaded_them(
    found: list[dict[str, Any]],
) -> None:
    assert all("differ in the first weights" in own["started"] for own in found)
    assert [own["resumed"] for own in found] == ["", ""]
