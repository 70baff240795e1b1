"""The graph-captured step on a real GPU: the same numbers, the same safety, no waits, and a way back when it fails."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run_gpu import tensors_of
from torch import Tensor, nn

from halfstep.errors import Interrupted
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.driver import Driver
from halfstep.hardware.probe import probe
from halfstep.step import tables as tabulated
from halfstep.step.clip import Clip
from halfstep.step.facts import Facts, Reading
from halfstep.step.graph import CaptureFailed, GraphedStep
from halfstep.step.guard import Guard
from halfstep.step.randomness import choose_algorithms
from halfstep.step.step import GuardedStep
from halfstep_train.report.metrics_file import read
from halfstep_train.run.assemble import assemble, build_workload, decide_plan
from halfstep_train.run.engine import Engine, RunRehearsal
from halfstep_train.run.train import train
from halfstep_train.tune.choose import tune_plan
from halfstep_train.tune.modes import UNCAPTURED
from halfstep_train.workloads import from_dict, load
from halfstep_train.workloads.segmentation.demo import write_demo
from no_waiting import no_host_wait
from tiny_training import assert_same_bits, batch, bits, everything, loss_of, make_step, plan, poisoned

pytestmark = pytest.mark.gpu

SELECTED = ["adamw", "sgd", "adam", "rmsprop", "nadam"]


@pytest.fixture(autouse=True)
def repeatable() -> Any:
    with choose_algorithms(deterministic=True):
        yield


def graphed(step: GuardedStep, loss_fn: Callable[[dict[str, Tensor]], Tensor], size: int = 1) -> Callable[..., Facts]:
    """Uncaptured steps first, as the engine makes them, then the capture."""
    for k in range(UNCAPTURED):
        step(loss_fn, [batch(k + j, device="cuda") for j in range(size)])
    window = [batch(k, device="cuda") for k in range(size)]
    return GraphedStep(step, loss_fn, window, torch.cuda.graph_pool_handle())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", SELECTED)
def test_a_graph_makes_the_very_steps_of_the_eager_step(optimizer: str, precision: str) -> None:
    eager, captured = (make_step(optimizer, precision, device="cuda") for _ in range(2))
    loss_fn = loss_of(eager.model)
    for k in range(UNCAPTURED):
        eager(loss_fn, [batch(k, device="cuda")])
    graph = graphed(captured, loss_of(captured.model))
    assert_same_bits(everything(eager), everything(captured))
    for k in range(10, 16):
        one, other = eager(loss_fn, [batch(k, device="cuda")]).read(), graph([batch(k, device="cuda")]).read()
        assert one == other
    assert_same_bits(everything(eager), everything(captured))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", SELECTED)
def test_bad_steps_inside_a_graph_leave_every_bit_alone(optimizer: str, precision: str) -> None:
    step = make_step(optimizer, precision, device="cuda")
    graph = graphed(step, loss_of(step.model))
    graph([batch(20, device="cuda")])
    before = everything(step)
    for _ in range(2):
        assert graph([poisoned(device="cuda")]).read().is_bad
        assert_same_bits(before, everything(step))
    scale = graph([batch(21, device="cuda")]).read()
    assert scale.committed == UNCAPTURED + 2
    assert scale.scale == (65536.0 / 4 if precision == "fp16" else 1.0)


def test_the_first_replayed_step_may_be_bad() -> None:
    step = make_step("adamw", "bf16", device="cuda")
    graph = graphed(step, loss_of(step.model))
    before = everything(step)
    assert graph([poisoned(device="cuda")]).read().is_bad
    assert_same_bits(before, everything(step))


def test_capturing_changes_nothing_and_readings_are_those_of_their_own_step() -> None:
    step = make_step("adamw", "bf16", device="cuda")
    loss_fn = loss_of(step.model)
    for k in range(UNCAPTURED):
        step(loss_fn, [batch(k, device="cuda")])
    before, rng = everything(step), torch.cuda.get_rng_state()
    graph = GraphedStep(step, loss_fn, [batch(0, device="cuda")], torch.cuda.graph_pool_handle())
    assert_same_bits(before, everything(step))
    assert torch.equal(rng, torch.cuda.get_rng_state())
    found = [graph([batch(k, device="cuda")]) for k in (5, 6, 7)]
    readings = [facts.read() for facts in found]  # read late: each has the numbers of its own step
    assert len({reading.loss for reading in readings}) == 3
    assert [reading.attempted for reading in readings] == [3, 4, 5]
    assert readings[0].sample_ids == (500, 501, 502, 503)
    assert len({reading.lr for reading in readings}) == 3  # the schedule moves inside the graph


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fifty_replayed_steps_make_no_host_synchronisation(optimizer: str, precision: str) -> None:
    step = make_step(optimizer, precision, device="cuda", accumulate=2)
    guard, graph = Guard(scaling=precision == "fp16"), graphed(step, loss_of(step.model), size=2)
    batches = [batch(k, device="cuda") for k in range(10)]
    with no_host_wait():
        for k in range(50):
            guard.watch(graph([batches[k % 10], batches[(k + 1) % 10]]))


def waits(b: dict[str, Tensor], loss_fn: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """CUDA refuses this during a capture and makes the capture invalid: it cannot even be ended."""
    loss = loss_fn(b)
    loss.item()
    return loss


def raises(b: dict[str, Tensor], loss_fn: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        loss_fn(b)
        raise ValueError("broken\non purpose")
    return loss_fn(b)


def test_a_batch_with_a_number_on_the_host_is_not_captured() -> None:
    """Replays would go on with the first window's."""
    step = make_step("sgd", "fp32", device="cuda")
    step(loss_of(step.model), [batch(0, device="cuda")])
    window = [batch(0, device="cuda") | {"weight": torch.tensor(2.0)}]
    with pytest.raises(CaptureFailed, match="'weight' in the batch not on cuda:0"):
        GraphedStep(step, loss_of(step.model), window, torch.cuda.graph_pool_handle())


