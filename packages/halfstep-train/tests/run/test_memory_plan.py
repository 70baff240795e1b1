"""The memory plan, compared with real steps on the CPU, where each storage can be counted."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.errors import ConfigError, MemoryLimitError, ModelError
from halfstep.evidence.watch import estimate_bytes
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.memory import LiveBytes
from halfstep.precision.decide import decide
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep_train.cli.plan import read_size
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.memory.out_of_memory import explain_out_of_memory
from halfstep_train.run.memory.planner import (
    Cell,
    MemoryPlanner,
    describe_effects,
    find_fits,
    find_largest_batch,
    list_levels,
    list_precisions,
    refuse_nothing_fits,
)  # fmt: skip
from halfstep_train.run.memory.sizing import (
    find_fitting_pieces,
    make_peak_predictor,
    suggest_fitting_settings,
)
from halfstep_train.run.memory.step_trace import derive_eager_timeline
from halfstep_train.run.memory.traceable_step import TraceableStep, build_traceable_step
from halfstep_train.tune.trials import NORMAL, MemorySetting, load_first_batch, sort_by_peak
from halfstep_train.workloads import load
from tiny_workload import build as build_tiny

UNET = ("unet", "model.base_channels=4", "model.depth=1", "data.image_size=32", "train.batch_size=4")
GPT2 = (
    "gpt2",
    "model.depth=2",
    "model.heads=2",
    "model.dim=64",
    "model.context=32",
    "model.vocab=300",
    "train.batch_size=4",
)


def config_of(*words: str) -> RunConfig:
    config = load(words[0], flags={"data_dir": "random"}, overrides=words[1:]).config
    return config.model_copy(update={"data": config.data.model_copy(update={"dir": None})})


def planner_of(*words: str) -> MemoryPlanner:
    return MemoryPlanner(build_traceable_step(config_of(*words)))


@pytest.fixture(scope="module")
def unet() -> MemoryPlanner:
    return planner_of(*UNET)


@pytest.fixture(scope="module")
def gpt2() -> MemoryPlanner:
    return planner_of(*GPT2)


def cell(precision: str = "bf16", mode: Any = "eager", batch_size: int = 4, accumulate: int = 1, **levers: Any) -> Cell:
    setting = MemorySetting(**levers)
    return Cell(precision=precision, mode=mode, batch_size=batch_size, accumulate=accumulate, setting=setting)


def tiny(*words: str) -> RunConfig:
    return load("tiny_workload:build", flags={}, overrides=["train.batch_size=8", *words]).config


# --- what is traced ---


def test_the_trace_counts_what_a_real_step_takes_to_the_byte() -> None:
    config = tiny()
    workload = build_workload(config)
    batch = workload.prepare_batch(load_first_batch(config.train, workload), key=(0, 0, 0), training=True)
    with LiveBytes() as live:
        loss, _ = workload.compute_loss(workload.forward(workload.model.train(), batch), batch)
        loss.backward()
    step = build_traceable_step(config)
    [trace] = step.trace_phases("tf32", "none", 8, chains=False)  # strict fp32 has workspaces
    blocks = sum(-value.num_bytes % 512 for value in trace.values)
    for value in trace.values:
        assert value.num_bytes % 512 == 0
    predicted = derive_eager_timeline(trace).find_peak().total()
    assert live.peak <= predicted <= live.peak + 512 * len(trace.values) + blocks


def test_tracing_leaves_the_model_as_it_was() -> None:
    workload = build_tiny(tiny())
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    step = TraceableStep(tiny(), workload, load_first_batch(tiny().train, workload))
    step.trace_phases("bf16-true", "none", 8, chains=False)
    step.measure_fixed("bf16-true", MemorySetting(optimizer_bits=8))
    after = workload.model.state_dict()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in workload.model.parameters())


def test_autocast_halves_activations_and_keeps_a_half_copy_of_each_weight_it_casts(gpt2: MemoryPlanner) -> None:
    half, full = gpt2.predict(cell("bf16")).components, gpt2.predict(cell("fp32")).components
    assert full["half copies"] == 0
    assert 0 < half["half copies"] <= full["weights"] // 2 + 512 * 100
    assert half["activations"] < 0.8 * full["activations"]
    assert gpt2.predict(cell("fp16")).components == half


def test_weights_in_bf16_take_half_and_their_low_halves_stand_with_the_optimizer(gpt2: MemoryPlanner) -> None:
    true, full = gpt2.predict(cell("bf16-true")).components, gpt2.predict(cell("fp32")).components
    assert true["weights"] == pytest.approx(full["weights"] / 2, rel=0.01)
    assert true["optimizer"] == pytest.approx(full["optimizer"] * 5 / 4, rel=0.01)


def test_eight_bit_moments_take_what_the_real_optimizer_allocates(gpt2: MemoryPlanner) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(p.shape)) for p in gpt2.step.workload.model.parameters()]
    optimizer = AdamW8bit(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = (value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor))
    expected = sum(value.untyped_storage().nbytes() for value in states)
    assert gpt2.predict(cell(optimizer_bits=8)).components["optimizer"] == expected


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_each_lever_saves_in_its_own_component(gpt2: MemoryPlanner, mode: Any) -> None:
    normal = gpt2.predict(cell(mode=mode)).components
    blocks = gpt2.predict(cell(mode=mode, recompute="blocks")).components
    small = gpt2.predict(cell(mode=mode, optimizer_bits=8)).components
    assert blocks["activations"] < normal["activations"]
    assert small["optimizer"] < normal["optimizer"] / 3
    assert {n: s for n, s in small.items() if n != "optimizer"} == {n: s for n, s in normal.items() if n != "optimizer"}


def test_attention_with_dropout_is_recomputed_as_it_ran() -> None:
    planner = planner_of(*GPT2, "model.dropout=0.1")
    normal, blocks = (planner.predict(cell(recompute=how)).components["activations"] for how in ("none", "blocks"))
    assert blocks < normal


def test_a_compiled_step_keeps_no_more_than_an_eager_one_and_a_captured_one_pays_for_its_pool(
    unet: MemoryPlanner,
) -> None:
    eager, compiled, graph = (unet.predict(cell(mode=mode)) for mode in ("eager", "compile", "graph"))
    assert compiled.components["activations"] <= eager.components["activations"]
    assert graph.components["graph pool"] > 0 == compiled.components["graph pool"]


def test_accumulating_has_all_gradients_in_every_forward_pass(gpt2: MemoryPlanner) -> None:
    once, often = gpt2.predict(cell()), gpt2.predict(cell(accumulate=4))
    assert often.components["gradients"] >= gpt2.predict(cell()).components["weights"]
    assert often.total > once.total


def test_a_batch_between_two_that_were_traced_needs_what_its_own_trace_says(unet: MemoryPlanner) -> None:
    asked = cell(batch_size=6)
    assert unet.predict(asked, base_batch=4).total == pytest.approx(unet.predict(asked).total, rel=1e-3)


def test_average_and_select_optimizers_are_counted() -> None:
    plain, more = (
        planner_of(*UNET, *words).predict(cell()).components
        for words in ((), ("ema.enabled=true", "optimizer.name=adafactor"))
    )
    assert plain["average"] == 0
    assert more["average"] == pytest.approx(more["weights"], rel=0.01)
    assert 0 < more["optimizer"] < plain["optimizer"]


def test_a_watch_takes_samples_and_next_to_a_graph_a_side_step() -> None:
    plain, watched = (planner_of(*UNET, f"log.watch={every}") for every in (0, 200))
    more = {}
    for mode in ("eager", "graph"):
        cell = Cell(precision="bf16", mode=mode, batch_size=4)
        more[mode] = watched.predict(cell).components["workspaces"] - plain.predict(cell).components["workspaces"]
    assert more["eager"] == estimate_bytes(watched.step.workload.model)
    assert more["graph"] > more["eager"]


# --- every kind of workload ---


def test_phases_take_the_larger_one_and_the_state_of_all() -> None:
    config = load("phased_workload:build", flags={}, overrides=["train.batch_size=8"]).config
    planner = MemoryPlanner(build_traceable_step(config))
    assert len(planner.step.trace_phases("fp32", "none", 8, chains=False)) == 2
    found = planner.predict(cell("fp32", batch_size=8)).components
    assert found["optimizer"] == pytest.approx(2 * found["weights"], rel=0.1)


def test_frozen_parts_are_stored_in_half_and_have_no_gradients() -> None:
    config = load("frozen_workload:build", flags={}, overrides=["train.batch_size=4"]).config
    planner = MemoryPlanner(build_traceable_step(config))
    half, full = (planner.predict(cell(precision)).components["frozen parts"] for precision in ("bf16", "fp32"))
    assert 0 < half < full


def test_a_model_that_reads_values_is_refused_with_what_to_do() -> None:
    workload = build_tiny(tiny())

    def forward(model: Any, batch: Any) -> Tensor:
        out: Tensor = model(batch["image"])
        return out if out.sum().item() > 0 else -out

    step = TraceableStep(
        tiny(), dataclasses.replace(workload, forward=forward), load_first_batch(tiny().train, workload)
    )
    with pytest.raises(ModelError, match=r"cannot be traced.*_local_scalar_dense") as caught:
        step.trace_phases("fp32", "none", 8, chains=False)
    assert "train.auto_batch=true" in caught.value.fix
    assert ".item()" in caught.value.why


def test_another_error_of_a_model_is_told_as_it_is() -> None:
    workload = build_tiny(tiny())
    wrong = dataclasses.replace(workload, forward=lambda model, batch: model(batch["picture"]))
    with pytest.raises(ModelError, match=r"cannot be traced: KeyError: 'picture'") as caught:
        TraceableStep(tiny(), wrong, load_first_batch(tiny().train, workload)).trace_phases(
            "fp32", "none", 8, chains=False
        )
    assert ".item()" not in caught.value.why


# --- what fits ---


def test_the_largest_batch_fits_and_a_larger_one_does_not(unet: MemoryPlanner) -> None:
    limit = unet.predict(cell(batch_size=37), base_batch=4).total
    largest = find_largest_batch(unet, cell(), limit)
    assert largest == 37
    assert find_largest_batch(unet, cell(), 1000) == 0


def test_rows_that_fit_come_fastest_first_and_keep_the_effective_batch(unet: MemoryPlanner) -> None:
    config = unet.step.config
    limit = int(0.7 * unet.predict(cell("bf16")).total)
    fits = find_fits(unet, config, limit, "eager", ("fp32", "bf16"), look_up_gpu("A100"), most=2)
    assert [fit.relative_time for fit in fits] == sorted(fit.relative_time for fit in fits)
    assert fits[0].prediction.cell.precision == "bf16"
    assert fits[0].prediction.cell.setting == NORMAL
    assert fits[0].batch_size < 4
    assert fits[0].accumulate > 1
    assert all(fit.batch_size * fit.accumulate == 4 and fit.prediction.total <= limit for fit in fits)
    assert any("BatchNorm" in note for note in describe_effects(unet, config, fits))


@pytest.mark.slow  # traces a ResNet at four levels
def test_levels_that_save_nothing_over_a_faster_one_are_left_out() -> None:
    """Blocks of a ResNet, computed again whole, hold more while they are than its compiled pointwise operations."""
    planner = planner_of("resnet18", "data.image_size=32", "train.batch_size=4")
    fits = find_fits(planner, planner.step.config, 10**10, "compile", ("fp32",))
    assert len(list_levels(planner, planner.step.config)) == 4
    assert [fit.prediction.cell.setting.recompute for fit in fits] == ["none", "pointwise"]


def test_the_effective_batch_stays_exactly_where_it_is_not_a_multiple_of_what_fits(unet: MemoryPlanner) -> None:
    config = unet.step.config
    config = config.model_copy(update={"train": config.train.model_copy(update={"batch_size": 10})})
    limit = unet.predict(cell(batch_size=4, accumulate=2), base_batch=10).total
    [fit] = find_fits(unet, config, limit, "eager", ("bf16",), most=1)
    assert (fit.largest_batch, fit.batch_size, fit.accumulate) == (4, 2, 5)


@pytest.mark.slow  # traces every precision and level
def test_where_nothing_fits_the_least_that_is_needed_is_said(unet: MemoryPlanner) -> None:
    assert find_fits(unet, unet.step.config, 1000, "eager", ("bf16",)) == []
    with pytest.raises(MemoryLimitError, match="nothing fits 1 kB") as caught:
        refuse_nothing_fits(unet, unet.step.config, 1000, "eager", "1 kB")
    assert "bf16-true" in caught.value.why


def test_levels_are_those_the_model_and_its_optimizer_have(gpt2: MemoryPlanner) -> None:
    assert len(list_levels(gpt2, gpt2.step.config)) == 8
    own = MemoryPlanner(build_traceable_step(tiny("optimizer.name=sgd")))
    assert list_levels(own, own.step.config) == [NORMAL]


def test_a_gpu_is_asked_for_formats_it_has() -> None:
    assert "bf16" not in list_precisions(look_up_gpu("v100"))
    assert "bf16-true" in list_precisions(look_up_gpu("H200"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("800mb", 8 * 10**8),
        ("24G", 24 * 10**9),
        ("1 TiB", 2**40),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "-3GB", "0", "24 parsecs", "1.2.3GB", "1e99GB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a memory size"):
        read_size(text)


# --- other users of the plan ---


def test_auto_batch_cuts_the_batch_by_the_plan(unet: MemoryPlanner) -> None:
    config = unet.step.config
    plan = dataclasses.replace(decide("bf16", look_up_gpu("H200")), mode="eager")
    needed = unet.predict(cell("bf16")).total
    assert find_fitting_pieces(config.train, plan, lambda: unet.step, needed) == 1
    pieces = find_fitting_pieces(config.train, plan, lambda: unet.step, int(0.8 * needed))
    assert pieces in (2, 4)


def test_an_out_of_memory_message_names_what_is_predicted_to_fit(unet: MemoryPlanner) -> None:
    config = unet.step.config
    plan = dataclasses.replace(decide("fp32", look_up_gpu("H200")), mode="eager")
    limit = int(0.9 * unet.predict(cell("fp32")).total)
    ways = suggest_fitting_settings(config, plan, unet.step.workload.store, limit)
    assert len(ways) == 3
    assert ways[0].startswith("--precision bf16 train.batch_size=")
    error = explain_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory"), config.train, "", 1, torch.device("cpu"), planned=ways
    )
    assert ways[0] in error.fix


def test_low_memory_tries_the_lever_first_that_is_predicted_to_save_most(unet: MemoryPlanner) -> None:
    small, recompute = [MemorySetting(optimizer_bits=8)], [MemorySetting(recompute="pointwise")]
    budget = [MemorySetting(activation_budget=0.5)]
    plan = dataclasses.replace(decide("bf16", look_up_gpu("H200")), mode="compile")
    peak = make_peak_predictor(
        unet.step.config.train, partial(build_traceable_step, unet.step.config, unet.step.workload.store)
    )
    ordered = sort_by_peak([budget, small, recompute], lambda setting: peak(plan, setting))
    assert ordered == [recompute, small, budget]
