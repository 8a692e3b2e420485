"""Which layers a tail is asked to record: the keys that a caller names them by."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torchlens._history.log import Log
from torchlens._recording.recording import Recording
from torchlens._text.wording import did_you_mean, got
from torchlens._trace.names import names_in_call

_SHOWN = 12  # names in a message


def checked_keys(layers: Any, example: str, operation: str, module: str) -> list[str]:
    """The keys as a list; the words are for the message where they are none."""
    keys = [layers] if isinstance(layers, str) else layers
    is_list = isinstance(keys, Sequence | set | frozenset) and not isinstance(keys, Mapping)
    if not is_list or not keys or not all(isinstance(key, str) for key in keys):
        raise TypeError(
            f"layers must be 'all', a module or several ('{example}.0', '{example}.*'), names in "
            f"the file ('{example}.*/{operation}'), or a function of path and {module}, got "
            f"{got(layers)}."
        )
    return list(keys)


def names_operations(keys: Iterable[str]) -> bool:
    """Whether some key is of names in the file, not of modules."""
    return any("/" in key for key in keys)


class NamedLayers:
    """The names in the file that some keys mean, and the keys that have met none of them so far.

    A key has a module and an operation, either of them with a number or without: `relu:2` is the
    second, `relu` is all of them. What is outside any module is `/add`.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.unmet = dict.fromkeys(keys)
        self._keys = {
            key: (key if "/" in key else f"{key}/*").rpartition("/")[::2] for key in self.unmet
        }
        self._known: dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        own = name.partition("/")[2]
        known = self._known.get(own)
        if known is None:
            known = self._known[own] = self._is_meant(own)
        return known

    def _is_meant(self, own: str) -> bool:
        module, _, operation = own.rpartition("/")
        met = [
            key
            for key, (one, other) in self._keys.items()
            if fits(module, one) and fits(operation, other)
        ]
        for key in met:
            self.unmet.pop(key, None)
        return bool(met)

    @property
    def names(self) -> list[str]:
        """The names that there were, as one would write them for all passes."""
        parts = [name.rpartition("/")[::2] for name in self._known]
        return list(
            dict.fromkeys(
                f"{module.partition(':')[0]}/{own.partition(':')[0]}" for module, own in parts
            )
        )


def fits(name: str, key: str) -> bool:
    """Whether a key means a module or operation in a name: `relu:2` is meant by `relu:2`, `relu`
    and `r*`.
    """
    bare, _, number = name.partition(":")
    return any(fnmatchcase(form, key) for form in (bare, f"{bare}:{number or 1}"))


def unmet_warning(keys: Iterable[str], names: Sequence[str], model: str) -> str | None:
    """What to tell at the end about keys that fitted nothing, if there are any and there was
    something to fit.
    """
    unmet = [repr(key) for key in keys]
    if not unmet or not names:
        return None
    shown = ", ".join(map(repr, names[:_SHOWN])) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
    return (
        f"torchlens: layers names {', '.join(unmet)}, and {model} calls no such module or "
        f"operation. There are {shown}."
    )


def rows_labelled(key: str, recording: Recording) -> list[int]:
    """The operations, inputs and outputs that a key without a module means: by what they are called
    in the file, if they are outside any module, or by their label."""
    log = Log(recording)
    found = [
        row
        for row, name in enumerate(names_in_call(recording))
        if "/" not in name and fits(name, key)
    ]
    for layer in log.graph.layers:
        for number, entry in enumerate(layer.entries, start=1):
            labels = (layer.label, layer.label_short)
            if any(fnmatchcase(label, key) or f"{label}:{number}" == key for label in labels):
                found.append(log.graph.recorded[entry])
    return found


def modules_named(keys: Iterable[str], addresses: Iterable[str], says: str) -> set[str]:
    """The addresses that the keys are or fit; an error for a key that fits none."""
    known = list(addresses)
    found: set[str] = set()
    for key in keys:
        fitting = modules_fitting(key, known)
        if not fitting:
            raise ValueError(
                f"layers names {key!r}, and {says} no such module. "
                f"{did_you_mean(key, known)}".rstrip()
            )
        found |= fitting
    return found


def modules_fitting(key: str, addresses: Iterable[str]) -> set[str]:
    return {address for address in addresses if address == key or fnmatchcase(address, key)}
