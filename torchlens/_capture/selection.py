"""What `layers_to_save` may mean, as far as that is known while the model runs.

Labels are known only when the graph is. While the model runs, everything is saved that a key could
turn out to mean; the rest of it is released afterwards. A key excludes most operations, because the
addresses of modules and the types of operations are known in time.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torchlens._capture.model_parts import Parts
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT, Operation
from torchlens._recording.recording import ModuleCall

# What follows the type in a label consists of these.
_NUMBERING = "_:0123456789"
_LABEL = re.compile(r"(.+?)_\d+(?:_\d+)?(?::\d+)?")
# What comes after it in a key names a tensor of what a module returned: `lstm:2.output.1.0`.
_PART = re.compile(r"\.output\.")
_BOUNDARIES = {INPUT.layer_type, BUFFER.layer_type, OUTPUT.layer_type}


def keys_in(layers_to_save: Any) -> list[Any]:
    """The keys in `layers_to_save`, which may be a single one."""
    if isinstance(layers_to_save, list | tuple | set | frozenset):
        return list(layers_to_save)
    return [layers_to_save]


def first_address(key: str, aliases: Mapping[str, str]) -> str:
    """The address that the log uses for a module that has several."""
    for other, address in aliases.items():
        if key == other or key.startswith((f"{other}.", f"{other}:")):
            return address + key[len(other) :]
    return key


class Selection:
    """The operations and modules that some keys may mean.

    With `by_operation`, what a module returns is saved when the operation runs rather than when the
    module returns, so that the arguments of the operation are saved, too. With `as_returned`, the
    value saved is what the module returned, even if it was changed since the operation.
    """

    def __init__(
        self, keys: Iterable[str], parts: Parts, *, by_operation: bool, as_returned: bool
    ) -> None:
        self.as_returned = as_returned
        self._addresses: set[str] = set()  # of modules, or of one pass: `block:2`
        self._label_types: set[str] = set()
        self._type_parts: list[str] = []
        self._address_parts: list[str] = []
        self._by_operation = by_operation
        self._known_types: dict[str, bool] = {}
        self._known_calls: dict[int, bool] = {}
        known = frozenset(parts.addresses.values())
        for key in keys:
            address = first_address(key, parts.aliases)
            starts = [address, *(address[: part.start()] for part in _PART.finditer(address))]
            addresses = [start for start in starts if start.partition(":")[0] in known]
            label = _LABEL.fullmatch(key)
            if label is not None:
                self._label_types.add(label[1])
            if addresses:  # several: a module may itself be called `output`
                self._addresses.update(addresses)
            else:  # possibly a part of a label or of an address
                self._type_parts.append(key.rstrip(_NUMBERING))
                self._address_parts.append(address.partition(":")[0])
        self._has_boundaries = bool(self._type_parts or self._label_types)

    def may_mean(self, operation: Operation, call: int, calls: list[ModuleCall]) -> bool:
        """True if a key may mean an operation that runs in a module call, an input or an output."""
        kind = operation.layer_type
        is_meant = self._known_types.get(kind)
        if is_meant is None:
            is_meant = self._known_types[kind] = (
                kind in self._label_types
                or any(part in kind for part in self._type_parts)
                or (self._has_boundaries and kind in _BOUNDARIES)
            )
        return is_meant or (self._by_operation and self._is_inside(call, calls))

    def may_mean_module(self, address: str, pass_num: int | None) -> bool:
        """True if a key may mean a module, or one pass of it; None is any pass."""
        if pass_num is None:
            is_meant = any(key.partition(":")[0] == address for key in self._addresses)
        else:
            is_meant = not self._addresses.isdisjoint((address, f"{address}:{pass_num}"))
        return is_meant or any(part in address for part in self._address_parts)

    def _is_inside(self, call: int, calls: list[ModuleCall]) -> bool:
        """True if a module call, or one that it belongs to, may be meant."""
        if not call:
            return False
        is_inside = self._known_calls.get(call)
        if is_inside is None:
            is_inside = self.may_mean_module(calls[call].address, None) or self._is_inside(
                calls[call].parent, calls
            )
            self._known_calls[call] = is_inside
        return is_inside


def can_exclude(layers_to_save: Any) -> bool:
    """True if every key excludes some operations while the model runs.

    A number, a function, or a part of a label without letters may mean any operation.
    """
    return all(isinstance(key, str) for key in keys_in(layers_to_save))
