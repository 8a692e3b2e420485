"""Makes compiled models run their Python source while a log is active.

torch has one such setting for all threads: the first log sets it, the last one to end gives it
back. The compiler takes seconds to import; where nobody has done so yet, nothing is set before the
model compiles something. Each function may be called again.
"""

import sys
import threading
from types import CodeType
from typing import Any

import torch

_COMPILER = "torch._dynamo.eval_frame"
_lock = threading.RLock()
_users: set[object] = set()
_before: list[Any] = []  # the setting to give back


def is_compiler_there() -> bool:
    """Whether somebody has imported it."""
    return _COMPILER in sys.modules


def keep_from_compiler(code: CodeType, is_kept: bool, with_calls: bool) -> None:
    """Has the compiler leave the frames of a function to Python, and with `with_calls` what they
    call; or undoes that.
    """
    if is_compiler_there():
        compiler = sys.modules[_COMPILER]
        skip, plain = compiler.FrameAction.SKIP, compiler.FrameAction.DEFAULT
        strategy = compiler.FrameExecStrategy(
            skip if is_kept else plain, skip if is_kept and with_calls else plain
        )
        compiler.set_code_exec_strategy(code, strategy)


def is_inside_compiled() -> bool:
    """Whether what runs now is called by what `torch.compile` returned. Looks at the whole stack:
    not to be asked often.
    """
    if not is_compiler_there():
        return False
    file = str(sys.modules[_COMPILER].__file__)
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file and not code.co_qualname.startswith("DisableContext"):
            return True
        frame = frame.f_back
    return False


def begin_eager(user: object) -> None:
    """Compiled code runs as its source, for `user` (any object of its own) and all others."""
    with _lock:
        _users.add(user)
        if not _before:
            # Noted before it is changed, so that an interrupt between the two leaves nothing
            # behind.
            _before.append(sys.modules[_COMPILER]._stance)
            torch.compiler.set_stance("force_eager")


def end_eager(user: object) -> None:
    """Compiled code runs compiled again, once no user is left."""
    with _lock:
        _users.discard(user)
        if not _users and _before:
            sys.modules[_COMPILER]._set_stance(_before[0])
            _before.clear()
