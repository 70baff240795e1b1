"""Compiled code, by the compiler's own graphs."""

from __future__ import annotations

import pytest
import torch
from planted import Net, loss_of, step_of, window
from torch import nn

from halfstep.evidence.compiled_code import GraphRecorder, parse_module_path, read_graphs
from halfstep.evidence.precision_ledger import Ledger, Weights, make_ledger, observe, undo_after


def compiled_ledger(model: nn.Module) -> Ledger:
    """In bf16 for real: simulated formats are not compiled."""
    step = step_of(model, "bf16")._step
    loss, recorder = loss_of(model), GraphRecorder()
    twin, _ = observe(step, loss, window())
    compiled = recorder.compile(loss)

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return compiled(batch)

    with undo_after(step), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(window()[0]).float().backward()
        weights = Weights.collect(model, step.optimizers)
    return make_ledger(step.plan, read_graphs(recorder.graphs, model, {}, twin.seen), model, weights, mode="compiled")


def test_graphs_tell_modules_formats_and_flops_forward_and_backward() -> None:
    ledger = compiled_ledger(Net("nothing"))
    assert ledger.findings == ()
    rows = {row.module: row for row in ledger.rows}
    flops = {"first": 2 * 4 * 8 * 2, "blocks.0": 2 * 8 * 8 * 3, "blocks.1.inner": 2 * 8 * 8 * 3, "head": 2 * 8 * 3 * 3}
    for module, count in flops.items():
        assert (rows[module].forward, rows[module].backward) == ("bf16", "bf16")
        assert rows[module].flops_share == pytest.approx(count / sum(flops.values()))
        assert rows[module].gradients == "fp32"
    assert any(row.kept_bytes for row in ledger.rows)


def test_what_differs_in_compiled_code_is_named_and_an_island_is_not() -> None:
    differing = compiled_ledger(Net("autocast_off"))
    assert {finding.module for finding in differing.findings} == {"blocks.1.inner"}
    island = compiled_ledger(Net("island"))
    assert island.findings == ()
    assert "blocks.1.inner (island)" in island.summary


def test_names_of_the_compiler_lead_to_modules() -> None:
    names = {"", "blocks", "blocks.0", "blocks.0.inner", "head"}
    assert parse_module_path("L['model'].blocks[0].inner", names) == "blocks.0.inner"
    assert parse_module_path("G['m'].blocks.0.inner", names) == "blocks.0.inner"
    assert parse_module_path("L['model']._modules['head']", names) == "head"
    assert parse_module_path("L['model']", names) == ""
    assert parse_module_path("L['loss'].inner.deep", names) is None
