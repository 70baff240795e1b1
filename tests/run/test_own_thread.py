"""Work in a thread of its own: results, errors and interrupts come through, and backward stays in it."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from halfstep.run.own_thread import in_own_thread

CPU = torch.device("cpu")


def test_results_and_errors_come_through() -> None:
    assert in_own_thread(threading.get_ident, CPU) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0, CPU)


def test_backward_runs_in_the_same_thread_and_settings_of_the_caller_hold() -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")
    setting.set("callers")
    threads: list[int] = []

    def work() -> tuple[int, str, bool]:
        x = torch.ones(2, requires_grad=True)

        def seen(grad: Tensor) -> None:
            threads.append(threading.get_ident())

        (x * 2).register_hook(seen)
        y = x * 2
        y.register_hook(seen)
        y.sum().backward()
        return threading.get_ident(), setting.get(), torch.autograd.is_multithreading_enabled()

    ident, value, is_multithreaded = in_own_thread(work, CPU)
    assert threads == [ident]
    assert value == "callers"
    assert not is_multithreaded
    assert torch.autograd.is_multithreading_enabled()


def test_ctrl_c_ends_the_work_and_is_raised_after_its_clean_up() -> None:
    events: list[str] = []

    def work() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                time.sleep(0.01)
        finally:
            events.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        in_own_thread(work, CPU)
    assert events == ["cleaned up"]