@pytest.mark.parametrize(("breaks", "reason"), [(waits, "permitted|captur"), (raises, "^broken$")])
def test_a_capture_that_breaks_says_why_and_leaves_everything_usable(breaks: Any, reason: str) -> None:
    """The step goes on as one that never tried; torch's stream, allocator and generator are as before."""
    broken, whole = (step_with_dropout() for _ in range(2))
    plain = {step: loss_of(step.model) for step in (broken, whole)}
    for k in range(UNCAPTURED):
        for step in (broken, whole):
            torch.manual_seed(k)
            step(plain[step], [batch(k, device="cuda")])
    before, rng, stream = everything(broken), torch.cuda.get_rng_state(), torch.cuda.current_stream()
    with pytest.raises(CaptureFailed, match=reason):
        GraphedStep(
            broken, lambda b: breaks(b, plain[broken]), [batch(0, device="cuda")], torch.cuda.graph_pool_handle()
        )
    assert torch.cuda.current_stream() == stream
    assert_same_bits(before, everything(broken))
    assert torch.equal(rng, torch.cuda.get_rng_state())
    assert gives_memory_back()
    for k in range(7, 10):
        for step in (broken, whole):
            torch.manual_seed(k)
            assert not step(plain[step], [batch(k, device="cuda")]).read().is_bad
    assert_same_bits(everything(broken), everything(whole))
    graph = GraphedStep(broken, plain[broken], [batch(0, device="cuda")], torch.cuda.graph_pool_handle())
    assert not graph([batch(8, device="cuda")]).read().is_bad


def step_with_dropout() -> GuardedStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 32), nn.Dropout(0.5), nn.Linear(32, 3)).cuda()
    return GuardedStep(
        model, torch.optim.AdamW(model.parameters(), fused=True), plan("bf16", "cuda"), clip=Clip(limit=1.0)
    )


def gives_memory_back() -> bool:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() <= before


def test_what_commits_by_the_host_is_not_captured() -> None:
    host = make_step("adafactor", "bf16", device="cuda")
    with pytest.raises(CaptureFailed, match="Adafactor commits by the host"):
        graphed(host, loss_of(host.model))


def test_loading_a_state_makes_the_graph_invalid() -> None:
    step = make_step("adamw", "bf16", device="cuda")
    graph = graphed(step, loss_of(step.model))
    assert isinstance(graph, GraphedStep)
    assert graph.is_valid
    step.load_state_dict(step.state_dict())
    assert not graph.is_valid


# --- the engine and whole runs ---


def made(tmp_path: Path, **values: Any) -> tuple[Any, Any, Any]:
    if not (tmp_path / "data").exists():
        write_demo(tmp_path / "data", num_images=30, side=64)
    small = {
        "data.dir": str(tmp_path / "data"), "data.image_size": 64, "data.num_workers": 0, "model.base_channels": 16,
        "model.depth": 2, "train.batch_size": 4, "device": "cuda", "precision": "bf16", "log.quiet": True,
        "optimizer.lr": 1e-3,
    }  # fmt: skip
    loaded = from_dict("unet", {**small, **values})
    workload = build_workload(loaded.config)
    return loaded, workload, decide_plan(loaded.config, workload, probe("cuda"))


