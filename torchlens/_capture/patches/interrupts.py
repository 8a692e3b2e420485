"""Interrupts that arrive where Python would swallow them."""

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable

_MOMENT = 0.002  # seconds


def finalize(work: Callable[[], object]) -> None:
    """Does the work of a finalizer. What strikes meanwhile, a Ctrl-C, is raised in this thread when
    the finalizer is over.

    Python prints and forgets what is raised in a finalizer. What `work` raises by itself is a
    mistake of ours.
    """
    try:
        work()
    except BaseException as error:
        # Nothing here may wait: a thread made by `threading` waits until it has begun.
        _thread.start_new_thread(_raise_in, (threading.get_ident(), type(error)))


def _raise_in(thread_id: int, error_type: type[BaseException]) -> None:
    while _is_finalizing(thread_id):
        time.sleep(_MOMENT)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(error_type)
    )


def _is_finalizing(thread_id: int) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code is finalize.__code__ or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
