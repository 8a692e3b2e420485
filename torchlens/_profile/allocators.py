"""Memory: what the allocators report, and what autograd keeps for the backward pass.

torch's profiler can listen to the allocators of the CPU and of other devices. The older of its two
profilers does this cheaply and prints nothing. It would also record every operation; that is
switched off, because it takes longer than a small operation. A thread can have only one profiler:
if the user runs one, memory is not measured.
"""

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter, methodcaller
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any, TypeAlias

import torch
import torch.autograd.profiler as user_profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors

# Where the user's profilers start. Each is patched to pause ours first.
_STARTS: tuple[tuple[Any, str], ...] = (
    (user_profiler, "_prepare_profiler"),
    (user_profiler, "_enable_profiler"),
    (torch.autograd, "_enable_profiler_legacy"),
)
_enable: Callable[[Any], None] = torch._C._autograd._enable_profiler_legacy
_cpu_bytes = methodcaller("cpu_memory_usage")
_disable: Callable[[], Any] = torch._C._autograd._disable_profiler_legacy
_report_operations: Callable[[bool], None] = (
    torch._C._autograd._enable_record_function
)  # in this thread


@cache
def _find_log_level() -> Any:
    """The severity from which on torch's C++ code prints messages, as a number that can be set.

    While it is profiled, the CPU allocator prints a warning for each thousand freed blocks that it
    does not know.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # not on Linux, or another build of torch
        return ctypes.c_int()


_ERROR = 2

# Set up once in the process for the watches of all threads: by the first, until the last has ended.
_lock = threading.RLock()
_listening: "list[AllocatorWatch]" = []
_undo: list[Callable[[], None]] = []


def _set_up() -> None:
    _take_away()  # what an interrupt may have left
    log_level = _find_log_level()
    _undo.append(partial(setattr, log_level, "value", log_level.value))
    log_level.value = max(log_level.value, _ERROR)
    for owner, name in _STARTS:
        original = getattr(owner, name)
        _undo.append(partial(setattr, owner, name, original))
        setattr(owner, name, _stepping_aside(original))


def _take_away() -> None:
    while _undo:
        _undo[-1]()
        _undo.pop()


def _stepping_aside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pauses our profiler before another starts: a thread can have only one."""

    def start(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        for watch in list(_listening):
            if watch.thread == thread:
                watch.pause()
        return original(*args, **kwargs)

    return start


# The most bytes at one time, and those at the end, both above what was allocated at the beginning;
# None, None if that is not known.
MemoryUse: TypeAlias = tuple[int, int] | tuple[None, None]
Span: TypeAlias = tuple[float, float]  # by `perf_counter`


class Timeline:
    """How many bytes were allocated at each moment, counted from when listening began."""

    def __init__(
        self, events: Sequence[tuple[float, int]], start: float = 0.0, end: float = 0.0
    ) -> None:
        self._times = [time for time, _ in events]
        self._levels = [0, *accumulate(num_bytes for _, num_bytes in events)]
        self._start, self._end = start, end

    def between(self, start: float, end: float) -> MemoryUse:
        """The use in a span of time; None, None unless listening covered all of it."""
        if start < self._start or end > self._end:
            return None, None
        first, last = bisect_left(self._times, start), bisect_right(self._times, end)
        before = self._levels[first]
        return max(self._levels[first : last + 1]) - before, self._levels[last] - before

    @property
    def whole(self) -> MemoryUse:
        """From beginning to end."""
        return self.between(self._start, self._end) if self._end else (None, None)


class AllocatorWatch:
    """Listens to the allocators from `start` to `stop`, in the thread that calls them."""

    def __init__(self) -> None:
        self.thread = 0  # that listens
        self._is_on = False
        self._events: Any = ()  # as torch gives them: a list for each thread
        self._start = self._end = 0.0
        self._clock_offset = 0.0  # of torch's clock
        # Size → blocks of that size that have been allocated and not freed.
        self._outstanding: Counter[int] = Counter()

    def start(self) -> bool:
        """Begins to listen; False if another profiler is running."""
        if torch._C._autograd._profiler_enabled():
            return False
        config = ProfilerConfig(
            ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig(), ""
        )
        self.thread = threading.get_ident()
        with _lock:
            if not _listening:
                _set_up()
            _listening.append(self)
        # Set before the next line, so that an interrupt between the two leaves nothing behind.
        self._is_on = True
        _enable(config)
        _report_operations(False)
        self._start = perf_counter()
        self._clock_offset = time_ns() / 1e9 - self._start
        return True

    def pause(self) -> None:
        """Ends listening, so that another profiler can start. May be called again."""
        if self._is_on:
            self._end = perf_counter()
            _report_operations(True)
            if torch._C._autograd._profiler_enabled():
                self._events = _disable()
            self._is_on = False

    def stop(self) -> None:
        """Ends listening and undoes the set-up. May be called again."""
        self.pause()
        with _lock:
            if self in _listening:
                _listening.remove(self)
            # Also after an interrupt between these lines, when this is called again.
            if not _listening:
                _take_away()

    def timeline(self, ignored: Sequence[Span]) -> Timeline:
        """What was reported since `start`, in order, without the `ignored` spans of time."""
        events = [self._moment_and_bytes(event) for thread in self._events for event in thread]
        events.sort(key=itemgetter(0))
        own = joined(ignored)
        starts = [start for start, _ in own]
        found = [
            (time, num_bytes)
            for time, num_bytes in events
            if num_bytes and self._is_ours(num_bytes) and not _is_within(time, starts, own)
        ]
        timeline = Timeline(found, self._start, self._end)
        self._events, self._start, self._end = (), 0.0, 0.0
        return timeline

    def _moment_and_bytes(self, event: Any) -> tuple[float, int]:
        num_bytes = _cpu_bytes(event)
        if not num_bytes and torch.cuda.is_available():
            num_bytes = event.cuda_memory_usage()
        return event.start_us() / 1e6 - self._clock_offset, num_bytes

    def _is_ours(self, num_bytes: int) -> bool:
        """Whether an event concerns memory that was allocated since measuring began.

        When older memory is freed, torch reports nothing, or the size of a former block at its
        address.
        """
        if num_bytes < 0 and self._outstanding[-num_bytes] == 0:
            return False
        self._outstanding[abs(num_bytes)] += 1 if num_bytes > 0 else -1
        return True


def joined(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _is_within(time: float, starts: list[float], spans: Sequence[Span]) -> bool:
    position = bisect_right(starts, time) - 1
    return position >= 0 and time <= spans[position][1]


# -- what autograd keeps

# Whether this version of torch can read the tensors that nodes keep without unpacking them.
CAN_READ_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")
_names_by_type: dict[type, tuple[str, ...]] = {}


def saved_storages(node: Any) -> Iterator[tuple[int, int]]:
    """Each storage that a node of autograd's graph keeps, with its bytes.

    The values are read without unpacking them, which would run a checkpointed part of the model
    again.
    """
    kind = type(node)
    names = _names_by_type.get(kind)
    if names is None:
        own = [name for name in dir(node) if name.startswith("_raw_saved_")]
        names = _names_by_type[kind] = tuple(own)
    for name in names:
        try:
            kept = getattr(node, name)
        except RuntimeError:  # freed by a backward pass
            continue
        for item in kept if isinstance(kept, list | tuple) else (kept,):
            # Hooks of the user may have packed anything, such as a pair of a tensor and a device.
            for _, tensor in plain_tensors(getattr(item, "data", None)):
                yield from storages_of(tensor)


def storages_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The storage of a tensor, with its bytes; nothing for tensors without one."""
    try:
        return [(storage_of(tensor), tensor.untyped_storage().nbytes())]
    except (RuntimeError, NotImplementedError, ValueError):  # sparse and lazy tensors and the like
        return []
