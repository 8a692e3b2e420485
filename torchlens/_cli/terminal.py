"""The terminal that the commands print to: its width, its colours."""

import os
import shutil
import sys

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def width() -> int:
    """The width of the terminal in characters; 100 if it is unknown."""
    return shutil.get_terminal_size((100, 24)).columns


def paint(text: str, style: str) -> str:
    """The text in a style ('bold', 'dim', 'red', ...), if it goes to a terminal and NO_COLOR is
    not set.
    """
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if is_colored() else text


def is_colored() -> bool:
    """Whether what is printed may have colours."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def say(text: str) -> None:
    """Prints, also where the terminal cannot show every letter, or where the reader of a pipe has
    closed it.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    except BrokenPipeError:
        _say_no_more()


def flush() -> None:
    """Sees that all that was said is out."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _say_no_more()


def _say_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
