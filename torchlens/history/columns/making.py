"""What all columns are made with."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from torchlens.capture.symbolic import SymbolicInt
from torchlens.history.log import nice_bytes

Entries = Sequence[int]
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def once(keys: Iterable[_Key], make: Callable[[_Key], _Value]) -> list[_Value]:
    """What `make` makes of each key; of keys that are equal only once."""
    known: dict[_Key, _Value] = {}
    found = []
    for key in keys:
        if key not in known:
            known[key] = make(key)
        found.append(known[key])
    return found


def nice_sizes(sizes: list[int]) -> list[str]:
    """Bytes as text."""
    if SymbolicInt in set(map(type, sizes)):  # may be equal to a number, and reads differently
        return list(map(nice_bytes, sizes))
    return once(sizes, nice_bytes)
