"""Gives the memory of dropped logs back to the system, where glibc would keep it.

The tensors of a log are freed together. Up to a limit that memory stays with the process: the next
log, and the next plain pass, would otherwise fetch every page from the system again, which costs
about as much as computing what is written there. Beyond the limit, glibc is asked to return all of
it (`malloc_trim`). No setting of the allocator changes.
"""

import _thread
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from torchlens._recording.process_memory import resident_bytes

# The process keeps at most this much free memory, and at most this share of the machine's.
_MOST_KEPT = 256 * 2**20
_SHARE_KEPT = 16
_NEGLIGIBLE_BYTES = 2**20  # below this, glibc returns nothing by itself
# Freeing a block of 64 KB makes glibc return free memory; from 128 KB on, a block may be a mapping
# of its own.
_CUSHION_SIZES = tuple(96 * 1024 * 2**power for power in range(6))
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


class FreedMemory:
    """The free memory that logs have left with the process. `library` is glibc, or None."""

    def __init__(self, library: Any, most_kept: int = _MOST_KEPT) -> None:
        self._library = library
        self._most_kept = most_kept
        # The smallest values seen so far. Free memory below its minimum is not left by logs.
        self._least_resident: int | None = None
        self._least_free: int | None = None
        # A block behind all memory in use: glibc returns only free memory at the end of its heap.
        self._cushion: bytearray | None = None

    def note_use(self) -> None:
        """A log is about to begin, or is at its largest: what is free now is not left by it."""
        if self._library is not None:
            grown = self._grown_bytes()
            if self._least_free is None or grown > self._most_kept:
                self._free_bytes()

    def drop(self, free: Callable[[], object]) -> None:
        """Calls `free`, which releases a log, and returns memory to the system if much is free."""
        grown = 0 if self._library is None else self._grown_bytes()
        if grown <= self._most_kept:
            if grown > _NEGLIGIBLE_BYTES:
                self._cushion = self._block_at_end()
            free()
            return
        self._free_bytes()
        free()
        left = self._free_bytes()
        if left - (self._least_free or 0) > self._most_kept:
            self._least_free = left  # returned memory still counts as free in glibc's books
            self._cushion = None
            self._library.malloc_trim(0)

    def _grown_bytes(self) -> int:
        """How much larger the process is than it was at its smallest."""
        now = resident_bytes() or 0
        if self._least_resident is None or now < self._least_resident:
            self._least_resident = now
        return now - self._least_resident

    def _free_bytes(self) -> int:
        free: int = self._library.mallinfo2().fordblks
        if self._least_free is None or free < self._least_free:
            self._least_free = free
        return free

    def _block_at_end(self) -> bytearray | None:
        """A block behind all memory in use; None if every size tried fills a gap before the end."""
        gaps = []
        for size in _CUSHION_SIZES:
            end = self._library.mallinfo2().keepcost
            block = bytearray(size)
            if self._library.mallinfo2().keepcost != end:
                return block
            gaps.append(block)  # held until the end, so that the next block fills another gap
        return None


class Afterwards:
    """Hangs on something that is freed late; its finalizer gives memory back."""

    def __del__(self) -> None:
        finalize(lambda: freed_memory().drop(lambda: None))


@cache
def freed_memory() -> FreedMemory:
    """The one of this process. Does nothing without glibc, or if the user has configured it."""
    is_configured = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(
        name in os.environ for name in _SETTINGS
    )
    library: Any = None if sys.platform != "linux" or is_configured else ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # glibc before 2.33; musl
        return FreedMemory(None)
    library.mallinfo2.restype = MallocInfo
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return FreedMemory(library, min(_MOST_KEPT, machine_bytes // _SHARE_KEPT))


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
