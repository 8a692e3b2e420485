"""What glibc and the system report about the memory of this process."""

import ctypes
import os
import sys
from functools import cache
from typing import Any, NamedTuple

from torchlens._recording.system_memory import resident_bytes

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
# Freeing a block of 64 KB makes glibc look at what it could hand back; one of 128 KB may be a
# mapping of its own.
_BLOCK_SIZES = tuple(96 * 1024 * 2**power for power in range(6))


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class HeapBytes(NamedTuple):
    """What was asked for and not freed, and what lies free, whether the system has provided it with
    memory or not.
    """

    used: int
    free: int


class Block:
    """A little memory, from the allocator itself."""

    _address = 0  # until it is told, which an interrupt may prevent

    def __init__(self, library: Any, address: int) -> None:
        self._library = library
        self._address = address

    def shrink(self, num_bytes: int) -> None:
        """Gives the rest of it back."""
        self._address = self._library.realloc(self._address, num_bytes) or self._address

    def __del__(self) -> None:
        if self._address:
            self._library.free(self._address)


class Glibc:
    """The allocator that torch and Python use on most Linux systems."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._tells = hasattr(library, "mallinfo2")  # since glibc 2.33
        if self._tells:
            library.mallinfo2.restype = _MallocInfo
        library.malloc.restype = library.realloc.restype = ctypes.c_void_p
        library.malloc.argtypes = [ctypes.c_size_t]
        library.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]

    def resident_bytes(self) -> int | None:
        """As in `system_memory`."""
        return resident_bytes()

    def heap_bytes(self) -> HeapBytes | None:
        """Of all threads; None where glibc does not tell. It walks over all that is free:
        microseconds, rarely more.
        """
        if not self._tells:
            return None
        info = self._library.mallinfo2()
        return HeapBytes(info.uordblks + info.hblkhd, info.fordblks)

    def last_block(self) -> Block | None:
        """A block behind all that is in use; None where there is none to be had, as in threads with
        memory of their own.
        """
        if not self._tells:
            return None
        gaps = []
        block = None
        for size in _BLOCK_SIZES:
            end = self._library.mallinfo2().keepcost  # what is left behind everything else
            address = self._library.malloc(size)
            if not address:
                break
            block = Block(self._library, address)
            if self._library.mallinfo2().keepcost != end:
                block.shrink(_BLOCK_SIZES[0])
                break
            gaps.append(
                block
            )  # what filled a gap is freed when all is done: the next must not fill it again
            block = None
        return block

    def trim(self) -> None:
        """Hands everything that lies free back to the system."""
        self._library.malloc_trim(0)


@cache
def glibc() -> Glibc | None:
    """None on other systems, and where the user has set by the environment what is to be kept."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if (
        sys.platform != "linux"
        or "glibc.malloc." in tunables
        or any(name in os.environ for name in _SETTINGS)
    ):
        return None
    library = ctypes.CDLL(None)  # ours alone: the types of its functions are nobody else's
    return (
        Glibc(library) if hasattr(library, "malloc_trim") else None
    )  # musl, for instance, has none
