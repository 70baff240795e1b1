"""Work in a fresh thread, backward passes included.

torch keeps cuDNN's choice of algorithms for each thread, by the shapes alone: a convolution that ran before in this
thread keeps its algorithm, whatever `cudnn.benchmark` says by then (ATen/native/cudnn/Conv_v8.cpp; tests/gpu has the
proof). So each candidate of a trial gets a thread without a past, and the run's own thread is left without one.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

LOOK_S = 0.1  # how often the waiting thread looks up: on some systems a signal does not end the wait for a lock


def in_fresh_thread(work: Callable[[], T], device: torch.device) -> T:
    """What `work` returns or raises. An interrupt of the caller reaches it, and is raised once it has ended."""
    before_a_thread()
    errand = _Errand(work, device)
    errand.start()
    try:
        errand.wait()
    except BaseException:  # Ctrl-C, or what a handler of another signal raises
        errand.interrupt()
        errand.wait()
        raise
    try:
        if errand.error is not None:
            raise errand.error
        return errand.result
    finally:
        del errand  # or its error's frames, this one among them, would hold it, and it its error


class _Errand(threading.Thread, Generic[T]):
    result: T

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        super().__init__(name="halfstep trial", daemon=True)
        self.work = work
        self._cuda = _index_of(device) if device.type == "cuda" else None
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._context = contextvars.copy_context()  # settings of torch's compiler are kept for each thread

    def run(self) -> None:
        try:
            self.result = self._context.run(self._worked)
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Not `join`: Python 3.11 takes a thread for ended whose join was interrupted."""
        while not self._ended.wait(LOOK_S) and self.is_alive():  # an interrupt may end it before it says so
            pass

    def _worked(self) -> T:
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)  # a new thread has no CUDA context of its own, which Triton needs
        with torch.autograd.set_multithreading_enabled(False):  # backward here, not in the thread all others share
            return self.work()

    def interrupt(self) -> None:
        """At the next instruction of Python: a compiler that takes a minute is Python for the most part."""
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(KeyboardInterrupt))


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# --- what torch 2.11's compiler gets wrong in threads that end; torch 2.13 needs none of it ---

TREES = "torch._inductor.cudagraph_trees"
PLACES = ("tree_manager_containers", "tree_manager_locks")  # where the compiler has a thread's CUDA graphs


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
