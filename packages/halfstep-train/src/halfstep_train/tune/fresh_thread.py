"""Run work in a fresh thread, including backward passes.

torch keeps cuDNN's choice of algorithms per thread, keyed by the shapes alone: a convolution that ran before in this
thread keeps its algorithm, whatever `cudnn.benchmark` is by then (ATen/native/cudnn/Conv_v8.cpp; tests/gpu has the
proof). So each candidate of a trial gets a thread without history, and the run's own thread is left without one.
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

LOOK_S = 0.1  # polling interval of the waiting thread: on some systems a signal does not interrupt a lock


def run_in_fresh_thread(work: Callable[[], T], device: torch.device) -> T:
    """Run `work` in a fresh thread, and return or raise its result. The caller's interrupt is passed to the thread, and
    raised once it has ended."""
    prepare_for_thread()
    errand = _Errand(work, device)
    errand.start()
    try:
        errand.wait()
    except BaseException:  # Ctrl-C, or an exception of another signal's handler
        errand.interrupt()
        errand.wait()
        raise
    try:
        if errand.error is not None:
            raise errand.error
        return errand.result
    finally:
        del errand  # breaks a cycle: the error's frames include this one


class _Errand(threading.Thread, Generic[T]):
    result: T

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        super().__init__(name="halfstep trial", daemon=True)
        self.work = work
        self._cuda: int | None = None
        if device.type == "cuda":
            self._cuda = torch.cuda.current_device() if device.index is None else device.index
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._context = contextvars.copy_context()  # torch's compiler keeps its settings per thread

    def run(self) -> None:
        try:
            self.result = self._context.run(self._work)
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait for the end. Not `join`: Python 3.11 treats a thread as ended if its join was interrupted."""
        while not self._ended.wait(LOOK_S) and self.is_alive():  # an interrupt may end it before it sets the event
            pass

    def _work(self) -> T:
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)  # Triton needs a CUDA context, which a new thread does not have
        with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, not in autograd's shared one
            return self.work()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the thread at its next Python instruction.

        This also stops a long compilation soon, since that mostly runs Python code.
        """
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(KeyboardInterrupt))


# --- workarounds for torch 2.11's compiler in threads that end; torch 2.13 needs none of them ---

TREES = "torch._inductor.cudagraph_trees"
STORAGES = ("tree_manager_containers", "tree_manager_locks")  # where the compiler has a thread's CUDA graphs


def prepare_for_thread() -> None:
    """Prepare the compiler; call this before a thread that may compile is started."""
    if torch.cuda.is_available():
        import_graphs()
    elif torch.backends.cuda.is_built():
        # Without a GPU the compiler uses a placeholder guard, which ends with the thread that first asked for it:
        # compiling after the end of that thread would crash.
        torch._C._ensureCUDADeviceGuardSet()


def forget_compiled() -> None:
    """Forget all code compiled in this process, in any thread: `torch.compiler.reset`."""
    if torch.cuda.is_available():
        import_graphs()
    torch.compiler.reset()


def import_graphs() -> None:
    """Import the compiler's CUDA graphs here, because `torch.compiler.reset` does it in the thread that first calls
    it."""
    if TREES in sys.modules:
        return
    from torch._inductor import cudagraph_trees as trees

    if not hasattr(trees, "_initialize_tls"):
        _hold_graph_storage(trees.local)


def make_graph_storage() -> None:
    """Make this thread's storage for the compiler's CUDA graphs: torch 2.11 makes it only in the importing thread."""
    import_graphs()
    from torch._inductor import cudagraph_trees as trees

    if hasattr(trees, "_initialize_tls") or hasattr(trees.local, STORAGES[0]):
        return
    trees.local.tree_manager_containers = {}
    trees.local.tree_manager_locks = defaultdict(threading.Lock)
    for name in STORAGES:
        torch._C._stash_obj_in_tls(name, getattr(trees.local, name))
    _hold_graph_storage(trees.local)


def _hold_graph_storage(local: threading.local) -> None:
    """Add the references that torch 2.11 drops when the thread ends, without having taken them.

    Otherwise the storage is freed while in use, and the next garbage collection crashes, or a layer has lost its
    weight.
    """
    for name in STORAGES:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(local, name)))
