"""Python's cyclic garbage collector, paused while a log is written.

Nothing that is written down can be garbage yet, and looking for some in it would double the cost of
the log. Several threads may pause it at once; it runs again when the last of them is done. Both
functions may be called again.

What a long log leaves behind is moved past the collector's young generations unread: reading
objects that were made just now is up to a third of the cost of making them. When much was left
unread, or the process has grown, everything is read, once, so that garbage among it is not kept for
good.
"""

import gc
import threading
from collections.abc import Callable
from typing import TypeVar

from torchlens._recording.system_memory import resident_bytes

_Result = TypeVar("_Result")

_MANY_OBJECTS = 10_000
_READ_ALL_AFTER = 5_000_000  # objects
# Bytes that the process may grow by before everything is read: some, and what an unread object
# takes with a tiny tensor.
_READ_ALL_BEYOND = 128 * 2**20
_BYTES_PER_OBJECT = 2**10

_lock = threading.RLock()
_users: set[object] = set()
_was_enabled: list[bool] = []
_num_unread = [0]
_least_resident: list[int] = []  # since everything was read


def pause_collector(user: object) -> None:
    """Pauses the collector for `user` (any object of its own)."""
    with _lock:
        if not _users:
            _was_enabled[:] = [gc.isenabled()]
        _users.add(user)
        gc.disable()


def resume_collector(user: object, may_have_garbage: bool = True) -> None:
    """Lets the collector run again as it did, once no user is left. Code of others, if any ran, may
    have left garbage.
    """
    with _lock:
        if _users == {user} and _was_enabled == [True]:
            _grow_old(may_have_garbage)
            gc.enable()
        # Last, so that after an interrupt above nobody else takes a collector that is off for the
        # user's own wish.
        _users.discard(user)


def without_collector(work: Callable[[], _Result]) -> _Result:
    """The result of `work`, which is ours alone and leaves no garbage; the collector is paused
    meanwhile.
    """
    user = object()
    try:
        pause_collector(user)
        return work()
    finally:
        resume_collector(user, may_have_garbage=False)


def _grow_old(may_have_garbage: bool) -> None:
    """Moves many young objects on to the oldest generation; a few are left to the collector's own
    ways.
    """
    num_young = gc.get_count()[0]
    if num_young < _MANY_OBJECTS or gc.get_freeze_count():  # frozen by the user, and to stay so
        return
    if may_have_garbage and _is_time_to_read(num_young):
        gc.collect()
        _num_unread[0] = 0
        _least_resident.clear()
    else:
        gc.freeze()
        gc.unfreeze()


def _is_time_to_read(num_young: int) -> bool:
    """Whether garbage may hold much, with that many objects more that nobody has read."""
    _num_unread[0] += num_young
    resident = resident_bytes() or 0  # where nobody tells, the number of objects has to do
    _least_resident[:] = [min(resident, *_least_resident)] if _least_resident else [resident]
    grown = resident - _least_resident[0]
    return (
        _num_unread[0] > _READ_ALL_AFTER
        or grown > _READ_ALL_BEYOND + _BYTES_PER_OBJECT * _num_unread[0]
    )
