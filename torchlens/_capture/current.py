"""What the current thread is logging, and the watchers that see the modules it calls."""

import sys
import threading
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol

import torch

from torchlens._capture.module_tracker import ModuleTracker


class Watcher(Protocol):
    """Sees the modules that a thread calls, whether it is logging or not."""

    def begins_with(self, module: Any) -> bool:
        """Whether a call of this module is one that `call` is to be told of, as it comes from
        outside.
        """

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module once more (and no longer begins with it), and returns what it
        returns.
        """

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], time: float) -> Any:
        """A module is going to run, and at `time` we began to take notice. None if that is of no
        interest.
        """

    def end(self, watched: Any) -> None:
        """The module has run, or raised; `watched` is what `enter` returned. One of the following
        follows.
        """

    def leave(
        self, watched: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """It returned `result`."""

    def fail(
        self, watched: Any, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """It raised `error`."""


class WatcherGroup:
    """Several watchers as one. Each sees what the others take as part of the modules."""

    def __init__(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers = watchers

    def begins_with(self, module: Any) -> bool:
        """As in Watcher."""
        return any(watcher.begins_with(module) for watcher in self.watchers)

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in Watcher: the next that begins with it takes its turn inside."""
        return next(watcher for watcher in self.watchers if watcher.begins_with(module)).call(
            module, args, kwargs
        )

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], time: float) -> Any:
        """As in Watcher."""
        watched = []
        for watcher in self.watchers:
            watched.append(watcher.enter(module, args, kwargs, time))
            time = perf_counter()
        return watched

    def end(self, watched: Any) -> None:
        """As in Watcher."""
        for watcher, own in zip(reversed(self.watchers), reversed(watched), strict=True):
            if own is not None:
                watcher.end(own)

    def leave(
        self, watched: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """As in Watcher."""
        for watcher, own in zip(reversed(self.watchers), reversed(watched), strict=True):
            if own is not None:
                watcher.leave(own, result, args, kwargs)

    def fail(
        self, watched: Any, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """As in Watcher."""
        for watcher, own in zip(reversed(self.watchers), reversed(watched), strict=True):
            if own is not None:
                watcher.fail(own, error, args, kwargs)


# Not the name `_call_impl` is patched but what stands in the function. A class that gets a new
# attribute, and each class derived from it, loses what Python has remembered about finding its
# attributes: half a millisecond for every log.
MODULE_CALL = torch.nn.Module._call_impl
_call_impl = FunctionType(MODULE_CALL.__code__, MODULE_CALL.__globals__, MODULE_CALL.__name__)


class _Current(threading.local):
    """What the current thread is logging, and who else observes the modules that it calls."""

    tracker: ModuleTracker | None = None
    # All watchers of the thread, as one. Class default, for threads without a watcher of their own.
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
