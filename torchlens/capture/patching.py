"""The few temporary patches, applied and undone in one place.

torch reports its operations to the recorder by itself (see `recorder.py`). Patched is only what it does not report (see
`patches.py`). A patch is a record: where, name, new. The first log applies them all, the last one to end undoes them in
reverse.
"""

import sys
import threading
from collections.abc import Sequence
from itertools import islice
from types import FunctionType
from typing import Any

from torchlens.capture.distributed_patches import distributed_patches
from torchlens.capture.patches import PATCHES, Patch
from torchlens.capture.thread_patches import THREAD_PATCHES

__all__ = ["apply_patches", "undo_patches"]

_MISSING = object()
_lock = threading.RLock()
_users: set[object] = set()
_undo: list[tuple[Any, str, Any]] = []
_applied: set[str] = set()  # which of them, wholly: an interrupt may leave some
_num_modules: list[int] = []  # how many there were when the patches were applied; new ones stand behind them


def apply_patches(user: object) -> None:
    """Patches torch for `user` (any object of its own), unless another user's log has done so."""
    with _lock:
        _users.add(user)
        if "torch" not in _applied:
            _revert()  # what an interrupt may have left of an earlier time
            _num_modules.append(len(sys.modules))
            _apply((*PATCHES, *THREAD_PATCHES))
            _applied.add("torch")
        if "distributed" not in _applied and (patches := distributed_patches()):
            _apply(patches)
            _applied.add("distributed")


def _apply(patches: Sequence[Patch]) -> None:
    for patch in patches:
        # Noted before it is done, so that an interrupt between the two leaves nothing behind.
        _undo.append((patch.owner, patch.name, _own(patch.owner, patch.name)))
        setattr(patch.owner, patch.name, patch.new)


def _own(owner: Any, name: str) -> Any:
    """What `owner` itself has under that name, bases aside."""
    return owner.__code__ if isinstance(owner, FunctionType) else vars(owner).get(name, _MISSING)


def undo_patches(user: object) -> None:
    """Gives torch back as it was, once no user is left. May be called again, and after an interrupted call."""
    with _lock:
        _users.discard(user)
        if not _users:
            _applied.clear()
            _revert()


def _revert() -> None:
    _clean_new_modules()
    for owner, name, old in reversed(_undo):
        if old is not _MISSING:
            setattr(owner, name, old)
        elif name in vars(owner):
            delattr(owner, name)
    _undo.clear()


def _clean_new_modules() -> None:
    """A module that the model imported may have taken a patched name along (torch._dynamo does); it gets the original."""
    num_before = _num_modules[-1] if _num_modules else len(sys.modules)
    new = list(islice(sys.modules, num_before, None)) if len(sys.modules) > num_before else []
    originals = {
        id(vars(owner)[name]): old for owner, name, old in _undo if new and old is not _MISSING and name in vars(owner)
    }
    for name in new:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if id(value) in originals:
                setattr(sys.modules[name], attribute, originals[id(value)])
    _num_modules.clear()
