"""Work in a thread without a past, and what torch 2.11 frees too often when one ends."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfstep_train.tune.fresh_thread import TREES, _Errand, import_graphs, make_graph_storage, run_in_fresh_thread
from warm_processes import process

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


def first_import_in_a_thread() -> None:
    assert TREES not in sys.modules
    places: list[object] = []

    def work() -> None:
        import_graphs()
        torch.compiler.reset()
        places.append(sys.modules[TREES].local.tree_manager_containers)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    others = [{} for _ in range(1000)]
    assert places == [{}]
    assert not any(other is places[0] for other in others)


@pytest.mark.slow  # a process imports the compiler
def test_a_thread_that_imports_the_compilers_graphs_first_may_end(tmp_path: Path) -> None:
    with process(first_import_in_a_thread, output=tmp_path / "said") as started:
        started.join()
        assert started.exitcode == 0, (tmp_path / "said").read_text()  # torch 2.11 crashed


def test_the_compilers_graphs_have_a_place_in_every_thread() -> None:
    from torch._inductor import cudagraph_trees as trees

    def containers() -> object:
        make_graph_storage()
        return trees.get_obj(trees.local, "tree_manager_containers")

    places = [run_in_fresh_thread(containers, torch.device("cpu")) for _ in range(9)]
    gc.collect()
    # With the thread torch 2.11 lets go of a place that it never took hold of: others would be written over ours.
    others = [{} for _ in range(1000)]
    assert places == [{}] * 9
    assert len({id(place) for place in [*places, *others]}) == 1009
