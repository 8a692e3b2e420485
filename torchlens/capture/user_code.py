"""Telling the user's code from torch's and ours."""

import os
from pathlib import Path
from types import CodeType

import torch

__all__ = ["is_user_code"]

_LIBRARIES = tuple(f"{Path(file).resolve().parents[up]}{os.sep}" for file, up in ((str(torch.__file__), 0), (__file__, 1)))
_KNOWN: dict[CodeType, bool] = {}


def is_user_code(code: CodeType) -> bool:
    """Whether `code` stands in a file outside torch and torchlens."""
    answer = _KNOWN.get(code)
    if answer is None:
        file = code.co_filename
        answer = _KNOWN[code] = not (file.startswith("<frozen") or str(Path(file).resolve()).startswith(_LIBRARIES))
    return answer
