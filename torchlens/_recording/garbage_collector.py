"""Pauses Python's cyclic garbage collector while a log is written.

Nothing in a running log can be garbage yet, and searching it would double the cost of the log.
Several threads may pause the collector at once; it resumes when the last of them is done. Both
functions may be called again.

After a long log, its objects move to the oldest generation without a search, which would cost up to
a third of what making them cost. Once many have moved, one full collection finds the garbage among
them.
"""

import gc
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

_MANY_OBJECTS = 10_000
_COLLECT_AFTER = 1_000_000  # objects that moved unsearched

_lock = threading.RLock()
_users: set[object] = set()
_was_enabled = [True]
_num_moved = [0]


def pause_collector(user: object) -> None:
    """Pauses the collector for `user` (any unique object)."""
    with _lock:
        if not _users:
            _was_enabled[:] = [gc.isenabled()]
        _users.add(user)
        gc.disable()


def resume_collector(user: object, may_have_garbage: bool = True) -> None:
    """Resumes the collector after its last user; `may_have_garbage` if foreign code has run."""
    with _lock:
        if _users == {user} and _was_enabled == [True]:
            _move_young_objects(may_have_garbage)
            gc.enable()
        # Last: after an interrupt above, the next user must not find the collector off.
        _users.discard(user)


def without_collector(work: Callable[[], _Result], may_have_garbage: bool = False) -> _Result:
    """The result of `work` with the collector paused. Work of ours leaves no garbage."""
    user = object()
    try:
        pause_collector(user)
        return work()
    finally:
        try:
            resume_collector(user, may_have_garbage)
        finally:  # again, because an interrupt may cut the first call short
            resume_collector(user, may_have_garbage)


def _move_young_objects(may_have_garbage: bool) -> None:
    """Moves young objects to the oldest generation, if they are many."""
    num_young = gc.get_count()[0]
    if num_young < _MANY_OBJECTS or gc.get_freeze_count():  # the user's frozen objects stay frozen
        return
    _num_moved[0] += num_young if may_have_garbage else 0
    if _num_moved[0] > _COLLECT_AFTER:
        _num_moved[0] = 0
        gc.collect()
    else:
        gc.freeze()
        gc.unfreeze()
