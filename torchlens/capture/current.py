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


def add_watcher(watcher: Watcher) -> None:
    """From now on, `watcher` sees the modules that this thread calls."""
    others = _watchers()
    if watcher not in others:
        CURRENT.watcher = WatcherGroup((*others, watcher)) if others else watcher


def remove_watcher(watcher: Watcher) -> None:
    """Undoes `add_watcher`, in whatever order others were added. May be called again."""
    others = tuple(other for other in _watchers() if other is not watcher)
    CURRENT.watcher = WatcherGroup(others) if len(others) > 1 else others[0] if others else None


def _watchers() -> tuple[Watcher, ...]:
    current = CURRENT.watcher
    return () if current is None else current.watchers if isinstance(current, WatcherGroup) else (current,)