def curve(tmp_path: Path, mode: str, **values: Any) -> tuple[list[Reading], Engine]:
    loaded, workload, plan = made(tmp_path, **{"train.fast": {"eager": "off"}.get(mode, mode), **values})
    parts = assemble(loaded.config, workload, plan)
    engine = Engine(parts, parts.mode or "eager", lambda text, level: pytest.fail(text))
    found = []
    for epoch in range(5):
        for loaded_batch in parts.train_loader.iterate_epoch(epoch):
            found.append(engine([{name: value.cuda() for name, value in loaded_batch.items()}]))
    return [facts.read() for facts in found], engine


def test_a_shape_that_changes_all_the_time_runs_uncaptured(tmp_path: Path) -> None:
    found, engine = curve(tmp_path, "graph", **{"train.batch_size": 5, "train.accumulate": 1})
    assert not any(reading.is_bad for reading in found)
    assert len(engine.graphs) == 1  # the last, smaller batch of each epoch has none


def test_a_captured_run_outlives_its_table_of_learning_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with choose_algorithms(deterministic=False):
        expected, _ = curve(tmp_path, "eager")
        monkeypatch.setattr(tabulated, "TABLE_CHUNK", 7)  # grows at 7, 14 and 28 of 30 steps
        found, engine = curve(tmp_path, "graph")
    assert [reading.lr for reading in found] == [reading.lr for reading in expected]
    assert engine.mode == "graph"


def test_a_run_whose_capture_breaks_goes_on_compiled_and_could_go_on_eager(tmp_path: Path) -> None:
    loaded, workload, plan = made(tmp_path, **{"train.fast": "graph"})

    def waiting_loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        value, weight = workload.loss(outputs, batch)
        value.item()
        return value, weight

    parts = assemble(loaded.config, dataclasses.replace(workload, loss=waiting_loss), plan)
    said: list[str] = []
    engine = Engine(parts, "graph", lambda text, level: said.append(text))
    window = [{name: value.cuda() for name, value in next(parts.train_loader.iterate_epoch(0)).items()}]
    losses = [engine(window).read().loss for _ in range(UNCAPTURED + 3)]
    assert engine.mode == "compile"
    in_parts, not_captured = said  # a line for each of the two things that waiting for the device costs
    assert in_parts.startswith("compiled with graph breaks, which is slower: `Tensor.item()` waits for the device")
    assert not_captured.startswith("not captured as a CUDA graph, running compiled: ")
    eager = Engine(parts, "eager", lambda text, level: pytest.fail(text))
    losses += [eager(window).read().loss for _ in range(3)]
    assert losses[-1] < losses[0]
    assert parts.step.attempted == int(parts.step.committed) == len(losses)


def test_a_rollback_to_the_start_is_captured_again(tmp_path: Path) -> None:
    loaded, workload, plan = made(tmp_path, **{"train.fast": "graph"})
    parts = assemble(loaded.config, workload, plan)
    engine = Engine(parts, "graph", lambda text, level: pytest.fail(text))
    window = [{name: value.cuda() for name, value in next(parts.train_loader.iterate_epoch(0)).items()}]
    start = parts.step.state_dict()
    for _ in range(2):
        for _ in range(UNCAPTURED + 2):
            assert not engine(window).read().is_bad
        assert all(captured.step.is_valid for captured in engine.graphs.values())
        assert len(engine.graphs) == 1
        parts.step.load_state_dict(start)


