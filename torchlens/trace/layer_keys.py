"""Which layers a tail is asked to record: the keys that a caller names them by."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torchlens.wording import did_you_mean, got

__all__ = ["checked_keys", "is_named", "modules_named", "names_operations"]


def checked_keys(layers: Any, example: str, operation: str, module: str) -> list[str]:
    """The keys as a list; the words are for the message where they are none."""
    keys = [layers] if isinstance(layers, str) else layers
    is_list = isinstance(keys, Sequence | set | frozenset) and not isinstance(keys, Mapping)
    if not is_list or not keys or not all(isinstance(key, str) for key in keys):
        raise TypeError(
            f"layers must be 'all', a module or several ('{example}.0', '{example}.*'), names in the file "
            f"('{example}.*/{operation}'), or a function of path and {module}, got {got(layers)}."
        )
    return list(keys)


def names_operations(keys: Iterable[str]) -> bool:
    """Whether some key is of names in the file, not of modules."""
    return any("/" in key for key in keys)


def is_named(name: str, keys: Iterable[str]) -> bool:
    """Whether a name in the file, without its call, fits one of the keys."""
    own = name.partition("/")[2]
    return any(fnmatchcase(own, key if "/" in key else f"{key}/*") for key in keys)


def modules_named(keys: Iterable[str], addresses: Iterable[str], says: str) -> set[str]:
    """The addresses that the keys are or fit; an error for a key that fits none."""
    known = list(addresses)
    found: set[str] = set()
    for key in keys:
        fitting = {address for address in known if address == key or fnmatchcase(address, key)}
        if not fitting:
            raise ValueError(f"layers names {key!r}, and {says} no such module. {did_you_mean(key, known)}".rstrip())
        found |= fitting
    return found
