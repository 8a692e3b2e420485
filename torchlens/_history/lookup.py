"""Finds the entries that a key means, in every function that takes keys; if there is none, the
error names the closest keys.
"""

import difflib
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain

from torchlens._capture.selection import first_address
from torchlens._history.log import Log
from torchlens._recording.trees import path_text
from torchlens._text.error_wording import got, is_whole


def lookup_keys(log: Log, entry: int) -> list[int | str]:
    """Every key that finds exactly this entry: ordinals, labels, modules that return it,
    addresses.
    """
    history = log.history()
    lookup: Lookup = Lookup(log) if history is None else history._lookup
    position = bisect_left(log.visible, entry)
    layer = log.graph.layers[log.graph.layer_of[entry]]
    pass_num = log.graph.pass_of[entry]
    names = [layer.label, f"{layer.label}:{pass_num}"]
    names += [layer.label_short, f"{layer.label_short}:{pass_num}"]
    for call in log.graph.modules_exited.get(entry, ()):
        names += [log.recording.module_calls[call].address, log.module_pass(call)]
    names += log.boundary_addresses.get(entry, [])
    names += lookup.part_names.get(entry, [])
    found = [name for name in dict.fromkeys(names) if lookup.entries(name) == [entry]]
    return [position - len(log.visible), position, *found]


