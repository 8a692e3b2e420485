"""Telling the user's code from torch's and ours."""

import os
from pathlib import Path
from types import CodeType

import torch

__all__ = ["KNOWN_CODE", "is_user_code"]

_LIBRARIES = tuple(f"{Path(file).resolve().parents[up]}{os.sep}" for file, up in ((str(torch.__file__), 0), (__file__, 1)))
# The answers so far, by id, with the code itself beside it so that the id stays its own: hashing a code object means
# reading it all.
KNOWN_CODE: dict[int, tuple[bool, CodeType]] = {}


def is_user_code(code: CodeType) -> bool:
    """Whether `code` stands in a file outside torch and torchlens."""
    known = KNOWN_CODE.get(id(code))
    if known is None:
        file = code.co_filename
        is_user = not (file.startswith("<frozen") or str(Path(file).resolve()).startswith(_LIBRARIES))
        known = KNOWN_CODE[id(code)] = (is_user, code)
    return known[0]
