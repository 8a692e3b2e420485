"""The words that refusals share: X must be Y, got Z."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

__all__ = ["checked_file", "did_you_mean", "got", "one_of"]


def got(value: Any) -> str:
    """What was given, in a few words: `'all' (str)`, `a Tensor of shape (2, 3)`, `the class Conv2d`.

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
    return f"a {kind} of {len(value)}" if isinstance(value, list | tuple | set | dict) else f"a {kind}"


def one_of(choices: Iterable[str]) -> str:
    """`'a', 'b' or 'c'`."""
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(name: Any, choices: Iterable[str]) -> str:
    """`Did you mean 'x'? ` with a blank after it, or nothing where nothing is near."""
    close = difflib.get_close_matches(str(name).lower(), list(choices), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def checked_file(name: str, path: Any, example: str) -> Path:
    """The path of a file to write, after seeing that it is one; `~` is the user's folder."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise TypeError(f"{name} must name a file, such as {example!r}, got {got(path)}.")
    target = Path(path).expanduser()
    if target.is_dir() or str(path).endswith(("/", os.sep)):
        raise ValueError(
            f"{name} must name a file, got the folder {str(target)!r}. "
            f"Name a file in it, such as {str(target / example)!r}."
        )
    return target
