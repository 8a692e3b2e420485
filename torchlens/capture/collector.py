"""Python's cyclic garbage collector, paused while a log is written.

Nothing that is written down can be garbage yet, and looking for some in it would double the cost of the log. Several
threads may pause it at once; it runs again when the last of them is done. Both functions may be called again.
"""

import gc
import threading

__all__ = ["pause_collector", "resume_collector"]

_lock = threading.RLock()
_users: set[object] = set()
_was_enabled: list[bool] = []


def pause_collector(user: object) -> None:
    """Pauses the collector for `user` (any object of its own)."""
    with _lock:
        if not _users:
            _was_enabled[:] = [gc.isenabled()]
        _users.add(user)
        gc.disable()


def resume_collector(user: object) -> None:
    """Lets the collector run again as it did, once no user is left."""
    with _lock:
        _users.discard(user)
        if not _users and _was_enabled == [True]:
            gc.enable()