class Lookup:
    """The keys of a log. The table of a kind of keys is built when it is first needed."""

    def __init__(self, log: Log) -> None:
        self._log = log

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
        exact = self.entries(key)
        found = exact or self._with_part(key)
        if not found:
            raise KeyError(f"No layer {key!r}. {self._closest(key)}")
        if len(found) > 1:
            raise KeyError(self._several(key, found, is_exact=bool(exact)))
        return found[0]

    def lists(self, entry: int) -> bool:
        """True if the history lists an entry."""
        return entry in self._listed

    def many(self, key: int | str, argument: str = "layers_to_save") -> list[int]:
        """All entries that `key` means: all passes of a bare name, all names that contain it."""
        if not isinstance(key, str):
            return [self.one(key)]
        found = self.entries(key) or self._with_part(key)
        if not found:
            raise ValueError(
                f"{argument} names {key!r}, and there is no such layer. {self._closest(key)}"
            )
        return found

    def entries(self, key: str) -> list[int]:
        """The listed entries with exactly this name. The first kind of key that has it decides."""
        meanings = self._meanings(key)
        listed = ([entry for entry in found if entry in self._listed] for found in meanings)
        return next(filter(None, listed), [])

    def _meanings(self, key: str) -> Iterator[Sequence[int]]:
        yield self._passes(self._labels, key)
        yield self._modules.get(first_address(key, self._log.recording.module_aliases), ())
        yield self._passes(self._short_labels, key)
        yield self._addresses.get(key, ())
        yield self._arguments.get(key, ())
        yield self._parts.get(first_address(key, self._log.recording.module_aliases), ())

    @cached_property
    def _listed(self) -> Container[int]:
        visible = self._log.visible
        return visible if isinstance(visible, range) else frozenset(visible)

    # -- the kinds of keys -------------------------------------------------------------------------

    @cached_property
    def _labels(self) -> dict[str, int]:
        return {label: number for number, label in enumerate(self._log.layer_labels)}

    @cached_property
    def _short_labels(self) -> dict[str, int]:
        layers = enumerate(self._log.graph.layers)
        return {layer.label_short: number for number, layer in layers}

    @cached_property
    def _modules(self) -> dict[str, list[int]]:
        """The address of a module, and of each of its calls → the first tensor that it returned."""
        found: dict[str, list[int]] = {}
        for call, entry in self._log.graph.first_exit.items():
            for name in (self._log.module_call_addresses[call], self._log.module_pass(call)):
                entries = found.setdefault(name, [])
                if entry not in entries[-1:]:
                    entries.append(entry)
        return found

    @cached_property
    def _addresses(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for entry, own in self._log.boundary_addresses.items():
            for address in own:
                found.setdefault(address, []).append(entry)
        return found

    @cached_property
    def _parts(self) -> dict[str, list[int]]:
        """`lstm.output.1.0`, with and without a pass → that tensor of what the module returned."""
        found: dict[str, list[int]] = {}
        for entry, names in self.part_names.items():
            for name in names:
                found.setdefault(name, []).append(entry)
        return found

    @cached_property
    def part_names(self) -> dict[int, list[str]]:
        """The names of an entry in the tuples, dicts and objects that modules returned."""
        found: dict[int, list[str]] = {}
        for call, path, number in self._log.recording.module_parts:
            entry = self._log.graph.entry_of.get(number)
            if entry is not None:
                for name in (self._log.module_call_addresses[call], self._log.module_pass(call)):
                    found.setdefault(entry, []).append(path_text(f"{name}.output", path))
        return found

    @cached_property
    def _arguments(self) -> dict[str, list[int]]:
        """The name of an argument of the model → the tensors in it."""
        entry_of = self._log.graph.entry_of
        found: dict[str, list[int]] = {}
        for path, number in self._log.recording.inputs:
            if path and isinstance(path[0], str) and number in entry_of:
                found.setdefault(path[0], []).append(entry_of[number])
        return found

    def _passes(self, layers: dict[str, int], key: str) -> Sequence[int]:
        """The passes of a layer for its label, one of them for `label:pass`."""
        if key in layers:
            return self._log.graph.layers[layers[key]].entries
        label, _, number = key.rpartition(":")
        if label not in layers or not number.isdecimal() or len(number) > 9:
            return []
        entries = self._log.graph.layers[layers[label]].entries
        pass_of = self._log.graph.pass_of
        return [entry for entry in entries if str(pass_of[entry]) == number]

    def _module_of(self, key: str) -> str:
        """The class of the module whose address is `key`, or is so with a pass; "" if none is."""
        address = first_address(key, self._log.recording.module_aliases).partition(":")[0]
        return self._log.recording.module_classes.get(address, "") if address else ""

    def _at(self, position: int) -> int:
        count = len(self._log.visible)
        if not -count <= position < count:
            raise IndexError(
                f"Layer {position} is out of range: there are {count}, numbered 0 to {count - 1}."
            )
        return self._log.visible[position]

    def _with_part(self, part: str) -> list[int]:
        """Entries with `part` in their label; if there are none, in another of their names."""
        if not part or self._module_of(part):
            return []
        labels = zip(self._log.visible, self._log.labels_w_pass(self._log.visible), strict=True)
        found = [entry for entry, label in labels if part in label]
        return found or self._with_part_of_address(part)

    def _with_part_of_address(self, part: str) -> list[int]:
        others = chain(self._modules.items(), self._addresses.items())
        meant = {entry for name, own in others if part in name for entry in own}
        return sorted(entry for entry in meant if entry in self._listed)

    # -- what is wrong with a key ------------------------------------------------------------------

    def _several(self, key: str, found: list[int], *, is_exact: bool) -> str:
        """The message for a key that means several entries."""
        labels = list(map(self._log.label, found))
        if not is_exact:
            return f"{key!r} fits {len(found)} layers; say which: {_listed(labels)}."
        passes = [f"{key}:{number}" for number in range(1, len(found) + 1)]
        if [self.entries(name) for name in passes] == [[entry] for entry in found]:
            return f"{key!r} has {len(found)} passes; say which: {_listed(passes)}."
        addresses = self._log.boundary_addresses
        names = [
            addresses.get(entry, [label])[0] for entry, label in zip(found, labels, strict=True)
        ]
        return f"{key!r} means {len(found)} tensors; say which: {_listed(names)}."

    def _closest(self, key: str) -> str:
        kind = self._module_of(key)
        why = f"The module {key!r} ({kind}) returned no tensor in this pass. " if kind else ""
        return why + self._similar(key)

    def _similar(self, key: str) -> str:
        names = list(dict.fromkeys([*self._log.labels(self._log.visible), *self._names()]))
        holding = [name for name in names if key.lower() in name.lower()]
        close = holding or difflib.get_close_matches(key, names, n=5, cutoff=0.4)
        if close:
            return f"Closest: {_listed(close[:5])}."
        if not names:
            return "The log is empty."
        return f"There are {len(self._log.visible)} layers, from {names[0]!r} on."

    def _names(self) -> Iterable[str]:
        """Every name, for suggestions."""
        return chain(
            self._log.labels_w_pass(self._log.visible),
            self._short_labels,
            self._modules,
            self._addresses,
            self._parts,
        )


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown) if len(shown) <= 12 else f"{', '.join(shown[:10])}, ... {shown[-1]}"
