"""What torch 2.11's compiler gets wrong in threads that end, put right. torch 2.13 needs none of it."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict

import torch

TREES = "torch._inductor.cudagraph_trees"
PLACES = ("tree_manager_containers", "tree_manager_locks")
"""Where the compiler has a thread's CUDA graphs."""


def before_a_thread() -> None:
    """Call this before a thread is started that may compile."""
    if torch.cuda.is_available():
        import_graphs()
    elif torch.backends.cuda.is_built():
        # Without a GPU the compiler puts a guard in the GPU's place, which goes with the thread that asked for it
        # first: whoever compiles after that thread would crash.
        torch._C._ensureCUDADeviceGuardSet()


def forget_compiled() -> None:
    """All that was compiled in this process, in whichever thread: `torch.compiler.reset`."""
    if torch.cuda.is_available():
        import_graphs()
    torch.compiler.reset()


def import_graphs() -> None:
    """Import the compiler's CUDA graphs, as `torch.compiler.reset` does in whatever thread calls it first."""
    if TREES in sys.modules:
        return
    from torch._inductor import cudagraph_trees as trees

    if not hasattr(trees, "_initialize_tls"):
        _hold_places(trees.local)


def place_for_graphs() -> None:
    """The compiler keeps CUDA graphs for each thread; in torch 2.11 only the thread that imported it has a place."""
    import_graphs()
    from torch._inductor import cudagraph_trees as trees

    if hasattr(trees, "_initialize_tls") or hasattr(trees.local, PLACES[0]):
        return
    trees.local.tree_manager_containers = {}
    trees.local.tree_manager_locks = defaultdict(threading.Lock)
    for name in PLACES:
        torch._C._stash_obj_in_tls(name, getattr(trees.local, name))
    _hold_places(trees.local)


def _hold_places(local: threading.local) -> None:
    """torch 2.11 lets go of them when the thread ends, but has not taken hold of them: we do that in its place.

    Else they are freed while in use, and the next garbage collection crashes, or a layer has lost its weight."""
    for name in PLACES:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(local, name)))
