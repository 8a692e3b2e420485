"""The temporary changes of torch, applied and undone in one place: patches, and the compiler's
setting.

torch reports its operations to the recorder by itself (see `recorder.py`). Patched is only what it
does not report (see `torch_patches.py`). A patch is a record: where, name, new. They come in
groups, as not every user needs them all: the first user of a group applies it, the last one to end
undoes it in reverse.

Compiled models run their Python source while a log is active. torch has one such setting for all
threads: the first log sets it, the last one to end gives it back. The compiler takes seconds to
import; where it is not imported yet, nothing is set before the model compiles something. Each
function may be called again.
"""

import sys
import threading
from collections.abc import Sequence
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

import torch

from torchlens._capture.distributed.distributed_patches import distributed_patches
from torchlens._capture.patches.torch_patches import MODULE_PATCHES, PATCHES, Patch
from torchlens._capture.threads import THREAD_PATCHES

_MISSING = object()
_lock = threading.RLock()


class _Group:
    """Patches that are applied and undone together."""

    def __init__(self) -> None:
        self.users: set[object] = set()
        self.is_applied = False  # wholly: an interrupt may leave some
        self._undo: list[tuple[Any, str, Any]] = []
        # The number of modules when the group was applied; new modules come after them.
        self._num_modules: int | None = None

    def apply(self, patches: Sequence[Patch]) -> None:
        if not self.is_applied:
            self._revert()  # what an interrupt may have left of an earlier time
            self._num_modules = len(sys.modules)
            for owner, name, new in patches:
                # What `owner` itself has under that name, bases aside. Noted before it is replaced,
                # so that an interrupt between the two leaves nothing behind.
                old = (
                    owner.__code__
                    if type(owner) is FunctionType
                    else owner.__dict__.get(name, _MISSING)
                )
                self._undo.append((owner, name, old))
                setattr(owner, name, new)
            self.is_applied = True

    def undo(self, user: object) -> None:
        self.users.discard(user)
        if not self.users:
            self.is_applied = False
            self._revert()

    def _revert(self) -> None:
        self._clean_new_modules()
        for owner, name, old in reversed(self._undo):
            if old is not _MISSING:
                setattr(owner, name, old)
            elif name in owner.__dict__:
                delattr(owner, name)
        self._undo.clear()

    def _clean_new_modules(self) -> None:
        """A module imported since may have taken a patched name along (torch._dynamo does); it gets
        the original.
        """
        num_before = len(sys.modules) if self._num_modules is None else self._num_modules
        new = list(islice(sys.modules, num_before, None)) if len(sys.modules) > num_before else []
        originals = {
            id(vars(owner)[name]): old
            for owner, name, old in self._undo
            if new and old is not _MISSING and name in vars(owner)
        }
        for name in new if originals else ():
            for attribute, value in list(vars(sys.modules[name]).items()):
                if id(value) in originals:
                    setattr(sys.modules[name], attribute, originals[id(value)])
        self._num_modules = None


_MODULES, _TORCH, _DISTRIBUTED = _Group(), _Group(), _Group()
_TORCH_PATCHES = (*PATCHES, *THREAD_PATCHES)


def apply_patches(user: object) -> None:
    """Patches torch for `user` (any unique object), unless it is patched already."""
    with _lock:
        for group in (_MODULES, _TORCH, _DISTRIBUTED):
            group.users.add(user)
        _MODULES.apply(MODULE_PATCHES)
        _TORCH.apply(_TORCH_PATCHES)
        if is_distributed() and not _DISTRIBUTED.is_applied:
            _DISTRIBUTED.apply(distributed_patches())


def is_distributed() -> bool:
    """True if this process is one of several that torch.distributed connects."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def apply_module_patches(user: object) -> None:
    """Applies only the patches needed to observe module calls."""
    with _lock:
        _MODULES.users.add(user)
        _MODULES.apply(MODULE_PATCHES)


def undo_patches(user: object) -> None:
    """Undoes the patches once no user is left. May be called again, also after an interrupt."""
    with _lock:
        for group in (_DISTRIBUTED, _TORCH, _MODULES):
            group.undo(user)


_COMPILER = "torch._dynamo.eval_frame"
_eager_users: set[object] = set()
_before: list[Any] = []  # the setting to restore


def is_compiler_there() -> bool:
    """Whether it has been imported."""
    return _COMPILER in sys.modules


def keep_from_compiler(code: CodeType, is_kept: bool, with_calls: bool) -> None:
    """Makes the compiler skip the frames of a function, and its calls if `with_calls`; or undoes
    it.
    """
    if not is_compiler_there():
        return
    compiler = sys.modules[_COMPILER]
    if not hasattr(compiler, "set_code_exec_strategy"):  # torch 2.6, which cannot skip the calls
        (compiler.skip_code if is_kept else compiler.reset_code)(code)
    else:
        skip, plain = compiler.FrameAction.SKIP, compiler.FrameAction.DEFAULT
        strategy = compiler.FrameExecStrategy(
            skip if is_kept else plain, skip if is_kept and with_calls else plain
        )
        compiler.set_code_exec_strategy(code, strategy)


def is_inside_compiled() -> bool:
    """True if the current code is called by compiled code. Walks the whole stack, so it is slow."""
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
    """Makes compiled code run eagerly, for `user` (any unique object) and everyone else."""
    with _lock:
        _eager_users.add(user)
        if not _before:
            # Noted before it is changed, so that an interrupt between the two leaves nothing
            # behind.
            _before.append(sys.modules[_COMPILER]._stance)
            torch.compiler.set_stance("force_eager")


def end_eager(user: object) -> None:
    """Lets compiled code run compiled again once no user is left."""
    with _lock:
        _eager_users.discard(user)
        if not _eager_users and _before:
            sys.modules[_COMPILER]._set_stance(_before[0])
            _before.clear()
