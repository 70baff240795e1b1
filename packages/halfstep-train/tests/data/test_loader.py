from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfstep.disk import is_alive
from halfstep.errors import DataError
from halfstep_train.data.loader import (
    FileSamples,
    Loader,
    NamedSamples,
    WholeBatches,
    WorkerBatches,
    implements,
    make_generator,
)
from warm_processes import process


class Numbers:
    """Sample i is i and noise of its key."""

    def __init__(self, count: int, *, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        if index == self.bad:
            raise DataError("cannot read seven.png", why="cut short", fix="replace it")
        noise = torch.rand(2, generator=make_generator(*key))
        return {"image": torch.cat([torch.tensor([float(index)]), noise])}


class WithNames(Numbers):
    """Attributes that are called as methods of other data sets are."""

    files, batch, filled, name_of = ["a.wav", "b.wav"], 8, True, "chirps"


def test_attributes_of_a_users_own_are_not_taken_for_the_methods_of_that_name() -> None:
    own, plain = (list(Loader(kind(5), batch_size=2).iterate_epoch(0)) for kind in (WithNames, Numbers))
    assert all(mine["image"].equal(other["image"]) for mine, other in zip(own, plain, strict=True))
    assert not any(implements(WithNames(5), kind) for kind in (FileSamples, WholeBatches, WorkerBatches, NamedSamples))


class Dying(Numbers):
    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        if index == self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index, key=key)


def rows(loader: Loader, epoch: int, start: int = 0) -> list[Tensor]:
    return [
        torch.cat([batch["index"][:, None].float(), batch["image"]], dim=1)
        for batch in loader.iterate_epoch(epoch, start)
    ]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_workers_change_nothing_and_order_depends_on_seed_and_epoch() -> None:
    here = Loader(Numbers(11), batch_size=4, seed=5)
    there = Loader(Numbers(11), batch_size=4, seed=5, num_workers=2)
    for epoch in (0, 1, 7):
        assert equal(rows(here, epoch), rows(there, epoch))
    assert not equal(rows(here, 0), rows(here, 1))
    assert not equal(rows(here, 0), rows(Loader(Numbers(11), batch_size=4, seed=6), 0))


def test_an_epoch_holds_every_sample_once_the_last_batch_partial() -> None:
    loader = Loader(Numbers(11), batch_size=4)
    batches = rows(loader, 3)
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert len(loader) == 3
    assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(11))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_starting_in_the_middle_gives_the_rest_of_the_epoch(num_workers: int) -> None:
    loader = Loader(Numbers(11), batch_size=2, num_workers=num_workers)
    whole = rows(loader, 2)
    assert equal(rows(loader, 2, start=4), whole[4:])
    assert rows(loader, 2, start=6) == []


def test_an_epoch_left_early_does_not_leak_into_the_next() -> None:
    loader = Loader(Numbers(12), batch_size=2, num_workers=2)
    expected = rows(loader, 1)
    left_early = loader.iterate_epoch(0)
    next(left_early)
    assert equal(rows(loader, 1), expected)


def test_validation_keeps_the_order_and_may_be_smaller_than_a_batch() -> None:
    (batch,) = Loader(Numbers(3), batch_size=8, shuffle=False).iterate_epoch(0)
    assert batch["index"].tolist() == [0, 1, 2]


def test_a_batch_larger_than_the_training_set_is_an_error() -> None:
    with pytest.raises(DataError, match="batch size 8 is larger than the training set of 3 samples"):
        Loader(Numbers(3), batch_size=8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_worker_arrives_as_it_was_raised(num_workers: int) -> None:
    loader = Loader(Numbers(10, bad=7), batch_size=2, num_workers=num_workers, shuffle=False)
    batches = loader.iterate_epoch(0)
    for _ in range(3):
        next(batches)
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "cannot read seven.png\n  why: cut short\n  fix: replace it"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_is_an_error_and_not_a_hang() -> None:
    loader = Loader(Dying(10, bad=3), batch_size=2, num_workers=2, shuffle=False)
    with pytest.raises(DataError, match="worker"):
        list(loader.iterate_epoch(0))
    gc.collect()  # multiprocessing drops a socket half-way through its handshake with the dead worker


def test_loading_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(Loader(Numbers(4), batch_size=2, num_workers=1).iterate_epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


class Ids:
    """Samples that tell which process made them."""

    def __len__(self) -> int:
        return 6

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return {"pid": torch.tensor(os.getpid())}


def signalled_with_its_workers() -> None:
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    batches = Loader(Ids(), batch_size=1, num_workers=2, shuffle=False).iterate_epoch(0)
    pids = {int(next(batches)["pid"]), int(next(batches)["pid"])}
    if os.fork() == 0:  # as a terminal or a scheduler does
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpgrp(), signal.SIGINT)
        os.killpg(os.getpgrp(), signal.SIGTERM)
        os._exit(0)
    os.wait()
    pids |= {int(batch["pid"]) for batch in batches}
    print(*pids, flush=True)


@pytest.mark.slow
def test_workers_survive_ctrl_c_and_end_with_their_parent(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with process(signalled_with_its_workers, output=said) as run:
        run.join(timeout=60)
        assert run.exitcode == 0, said.read_text()
    pids = [int(pid) for pid in said.read_text().split()]
    assert len(pids) == 2
    assert_end(pids)


def assert_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="workers elsewhere are left to torch")
def test_a_run_that_ended_and_was_not_asked_how_is_not_there() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        deadline = time.monotonic() + 20
        while is_running(ended.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.path.exists(f"/proc/{ended.pid}")
        assert not is_alive(ended.pid)
    assert not is_alive(ended.pid)
    assert is_alive(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="workers elsewhere are left to torch")
def test_a_run_is_there_whose_name_was_cut_in_the_middle_of_a_letter() -> None:
    name = "a训练模型运行".encode()[:15]
    Path("/proc/self/comm").write_bytes(name)
    try:
        assert name in Path("/proc/self/stat").read_bytes()
        assert is_alive(os.getpid())
    finally:
        Path("/proc/self/comm").write_bytes(b"python")


def is_running(pid: int) -> bool:
    """Return False for zombies, too: they have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_workers_than_cores_are_the_users_own_choice_without_a_warning() -> None:
    loader = Loader(Numbers(4), batch_size=2, num_workers=(os.cpu_count() or 1) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader.iterate_epoch(0))) == 2
    loader.close()


def test_closing_ends_the_workers_of_an_epoch_that_somebody_still_holds() -> None:
    """As the traceback of an interrupted run does."""
    others = set(multiprocessing.active_children())
    loader = Loader(Numbers(40), batch_size=2, num_workers=2)
    held = loader.iterate_epoch(0)
    next(held)
    assert len(set(multiprocessing.active_children()) - others) == 2
    loader.close()
    assert set(multiprocessing.active_children()) <= others
    assert len(list(loader.iterate_epoch(1))) == 20
    loader.close()
