"""Strict fp32 and TF32 set every leaf flag, agree with the old switches, and put everything back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halfstep import backend_flags
from halfstep.backend_flags import (
    LEAVES,
    BackendFlags,
    Fp32Mode,
    _use_up_deprecation_notice,
    read_effective_leaves,
    read_flags,
    set_fp32_mode,
    write_flags,
)

set_leaf = torch._C._set_fp32_precision_setter
get_leaf = torch._C._get_fp32_precision_getter

PARENTS = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]


@pytest.fixture(autouse=True)
def _flags_as_found() -> Iterator[None]:
    found = read_flags()
    for flag in (*PARENTS, *LEAVES):
        set_leaf(*flag, "none")
    yield
    for parent in PARENTS:
        set_leaf(*parent, "none")
    write_flags(found)


@pytest.mark.parametrize("mode", ["ieee", "tf32"])
def test_every_leaf_is_set_inside(mode: Fp32Mode) -> None:
    with set_fp32_mode(mode):
        assert set(read_effective_leaves().values()) == {mode}


@pytest.mark.parametrize(("mode", "is_tf32"), [("ieee", False), ("tf32", True)])
def test_the_old_switches_can_be_read_and_agree(mode: Fp32Mode, is_tf32: bool) -> None:
    with set_fp32_mode(mode):
        assert torch.backends.cuda.matmul.allow_tf32 is is_tf32
        assert torch.backends.cudnn.allow_tf32 is is_tf32
        assert torch.get_float32_matmul_precision() == ("high" if is_tf32 else "highest")


def start_states() -> dict[str, list[tuple[str, str, str]]]:
    return {
        "torch's own": [],
        "root set": [("generic", "all", "tf32")],
        "leaf follows its parent": [("cuda", "all", "tf32"), ("cuda", "matmul", "none"), ("cuda", "conv", "none")],
        "old and new disagree": [("cuda", "matmul", "tf32"), ("cuda", "conv", "ieee")],
        "bf16 on the CPU": [("mkldnn", "matmul", "bf16")],
    }


@pytest.mark.parametrize("state", start_states())
def test_everything_is_put_back_exactly(state: str) -> None:
    for backend, op, value in start_states()[state]:
        set_leaf(backend, op, value)
    raw, effective, parents = read_flags(), read_effective_leaves(), [get_leaf(*parent) for parent in PARENTS]
    with set_fp32_mode("ieee"), set_fp32_mode("tf32"), set_fp32_mode("ieee"):
        pass
    assert (read_flags(), read_effective_leaves(), [get_leaf(*parent) for parent in PARENTS]) == (
        raw,
        effective,
        parents,
    )


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("cudnn", [True, False])
def test_old_switches_are_put_back(precision: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn
    with set_fp32_mode("tf32"):
        pass
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 is cudnn


def test_a_leaf_that_followed_its_parent_still_does() -> None:
    set_leaf("cuda", "conv", "none")
    with set_fp32_mode("ieee"):
        pass
    set_leaf("cuda", "all", "tf32")
    assert get_leaf("cuda", "conv") == "tf32"


def test_flags_are_put_back_after_an_exception() -> None:
    before = read_flags()
    with pytest.raises(ZeroDivisionError), set_fp32_mode("tf32"):
        _ = 1 / 0
    assert read_flags() == before


def test_the_first_reading_of_a_process_changes_nothing() -> None:
    before = [get_leaf(*leaf) for leaf in LEAVES]
    _use_up_deprecation_notice.cache_clear()
    read_flags()
    assert [get_leaf(*leaf) for leaf in LEAVES] == before


@pytest.mark.parametrize("moment", ["enter", "exit"])
def test_ctrl_c_between_the_old_switches_and_the_leaves_changes_no_flag(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    before, moments = read_flags(), ["enter", "exit"]

    def write_half(flags: BackendFlags) -> None:
        if moments and moments.pop(0) == moment:
            torch._C._set_cudnn_allow_tf32(flags.cudnn_allow_tf32)
            raise KeyboardInterrupt
        write_flags(flags)

    monkeypatch.setattr(backend_flags, "write_flags", write_half)
    with pytest.raises(KeyboardInterrupt), set_fp32_mode("ieee"):
        pass
    assert read_flags() == before
