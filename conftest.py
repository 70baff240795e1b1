"""Shared by all tests: two cores, so one torch thread a worker. Without a GPU, GPU tests are skipped loudly and
Triton's kernels run in its interpreter."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # after the number of threads, which it reads once

from halfstep.backend_flags import read_flags, write_flags
from warm_processes import nothing_waits_for_the_disk

# A job in a script's background ignores Ctrl-C, one under nohup a closed terminal, and both hand that down: tests that
# send themselves such a signal would wait for it for ever.
for number, usual in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

nothing_waits_for_the_disk()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("soak") and "soak" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="takes minutes, `make soak` runs it: this was NOT tested"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, none here: this was NOT tested"))


def pytest_collection_finish(session: pytest.Session) -> None:
    forget_to_look_through_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At the end of each file: its tests may have imported the compiler's hundred thousand objects."""
    if nextitem is not None and nextitem.path != item.path:
        forget_to_look_through_what_is_there()


def forget_to_look_through_what_is_there() -> None:
    """Every run collects garbage: without this it would walk torch, the compiler and all tests each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def trained_unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests read; one that changes it copies it first."""
    from tiny_runs import unet_run

    return unet_run(tmp_path_factory.mktemp("unet") / "run")


@pytest.fixture(scope="session")
def trained_resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_runs import resnet_run

    return resnet_run(tmp_path_factory.mktemp("resnet") / "run")


@pytest.fixture(autouse=True)
def _backend_flags_are_as_before() -> Iterator[None]:
    """Fail a test that leaves torch's flags of fp32 matmuls and convolutions changed: code under test did not restore
    them. They are restored for the tests after it."""
    before = read_flags()
    yield
    after = read_flags()
    write_flags(before)
    assert after == before


@pytest.fixture(autouse=True)
def _no_autocast_left_open() -> Iterator[None]:
    """Close autocast contexts that a test left open, as an interrupt inside `torch.autocast.__enter__` does.

    While one is open torch never clears its cache of cast weights, and later tests would train on stale copies.
    """
    yield
    torch.autocast_increment_nesting()
    for _ in range(torch.autocast_decrement_nesting()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
