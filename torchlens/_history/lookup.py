"""Finds the entry that a key means; if there is none, the error names the closest keys."""

import difflib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain

from torchlens._history.log import Log
from torchlens._recording.collector import without_collector
from torchlens._text.error_wording import got, is_whole


def lookup_keys(log: Log, entry: int) -> list[int | str]:
    """Every key that finds exactly this entry: ordinals, labels, modules that return it,
    addresses.
    """
    position = bisect_left(log.visible, entry)
    layer = log.graph.layers[log.graph.layer_of[entry]]
    pass_num, is_single = log.graph.pass_of[entry], len(layer.entries) == 1
    keys: list[int | str] = [position - len(log.visible), position]
    for label in (layer.label, layer.label_short):
        keys += [label, f"{label}:{pass_num}"] if is_single else [f"{label}:{pass_num}"]
    for call in log.graph.modules_exited.get(entry, ()):
        if log.graph.first_exit[call] == entry:
            record = log.recording.module_calls[call]
            if log.graph.module_tree.num_passes[record.address] == 1:
                keys.append(record.address)
            keys.append(log.module_pass(call))
    keys += log.boundary_addresses.get(entry, [])
    return list(dict.fromkeys(keys))


class Lookup:
    """All the keys of a log. The table of them is large, and is built when a key is not a plain
    label.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    @cached_property
    def _entries(self) -> dict[str, list[int]]:
        return without_collector(self._table)

    def _table(self) -> dict[str, list[int]]:
        """Every key, and the listed entries that it means."""
        table: dict[str, list[int]] = {}
        visible = set(self._log.visible)

        def add(keys: Iterable[tuple[str, int]]) -> None:
            for key, entry in keys:
                if entry in visible:
                    found = table.setdefault(key, [])
                    if entry not in found[-1:]:
                        found.append(entry)

        add(self._label_keys())
        labels = set(table)
        # A label wins over a module of the same name.
        add((key, entry) for key, entry in self._module_keys() if key not in labels)
        addresses = self._log.boundary_addresses
        add((address, entry) for entry, own in addresses.items() for address in own)
        return table

    def _label_keys(self) -> Iterator[tuple[str, int]]:
        for layer in self._log.graph.layers:
            for label in (layer.label, layer.label_short):
                for number, entry in enumerate(layer.entries, start=1):
                    yield label, entry
                    yield f"{label}:{number}", entry

    def _module_keys(self) -> Iterator[tuple[str, int]]:
        for call, entry in self._log.graph.first_exit.items():
            yield self._log.module_call_addresses[call], entry
            yield self._log.module_pass(call), entry

    @cached_property
    def _layers(self) -> dict[str, int]:
        """The layers by label, without the labels that mean something else as well."""
        full = {label: number for number, label in enumerate(self._log.layer_labels)}
        short = {layer.label_short: number for number, layer in enumerate(self._log.graph.layers)}
        found = full | short
        addresses = list(chain.from_iterable(self._log.boundary_addresses.values()))
        for label in [
            *(full.keys() & short.keys()),
            *addresses,
            *(one.rpartition(":")[0] for one in addresses),
        ]:
            found.pop(label, None)
        return found

    def _labelled(self, key: str) -> int | None:
        """The entry with this label; None if the key may mean something else."""
        label, colon, pass_text = key.rpartition(":")
        if not colon:
            label, pass_text = key, "1"
        layer = self._layers.get(label)
        if layer is None:
            return None
        entries = self._log.graph.layers[layer].entries
        if not colon and len(entries) > 1:
            return None
        digits = pass_text[:9]
        number = int(digits) if digits.isdecimal() else 0
        if str(number) != pass_text or not 0 < number <= len(entries):
            return None
        entry = entries[number - 1]
        return entry if entry in self._log.visible else None

    def one(self, key: int | str) -> int:
        """The entry that `key` means."""
        if is_whole(key):
            return self._at(int(key))
        if not isinstance(key, str):
            cure = "Try history['conv2d_1_1'], history['features.0'] or history[0]."
            if isinstance(key, slice):
                cure = "For several entries at once: history.layer_list[1:3]."
            raise TypeError(
                f"The key of a layer must be a name or a number, got {got(key)}. {cure}"
            )
        labelled = self._labelled(key)
        if labelled is not None:
            return labelled
        found = self._entries.get(key) or self._labels_with(key)
        if len(found) != 1:
            raise KeyError(self._not_one(key, found))
        return found[0]

    def _not_one(self, key: str, found: list[int]) -> str:
        """The message for a key that means no entry, or several."""
        if not found:
            return f"No layer {key!r}. {self._closest(key)}"
        labels = list(map(self._log.label, found))
        is_one_layer = len({self._log.graph.layer_of[entry] for entry in found}) == 1
        if key in self._entries and (is_one_layer or key in self._log.graph.module_tree.num_passes):
            passes = [name for name in self._entries if name.startswith(f"{key}:")]
            return f"{key!r} has {len(found)} passes; say which: {_listed(passes or labels)}."
        return f"{key!r} is part of {len(found)} labels; say which: {_listed(labels)}."

    def many(self, key: int | str) -> list[int]:
        """All entries that `key` means: all passes of a bare name, or all keys that contain it."""
        if not isinstance(key, str):
            return [self.one(key)]
        exact = self._entries.get(key)
        if exact is not None:
            return exact
        found = sorted(
            {entry for name, entries in self._entries.items() if key in name for entry in entries}
        )
        if not found:
            raise ValueError(
                f"layers_to_save names {key!r}, and there is no such layer. {self._closest(key)}"
            )
        return found

    def _at(self, position: int) -> int:
        count = len(self._log.visible)
        if not -count <= position < count:
            raise IndexError(
                f"Layer {position} is out of range: there are {count}, numbered 0 to {count - 1}."
            )
        return self._log.visible[position]

    def _labels_with(self, part: str) -> list[int]:
        """Entries with `part` in their label."""
        if not part:
            return []
        return [entry for entry in self._log.visible if part in self._log.label_w_pass(entry)]

    def _closest(self, key: str) -> str:
        names = list(dict.fromkeys([*self._log.labels(self._log.visible), *self._entries]))
        holding = [name for name in names if key.lower() in name.lower()]
        close = holding or difflib.get_close_matches(key, names, n=5, cutoff=0.4)
        if close:
            return f"Closest: {_listed(close[:5])}."
        if not names:
            return "The log is empty."
        return f"There are {len(self._log.visible)} layers, from {names[0]!r} on."


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown) if len(shown) <= 12 else f"{', '.join(shown[:10])}, ... {shown[-1]}"
