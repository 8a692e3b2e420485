"""What the current thread is logging, and who else observes the modules that it calls."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import Any

import torch

from torchlens._capture.module_tracker import ModuleTracker
from torchlens._capture.watchers import Watcher, WatcherGroup

# Not the name `_call_impl` is patched but what stands in the function. A class that gets a new
# attribute, and each class derived from it, loses what Python has remembered about finding its
# attributes: half a millisecond for every log.
MODULE_CALL = torch.nn.Module._call_impl
_call_impl = FunctionType(MODULE_CALL.__code__, MODULE_CALL.__globals__, MODULE_CALL.__name__)


class _Current(threading.local):
    """What the current thread is logging, and who else observes the modules that it calls."""

    tracker: ModuleTracker | None = None
    # Whoever is told, as one. What stands in the class is for threads that have no watcher of their
    # own.
    watcher: Watcher | None = None
    # What the patched `_call_impl` needs beside.
    call_impl = staticmethod(_call_impl)
    clock = staticmethod(perf_counter)


CURRENT = _Current()
_everywhere: tuple[Watcher, ...] = ()
# Threads that have watchers of their own: what `CURRENT` has there, so that others can change it,
# and the watchers.
_threads: dict[int, tuple[dict[str, Any], tuple[Watcher, ...]]] = {}


def add_watcher(watcher: Watcher, is_everywhere: bool = False) -> None:
    """From now on, `watcher` sees the modules that this thread calls; or those of every thread."""
    global _everywhere
    if is_everywhere:
        if watcher not in _everywhere:
            _everywhere = (*_everywhere, watcher)
    else:
        namespace, own = _threads.get(get_ident(), ({}, ()))
        if namespace is not vars(CURRENT):
            own = ()  # of a thread that has ended, and had the same number
        if watcher not in own:
            _threads[get_ident()] = vars(CURRENT), (*own, watcher)
    _tell_all()


def remove_watcher(watcher: Watcher) -> None:
    """Undoes `add_watcher`, in whatever order others were added, from any thread. May be called
    again.
    """
    global _everywhere
    _everywhere = tuple(other for other in _everywhere if other is not watcher)
    for number, (namespace, own) in list(_threads.items()):
        rest = tuple(other for other in own if other is not watcher)
        if rest:
            _threads[number] = namespace, rest
        else:
            _threads.pop(number, None)
            namespace.pop("watcher", None)  # the class's is then seen there
    _tell_all()


@contextmanager
def unwatched() -> Iterator[None]:
    """Meanwhile, nobody sees the modules that this thread calls."""
    namespace = vars(CURRENT)
    namespace["watcher"] = None
    try:
        yield
    finally:
        del namespace["watcher"]
        _tell_all()


def _tell_all() -> None:
    _Current.watcher = _as_one(_everywhere)
    if _threads:
        alive = sys._current_frames()
        for number, (namespace, own) in list(_threads.items()):
            if number in alive:
                namespace["watcher"] = _as_one((*_everywhere, *own))
            else:
                _threads.pop(number, None)


def _as_one(watchers: tuple[Watcher, ...]) -> Watcher | None:
    return WatcherGroup(watchers) if len(watchers) > 1 else watchers[0] if watchers else None
