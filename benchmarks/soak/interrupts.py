"""Interrupts, and what makes sure that none is lost unnoticed."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.soak.figures import Figures

__all__ = ["Interrupt", "Target", "told_of_dropped"]


class Interrupt(KeyboardInterrupt):
    """Our own Ctrl-C, so that the user's is not mistaken for it."""


class Target:
    """Lets at most one interrupt strike a piece of work, and waits for it if it is on its way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = self._is_fired = self._is_dropped = False

    def strike(self, send: Callable[[], None]) -> bool:
        """Sends the interrupt, unless the work is over."""
        with self._lock:
            if self._is_open and not self._is_fired:
                self._is_fired = True
                send()
                return True
        return False

    def drop(self) -> None:
        """Python itself drops what is raised while it finalizes an object; that is no loss of
        ours.
        """
        self._is_dropped = True

    def run(self, work: Callable[[], Any], figures: Figures) -> tuple[Any, bool]:
        """What `work` returned, and whether an interrupt arrived; None as the result if it cut the
        work short.
        """
        result = None
        try:
            with self._lock:
                self._is_open, self._is_fired, self._is_dropped = True, False, False
            result = work()
            with self._lock:
                self._is_open = False
            if self._is_fired:
                for _ in range(
                    1000
                ):  # it was sent before now, and strikes the next time that this thread looks
                    time.sleep(0)
                figures.expect(self._is_dropped, "an interrupt was lost")
        except Interrupt:
            self._is_open = False
            return result, True
        return result, False


@contextmanager
def told_of_dropped(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell`, in the thread that was struck, when Python drops an interrupt because it struck
    a finalizer.
    """
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, Interrupt):
            tell()
        else:
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous
