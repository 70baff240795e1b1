"""Models with one thing planted that runs otherwise than the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep.evidence.compiled_code import parse_module_path, read_graphs, record_graphs
from halfstep.evidence.observer import Observer, count_flops
from halfstep.evidence.precision_ledger import Ledger, LedgerRow, Weights, make_ledger, observe, undo_after
from tiny_training import graph_is_held


@torch.library.custom_op("planted::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


mix.register_autograd(_gradients, setup_context=_keep)


class Unaware(torch.autograd.Function):
    """Its backward multiplies in fp32, whatever forward did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        return (gradient.float() @ weight.t()).to(ctx.saved_tensors[0].dtype), x.t() @ gradient.float()


class Aware(torch.autograd.Function):
    """The same with the fix."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        return (gradient.float() @ weight.t()).to(ctx.saved_tensors[0].dtype), x.t() @ gradient.float()


class Planted(nn.Module):
    """A part whose forward is one of the ways below."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.kind)(x)

    def nothing(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def custom_op(self, x: Tensor) -> Tensor:
        return mix(x.float(), self.inner.weight)

    def autocast_off(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.to(self.inner.weight.dtype))

    def island(self, x: Tensor) -> Tensor:
        with hs.fp32_island():
            return self.inner(x.float())

    def unaware(self, x: Tensor) -> Tensor:
        return Unaware.apply(x, self.inner.weight)  # type: ignore[no-untyped-call]

    def aware(self, x: Tensor) -> Tensor:
        return Aware.apply(x, self.inner.weight)  # type: ignore[no-untyped-call]

    def tf32_on(self, x: Tensor) -> Tensor:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Planted(kind)])
        self.stats = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.stats(x))


