"""How much work something is: counted, not timed, so that a busy machine finds the same."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torchlens as tl

_PACKAGE = str(Path(tl.__file__).parent) + os.sep


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of the package's code `work` runs."""
    count = 0

    def in_ours(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_ours

    def anywhere(frame: FrameType, event: str, arg: Any) -> Any:
        return in_ours if frame.f_code.co_filename.startswith(_PACKAGE) else None

    previous = sys.gettrace()
    sys.settrace(anywhere)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count
