"""What glibc and the system say of the memory of this process."""

import ctypes
import os
import sys
from functools import cache
from typing import Any, NamedTuple

from torchlens.capture.system_memory import resident_bytes

__all__ = ["Glibc", "HeapBytes", "glibc"]

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class HeapBytes(NamedTuple):
    """What was asked for and not freed, and what lies free, whether the system has provided it with memory or not."""

    used: int
    free: int


class Glibc:
    """The allocator that torch and Python use on most Linux systems."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._tells = hasattr(library, "mallinfo2")  # since glibc 2.33
        if self._tells:
            library.mallinfo2.restype = _MallocInfo

    def resident_bytes(self) -> int | None:
        """As in `system_memory`."""
        return resident_bytes()

    def heap_bytes(self) -> HeapBytes | None:
        """Of all threads; None where glibc does not tell. It walks over all that is free: microseconds, rarely more."""
        if not self._tells:
            return None
        info = self._library.mallinfo2()
        return HeapBytes(info.uordblks + info.hblkhd, info.fordblks)

    def trim(self) -> None:
        """Hands everything that lies free back to the system."""
        self._library.malloc_trim(0)


@cache
def glibc() -> Glibc | None:
    """None on other systems, and where the user has set by the environment what is to be kept."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "glibc.malloc." in tunables or any(name in os.environ for name in _SETTINGS):
        return None
    library = ctypes.CDLL(None)
    return Glibc(library) if hasattr(library, "malloc_trim") else None  # musl, for instance, has none
