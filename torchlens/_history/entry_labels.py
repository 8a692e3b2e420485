"""What an entry is called."""

from typing import TYPE_CHECKING

from torchlens._history.field import EntryFields, field, once
from torchlens._history.log import picked
from torchlens._history.lookup import lookup_keys

if TYPE_CHECKING:
    from torchlens._graph.labels import Layer


class EntryLabels(EntryFields):
    """What an entry is called."""

    __slots__ = ()

    @field
    def layer_label(self) -> list[str]:
        """Its name: `conv2d_3_7`, or `conv2d_3_7:2` if the layer has several passes."""
        return self._log.labels(self._numbers)

    @field
    def layer_label_w_pass(self) -> list[str]:
        """Its name, always with the pass: `conv2d_3_7:1`."""
        return self._log.labels_w_pass(self._numbers)

    @field
    def layer_label_no_pass(self) -> list[str]:
        """The name of its layer: `conv2d_3_7`."""
        return picked(self._log.layer_labels, _layer_numbers(self))

    @field
    def layer_label_short(self) -> list[str]:
        """Its short name: `conv2d_3`, or `conv2d_3:2` if the layer has several passes."""
        numbers, layers = _layer_numbers(self), self._log.graph.layers
        labels = once(numbers, lambda number: layers[number].label_short)
        repeats = picked(self._log.repeats, numbers)
        names = zip(labels, repeats, _passes(self), strict=True)
        return [f"{name}:{number}" if is_repeated else name for name, is_repeated, number in names]

    @property
    def layer_label_w_pass_short(self) -> str:
        """Its short name, always with the pass: `conv2d_3:1`."""
        return f"{self.layer_label_no_pass_short}:{self.pass_num}"

    @property
    def layer_label_no_pass_short(self) -> str:
        """The short name of its layer: `conv2d_3`."""
        return self._log.graph.layers[self._log.graph.layer_of[self._entry]].label_short

    @field
    def layer_type(self) -> list[str]:
        """The kind of operation: `conv2d`."""
        return [layer.type for layer in _layers(self)]

    @field
    def layer_type_num(self) -> list[int]:
        """The layer's number among those of its type: 3 in `conv2d_3_7`."""
        return [layer.type_num for layer in _layers(self)]

    @field
    def layer_total_num(self) -> list[int]:
        """The layer's number among all layers: 7 in `conv2d_3_7`; 0 for inputs and buffers."""
        return [layer.total_num for layer in _layers(self)]

    @field
    def pass_num(self) -> list[int]:
        """Which pass of its layer it is, from 1."""
        return _passes(self)

    @field
    def layer_passes_total(self) -> list[int]:
        """How many passes its layer has."""
        return [len(layer.entries) for layer in _layers(self)]

    @field
    def operation_num(self) -> list[int]:
        """Its place in the log, from 1; inputs and buffers come first."""
        return [number + 1 for number in self._numbers]

    @property
    def lookup_keys(self) -> list[int | str]:
        """Every key that finds this entry and no other."""
        return lookup_keys(self._log, self._entry)

    @property
    def same_layer_operations(self) -> list[str]:
        """Labels of all passes of its layer, its own among them."""
        return self._labels(self._log.graph.layers[self._log.graph.layer_of[self._entry]].entries)


def _layer_numbers(entries: EntryFields) -> list[int]:
    return picked(entries._log.graph.layer_of, entries._numbers)


def _layers(entries: EntryFields) -> "list[Layer]":
    return picked(entries._log.graph.layers, _layer_numbers(entries))


def _passes(entries: EntryFields) -> list[int]:
    return picked(entries._log.graph.pass_of, entries._numbers)
