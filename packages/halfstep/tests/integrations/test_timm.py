"""timm's loop with the drop-in scaler, with the real package. `make integrations` runs this file."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed, `make integrations` has it: this was NOT tested", allow_module_level=True)

from torchvision_shim import define_missing_operators  # noqa: E402

define_missing_operators()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import timm
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, NativeScaler

from halfstep.errors import ConfigError  # noqa: E402
from halfstep.integrations.timm import HalfstepScaler  # noqa: E402
from host_faults import (  # noqa: E402
    FAULTS,
    Net,
    assert_bad_steps_change_nothing,
    copy_state,
    find_dropped,
    make_data,
    same_bits,
    seeded,
)
from host_pages import run_page  # noqa: E402
from ranks_together import together  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


class Script:
    """One epoch as timm's train.py writes it."""

    def __init__(
        self, scaler: str = "ours", *, precision: Any = "fp32", accumulate: int = 1, ddp: bool = False, **clip: Any
    ) -> None:
        self.net: Any = seeded(Net)
        self.model: Any = torch.nn.parallel.DistributedDataParallel(self.net) if ddp else self.net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=True)
        self.schedule: Any = CosineLRScheduler(self.optimizer, t_initial=60, t_in_epochs=False)
        self.ema = ModelEmaV3(self.net, decay=0.9)
        self.loss_scaler: Any = NativeScaler("cpu") if scaler == "own" else None
        if scaler == "ours":
            self.loss_scaler = HalfstepScaler(self.model, self.optimizer, precision, max_consecutive=9)
            self.schedule, self.ema = self.loss_scaler.follow(self.schedule), self.loss_scaler.follow(self.ema)
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        self.clip, self.accumulate = clip, accumulate
        self.x, self.y = make_data(512)
        self.num = self.num_updates = 0

    def train(self, num_steps: int, fault: Any = None) -> None:
        for number in range(num_steps * self.accumulate):
            self.net.fault = fault
            rows = slice(8 * (self.num % 64), 8 * (self.num % 64) + 8)
            self.num += 1
            need_update = (number + 1) % self.accumulate == 0
            with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
                loss = self.model(self.x[rows], self.y[rows])["loss"] / self.accumulate
            if self.loss_scaler is not None:
                parameters = self.model.parameters()
                self.loss_scaler(loss, self.optimizer, parameters=parameters, need_update=need_update, **self.clip)
            else:
                loss.backward()
                if need_update:
                    timm.utils.dispatch_clip_grad(self.model.parameters(), self.clip["clip_grad"])
                    self.optimizer.step()
            if need_update:
                self.num_updates += 1
                self.optimizer.zero_grad()
                self.ema.update(self.net, step=self.num_updates)
                self.schedule.step_update(num_updates=self.num_updates, metric=0.0)

    @property
    def state(self) -> list[Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [
            *copy_state(self.model, self.optimizer, self.ema, *([self.loss_scaler] if self.loss_scaler else [])),
            rates,
        ]


def test_the_scaler_of_timm_is_called_as_expected() -> None:
    own, ours = inspect.signature(NativeScaler.__call__), inspect.signature(HalfstepScaler.__call__)
    assert list(own.parameters) == list(ours.parameters)
    assert [one.default for one in own.parameters.values()] == [one.default for one in ours.parameters.values()]
    assert NativeScaler.state_dict_key == HalfstepScaler.state_dict_key
    assert {"step_update", "t_in_epochs"} <= set(dir(Script("own").schedule))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guarded_loop_without_faults_equals_timms_own(accumulate: int) -> None:
    own, ours = (Script(kind, accumulate=accumulate, clip_grad=0.5) for kind in ("none", "ours"))
    own.train(30)
    ours.train(30)
    assert same_bits(own.state[:3], ours.state[:3])
    assert own.state[-1] == ours.state[-1]


def test_fp16_equals_timms_own_scaler() -> None:
    own, ours = Script("own", precision="fp16", clip_grad=0.5), Script(precision="fp16", clip_grad=0.5)
    own.train(10)
    ours.train(10)
    assert same_bits(own.state, ours.state)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [{}, {"clip_grad": 0.1}, {"clip_grad": 0.1, "clip_mode": "value"}])
def test_a_bad_step_leaves_everything_as_it_was(precision: str, accumulate: int, clip: dict[str, Any]) -> None:
    script = Script(precision=precision, accumulate=accumulate, **clip)
    assert_bad_steps_change_nothing(script, is_fp16=precision == "fp16")


def test_the_scaler_states_of_both_load_in_both() -> None:
    own, ours = Script("own", precision="fp16"), Script(precision="fp16")
    own.train(2)
    ours.train(2)
    ours.loss_scaler.load_state_dict(own.loss_scaler.state_dict())
    own.loss_scaler.load_state_dict(ours.loss_scaler.state_dict())
    Script(precision="bf16").loss_scaler.load_state_dict(own.loss_scaler.state_dict())


def test_a_model_of_timm_trains() -> None:
    model = timm.create_model("test_resnet", num_classes=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    loss_scaler = HalfstepScaler(model, optimizer, "fp32")
    x, y = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    before = copy_state(model)
    loss_scaler(F.cross_entropy(model(x * float("nan")), y), optimizer)
    assert same_bits(before, copy_state(model))
    optimizer.zero_grad()
    loss_scaler(F.cross_entropy(model(x), y), optimizer, clip_grad=1.0, parameters=model.parameters())
    assert not same_bits(before, copy_state(model))


def test_wrong_use_is_refused() -> None:
    script = Script()
    other = torch.optim.SGD(script.model.parameters())
    with pytest.raises(ConfigError, match="this SGD is not the optimizer"):
        script.loss_scaler(torch.zeros(()), other)
    with pytest.raises(ConfigError, match="already guarded"):
        HalfstepScaler(script.model, script.optimizer)
    with pytest.raises(ConfigError, match="HalfstepScaler takes a model, or a list of models, not str"):
        HalfstepScaler("cuda", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="precision='fp12'"):
        HalfstepScaler(script.model, other, "fp12")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not Linear"):
        script.loss_scaler.follow(torch.nn.Linear(1, 1))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("timm")


# --- two ranks ---


def train_on_a_rank(rank: int, size: int, port: int) -> list[bool]:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return find_dropped(Script(clip_grad=0.5, ddp=True), rank)


@pytest.mark.ranks
def test_a_fault_of_one_rank_drops_the_step_on_both(tmp_path: Path) -> None:
    assert together(2, train_on_a_rank, tmp_path) == [[True] * len(FAULTS)] * 2
