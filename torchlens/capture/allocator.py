"""How much freed memory the C library keeps."""

import ctypes
import os
import sys
from functools import cache

__all__ = ["keep_freed_memory"]

# Of freed memory, the process keeps at most this much, and at most this share of the machine's memory.
_KEPT_BYTES = 512 * 2**20
_KEPT_SHARE = 16
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_ALLOCATOR_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> None:
    """Lets the C library keep some freed memory for the next tensors, rather than hand it back at once.

    The tensors of a log are freed together, and the next log would get each page of its memory anew from the system,
    which costs about as much as computing what is written there. glibc keeps what lies free at the end of its memory up to
    a limit of at most 64 MB, unless it is told another; who has told it one by the environment is left alone.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        if mallopt is not None:
            num_bytes = min(_KEPT_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _KEPT_SHARE)
            mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # where glibc itself would end; saying the other fixes this one too
            mallopt(_TRIM_THRESHOLD, num_bytes)
