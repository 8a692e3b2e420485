"""One entry of a history: one tensor, and the operation that made it."""

from typing import TYPE_CHECKING, Any

import torch

from torchlens._history.backward import backward_times
from torchlens._history.entry_calls import EntryCalls
from torchlens._history.entry_graph import EntryGraph, EntryModules
from torchlens._history.entry_questions import EntryQuestions
from torchlens._history.field import ClassicAccess, EntryFields, field, once, size_texts
from torchlens._history.log import picked
from torchlens._history.lookup import lookup_keys
from torchlens._recording.regions import shape_of
from torchlens._text.lazy_import import lazy_function

if TYPE_CHECKING:
    from torchlens._graph.labels import Layer
    from torchlens._history.printing import entry_text
else:
    entry_text = lazy_function("torchlens._history.printing", "entry_text")


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
        return [layer.num_passes for layer in _layers(self)]

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


class EntryTensors(EntryFields):
    """The tensor itself, and its gradient."""

    __slots__ = ()

    @property
    def tensor_contents(self) -> Any:
        """The value at the moment the operation ended; None if it was not saved."""
        return self._log.value(self._entry)

    @field
    def has_saved_activations(self) -> list[bool]:
        """Whether its value was saved."""
        return self._log.are_saved(self._numbers)

    @field
    def tensor_shape(self) -> list[tuple[int, ...]]:
        """The shape of the tensor."""
        return list(map(tuple, self._rows.shape))

    @field
    def tensor_dtype(self) -> list[torch.dtype]:
        """The dtype of the tensor."""
        return list(self._rows.dtype)

    @field
    def tensor_fsize(self) -> list[int]:
        """The bytes of the tensor's elements."""
        return self._log.sizes(self._numbers)

    @field
    def tensor_fsize_nice(self) -> list[str]:
        """The size of the tensor as text: `253.5 KB`."""
        return size_texts(self._log.sizes(self._numbers))

    # -- its gradient ------------------------------------------------------------------------------

    @property
    def grad_contents(self) -> torch.Tensor | None:
        """The gradient that arrived in backward passes, summed over them; None if none did.

        Those of `log_backward()` always arrive, with `save_gradients=True` those of every backward
        pass.
        """
        return self._log.gradient(self._entry)

    @property
    def grad_missing_reason(self) -> str | None:
        """Why a view has no gradient although a backward pass reached it; None for all other
        entries.
        """
        return self._log.missing_gradient(self._entry)

    @field
    def has_saved_grad(self) -> list[bool]:
        """Whether a gradient arrived."""
        return [gradient is not None for gradient in self._log.gradients(self._numbers)]

    @field
    def grad_shape(self) -> list[tuple[int, ...] | None]:
        """The shape of the gradient; None without one."""
        gradients = self._log.gradients(self._numbers)
        return [None if gradient is None else tuple(shape_of(gradient)) for gradient in gradients]

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient; None without one."""
        return None if self.grad_contents is None else self.grad_contents.dtype

    @field
    def backward_time_elapsed(self) -> list[float | None]:
        """Seconds that its part of all backward passes took; None if none reached it."""
        return list(map(backward_times(self._log).seconds.get, self._numbers))

    @field
    def backward_order(self) -> list[int | None]:
        """Its place in the last backward pass that reached it, from 1."""
        return list(map(backward_times(self._log).order.get, self._numbers))


class LayerEntry(
    EntryLabels, EntryTensors, EntryCalls, EntryGraph, EntryModules, EntryQuestions, ClassicAccess
):
    """Everything known about one operation's result. Each field is computed when it is read.

    >>> entry = history['conv2d_3_7']
    >>> entry.tensor_contents.shape
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<LayerEntry {self.layer_label}>"

    def __str__(self) -> str:
        return entry_text(self._log, self._entry)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LayerEntry)
            and self._log is other._log
            and self._entry == other._entry
        )

    def __hash__(self) -> int:
        return hash((id(self._log), self._entry))

    def __reduce__(self) -> tuple[Any, ...]:
        # With the whole log, which several entries share.
        return LayerEntry, (self._log, self._entry)


# The fields that are computed for many entries at once, in the order of their declaration: the
# columns of a table.
COLUMNS: dict[str, field[Any]] = {
    name: value
    for subject in LayerEntry.__bases__
    for name, value in vars(subject).items()
    if isinstance(value, field)
}


def _layer_numbers(entries: EntryFields) -> list[int]:
    return picked(entries._log.graph.layer_of, entries._numbers)


def _layers(entries: EntryFields) -> "list[Layer]":
    return picked(entries._log.graph.layers, _layer_numbers(entries))


def _passes(entries: EntryFields) -> list[int]:
    return picked(entries._log.graph.pass_of, entries._numbers)
