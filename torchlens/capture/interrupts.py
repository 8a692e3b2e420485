"""Interrupts that strike where Python would swallow them."""

import ctypes
import threading
import time
from collections.abc import Callable

__all__ = ["finalize"]

_MOMENT = 0.005  # seconds


def finalize(work: Callable[[], object]) -> None:
    """Does the work of a finalizer. What strikes meanwhile, a Ctrl-C, is raised in this thread a moment later.

    Python prints and forgets what is raised in a finalizer. What `work` raises by itself is a mistake of ours.
    """
    try:
        work()
    except BaseException as error:
        threading.Thread(target=_raise_in, args=(threading.get_ident(), type(error)), daemon=True).start()


def _raise_in(thread_id: int, error_type: type[BaseException]) -> None:
    time.sleep(_MOMENT)  # until the finalizer has returned
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error_type))