def window(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    return [{"x": x, "y": y}]


def loss_of(model: nn.Module) -> Any:
    return lambda batch: F.cross_entropy(model(batch["x"]).float(), batch["y"])


def step_of(model: nn.Module, precision: str = "bf16", modules: Any = None, **more: Any) -> hs.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return hs.Step(
        model, optimizer, hs.Precision(precision, modules=modules or {}, simulate=precision != "fp32"), **more
    )


# --- the ledger compared with the plan ---


def ledger_of(model: nn.Module, precision: str = "bf16", **more: object) -> Ledger:
    step = step_of(model, precision, **more)
    with hs.ledger(step) as seen:
        step(loss_of(model), window())
    return seen.ledger


def row(ledger: Ledger, module: str) -> LedgerRow:
    return next(found for found in ledger.rows if found.module == module)


def test_a_clean_model_is_as_planned_forward_and_backward() -> None:
    ledger = ledger_of(Net("nothing"))
    assert ledger.findings == ()
    assert "100% of FLOPs in bf16" in ledger.summary
    for module in ("first", "blocks.0", "blocks.1.inner", "head"):
        found = row(ledger, module)
        assert (found.forward, found.backward, found.planned) == ("bf16", "bf16", "bf16"), module
        assert (found.weights, found.gradients, found.optimizer_state) == ("fp32", "fp32", "fp32")
        assert "bf16" in found.kept
        assert found.casts > 0
        assert found.cast_bytes > 0


def test_shares_of_flops_are_those_of_the_formulas() -> None:
    ledger = ledger_of(Net("nothing"))
    # 2·m·n·k forward; backward twice that, but once for the first layer, whose input needs no gradient.
    flops = {"first": 2 * 4 * 8 * 2, "blocks.0": 2 * 8 * 8 * 3, "blocks.1.inner": 2 * 8 * 8 * 3, "head": 2 * 8 * 3 * 3}
    for module, count in flops.items():
        assert row(ledger, module).flops_share == pytest.approx(count / sum(flops.values()))


def test_a_branch_that_no_backward_passes_is_let_go_of() -> None:
    """Else its gradients stay tied to the stream of the observed step, and no later step can be captured."""
    model = Net("nothing")
    observer = Observer(model)

    def forward() -> Tensor:
        with observer.watch():
            out: Tensor = model(window()[0]["x"]).exp()
            return out

    assert not graph_is_held(model.head.weight, forward)


PLANTED = {
    "custom_op": ("blocks.1", "planted::mix", 'register_autocast("planted::mix"'),
    "autocast_off": ("blocks.1.inner", "autocast is off", "fp32_island"),
    "unaware": ("blocks.1", "Unaware", "custom_bwd"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_computes_otherwise_is_named_by_path_with_reason_and_fix(kind: str) -> None:
    module, why, fix = PLANTED[kind]
    ledger = ledger_of(Net(kind))
    assert {finding.module for finding in ledger.findings} == {module}
    assert any(why in finding.why and fix in finding.fix for finding in ledger.findings)
    assert row(ledger, module).verdict.startswith("differs")


def test_the_fix_for_an_autograd_function_is_one() -> None:
    assert ledger_of(Net("aware")).findings == ()


def test_an_island_is_no_difference_and_named_in_the_summary() -> None:
    ledger = ledger_of(Net("island"))
    assert ledger.findings == ()
    assert "blocks.1.inner (island)" in ledger.summary
    assert (row(ledger, "blocks.1.inner").forward, row(ledger, "blocks.1.inner").backward) == ("fp32", "fp32")


def test_a_half_weight_is_named() -> None:
    model = Net("nothing")
    step = step_of(model)
    model.blocks[0].weight.data = model.blocks[0].weight.data.bfloat16()
    with hs.ledger(step) as seen:
        step._step.compute(loss_of(model), window())
    (found,) = seen.ledger.findings
    assert found.module == "blocks.0"
    assert "weight is stored in bf16" in found.what
    assert "torch.float32" in found.fix


def test_a_half_running_mean_is_named() -> None:
    model = Net("nothing")
    step = step_of(model)
    model.stats.bfloat16()
    with hs.ledger(step) as seen:
        step._step.compute(loss_of(model), window())
    assert {found.module for found in seen.ledger.findings} == {"stats"}
    assert "running_mean and running_var in bf16" in [found.what for found in seen.ledger.findings]


def test_tf32_left_on_in_strict_fp32_is_named() -> None:
    (found,) = ledger_of(Net("tf32_on"), "fp32").findings[:1]
    assert found.module == "blocks.1.inner"
    assert "tf32" in found.what
    assert "TF32" in found.why


def test_a_part_with_a_precision_of_its_own_is_as_planned() -> None:
    ledger = ledger_of(Net("nothing"), modules={"blocks.0": "fp32"})
    assert ledger.findings == ()
    assert row(ledger, "blocks.0").forward == "fp32"
    assert "blocks.0 (as planned)" in ledger.summary


def test_what_the_plan_casts_itself_is_no_finding_against_the_model() -> None:
    ledger = ledger_of(Net("nothing"), "fp16", modules={"blocks.0": "bf16"})
    assert ledger.findings == ()
    assert row(ledger, "blocks.0").forward == "bf16"


def test_the_ledger_changes_no_bit_of_training() -> None:
    def trained(watched: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
        step = step_of(model)
        for k in range(3):
            if watched:
                with hs.ledger(step):
                    step(loss_of(model), window(k))
            else:
                step(loss_of(model), window(k))
        return model.state_dict()

    plain, watched = trained(False), trained(True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), Planted("autocast_off")
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda y: self.second(self.first(y)), x, use_reentrant=False))


def test_recomputed_modules_keep_their_own_rows() -> None:
    ledger = ledger_of(Recomputed())
    assert {finding.module for finding in ledger.findings} == {"second.inner"}
    first = row(ledger, "first")
    assert (first.forward, first.backward) == ("bf16", "bf16")
    assert row(ledger, "head").backward == "bf16"


class Penalised(nn.Module):
    """Takes a gradient in its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        features = torch.tanh(self.inner(x))
        (gradient,) = torch.autograd.grad(features.float().sum(), x, create_graph=True)
        return self.head(features) + gradient.square().mean()


def test_a_gradient_taken_inside_forward_belongs_to_its_module() -> None:
    ledger = ledger_of(Penalised())
    assert ledger.findings == ()
    assert row(ledger, "inner").backward == "bf16"


def test_attention_counts_with_its_flops() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 3)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.embed(x.unsqueeze(-1))
            return self.head(self.attend(tokens, tokens, tokens, need_weights=False)[0].mean(1))

    ledger = ledger_of(Attention())
    assert ledger.findings == ()
    assert row(ledger, "attend").flops_share > 0.5
    assert (row(ledger, "attend").forward, row(ledger, "attend").backward) == ("bf16", "bf16")


def test_a_ledger_without_a_step_says_so() -> None:
    model = Net("nothing")
    with hs.ledger(step_of(model)) as seen:
        pass
    with pytest.raises(ConfigError, match="no step") as refused:
        str(seen)
    assert "inside" in refused.value.fix
    with pytest.raises(ConfigError, match="Linear"), hs.ledger(nn.Linear(2, 2)):  # type: ignore[arg-type]
        pass


def test_findings_of_one_reason_are_told_together() -> None:
    model = nn.Sequential(nn.Linear(4, 8), *(Planted("custom_op") for _ in range(8)), nn.Linear(8, 3))
    text = str(ledger_of(model))
    assert text.count("why:") == 2  # of forward and of backward
    assert "1: planted::mix (forward) computed in fp32" in text
    assert "and 2 more modules likewise" in text


def test_flops_of_a_product_with_a_wider_result_are_counted() -> None:
    half, total = torch.ones(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4)
    given = (total, half, half, torch.float32)
    assert count_flops(torch.ops.aten.addmm.dtype_out, given, {"out": total}, total) == 2 * 4**3


# --- compiled code, by the compiler's own graphs ---


def compiled_ledger(model: nn.Module) -> Ledger:
    """In bf16 for real: simulated formats are not compiled."""
    step = step_of(model, "bf16")._step
    loss = loss_of(model)
    twin, _ = observe(step, loss, window())
    compiled, graphs = record_graphs(loss)

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return compiled(batch)

    with undo_after(step), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(window()[0]).float().backward()
        weights = Weights.collect(model, step.optimizers)
    return make_ledger(step.plan, read_graphs(graphs, model, {}, twin.seen), model, weights, mode="compiled")


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
