"""Giving freed memory back to the system.

The tensors of a log are freed together. glibc hands back what lies free at the end of its memory,
and keeps the rest for what is allocated next. To keep it is welcome up to a limit: otherwise the
next log, and the next plain pass, would get each page anew from the system, which costs about as
much as computing what is written there. So up to the limit one small block at the end, which lives
no longer than the model, keeps glibc from handing it back; beyond the limit, all that lies free is
handed back. No setting of the allocator is changed.
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torchlens._capture.memory.glibc import Block, Glibc, HeapBytes, glibc
from torchlens._capture.patches.interrupts import finalize

# Of the memory that logs let go of, the process keeps at most this much, and at most this share of
# the machine's.
_KEPT_BYTES = 256 * 2**20
_KEPT_SHARE = 16
# Below this, glibc keeps what lies free in any case, or soon does.
_NEGLIGIBLE_BYTES = 2**20


class FreedMemory:
    """How much memory logs have let go of that may still lie with the process."""

    def __init__(self, allocator: Glibc | None) -> None:
        self._allocator = allocator
        self._most_kept = (
            0 if allocator is None else min(_KEPT_BYTES, allocator.machine_bytes // _KEPT_SHARE)
        )
        # The least memory that the process held at any look.
        self._least_resident: int | None = None
        # The least that lay free since it was last handed back: it is not ours, or the system has
        # it already.
        self._least_free: int | None = None
        # What logs have freed since then.
        self._num_freed = 0
        # By model: what stands behind the memory that its last log freed.
        self._blocks: WeakKeyDictionary[Any, Block] = WeakKeyDictionary()

    def begin(self) -> None:
        """A log is about to begin."""
        if self._allocator is not None:
            is_first = self._least_resident is None
            self._grown_bytes(self._allocator)
            if is_first:
                self.note_use()

    def note_use(self) -> None:
        """Much memory is in use: what lies free beyond what lies free now may be ours."""
        if self._allocator is not None:
            self._look(self._allocator)

    def drop(self, free: Callable[[], object], model: Any = None) -> None:
        """Calls `free`, which lets go of a log, and hands memory back if logs have left too much of
        it lying.

        Less than that is kept for the next log as long as the model lives.
        """
        if self._allocator is None:
            free()
            return
        grown = self._grown_bytes(self._allocator)
        if (
            grown <= self._most_kept
        ):  # so there cannot be too much, and the allocator need not be asked
            self._num_freed = max(self._num_freed, grown)
            if model is not None and grown > _NEGLIGIBLE_BYTES:
                block = self._allocator.last_block()
                if block is not None:
                    self._blocks[model] = block  # the one before it goes
            free()
            return
        before = self._look(self._allocator)
        free()
        after = self._look(self._allocator)
        num_freed = self._num_freed
        if before is not None and after is not None:
            num_freed += before.used - after.used
            self._num_freed = num_freed
        self._hand_back(self._allocator, after, num_freed)

    def give_back(self) -> None:
        """Work of ours is done and keeps nothing: hands memory back if too much of it lies free,
        whoever freed it.
        """
        if self._allocator is not None and self._grown_bytes(self._allocator) > self._most_kept:
            heap = self._look(self._allocator)
            self._hand_back(self._allocator, heap, 0 if heap is None else heap.free)

    def _grown_bytes(self, allocator: Glibc) -> int:
        """By how much the process is larger than when it was smallest."""
        now = allocator.resident_bytes()
        if now is None:
            return 0
        if self._least_resident is None or now < self._least_resident:
            self._least_resident = now
        return now - self._least_resident

    def _look(self, allocator: Glibc) -> HeapBytes | None:
        heap = allocator.heap_bytes()
        if heap is not None and (self._least_free is None or heap.free < self._least_free):
            self._least_free = heap.free
        return heap

    def _hand_back(self, allocator: Glibc, heap: HeapBytes | None, num_freed: int) -> None:
        if heap is None or min(num_freed, heap.free - (self._least_free or 0)) > self._most_kept:
            # Noted before, not after: what another thread frees meanwhile may come too late for
            # this time.
            self._num_freed = 0
            self._least_free = None if heap is None else heap.free
            allocator.trim()


class Afterwards:
    """Hung on something that is freed late: when it goes, memory is given back."""

    def __del__(self) -> None:
        finalize(freed_memory().give_back)


@cache
def freed_memory() -> FreedMemory:
    """The one of this process."""
    return FreedMemory(glibc())
