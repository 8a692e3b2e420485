"""The wording that error messages share: X must be Y, got Z."""

import difflib
import os
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch


def got(value: Any) -> str:
    """Describes a value in a few words: `'all' (str)`, `a Tensor of shape (2, 3)`, `the class
    Conv2d`.

    >>> f"layers_to_save must be a label, got {got(3.5)}."
    "layers_to_save must be a label, got 3.5 (float)."
    """
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"the function {value.__name__}"
    if value is None:
        return "None"
    text, kind = repr(value), type(value).__name__
    if len(text) <= 80 and "\n" not in text:
        return f"{text} ({kind})"
    return (
        f"a {kind} of {len(value)}" if isinstance(value, list | tuple | set | dict) else f"a {kind}"
    )


def one_of(choices: Iterable[str]) -> str:
    """`'a', 'b' or 'c'`."""
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(name: Any, choices: Iterable[str]) -> str:
    """`Did you mean 'x'? ` with a trailing blank, or an empty string if no choice is close."""
    in_lower_case = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(name).lower(), list(in_lower_case), n=1)
    return f"Did you mean {in_lower_case[close[0]]!r}? " if close else ""


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, NumPy's included; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any, least: int, meaning: str = "") -> None:
    """Raises unless the value is an integer and large enough."""
    note = f" ({meaning})" if meaning else ""
    if not is_whole(value):
        raise TypeError(f"{name} must be a whole number{note}, got {got(value)}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{note}, got {value}.")


def check_seconds(seconds: Any) -> None:
    """Raises unless it is a number above 0, or None."""
    if seconds is None:
        return
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise ValueError(
            f"seconds must be a number above 0, or None for no limit, got {got(seconds)}."
        )


def check_choice(name: str, value: Any, choices: Iterable[str], or_none: bool = False) -> None:
    """Raises unless the value is one of the accepted words."""
    words = list(choices)
    if (or_none and value is None) or (isinstance(value, str) and value in words):
        return
    near = did_you_mean(str(value).lower().lstrip("."), words)
    accepted = f"{one_of(words)}, or None" if or_none else one_of(words)
    raise ValueError(f"{name} must be {accepted}, got {got(value)}. {near}".rstrip())


def checked_file(name: str, path: Any, example: str) -> Path:
    """The path of a file to write, with `~` expanded; raises if it cannot name a file."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise TypeError(f"{name} must name a file, such as {example!r}, got {got(path)}.")
    target = Path(path).expanduser()
    if target.is_dir() or str(path).endswith(("/", os.sep)):
        raise ValueError(
            f"{name} must name a file, got the folder {str(target)!r}. Name a file in it, such as "
            f"{str(target / example)!r}."
        )
    return target
