"""Which layers a tail is asked to record: the keys that a caller names them by."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torchlens.capture.recording import Recording
from torchlens.history.log import Log
from torchlens.trace.names import names_in_call
from torchlens.wording import did_you_mean, got

__all__ = ["checked_keys", "is_named", "modules_named", "names_operations", "rows_labelled"]


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
    """Whether a name in the file fits one of the keys, without its call. What is outside any module is `/add`."""
    own = name.partition("/")[2]
    own = own if "/" in own else f"/{own}"
    return any(fnmatchcase(own, key if "/" in key else f"{key}/*") for key in keys)


def rows_labelled(key: str, recording: Recording) -> list[int]:
    """The operations, inputs and outputs that a key without a module means: by what they are called in the file, if they
    are outside any module, or by their label."""
    log = Log(recording)
    found = [row for row, name in enumerate(names_in_call(recording)) if "/" not in name and fnmatchcase(name, key)]
    for layer in log.graph.layers:
        for number, entry in enumerate(layer.entries, start=1):
            labels = (layer.label, layer.label_short)
            if any(fnmatchcase(label, key) or f"{label}:{number}" == key for label in labels):
                found.append(log.graph.recorded[entry])
    return found


def modules_named(keys: Iterable[str], addresses: Iterable[str], says: str, what: str = "module") -> set[str]:
    """The addresses that the keys are or fit; an error for a key that fits none."""
    known = list(addresses)
    found: set[str] = set()
    for key in keys:
        fitting = {address for address in known if address == key or fnmatchcase(address, key)}
        if not fitting:
            raise ValueError(f"layers names {key!r}, and {says} no such {what}. {did_you_mean(key, known)}".rstrip())
        found |= fitting
    return found
