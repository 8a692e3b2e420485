"""Where in the user's code a primitive was called."""

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
# The frame of a function that has this among its local names is where a log began: what called it
# is no part of the model.
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
    """What a piece of code is. It is kept, so that its id stays its own: hashing a code object
    means reading it all.
    """

    is_passed_over: bool  # a library's
    is_user: bool
    code: CodeType


_KNOWN: dict[int, _Kind] = {}


def _look(code: CodeType) -> _Kind:
    file = str(Path(code.co_filename).resolve())
    is_user = is_user_code(code) and not file.startswith(_folders())
    found = _KNOWN[id(code)] = _Kind(not is_user and END not in code.co_varnames, is_user, code)
    return found


class Places:
    """Finds the innermost line of the user's code; remembers the answer for each code object."""

    def __init__(self) -> None:
        self._traced: dict[int, tuple[Any, Place]] = {}

    def here(self, frame: FrameType | None) -> Place:
        """The first of this frame and those that called it that is the user's."""
        known = _KNOWN
        while frame is not None:
            code = frame.f_code
            is_passed_over, is_user, _ = known.get(id(code)) or _look(code)
            if not is_passed_over:
                return (code, frame.f_lasti) if is_user else (None, 0)
            frame = frame.f_back
        return None, 0

    def traced(self, traceback: Any) -> Place:
        """The same for a program that was written down earlier, as JAX remembers it."""
        known = self._traced.get(id(traceback))
        if known is None:
            found: Place = (None, 0)
            for code, instruction in zip(*traceback.raw_frames(), strict=True):
                kind = _KNOWN.get(id(code)) or _look(code)
                if not kind.is_passed_over:
                    found = (code, instruction) if kind.is_user else (None, 0)
                    break
            known = self._traced[id(traceback)] = (traceback, found)
        return known[1]
