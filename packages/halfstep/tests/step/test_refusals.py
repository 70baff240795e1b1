"""Models spread differently from DDP and FSDP2 are refused; a world of one trains as without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep.step import torch_version
from halfstep.step.step import GuardedStep
from halfstep.step.torch_version import NEWEST_TESTED, report_untested_torch
from tiny_training import assert_same_bits, batch, loss_of, make_model, plan, poisoned


@contextmanager
def world_of(size: int, folder: Path) -> Iterator[None]:
    if size == 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_of(model: nn.Module) -> hs.Step:
    return hs.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), "fp32", clip_norm=1.0)


def test_a_plain_model_among_two_processes_is_refused_with_the_lines_to_add(tmp_path: Path) -> None:
    with world_of(2, tmp_path), pytest.raises(ConfigError, match="2 ranks") as refused:
        step_of(make_model())
    assert "DistributedDataParallel(model)" in refused.value.fix


def test_in_a_world_of_one_a_wrapped_model_trains_to_the_same_bits(tmp_path: Path) -> None:
    plain, wrapped = make_model(), make_model()
    with world_of(1, tmp_path):
        ddp = DistributedDataParallel(wrapped)
        steps = [(step_of(plain), plain), (step_of(ddp), ddp)]
        for made in ([batch(0)], [batch(1)], [poisoned()], [batch(2)]):
            outcomes = [step(loss_of(model), made).committed for step, model in steps]
            assert outcomes[0] == outcomes[1]
            assert_same_bits(plain.state_dict(), wrapped.state_dict())


def test_models_spread_over_devices_are_refused_by_name() -> None:
    spread = nn.DataParallel(make_model())
    spread.device_ids = [0, 1]
    with pytest.raises(ConfigError, match="DataParallel spreads the model over 2 devices"):
        step_of(spread)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ConfigError, match="the model is on cpu, meta"):
        GuardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), plan())


# --- a newer torch than the newest tested one is reported once per process ---


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The one line for the installed torch, if no version were tested."""
    monkeypatch.setattr(torch_version, "NEWEST_TESTED", (1, 99))
    report_untested_torch.cache_clear()
    yield f"halfstep: torch {torch.__version__} is newer than 1.99, the newest version that halfstep was tested with\n"
    report_untested_torch.cache_clear()


def test_steps_report_an_untested_torch_once_per_process(untested: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        model = nn.Linear(2, 1)
        hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32")
    assert capsys.readouterr().err == untested


@pytest.mark.parametrize("suffix", [".0", ".1", ".0+cu132", ".0.dev20261101", ".0a0+git0123abc"])
def test_only_versions_after_the_newest_tested_one_are_reported(
    suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    major, minor = NEWEST_TESTED
    for tested in ("2.10.0", f"{major}.{minor}{suffix}"):
        report_untested_torch(tested)
    assert capsys.readouterr().err == ""
    for newer in (f"{major}.{minor + 1}{suffix}", f"{major + 1}.0{suffix}"):
        report_untested_torch(newer)
        assert f"torch {newer} is newer" in capsys.readouterr().err
