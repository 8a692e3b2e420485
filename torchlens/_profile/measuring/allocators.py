"""What is allocated and freed, as torch's own allocators report it.

torch's profiler can be told to listen to the allocators (of the CPU and of other devices alike).
The old one of its two profilers does so in its cheapest form and says nothing on the terminal. That
it should also be told of every operation is switched off: it would cost more than the small ones
among them. There can be one profiler in a thread: where the user runs one, memory is not measured.
"""

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
import torch.autograd.profiler as user_profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

# Where a profiler of the user's is started. Each steps over ours, which lets it pass.
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
    """How severe a message of torch's C++ code must be to reach the terminal, as a number that can
    be set.

    The allocator of the CPU has one for each thousand blocks from before that it sees freed. Nobody
    needs to know.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # not on Linux, or another build of torch
        return ctypes.c_int()


_ERROR = 2

# What is set up in the process for all who listen, in whichever threads: by the first of them,
# until the last has ended.
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
    """Starts a profiler of the user's. There is room for one in a thread; the user's takes it."""

    def start(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        for watch in list(_listening):
            if watch.thread == thread:
                watch.pause()
        return original(*args, **kwargs)

    return start


class Timeline:
    """How many bytes were allocated at each moment, counted from when listening began."""

    def __init__(self, events: Sequence[tuple[int, int]], start: int = 0, end: int = 0) -> None:
        self._times = [time for time, _ in events]
        self._levels = [0, *accumulate(num_bytes for _, num_bytes in events)]
        self._start, self._end = start, end

    def between(self, start: int, end: int) -> tuple[int, int] | None:
        """Peak and what remained, above what was allocated at `start`. None if nobody listened all
        the time.
        """
        if start < self._start or end > self._end:
            return None
        first, last = bisect_left(self._times, start), bisect_right(self._times, end)
        before = self._levels[first]
        return max(self._levels[first : last + 1]) - before, self._levels[last] - before

    def num_events(self, start: int, end: int) -> int:
        """How many events there were in a span."""
        return bisect_right(self._times, end) - bisect_left(self._times, start)

    @property
    def whole(self) -> tuple[int, int] | None:
        """Peak and what remained, over all."""
        return self.between(self._start, self._end) if self._end else None


class AllocatorEvents:
    """What the allocators reported from `start` to `end`, as torch gives it: a list for each
    thread.
    """

    def __init__(self) -> None:
        self.events: Any = ()
        self.start = 0
        self.end = 0

    @property
    def num_events(self) -> int:
        """How many there are."""
        return sum(map(len, self.events))


class AllocatorWatch:
    """Listens from `start` to `stop`, in the thread that calls them. `clock` is that of
    `time.time_ns`.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.thread = 0  # that listens
        self._is_on = False
        self._events = AllocatorEvents()
        self._outstanding: Counter[int] = (
            Counter()
        )  # size → blocks that have been allocated and not freed

    def start(self) -> bool:
        """Begins to listen; False if a profiler of the user's is running."""
        if torch._C._autograd._profiler_enabled():
            return False
        self._events = AllocatorEvents()
        config = ProfilerConfig(
            ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig(), ""
        )
        self.thread = threading.get_ident()
        with _lock:
            if not _listening:
                _set_up()
            _listening.append(self)
        # said before it is done, so that an interrupt between the two leaves nothing behind
        self._is_on = True
        _enable(config)
        _report_operations(False)
        self._events.start = self._clock()
        return True

    def stop(self) -> AllocatorEvents:
        """Ends listening. May be called again."""
        self.pause()
        with _lock:
            if self in _listening:
                _listening.remove(self)
            if (
                not _listening
            ):  # also if an interrupt came just after that line, and this is called again
                _take_away()
        found, self._events = self._events, AllocatorEvents()
        return found

    def timeline(self, found: AllocatorEvents, ignored: Sequence[tuple[int, int]]) -> Timeline:
        """What was reported, in order. What happened in the `ignored` spans of time is left out."""
        events = []
        has_devices = torch.cuda.is_available()
        for thread in found.events:
            for event, num_bytes in zip(thread, map(_cpu_bytes, thread), strict=True):
                if not num_bytes and has_devices:
                    num_bytes = event.cuda_memory_usage()
                if num_bytes:
                    events.append((int(event.start_us() * 1000), num_bytes))
        events.sort(key=itemgetter(0))
        starts = [start for start, _ in ignored]
        return Timeline(
            [
                event
                for event in events
                if self._is_ours(event[1])
                and not (starts and _is_within(event[0], starts, ignored))
            ],
            found.start,
            found.end,
        )

    def pause(self) -> None:
        """Ends listening for now: somebody else is to have the place. Does nothing if that has been
        done.
        """
        if self._is_on:
            self._events.end = self._clock()
            _report_operations(True)
            if torch._C._autograd._profiler_enabled():
                self._events.events = _disable()
            self._is_on = False

    def _is_ours(self, num_bytes: int) -> bool:
        """Whether an event is of memory that was allocated since measuring began.

        When other memory is freed, torch says nothing, or the size of what lay at that address at
        some earlier time.
        """
        if num_bytes < 0 and self._outstanding[-num_bytes] == 0:
            return False
        self._outstanding[abs(num_bytes)] += 1 if num_bytes > 0 else -1
        return True


def _is_within(time: int, starts: list[int], spans: Sequence[tuple[int, int]]) -> bool:
    position = bisect_right(starts, time) - 1
    return position >= 0 and time <= spans[position][1]
