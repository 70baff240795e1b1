"""Work in a thread without a past, and what torch 2.11 frees too often when one ends."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from halfstep_train.tune.fresh_thread import _Errand, run_in_fresh_thread

CPU = torch.device("cpu")


def test_results_and_errors_come_through() -> None:
    assert run_in_fresh_thread(threading.get_ident, CPU) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        run_in_fresh_thread(lambda: 1 // 0, CPU)


def test_backward_runs_in_the_same_thread_and_context_variables_of_the_caller_hold() -> None:
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

    ident, value, is_multithreaded = run_in_fresh_thread(work, CPU)
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
        run_in_fresh_thread(work, CPU)
    assert events == ["cleaned up"]


class CutOff(_Errand[None]):
    """As if an interrupt came right before it would say that it has ended."""

    def run(self) -> None:
        pass


def test_a_thread_that_could_not_say_that_it_ended_is_not_waited_for() -> None:
    errand = CutOff(lambda: None, CPU)
    errand.start()
    waiting = threading.Thread(target=errand.wait, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()


def test_code_is_compiled_after_a_thread_that_compiled_is_gone() -> None:
    def compiled() -> float:
        torch.compiler.reset()
        return float(torch.compile(lambda x: x * 2, backend="eager")(torch.ones(())))

    assert [run_in_fresh_thread(compiled, torch.device("cpu")) for _ in range(2)] == [2.0, 2.0]
    assert compiled() == 2.0
