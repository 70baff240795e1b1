"""The guard inside Hugging Face Accelerate: real Accelerators, prepared models, optimizers, loaders and schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.errors import ConfigError
from host_faults import FAULTS, Fault, Net, copy_state, make_data, reset_accelerate, same_bits, seeded

accelerate = pytest.importorskip("accelerate")
from accelerate import Accelerator  # noqa: E402


class Script:
    """A training script as Accelerate's documentation writes it, with and without the guard."""

    def __init__(
        self, *, guarded: bool = True, accumulate: int = 1, scale: bool = False,
        fused: bool = True, ways: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model: Any = seeded(Net)
        adamw: Any = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 40)
        loader: Any = DataLoader(TensorDataset(*make_data(512)), batch_size=8)
        if scale:  # Accelerate makes none on a CPU
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
            self.accelerator.state._mixed_precision = "fp16"
        self.scaler = self.accelerator.scaler
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, adamw, loader, schedule
        )
        self.accelerator.native_amp = scale
        self.net = self.accelerator.unwrap_model(self.model)
        self.guard = None
        if guarded:
            self.guard = hs.integrations.accelerate.guard(
                self.accelerator, self.model, self.optimizer, schedule=ways or "auto", **more
            )
        self.batches = iter(self.loader)

    def train(self, num_steps: int, fault: Fault | None = None, *, skipped: bool = False) -> None:
        for _ in range(num_steps):
            for part in range(self.accelerator.gradient_accumulation_steps):
                x, y = next(self.batches)
                if skipped:  # another script has dropped this batch
                    continue
                self.net.fault = fault if part == 0 else None
                with self.accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(x), y) * (float("nan") if self.net.fault == "loss" else 1)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()

    @property
    def state(self) -> list[Any]:
        held = [self.net, self.optimizer, self.scheduler]
        return copy_state(*held, *([] if self.scaler is None else [self.scaler]))


@pytest.mark.parametrize(("ways", "accumulate", "scale"), [
    ("read", 1, False), ("exact", 1, False), ("exact", 3, False), ("read", 2, True), ("exact", 1, True),
])  # fmt: skip
def test_thirty_steps_have_the_hosts_bits(ways: str, accumulate: int, scale: bool) -> None:
    runs = []
    for guarded in (False, True):
        script = Script(guarded=guarded, ways=ways, accumulate=accumulate, scale=scale)
        script.train(30 if accumulate == 1 else 20)
        runs.append(script.state)
        reset_accelerate()
    assert same_bits(*runs)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("ways", "fused"), [("exact", True), ("read", True), ("read", False)])
def test_a_planted_fault_leaves_every_bit(fault: Fault, accumulate: int, ways: str, fused: bool) -> None:
    script = Script(ways=ways, accumulate=accumulate, fused=fused)
    script.train(2)
    before = script.state
    script.train(1, fault)
    assert same_bits(script.state, before)
    assert script.guard is not None
    assert script.guard.dropped
    assert script.accelerator.optimizer_step_was_skipped == (ways == "read")
    script.train(1)
    assert not same_bits(script.state, before)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_planted_fault_in_half_precision(fault: Fault, name: str) -> None:
    script = Script(scale=name == "fp16", ways="exact")
    with hs.simulate(name):
        script.train(2)
        before = script.state
        script.train(1, fault)
        is_overflow = name == "fp16" and fault == "gradient"
        assert same_bits(script.state[:3], before[:3])
        assert same_bits(script.state[3:], before[3:]) != is_overflow  # an overflow lowers the scale, nothing else does
        script.train(1)
    assert not same_bits(script.state[0], before[0])


