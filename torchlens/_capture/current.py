"""The log of the current thread, and the watchers of the modules it calls."""

import sys
import threading
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol

import torch

from torchlens._capture.exchange import Exchange
from torchlens._capture.module_tracker import ModuleTracker


class Watcher(Protocol):
    """Observes the modules that a thread calls, with or without a log."""

    def begins_with(self, module: Any) -> bool:
        """True if `call` must handle this call of the module, which comes from outside."""

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module once more (and no longer begins with it), and returns what it
        returns.
        """

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], time: float) -> Any:
        """Called before a module runs; `time` is when our overhead began. None to ignore the
        module.
        """

    def end(self, watched: Any) -> None:
        """Called when the module has returned or raised, before `leave` or `fail`.

        `watched` is what `enter` returned.
        """

    def leave(
        self, watched: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called when the module has returned `result`."""

    def fail(
        self, watched: Any, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Called when the module has raised `error`."""


class WatcherGroup:
    """Combines several watchers. To each, the overhead of the others is part of the modules."""

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


# The code of the function `_call_impl` is patched, not the class attribute: setting an attribute of
# a class invalidates Python's attribute caches of all derived classes, which costs half a
# millisecond per log.
MODULE_CALL = torch.nn.Module._call_impl
_call_impl = FunctionType(MODULE_CALL.__code__, MODULE_CALL.__globals__, MODULE_CALL.__name__)


class _Current(threading.local):
    """What the current thread is logging, and who else observes the modules that it calls."""

    tracker: ModuleTracker | None = None
    # What exchanges results of calls, in every log of the thread.
    exchanges: tuple[Exchange, ...] = ()
    # All watchers of the thread, as one. Class default, for threads without a watcher of their own.
    watcher: Watcher | None = None
    # Used by the patched `_call_impl`.
    call_impl = staticmethod(_call_impl)
    clock = staticmethod(perf_counter)


CURRENT = _Current()
_everywhere: tuple[Watcher, ...] = ()
# Threads with watchers of their own: the thread's namespace of `CURRENT`, which other threads may
# change, and the watchers.
_threads: dict[int, tuple[dict[str, Any], tuple[Watcher, ...]]] = {}


def add_watcher(watcher: Watcher, is_everywhere: bool = False) -> None:
    """Adds a watcher of the modules that this thread calls; `is_everywhere`: every thread."""
    global _everywhere
    if is_everywhere:
        if watcher not in _everywhere:
            _everywhere = (*_everywhere, watcher)
    else:
        namespace, own = _threads.get(get_ident(), ({}, ()))
        if namespace is not vars(CURRENT):
            own = ()  # of an ended thread with the same id
        if watcher not in own:
            _threads[get_ident()] = vars(CURRENT), (*own, watcher)
    _tell_all()


def remove_watcher(watcher: Watcher) -> None:
    """Undoes `add_watcher`, in any order and from any thread. May be called again."""
    global _everywhere
    _everywhere = tuple(other for other in _everywhere if other is not watcher)
    for number, (namespace, own) in list(_threads.items()):
        rest = tuple(other for other in own if other is not watcher)
        if rest:
            _threads[number] = namespace, rest
        else:
            _threads.pop(number, None)
            namespace.pop("watcher", None)  # the class default applies again
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
