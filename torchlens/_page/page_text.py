"""Text on the page: each string and each line of source code once, referred to by number."""

from pathlib import Path
from typing import Any

from torchlens._recording.user_code import SourceLine, source_line, source_text


class Strings:
    """Text → its number; the empty string has the number 0."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.found.setdefault(text, len(self.found))


class Places:
    """Lines of source code → their numbers; `lines` has the place and the text of each."""

    def __init__(self, strings: Strings) -> None:
        self.lines: list[list[int]] = []
        self._strings = strings
        self._number_of: dict[Any, int] = {}

    def __call__(self, code: Any, instruction: int) -> int:
        """The number of a line; -1 without code."""
        if code is None:
            return -1
        key = (code, instruction)
        if key not in self._number_of:
            self._number_of[key] = len(self.lines)
            place = place_text(source_line(code, instruction))
            self.lines.append([self._strings(place), self._strings(source_text(code, instruction))])
        return self._number_of[key]


def place_text(line: SourceLine) -> str:
    """A place in the code; files below the working directory have relative paths."""
    file = Path(line.file)
    here = Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return f"{shown}:{line.line} in {line.function}"


def shape_text(shape: Any) -> str:
    """`1×384`; `(384,)` for one dimension, for `× 8` is a number of passes; `scalar` for none."""
    if len(shape) == 1:
        return f"({shape[0]},)"
    return "×".join(map(str, shape)) if len(shape) else "scalar"