@pytest.mark.parametrize("when", ["before clipping by value", "after clipping by norm"])
def test_gradients_written_around_clipping_are_judged(when: str) -> None:
    script = Script()
    script.train(2)
    before = script.state
    x, y = next(script.batches)
    script.accelerator.backward(F.cross_entropy(script.model(x), y))
    if when == "before clipping by value":
        script.net.body[0].weight.grad[0, 0] = float("inf")
        script.accelerator.clip_grad_value_(script.model.parameters(), 0.5)
    else:
        script.accelerator.clip_grad_norm_(script.model.parameters(), 0.5)
        script.net.body[0].weight.grad[0, 0] = float("nan")
    script.optimizer.step()
    script.scheduler.step()
    assert same_bits(script.state, before)


@pytest.mark.parametrize("ways", ["read", "exact"])
def test_save_state_resumes_with_and_without_the_guard(tmp_path: Path, ways: str) -> None:
    whole = Script(ways=ways)
    whole.train(2)
    whole.train(1, "batch")
    whole.train(1)
    whole.accelerator.save_state(str(tmp_path / "stored"))
    whole.train(3)
    found = whole.state
    reset_accelerate()
    for guarded in (True, False):
        resumed = Script(ways=ways, guarded=guarded)
        resumed.train(1)  # what was trained before the state is loaded must not matter
        resumed.accelerator.load_state(str(tmp_path / "stored"))
        resumed.train(3, skipped=True)
        resumed.train(3)
        assert same_bits(resumed.state, found)
        reset_accelerate()


def test_a_capsule_names_the_sample_and_the_module(tmp_path: Path) -> None:
    script = Script(capsules=tmp_path / "capsules")
    assert script.guard is not None

    def loss_fn(batch: dict[str, Any]) -> Any:
        return F.cross_entropy(script.model(batch["x"]), batch["y"])

    for number in range(3):
        x, y = next(script.batches)
        batch = {"x": x.clone(), "y": y, "index": torch.arange(8) + 8 * number}
        if number == 1:
            batch["x"][5, 2] = float("nan")
        script.guard.keep(batch)
        script.accelerator.backward(loss_fn(batch))
        script.optimizer.step()
        script.scheduler.step()
        script.optimizer.zero_grad()
    with pytest.warns(UserWarning, match="was saved; find the cause"):
        script.guard.finish()
    found = str(hs.replay(tmp_path / "capsules" / "00000001", script.net, loss_fn))
    assert "sample 13: ['x'][2] is nan" in found
    assert "body.1.running_var" in found


