"""Where in the user's code a primitive was called."""

import os
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torchlens.capture.user_code import is_user_code

__all__ = ["END", "Place", "Places"]

Place = tuple[CodeType | None, int]

_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax", "jaxtyping", "chex", "numpy")
_STANDARD = Path(os.__file__).resolve().parent
# The frame of a function that has this among its local names is where a log began: what called it is no part of the model.
END = "_torchlens_log_began"


def _folders() -> tuple[str, ...]:
    specs = [find_spec(name) for name in _LIBRARIES]
    found = [str(Path(spec.origin).resolve().parent) for spec in specs if spec is not None and spec.origin is not None]
    standard = [str(_STANDARD / name) for name in ("functools.py", "contextlib.py", "threading.py")]
    return (*(folder + os.sep for folder in found), *standard)


class Places:
    """Finds the innermost line of the user's code; what was told of a piece of code once is remembered."""

    def __init__(self) -> None:
        self._libraries = _folders()
        self._is_user: dict[CodeType, bool] = {}
        self._traced: dict[int, tuple[Any, Place]] = {}

    def here(self, frame: FrameType | None) -> Place:
        """The first of this frame and those that called it that is the user's."""
        known = self._is_user
        while frame is not None:
            code = frame.f_code
            is_user = known.get(code)
            if is_user is None:
                is_user = self._look(code)
            if is_user:
                return code, frame.f_lasti
            if END in code.co_varnames:
                break
            frame = frame.f_back
        return None, 0

    def traced(self, traceback: Any) -> Place:
        """The same for a program that was written down earlier, as JAX remembers it."""
        known = self._traced.get(id(traceback))
        if known is None:
            found: Place = (None, 0)
            for code, instruction in zip(*traceback.raw_frames(), strict=True):
                if self._is_user.get(code) or (code not in self._is_user and self._look(code)):
                    found = (code, instruction)
                    break
                if END in code.co_varnames:
                    break
            known = self._traced[id(traceback)] = (traceback, found)
        return known[1]

    def _look(self, code: CodeType) -> bool:
        file = str(Path(code.co_filename).resolve())
        found = self._is_user[code] = is_user_code(code) and not file.startswith(self._libraries)
        return found
