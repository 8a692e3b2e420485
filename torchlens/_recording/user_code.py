"""Places in the user's code, as opposed to code of torch and torchlens."""

import linecache
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_FOLDERS = [
    f"{Path(file).resolve().parents[up]}{os.sep}"
    for file, up in ((str(torch.__file__), 0), (__file__, 1))
]
# torch wraps deprecated functions with it: its frames are between theirs and the caller's.
_DEPRECATION = str(
    Path(str(getattr(sys.modules.get("typing_extensions"), "__file__", os.devnull))).resolve()
)
# The modules by which Python runs threads.
_THREADING = tuple(
    str(Path(threading.__file__).resolve().parent / part)
    for part in (
        "threading.py",
        f"asyncio{os.sep}",
        f"concurrent{os.sep}",
        f"multiprocessing{os.sep}",
    )
)
_LIBRARIES = (*_FOLDERS, _DEPRECATION, *_THREADING)
# The answers so far, by id, with the code itself beside it so that the id stays its own: hashing a
# code object means reading it all.
KNOWN_CODE: dict[int, tuple[bool, CodeType]] = {}


def is_user_code(code: CodeType) -> bool:
    """True if the file of `code` is not part of torch, torchlens or Python's threading modules."""
    known = KNOWN_CODE.get(id(code))
    if known is None:
        file = code.co_filename
        is_user = not (
            file.startswith("<frozen") or str(Path(file).resolve()).startswith(_LIBRARIES)
        )
        known = KNOWN_CODE[id(code)] = (is_user, code)
    return known[0]


def warn_caller(message: str) -> None:
    """Warns of `message` at the line of the user's code that led here."""
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and not is_user_code(frame.f_code):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, stacklevel=stacklevel)


def warn_log_caller(message: str) -> None:
    """Warns of `message` at the line of the user's code that asked for the log, though the model is
    running now.
    """
    stack = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack.append(frame.f_code)
        frame = frame.f_back
    place = max(
        place
        for place, code in enumerate(stack)
        if str(Path(code.co_filename).resolve()).startswith(_FOLDERS[1])
    )
    while place + 1 < len(stack) and not is_user_code(stack[place]):
        place += 1
    warnings.warn(message, stacklevel=2 + place)


@dataclass(frozen=True)
class SourceLine:
    """A place in the user's code. The file has no absolute path; see `short_path`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def source_line(code: CodeType, instruction: int) -> SourceLine:
    """The number of the line of an instruction of `code`."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return SourceLine(short_path(code.co_filename), line, code.co_qualname)


def source_text(code: CodeType, instruction: int) -> str:
    """The text of the line; "" if its file is missing."""
    if code.co_consts[:1] == (_STANDS_FOR_LINE,):
        return str(code.co_consts[1])
    line = source_line(code, instruction)
    return linecache.getline(code.co_filename, line.line).strip()


# Code cannot be pickled. A line can, and code that stands for it serves all who ask where something
# was called.
_STANDS_FOR_LINE = "torchlens: stands for a line of the user's"


def line_of_code(code: CodeType, instruction: int) -> tuple[str, int, str, str]:
    """The arguments with which `code_of_line` makes code for the line of this instruction."""
    line = source_line(code, instruction)
    return line.file, line.line, line.function, source_text(code, instruction)


def short_path(file: str) -> str:
    """The path of a file from the working directory, or from the innermost folder of `sys.path`
    that holds it; only its name if none does. So files that are passed on to others carry no
    absolute path of this machine.
    """
    return _short_path(file, os.getcwd())  # noqa: PTH109 (Path.cwd() takes ten times as long)


@lru_cache(maxsize=4096)
def _short_path(file: str, here: str) -> str:
    path = Path(file)
    if not path.is_absolute():
        return file
    folders = [Path(folder) for folder in sys.path if path.is_relative_to(folder or os.curdir)]
    folders.sort(key=lambda folder: -len(folder.parts))
    home = Path(here) if path.is_relative_to(here) else next(iter(folders), path.parent)
    return str(path.relative_to(home))


def code_of_line(file: str, line: int, function: str, text: str) -> CodeType:
    """A code object that does nothing; it only has the position of this line."""
    return (lambda: None).__code__.replace(
        co_filename=file, co_firstlineno=line, co_name=function.rpartition(".")[2],
        co_qualname=function,
        co_linetable=b"", co_consts=(_STANDS_FOR_LINE, text),
    )  # fmt: skip