def test_a_scheduler_that_was_not_prepared_is_named_and_can_follow(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator, model = Accelerator(cpu=True), seeded(Net)
    adamw = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(adamw, 1)
    model, adamw = accelerator.prepare(model, adamw)
    guard = hs.integrations.accelerate.guard(accelerator, model, adamw)
    assert "scheduler = guard.follow(scheduler)" in capsys.readouterr().err
    followed = guard.follow(schedule)
    for fault in (None, "batch"):
        model.fault = fault
        accelerator.backward(model(torch.ones(4, 4)).sum())
        adamw.step()
        followed.step()
        adamw.zero_grad()
    assert schedule.last_epoch == 1


@pytest.mark.parametrize("ways", ["read", "exact"])
def test_a_prepared_scheduler_by_epochs_moves_although_the_last_step_was_dropped(ways: str) -> None:
    script = Script(ways=ways)
    step = script.scheduler.step
    script.scheduler.step = lambda: None
    script.train(2)
    script.train(1, "batch")
    assert script.accelerator.optimizer_step_was_skipped == (ways == "read")
    step()
    assert script.accelerator.optimizer_step_was_skipped == (ways == "read")
    assert script.scheduler.scheduler.state_dict()["last_epoch"] == 1


# --- bad input ---


def test_models_that_the_optimizer_does_not_train_alone_are_refused() -> None:
    accelerator, unet, encoder = Accelerator(cpu=True), Net(), torch.nn.Linear(4, 4)
    both = torch.optim.AdamW([*unet.parameters(), *encoder.parameters()])
    unet, encoder, both = accelerator.prepare(unet, encoder, both)
    guard = hs.integrations.accelerate.guard
    with pytest.raises(ConfigError, match=r"2 of the 8 parameters .* do not belong to the given models \(Net\)"):
        guard(accelerator, unet, both)
    with pytest.raises(ConfigError, match=r"6 of the 8 parameters .* do not belong to the given models \(Linear\)"):
        guard(accelerator, encoder, both)
    guard(accelerator, [unet, encoder], both)


def test_swapped_arguments_are_refused() -> None:
    script = Script(guarded=False)
    guard: Any = hs.integrations.accelerate.guard
    with pytest.raises(ConfigError, match="takes a model, or a list of models, not AcceleratedOptimizer"):
        guard(script.accelerator, script.optimizer, script.model)
    with pytest.raises(ConfigError, match="takes an optimizer after the model, not DataLoaderShard"):
        guard(script.accelerator, script.model, script.loader)
    with pytest.raises(ConfigError, match="takes an optimizer after the model, not NoneType"):
        guard(script.accelerator, script.model)
    with pytest.raises(ConfigError, match="takes a model, or a list of models, not NoneType"):
        guard(script.accelerator, [], script.optimizer)


def test_a_loop_that_steps_another_optimizer_is_told() -> None:
    script = Script()
    assert script.guard is not None
    x, y = next(script.batches)
    script.accelerator.backward(F.cross_entropy(script.model(x), y))
    with pytest.warns(UserWarning, match="no guarded step followed: call step.. of the optimizer that accelerator.pre"):
        script.guard.finish()
    with pytest.warns(UserWarning, match="bypassed the guard inside Accelerate.*prepare returned instead") as found:
        script.optimizer.optimizer.step()
    assert found[0].filename == __file__  # Accelerate ignores warnings of torch's schedulers, which wrap step()
    script.optimizer.optimizer.step()  # once is enough


def test_guard_before_prepare_is_refused() -> None:
    accelerator, model = Accelerator(cpu=True), Net()
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="AdamW was not prepared"):
        hs.integrations.accelerate.guard(accelerator, model, adamw)
    prepared = accelerator.prepare(adamw)
    with pytest.raises(ConfigError, match="Net was not prepared"):
        hs.integrations.accelerate.guard(accelerator, model, prepared)


def test_closing_leaves_no_trace() -> None:
    script = Script(ways="exact")
    assert script.guard is not None
    script.train(2)
    script.guard.close()
    assert "backward" not in vars(script.accelerator)
    assert "step" not in vars(script.optimizer)
    assert isinstance(script.scheduler.scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)
    assert isinstance(script.optimizer.param_groups[0]["lr"], float)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"])
def test_setups_that_step_by_themselves_are_refused(kind: str) -> None:
    script = Script(guarded=False)
    script.accelerator.state.distributed_type = accelerate.DistributedType[kind]
    with pytest.raises(ConfigError, match=f"{kind} cannot be guarded"):
        hs.integrations.accelerate.guard(script.accelerator, script.model, script.optimizer)


def test_a_closure_is_refused() -> None:
    script = Script()
    with pytest.raises(ConfigError, match="closure"):
        script.optimizer.step(lambda: None)


def test_an_optimizer_that_steps_inside_backward_is_refused() -> None:
    class LayerWiseDummyOptimizer(torch.optim.SGD):
        """As transformers names the one of GaLore."""

    accelerator, model = Accelerator(cpu=True), Net()
    prepared = accelerator.prepare(model, LayerWiseDummyOptimizer(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="LayerWiseDummyOptimizer cannot be guarded"):
        hs.integrations.accelerate.guard(accelerator, *prepared)


def test_backward_on_the_loss_itself_is_named() -> None:
    script = Script()
    x, y = next(script.batches)
    F.cross_entropy(script.model(x), y).backward()
    with pytest.warns(UserWarning, match="the loss is not"):
        script.optimizer.step()
