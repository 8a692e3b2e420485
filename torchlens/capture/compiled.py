"""What `torch.compile` returned runs its source while anybody logs.

torch has one such setting for all threads: the first log sets it, the last one to end gives it back. The compiler takes
seconds to import; where nobody has done so yet, nothing is set before the model compiles something. Each function may be
called again.
"""

import sys
import threading
from typing import Any

import torch

__all__ = ["begin_eager", "end_eager", "is_compiler_there"]

_COMPILER = "torch._dynamo.eval_frame"
_lock = threading.RLock()
_users: set[object] = set()
_before: list[Any] = []  # the setting to give back


def is_compiler_there() -> bool:
    """Whether somebody has imported it."""
    return _COMPILER in sys.modules


def begin_eager(user: object) -> None:
    """Compiled code runs as its source, for `user` (any object of its own) and all others."""
    with _lock:
        _users.add(user)
        if not _before:
            # Noted before it is changed, so that an interrupt between the two leaves nothing behind.
            _before.append(sys.modules[_COMPILER]._stance)
            torch.compiler.set_stance("force_eager")


def end_eager(user: object) -> None:
    """Compiled code runs compiled again, once no user is left."""
    with _lock:
        _users.discard(user)
        if not _users and _before:
            sys.modules[_COMPILER]._set_stance(_before[0])
            _before.clear()
