"""The compiler in threads that end: what torch 2.11 frees too often stays alive."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import torch

from halfstep.tune.fresh_thread import TREES, import_graphs, in_fresh_thread, place_for_graphs
from warm_processes import process


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


def test_a_thread_that_imports_the_compilers_graphs_first_may_end(tmp_path: Path) -> None:
    with process(first_import_in_a_thread, output=tmp_path / "said") as started:
        started.join()
        assert started.exitcode == 0, (tmp_path / "said").read_text()  # torch 2.11 crashed


def test_the_compilers_graphs_have_a_place_in_every_thread() -> None:
    from torch._inductor import cudagraph_trees as trees

    def containers() -> object:
        place_for_graphs()
        return trees.get_obj(trees.local, "tree_manager_containers")

    places = [in_fresh_thread(containers, torch.device("cpu")) for _ in range(9)]
    gc.collect()
    # With the thread torch 2.11 lets go of a place that it never took hold of: others would be written over ours.
    others = [{} for _ in range(1000)]
    assert places == [{}] * 9
    assert len({id(place) for place in [*places, *others]}) == 1009
