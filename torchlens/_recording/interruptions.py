"""Tells the exceptions of a model or an operation from those that end a run from outside."""

import signal
from types import CodeType, TracebackType
from typing import Any


def interrupts(error: BaseException) -> bool:
    """True for an exception that ends a run from outside, and must come through to the caller.

    Ctrl-C and its like (what is neither an Exception nor SystemExit), a TimeoutError, and whatever
    a signal handler raises.
    """
    if isinstance(error, TimeoutError) or not isinstance(error, Exception | SystemExit):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    return not handlers.isdisjoint(_codes_in(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler that is written in Python."""
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__call__", None)  # noqa: B004 (its code)
    return getattr(function, "__code__", None)


def _codes_in(traceback: TracebackType | None) -> set[CodeType]:
    found = set()
    while traceback is not None:
        found.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return found
