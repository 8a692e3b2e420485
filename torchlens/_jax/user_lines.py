"""Finds the line of user code that called a primitive."""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torchlens._recording.user_code import is_user_code

Place = tuple[CodeType | None, int]

_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax", "jaxtyping", "chex", "numpy")
_STANDARD = Path(os.__file__).resolve().parent
# A function with this local variable starts a log: its callers are not part of the model.
END = "_torchlens_log_began"


@cache
def _folders() -> tuple[str, ...]:
    specs = [find_spec(name) for name in _LIBRARIES]
    found = [
        str(Path(spec.origin).resolve().parent)
        for spec in specs
        if spec is not None and spec.origin is not None
    ]
    standard = [str(_STANDARD / name) for name in ("functools.py", "contextlib.py", "threading.py")]
    return (*(folder + os.sep for folder in found), *standard)


class _Kind(NamedTuple):
    """Whether a code object is the user's. Kept by id, because hashing a code object is slow; the
    code is kept alive, so that its id is unique.
    """

    is_library: bool
    is_user: bool
    code: CodeType


_KNOWN: dict[int, _Kind] = {}


def _look(code: CodeType) -> _Kind:
    file = str(Path(code.co_filename).resolve())
    is_user = is_user_code(code) and not file.startswith(_folders())
    found = _KNOWN[id(code)] = _Kind(not is_user and END not in code.co_varnames, is_user, code)
    return found


class UserLines:
    """Finds the innermost line of the user's code."""

    def __init__(self) -> None:
        self._traced: dict[int, tuple[Any, Place]] = {}

    def here(self, frame: FrameType | None) -> Place:
        """The innermost line of user code, from this frame outwards."""
        known = _KNOWN
        while frame is not None:
            code = frame.f_code
            is_library, is_user, _ = known.get(id(code)) or _look(code)
            if not is_library:
                return (code, frame.f_lasti) if is_user else (None, 0)
            frame = frame.f_back
        return None, 0

    def traced(self, traceback: Any) -> Place:
        """The innermost line of user code in a traceback that JAX kept with a traced program."""
        known = self._traced.get(id(traceback))
        if known is None:
            found: Place = (None, 0)
            for code, instruction in zip(*traceback.raw_frames(), strict=True):
                kind = _KNOWN.get(id(code)) or _look(code)
                if not kind.is_library:
                    found = (code, instruction) if kind.is_user else (None, 0)
                    break
            known = self._traced[id(traceback)] = (traceback, found)
        return known[1]
