"""Kernels of a replayed graph find their modules by an uncaptured step of the same code."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.evidence.captured_ledger import (
    COMMITTING,
    COMPUTING,
    GUARDING,
    LaunchPurpose,
    LocatedKernel,
    find_node_owners,
    locate_kernels,
    make_captured_ledger,
    match_replay,
)
from halfstep.evidence.compiled_code import CompiledCode, NodeRecorder, list_module_names
from halfstep.evidence.kernel_events import Kernel, get_sequence_number, split_replays
from halfstep.evidence.precision_ledger import Ledger, LedgerRow
from halfstep_train.kernels.chain import cast_together
from tiny_training import plan

NO_CODE = CompiledCode([], [])


def kernel(name: str, *, start: float, shape: tuple[int, ...] = (1,), time: float = 1.0) -> Kernel:
    return Kernel(name, shape, start, time, -1)


def of(name: str, *modules: str, shape: tuple[int, ...] = (1,), format: str = "") -> LocatedKernel:
    return LocatedKernel(
        kernel(name, start=0.0, shape=shape), LaunchPurpose(modules, "forward", "mm" if format else "", format)
    )


def modules(found: list[LocatedKernel]) -> list[tuple[str, ...]]:
    return [one.place.modules if one.place else () for one in found]


def replayed(*names: str) -> list[Kernel]:
    return [kernel(name, start=float(number)) for number, name in enumerate(names)]


def test_kernels_of_one_name_are_told_apart_by_shape_and_order() -> None:
    reference = [of("gemm", "a", shape=(8,)), of("relu", "a"), of("gemm", "b", shape=(4,)), of("relu", "b")]
    replay = [
        kernel("gemm", start=0, shape=(4,)), kernel("relu", start=1), kernel("gemm", start=2, shape=(8,)),
        kernel("relu", start=3),
    ]  # fmt: skip
    assert modules(match_replay(replay, reference)) == [("b",), ("a",), ("a",), ("b",)]


def test_what_only_the_replay_runs_is_not_mapped_in_between_and_is_the_commit_at_the_end() -> None:
    reference = [of("conv", "a"), of("conv", "b"), of("norm", GUARDING)]
    found = match_replay(replayed("conv", "memset", "conv", "norm", "adamw", "memcpy"), reference)
    assert modules(found) == [("a",), (), ("b",), (GUARDING,), (COMMITTING,), (COMMITTING,)]


def test_a_kernel_that_one_of_them_lacks_does_not_shift_the_others() -> None:
    reference = [of("copy", "a"), of("conv", "a"), of("copy", "b"), of("gemm", "b"), of("copy", "c"), of("pool", "c")]
    found = match_replay(replayed("conv", "copy", "gemm", "copy", "pool"), reference)
    assert modules(found) == [("a",), ("b",), ("b",), ("c",), ("c",)]


def test_another_launch_shape_still_matches_by_name() -> None:
    found = match_replay([kernel("dgrad", start=0, shape=(2,))], [of("dgrad", "a", "b", shape=(16,))])
    assert modules(found) == [("a", "b")]


def test_memory_that_a_graph_sets_and_copies_by_kernels_is_that_of_the_step() -> None:
    names = {"Memset (Device)": "a", "conv": "a", "Memcpy DtoD (Device -> Device)": "b", "pool": "b"}
    reference = [of(name, module) for name, module in names.items()]
    found = match_replay(replayed("memset32", "conv", "memcpy32_post", "pool"), reference)
    assert modules(found) == [("a",), ("a",), ("b",), ("b",)]


def test_a_recorded_step_of_a_unet_is_matched_whole() -> None:
    """A replay on an H200, and the uncaptured step that was recorded with it; modules are autograd's numbers here."""
    recorded = json.loads(gzip.decompress((Path(__file__).parent / "recorded_unet.json.gz").read_bytes()))
    numbers = {get_sequence_number(event) for event in recorded["uncaptured"]} - {None}
    reference = locate_kernels(recorded["uncaptured"], {n: (str(n),) for n in numbers if n is not None}, NO_CODE)
    (replay,) = split_replays(recorded["replay"])
    found = match_replay(replay, reference)
    assert len(found) == 275
    compiled = {one.kernel.name for one in found if one.place is None}
    assert all(name.startswith("triton_") for name in compiled)  # of the loss, whose code is not at hand here
    committing = [one for one in found if one.place is not None and one.place.modules == (COMMITTING,)]
    assert "_update" in {one.kernel.name for one in committing}
    formats = {one.place.format for one in found if one.place is not None and one.place.format}
    assert formats == {"bf16"}


