"""The names of tensors in a file: `1/features.0/conv2d` was made in that module in the first call.

`1/block:2/relu:3` is the third `relu` in the second pass of the module `block`. `1/add` is an
operation of the model itself, outside any module. Inputs, outputs and buffers are named by address:
`1/input.x`, `1/output.logits`, `1/buffer.bn.mean`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torchlens._history.log import Log
from torchlens._portable.documents import plain_name
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Recording
from torchlens._recording.trees import path_text
from torchlens._text.error_wording import did_you_mean, got

OWN_PREFIX = "torchlens/"  # of our own documents, which describe the tensors
_LONGEST = 1000
_SHOWN = 12  # names in a message


class Names:
    """The names in use within one call."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def claim(self, name: str) -> str:
        """The name, with a suffix `~2`, `~3` ... if it is already in use."""
        name = name[:_LONGEST]
        count = self._taken.get(name, 0)
        while count:
            count += 1
            other = f"{name}~{count}"
            if other not in self._taken:
                self._taken[name] = count
                name = other
                break
        self._taken[name] = 1
        return name


def full_name(call: int, key: str) -> str:
    """The name in the file of a key of a call. A key that begins with a slash belongs to no
    call.
    """
    return key[1:] if key.startswith("/") else f"{call}/{key}"


def call_of(name: str) -> int | None:
    """The number of the call that a name belongs to; None if there is none."""
    number = name.partition("/")[0]
    return int(number) if number.isdigit() and number.isascii() and len(number) < 10 else None


def names_of_rows(recording: Recording, call: int) -> list[str]:
    """The names in the file of the values of all rows."""
    return [f"{call}/{name}" for name in names_in_call(recording)]


def names_in_call(recording: Recording) -> list[str]:
    """The names without the number of the call, all different. Calls with the same graph have equal
    names.
    """
    addresses = boundary_addresses(recording)
    modules = [_module_part(call.address, call.pass_num) for call in recording.module_calls]
    counts: dict[tuple[int, str], int] = {}
    found = []
    for number, row in enumerate(recording.rows):
        kind = row.operation.layer_type
        address = addresses.get(number)
        if address is not None and row.operation in (INPUT, OUTPUT, BUFFER):
            found.append(plain_name(address))
            continue
        place = (row.module_call, kind)
        count = counts[place] = counts.get(place, 0) + 1
        found.append(
            f"{modules[row.module_call]}{plain_name(kind)}{f':{count}' if count > 1 else ''}"
        )
    return _apart(found)


def boundary_addresses(recording: Recording) -> dict[int, str]:
    """Row → `input.x`, `output.logits`, `buffer.bn.running_mean`."""
    found: dict[int, str] = {}
    for head, paths in (("input", recording.inputs), ("output", recording.outputs)):
        for path, number in paths:
            found.setdefault(number, path_text(head, path))
    for address, number in recording.buffers:
        found.setdefault(number, f"buffer.{address}")
    return found


def _module_part(address: str, pass_num: int) -> str:
    if not address:
        return ""
    return f"{plain_name(address)}{f':{pass_num}' if pass_num > 1 else ''}/"


def _apart(names: Sequence[str]) -> list[str]:
    if len(set(names)) == len(names):
        return list(names)
    own = Names()
    return list(map(own.claim, names))


def without_own(names: Iterable[str]) -> list[str]:
    """The names of tensors, without those of our documents."""
    return [name for name in names if not name.startswith(OWN_PREFIX)]


# -- the `layers` argument of a tail ---------------------------------------------------------------


def checked_keys(layers: Any, example: str, operation: str, module: str) -> list[str]:
    """The keys as a list. The other arguments are used in the error message."""
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
    """Whether any key is a name in the file, not the address of a module."""
    return any("/" in key for key in keys)


class NamedLayers:
    """A filter for names in the file by keys. `unmet` holds the keys without a match so far.

    A key has a module and an operation, each with or without a number: `relu:2` is the second,
    `relu` is all of them. `/add` is an operation outside any module.
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
        """All names seen, as keys without numbers."""
        parts = [name.rpartition("/")[::2] for name in self._known]
        return list(
            dict.fromkeys(
                f"{module.partition(':')[0]}/{own.partition(':')[0]}" for module, own in parts
            )
        )


def fits(name: str, key: str) -> bool:
    """Whether a key matches a module or operation in a name: `relu:2`, `relu` and `r*` match
    `relu:2`.
    """
    bare, _, number = name.partition(":")
    return any(fnmatchcase(form, key) for form in (bare, f"{bare}:{number or 1}"))


class UnmetFilter:
    """Whether the choice of modules, by address or by a function, met one that was called."""

    def __init__(self) -> None:
        self._called: dict[str, None] | None = None
        self._is_met = False

    def note(self, chosen: Collection[str], called: Iterable[str]) -> None:
        """Takes the addresses that were chosen, and those that a call of the model called."""
        if not self._is_met:
            self._called = dict.fromkeys(called)
            self._is_met = not self._called.keys().isdisjoint(chosen)

    def warning(self, model: str) -> str | None:
        """What to say at the end; None if a module was met or nothing was called."""
        if self._is_met or self._called is None:
            return None
        called = ", ".join(map(repr, list(self._called)[:_SHOWN])) or "none"
        return (
            f"torchlens: layers chose no module that {model} called. Modules that it called: "
            f"{called}."
        )


def unmet_warning(keys: Iterable[str], names: Sequence[str], model: str) -> str | None:
    """The warning about keys without a match; None if there are none, or no names to match."""
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
    """The rows that match a key without a module: by their name in the file, if they are outside
    any module, or by their label."""
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
    """The addresses that match the keys. Raises ValueError for a key without a match."""
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
