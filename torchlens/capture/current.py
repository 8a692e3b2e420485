"""What the current thread is logging, and who else watches the modules that it calls."""

import threading
from time import perf_counter
from types import FunctionType

import torch

from torchlens.capture.modules import ModuleTracker
from torchlens.capture.watchers import Watcher, WatcherGroup

__all__ = ["CURRENT", "MODULE_CALL", "add_watcher", "remove_watcher"]


# Not the name `_call_impl` is patched but what stands in the function. A class that gets a new attribute, and each class
# derived from it, loses what Python has remembered about finding its attributes: half a millisecond for every log.
MODULE_CALL = torch.nn.Module._call_impl
_call_impl = FunctionType(MODULE_CALL.__code__, MODULE_CALL.__globals__, MODULE_CALL.__name__)


class _Current(threading.local):
    """What the current thread is logging, and who else watches the modules that it calls."""

    tracker: ModuleTracker | None = None
    watcher: Watcher | None = None
    # What the patched `_call_impl` needs beside.
    call_impl = staticmethod(_call_impl)
    clock = staticmethod(perf_counter)


CURRENT = _Current()


def add_watcher(watcher: Watcher, is_everywhere: bool = False) -> None:
    """From now on, `watcher` sees the modules that this thread calls; or also those of threads that have no watcher."""
    for place in (CURRENT, _Current) if is_everywhere else (CURRENT,):
        others = _watchers(place)
        if watcher not in others:
            place.watcher = WatcherGroup((*others, watcher)) if others else watcher


def remove_watcher(watcher: Watcher) -> None:
    """Undoes `add_watcher`, in whatever order others were added. May be called again."""
    for place in (CURRENT, _Current):
        others = tuple(other for other in _watchers(place) if other is not watcher)
        place.watcher = WatcherGroup(others) if len(others) > 1 else others[0] if others else None
    if CURRENT.watcher is None:
        vars(CURRENT).pop("watcher", None)  # what is added everywhere is then seen here, too


def _watchers(place: _Current | type[_Current]) -> tuple[Watcher, ...]:
    """Of this thread, or (of the class) those of every thread that has none of its own."""
    current = place.watcher
    return () if current is None else current.watchers if isinstance(current, WatcherGroup) else (current,)
