"""The memory of this process: what it holds and what is free, a warning when a log takes too much,
and how the memory of dropped logs goes back to the system.

The tensors of a log are freed together. Up to a limit that memory stays with the process: the next
log, and the next plain pass, would otherwise fetch every page from the system again, which costs
about as much as computing what is written there. Beyond the limit, glibc is asked to return all of
it (`malloc_trim`). No setting of the allocator changes.
"""

import _thread
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from torchlens._recording.trees import plain_tensors
from torchlens._recording.user_code import warn_log_caller
from torchlens._recording.wrappers import inner_of
from torchlens._text.numbers import bytes_text

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Memory from an address on, as an array longer than any. The caller slices what it needs, and keeps
# the owner of the memory alive. (`tensor.numpy()` has a side effect: the storage can never be
# resized again.)
memory_at: Callable[[int], Any] = (ctypes.c_char * (1 << 46)).from_address


def resident_bytes() -> int | None:
    """The memory that the process holds, without files; None if the system does not report it."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # no /proc, or too many open files
        return None
    try:
        _, resident, shared, *_ = os.read(file, 200).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def held_bytes(device: torch.device) -> int | None:
    """The memory of a device that the process holds, as far as it is cheap to know."""
    if device.type == "cpu":
        return resident_bytes()
    return int(torch.get_device_module(device).memory_allocated(device))


def free_bytes(device: torch.device) -> int | None:
    """The memory that can still be allocated on a device; None if unknown.

    For the CPU: what is free or easily freed, within the limits of containers (control groups).
    """
    if device.type == "cpu":
        free = [_numbers(_PROC / "meminfo").get("MemAvailable:"), *_left_by_groups(_PROC, _CGROUPS)]
        return min((number for number in free if number is not None), default=None)
    module: Any = None if device.type == "meta" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    cached = module.memory_reserved(device) - module.memory_allocated(device)  # by torch, and free
    return int(module.mem_get_info(device)[0] + cached)


def _left_by_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What the memory limits of this process's control group, and of those around it, leave.

    Control groups of version 2; on systems with version 1, their limits are not seen.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controller, path = line.split(":", 2)
        if not controller:  # version 2
            group = groups / path.lstrip("/")
            for parent in (group, *group.parents):
                if parent.is_relative_to(groups):
                    yield from _left_by_group(parent)


def _left_by_group(folder: Path) -> Iterator[int]:
    limit = _text(folder / "memory.max").strip()
    usage = _text(folder / "memory.current").strip()
    if limit.isdigit() and usage.isdigit():  # else "max", or no such file
        cached = _numbers(folder / "memory.stat").get("inactive_file", 0)  # given up when needed
        yield max(0, int(limit) - int(usage) + cached)


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number, in bytes or in kB."""
    words = [line.split() for line in _text(file).splitlines()]
    return {
        name: int(number) * (1024 if unit == ["kB"] else 1)
        for name, number, *unit in filter(None, words)
    }


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # missing, or not readable for this user
        return ""


# -- the warning

_INTERVAL = 0.005  # seconds between two checks
# Until the process has grown by this much, `free_bytes` is not read: it takes as long as hundreds
# of operations.
_NEGLIGIBLE_BYTES = 32 * 2**20
_CURE = (
    "Save less: layers_to_save=[...] with the layers or modules you need, or 'none' for a log "
    "without values. Or make the batch smaller, or put model and inputs on torch.device('meta') "
    "if shapes are enough"
)


class MemoryWatch:
    """Compares what a log has saved with the memory that was free when it began."""

    interval = _INTERVAL

    def __init__(
        self, values: Sequence[Any], saved_args: dict[int, Any], keeps_gradients: bool
    ) -> None:
        self._values = values
        self._saved_args = saved_args
        self._times = 2 if keeps_gradients else 1  # a gradient for each value comes later
        self._held_before = {device: _held(device) for device in _devices()}
        # By device: free memory at the start, and the growth at which to count saved tensors.
        self._free: dict[torch.device, float] = {}
        self._count_at: dict[torch.device, float] = {}
        self._is_over = False

    def look(self, outside: Iterable[torch.Tensor]) -> float:
        """Warns once if the log has saved too much; returns the time of the next check."""
        for device, before in self._held_before.items():
            grown = _held(device) - before
            if grown >= self._count_at.get(device, _NEGLIGIBLE_BYTES) and not self._is_over:
                self._compare(device, grown, outside)
        return math.inf if self._is_over else perf_counter() + self.interval

    def _compare(self, device: torch.device, grown: int, outside: Iterable[torch.Tensor]) -> None:
        if device not in self._free:
            free = free_bytes(device)
            self._free[device] = math.inf if free is None else free + grown
        limit = self._free[device] / 2 / self._times
        if grown >= limit:
            with torch._C.DisableTorchFunctionSubclass():
                saved = _bytes_kept_alive(self._tensors(), device, outside)
            if saved >= limit:
                self._is_over = True  # also for other threads
                self._warn(saved, device)
        self._count_at[device] = max(limit, grown + limit / 8)

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from (value for value in self._values if isinstance(value, torch.Tensor))
        yield from (tensor for _, tensor in plain_tensors(list(self._saved_args.values())))

    def _warn(self, saved: int, device: torch.device) -> None:
        where = "" if device.type == "cpu" else f" on {device}"
        gradients = (
            ", and a backward pass will save as much again for the gradients"
            if self._times > 1
            else ""
        )
        warn_log_caller(
            f"torchlens: this log has saved {bytes_text(saved)} so far, and the model is still "
            f"running{gradients}: more than half of the {bytes_text(self._free[device])} that were "
            f"free{where} when it began. {_CURE}."
        )


def _devices() -> list[torch.device]:
    """The devices that this process uses."""
    used = [module for module in (torch.cuda, torch.xpu) if module.is_initialized()]
    return [
        torch.device("cpu"),
        *(
            torch.device(module.__name__.rpartition(".")[2], number)
            for module in used
            for number in range(module.device_count())
        ),
    ]


def _held(device: torch.device) -> int:
    return held_bytes(device) or 0


def _bytes_kept_alive(
    tensors: Iterable[torch.Tensor], device: torch.device, outside: Iterable[torch.Tensor]
) -> int:
    """The bytes of a device that `tensors` keep alive, without the storages of `outside`."""
    seen = {storage._cdata for storage in map(_storage, outside) if storage is not None}
    total = 0
    for storage in map(_storage, tensors):
        if storage is not None and storage.device == device and storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _storage(tensor: torch.Tensor) -> Any:
    while (inner := inner_of(tensor)) is not None:
        tensor = inner
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse and nested tensors have none
        return None


# -- giving memory back

# The process keeps at most this much free memory, and at most this share of the machine's.
_MOST_KEPT = 256 * 2**20
_SHARE_KEPT = 16
_NEGLIGIBLE_GROWTH = 2**20  # below this, glibc returns nothing by itself
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
        """Called when a log begins, or is at its largest: memory that is free now was not left by
        it.
        """
        if self._library is not None:
            grown = self._grown_bytes()
            if self._least_free is None or grown > self._most_kept:
                self._free_bytes()

    def drop(self, free: Callable[[], object]) -> None:
        """Calls `free`, which releases a log, and returns memory to the system if much is free."""
        grown = 0 if self._library is None else self._grown_bytes()
        if grown <= self._most_kept:
            if grown > _NEGLIGIBLE_GROWTH:
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
