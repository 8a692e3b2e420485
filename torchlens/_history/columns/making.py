"""Helpers that all columns share."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from torchlens._recording.symbolic import SymbolicInt
from torchlens._text.numbers import bytes_text

Entries = Sequence[int]
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def once(keys: Iterable[_Key], make: Callable[[_Key], _Value]) -> list[_Value]:
    """The result of `make` for each key, computed once for equal keys."""
    keys = list(keys)
    known = {key: make(key) for key in dict.fromkeys(keys)}
    return list(map(known.__getitem__, keys))


def nice_sizes(sizes: list[int]) -> list[str]:
    """Bytes as text."""
    if SymbolicInt in set(map(type, sizes)):  # may be equal to a number, and reads differently
        return list(map(bytes_text, sizes))
    return once(sizes, bytes_text)
