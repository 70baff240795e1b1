"""Each self-test of a library bug sees the symptom where it is, and none where halfstep or another torch avoids it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from command_line import run_command
from halfstep.hardware.driver import Accelerator, Driver
from halfstep_train.use import library_bugs
from halfstep_train.use.library_bugs import BUGS, BugFinding, LibraryBug, find_bugs

BY_NAME = {bug.name: bug for bug in BUGS}
IN_EVERY_TORCH = [
    "no-check-in-bf16",
    "fused-sgd",
    "batchnorm-nan",
    "scheduler-skip",
    "plateau-below-zero",
    "stale-casts",
    "tf32-flags",
]
"""Seen with torch 2.10 to 2.13. If one fails, torch has fixed the bug: say so on the page."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore")  # the tests train on infinity on purpose
@pytest.mark.parametrize("name", IN_EVERY_TORCH)
def test_plain_torch_has_the_bug_and_halfstep_does_not(name: str) -> None:
    assert BY_NAME[name].check("cpu", False)
    assert not BY_NAME[name].check("cpu", True)


@pytest.mark.filterwarnings("ignore")
def test_the_cast_cache_is_tested_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    check = BY_NAME["casts-without-grad"].check
    assert check("cpu", False) == (torch.__version__ < "2.11")
    assert not check("cpu", True)

    # What the cache of torch 2.10 does: the cast of the pass under no_grad is used again.
    casts: dict[int, torch.Tensor] = {}

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        cast = casts.setdefault(id(layer), layer.weight * 1)
        return F.linear(x, cast)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert check("cpu", False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_format_of_recurrent_layers_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need a GPU (tests/gpu); here a layer returns what cuDNN's does, and what it should."""
    monkeypatch.setattr(nn.LSTM, "forward", lambda layer, x: (x.to(dtype), None))
    assert BY_NAME["lstm-in-fp16"].check("cpu", False) == (dtype == torch.float16)


def test_an_attention_that_returns_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not BY_NAME["cudnn-attention"].check("cpu", False)
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *qkv: attention(*qkv) * float("nan"))
    assert BY_NAME["cudnn-attention"].check("cpu", False)


def test_a_gpu_that_emulates_bf16_is_seen_and_gets_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    t4 = Accelerator(kind="cuda", device="cuda:0", name="Tesla T4", capability=(7, 5), memory_total_bytes=15 * 2**30)
    monkeypatch.setattr(Driver, "list_accelerators", lambda self: (t4,))
    monkeypatch.setattr(Driver, "read_free_bytes", lambda self, device: 14 * 2**30)
    # What torch answers on that GPU (pytorch/pytorch#148322).
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    check = BY_NAME["emulated-bf16"].check
    assert check("cuda", False)
    assert not check("cuda", True)


def test_without_a_gpu_its_bugs_are_not_claimed_either_way() -> None:
    findings = {finding.bug.name: finding for finding in find_bugs("cpu")}
    assert list(findings) == list(BY_NAME)
    for finding in findings.values():
        assert (finding.here == "needs a GPU") == finding.bug.needs_gpu
        assert finding.with_halfstep == ("avoided" if finding.is_here else "")


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return run_command(capsys, "detect", *words)


def test_the_command_lists_every_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = output_of(capsys, "--bugs")
    assert code == 0
    assert all(bug.name in out for bug in BUGS)
    assert out.count("needs a GPU") == sum(bug.needs_gpu for bug in BUGS)
    code, out, _ = output_of(capsys, "--bugs", "--json")
    assert [bug["name"] for bug in json.loads(out)["bugs"]] == list(BY_NAME)


def test_a_bug_that_halfstep_does_not_avoid_is_a_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = LibraryBug(name="everywhere", what="always there", check=lambda device, is_guarded: True)
    monkeypatch.setattr(library_bugs, "BUGS", (bug,))
    code, out, _ = output_of(capsys, "--bugs")
    assert code == 1
    assert "NOT avoided" in out
    assert BugFinding(bug=bug, is_here=False, is_shielded=True).with_halfstep == ""


@pytest.mark.parametrize("more", ["v100", "--no-measure", "--fresh"])
def test_other_options_are_refused(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output_of(capsys, "--bugs", more)
    assert code == 2
    assert "--bugs tests the first GPU" in err