def test_only_kernels_of_graph_launches_are_of_the_replay() -> None:
    events = [
        _host("cudaGraphLaunch", 5, 1, cat="cuda_runtime", correlation=7),
        _host("cudaLaunchKernel", 1, 1, cat="cuda_runtime", correlation=3),
        _device("augment", 3, correlation=3), _device("conv", 10, correlation=7), _device("adamw", 12, correlation=7),
    ]  # fmt: skip
    assert [[k.name for k in replay] for replay in split_replays(events)] == [["conv", "adamw"]]


def test_a_kernel_belongs_to_the_operation_around_its_launch_or_to_the_one_that_reads_it() -> None:
    computing = _host(COMPUTING, 0, 50)
    events = [
        computing,
        _host("aten::convolution", 10, 5, **{"Sequence number": 4, "Input type": ["c10::BFloat16", "c10::BFloat16"]}),
        *_launch("statistics", 8, 1), *_launch("conv", 12, 2), *_launch("norm", 60, 3),
        _host("autograd::engine::evaluate_function: ConvolutionBackward0", 30, 9, tid=2, **{"Sequence number": 4}),
        *_launch("dgrad", 33, 4, tid=2),
    ]  # fmt: skip
    places = {one.kernel.name: one.place for one in locate_kernels(events, {4: ("encoder.0",)}, NO_CODE)}
    assert places["conv"] == LaunchPurpose(("encoder.0",), "forward", "convolution", "bf16")
    assert places["statistics"] == LaunchPurpose(("encoder.0",), "forward")
    assert places["dgrad"] == LaunchPurpose(("encoder.0",), "backward")
    assert places["norm"] == LaunchPurpose((GUARDING,), "step")


def test_autograd_nodes_lead_to_modules_through_casts_and_one_without_weights_to_what_is_around_it() -> None:
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3), "body": nn.ModuleDict({"norm": nn.BatchNorm2d(8),
                           "conv": nn.Conv2d(8, 4, 1)})})  # fmt: skip
    stem, norm, conv = model["stem"], model["body"]["norm"], model["body"]["conv"]  # type: ignore[index]
    half = cast_together([stem.weight, conv.weight], torch.bfloat16)
    y = nn.functional.conv2d(torch.randn(2, 3, 8, 8).bfloat16(), half[0])
    z = norm(y.float()).relu()
    out = nn.functional.conv2d(z.bfloat16(), half[1])
    owners = find_node_owners(out.float().square().mean(), model)
    assert owners[y.grad_fn._sequence_nr()] == ("stem",)  # type: ignore[union-attr]
    assert owners[z.grad_fn._sequence_nr()] == ("body",)
    assert owners[out.grad_fn._sequence_nr()] == ("body.conv",)  # type: ignore[union-attr]
    assert owners[half[0].grad_fn._sequence_nr()] == ("stem", "body.conv")  # type: ignore[union-attr]
    assert owners[max(owners)] == ("(outside the model)",)