@pytest.mark.parametrize("mode", ["off", "graph"])
def test_a_run_resumes_to_the_bit_in_every_mode(tmp_path: Path, mode: str) -> None:
    flag = tmp_path / "signal"
    values = {
        "precision.default": "bf16", "data.dir": "anywhere", "data.num_workers": 2, "train.batch_size": 3,
        "train.accumulate": 2, "train.epochs": 6, "train.checkpoint_every": 2, "train.deterministic": True,
        "ema.enabled": True, "log.quiet": True, "device": "cuda", "model.options.poisoned": [2, 3, 9, 15],
        "model.options.signal_file": str(flag), "model.options.signal_step": 11, "train.fast": mode,
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    whole = train(load("tiny_workload:build", overrides=overrides), out=tmp_path / "whole")
    flag.touch()
    with pytest.raises(Interrupted):
        train(load("tiny_workload:build", overrides=overrides), out=tmp_path / "parts")
    parts = train(load(str(tmp_path / "parts" / "config.yaml")), resume=tmp_path / "parts")
    assert_same_bits(tensors_of(whole), tensors_of(parts))


class Alone(Driver):
    """What is measured beside others is not kept, and other tests may run on this GPU now."""

    def describe_other_use(self, device: str) -> str:
        return ""


def test_auto_measures_chooses_and_stores_and_the_next_run_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with choose_algorithms(deterministic=False):
        # So many steps are enough for compiling and cuDNN's trials, by the rule, whatever a step takes.
        loaded, workload, plan = made(tmp_path, **{"train.epochs": 1_000_000, "train.tune_kernels": False})
        before = {name: value.clone() for name, value in workload.model.state_dict().items()}
        rng = torch.cuda.get_rng_state()
        said: list[str] = []
        clock = Stopwatch()
        first = tune_plan(plan, RunRehearsal(loaded.config, workload), said.append, driver=Alone())
        assert clock.elapsed_s < 180  # the steps are bounded by a minute, compiling by what it takes
        assert all(torch.equal(bits(before[name]), bits(now)) for name, now in workload.model.state_dict().items())
        assert torch.equal(rng, torch.cuda.get_rng_state())
        assert first.mode in ("compile", "graph")
        assert {gain.part for gain in first.gains} == {"channels_last", "compile", "graph", "cudnn.benchmark"}
        assert all(f"  {gain}" in said for gain in first.gains)
        again = tune_plan(plan, RunRehearsal(loaded.config, workload), said.append, driver=Alone())
        assert (again.mode, again.cudnn_benchmark, again.gains) == (first.mode, first.cudnn_benchmark, first.gains)
        assert again.mode_reason.startswith("measured before")
        short, _, _ = made(tmp_path, **{"train.epochs": 2, "train.tune_kernels": False})
        assert (
            tune_plan(plan, RunRehearsal(short.config, workload), said.append).mode == "eager"
        )  # 12 steps do not pay for a start
        monkeypatch.setattr("halfstep_train.tune.mode_search.WARM_START_S", -1e3)
        folder = train(short, out=tmp_path / "run")
    stored = json.loads((folder / "plan.json").read_text())
    assert (stored["mode"], stored["cudnn_benchmark"]) == (first.mode, first.cudnn_benchmark)
    assert any(record.get("kind") == "validation" or "val" in str(record) for record in read(folder / "metrics.jsonl"))


def test_a_candidate_that_runs_out_of_memory_is_dropped(tmp_path: Path) -> None:
    loaded, workload, plan = made(tmp_path, **{"data.image_size": 512, "train.batch_size": 16})
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    with RunRehearsal(loaded.config, workload).begin(plan) as trial:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1e8) / total)
        try:
            with pytest.raises(Exception, match="out of memory"):
                trial.measure("eager")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_odd_batch_that_does_not_fit_beside_the_graph_does_not_cost_later_steps_theirs(tmp_path: Path) -> None:
    said: list[str] = []
    loaded, workload, plan = made(
        tmp_path, **{"train.fast": "graph", "data.image_size": 256, "train.batch_size": 8, "model.base_channels": 32}
    )
    parts = assemble(loaded.config, workload, plan)
    engine = Engine(parts, "graph", lambda text, level: said.append(text))
    full = [{name: value.cuda() for name, value in next(parts.train_loader.iterate_epoch(0)).items()}]
    odd = [{name: value[:7] for name, value in full[0].items()}]
    for _ in range(UNCAPTURED + 2):
        engine(full)
    assert engine.graphs
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
    try:
        assert not engine(odd).read().is_bad
        assert not engine.graphs
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(UNCAPTURED + 2):
        assert not engine(full).read().is_bad
    assert (engine.mode, len(engine.graphs)) == ("graph", 1)
    assert len(said) == 1
    assert "captured again (1 of at most 3 times)" in said[0]


class Replacing(nn.Module):
    """Makes a new buffer tensor in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.conv(x).mean((2, 3))


def test_a_model_that_replaces_its_buffers_is_not_captured() -> None:
    step = make_step("adamw", "bf16", device="cuda")
    model = Replacing().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    own = GuardedStep(model, optimizer, dataclasses.replace(step.plan))
    loss_fn = lambda b: model(b["image"]).square().mean()  # noqa: E731
    window = [{"image": torch.randn(2, 3, 8, 8, device="cuda")}]
    for _ in range(UNCAPTURED):
        own(loss_fn, window)
    with pytest.raises(CaptureFailed, match="replaces or registers"):
        GraphedStep(own, loss_fn, window, torch.cuda.graph_pool_handle())
    assert float(model.seen) == UNCAPTURED
