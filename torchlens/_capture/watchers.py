"""The observers, besides the log, of the modules that a thread calls."""

from time import perf_counter
from typing import Any, Protocol


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