def test_a_call_of_compiled_code_has_the_modules_of_the_nodes_above_it() -> None:
    source = """
    def call(self, args):
        # Topologically Sorted Source Nodes: [input_1], Original ATen: [aten.convolution]
        buf0 = extern_kernels.convolution(primals_2, primals_1)
        # Topologically Sorted Source Nodes: [input_1, relu], Original ATen: [aten.convolution, aten.relu]
        stream0 = get_raw_stream(0)
        triton_poi_fused_convolution_relu_0.run(buf0, 4, stream=stream0)
        # Topologically Sorted Source Nodes: [input_2], Original ATen: [aten.addmm]
        extern_kernels.bias_addmm(primals_4, buf0, out=buf1)
        # Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.relu]
        triton_poi_fused_convolution_relu_0.run(buf1, 4, stream=stream0)
    """
    code = CompiledCode([source], [{"input_1": "0", "relu": "1", "input_2": "2", "gelu": "3"}])
    calls = ["convolution", "triton_poi_fused_convolution_relu_0", "addmm", "triton_poi_fused_convolution_relu_0", "x"]
    assert code.find_modules(calls) == [("0",), ("0", "1"), ("2",), ("3",), ()]


def test_a_call_without_nodes_of_its_own_is_of_those_that_its_buffer_was_made_from() -> None:
    source = """
def call(args):
        # Topologically Sorted Source Nodes: [zeros, embedding_grad], Original ATen: [aten.embedding_dense_backward]
        triton_poi_fused_embedding_dense_backward_1.run(buf5, 800, stream=stream0)
        # Topologically Sorted Source Nodes: [mm_1], Original ATen: [aten.mm]
        extern_kernels.mm(buf1, primals_3, out=buf2)
        aten.index_put_(buf5, [buf7], buf6, True)
"""
    graph = {"embedding_grad": "wte", "mm_1": "head"}
    called = ["triton_poi_fused_embedding_dense_backward_1", "mm", "index_put_"]
    assert CompiledCode([source], [graph]).find_modules(called) == [("wte",), ("head",), ("wte",)]


def test_nodes_traced_on_the_side_know_their_modules_forward_and_backward() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    recorder = NodeRecorder(list_module_names(model, {}))

    def region(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    recorder.trace(region)(torch.randn(3, 4)).backward()
    forward, backward = recorder.graphs
    assert {"0", "1", "2"} <= set(forward.values())
    assert {backward[name] for name in backward if name.startswith("mm")} == {"0", "2"}


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_the_ledger_shows_time_formats_what_is_unmapped_and_what_differs(format: str) -> None:
    row = LedgerRow(module="0", planned="bf16", forward="bf16")
    code = Ledger(mode="compiled", rows=(row,), findings=(), summary="")
    found = [
        LocatedKernel(kernel("gemm", start=0, time=6.0), LaunchPurpose(("0",), "forward", "mm", format)),
        LocatedKernel(kernel("fused", start=1, time=3.0), LaunchPurpose(("0", "1"), "forward")),
        LocatedKernel(kernel("memset", start=2, time=1.0), None),
    ]
    seen = make_captured_ledger(plan("bf16", "cpu"), found, code, nn.Sequential(nn.Linear(2, 2), nn.ReLU()), set())
    assert seen.unmapped_share == pytest.approx(0.1)
    assert {row.module: row.time_share for row in seen.rows} == pytest.approx({"0": 0.75, "1": 0.15})
    assert seen.rows[0].forward == format
    assert [finding.module for finding in seen.differences] == ([] if format == "bf16" else ["0"])
    assert "90% of their time mapped" in seen.summary
    assert "0, 1" in str(seen)
    assert "not mapped" in str(seen)


def _host(name: str, ts: float, dur: float, *, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def _device(name: str, ts: float, *, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation, "grid": [1, 1, 1], "block": [32, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": 1.0, "tid": 7, "args": args}


def _launch(name: str, ts: float, correlation: int, *, tid: int = 1) -> list[dict[str, Any]]:
    call = _host("cudaLaunchKernel", ts, 0.5, cat="cuda_runtime", tid=tid, correlation=correlation)
    return [call, _device(name, ts + 100, correlation=correlation)]
