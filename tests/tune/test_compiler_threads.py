"""The compiler in threads that end: what torch 2.11 frees too often stays alive."""

from __future__ import annotations

import gc
import subprocess
import sys

import torch

from halfstep.tune.fresh_thread import in_fresh_thread, place_for_graphs

FIRST_IMPORT_IN_A_THREAD = """
import gc, threading
from halfstep.tune.fresh_thread import import_graphs
from torch.compiler import reset

def work():
    import_graphs()
    reset()
    from torch._inductor import cudagraph_trees
    places.append(cudagraph_trees.local.tree_manager_containers)

places = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
gc.collect()
others = [{} for _ in range(1000)]
assert places == [{}] and not any(other is places[0] for other in others)
"""


def test_a_thread_that_imports_the_compilers_graphs_first_may_end() -> None:
    ended = subprocess.run([sys.executable, "-c", FIRST_IMPORT_IN_A_THREAD], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr  # torch 2.11 crashed


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
