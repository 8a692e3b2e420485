"""One entry of a history: one tensor, and the operation that made it."""

from typing import TYPE_CHECKING, Any

from torchlens._history.entry_calls import EntryCalls
from torchlens._history.entry_graph import EntryGraph
from torchlens._history.entry_labels import EntryLabels
from torchlens._history.entry_modules import EntryModules
from torchlens._history.entry_tensors import EntryTensors
from torchlens._history.field import ClassicAccess, field
from torchlens._text.lazy_import import lazy_function

if TYPE_CHECKING:
    from torchlens._history.text import entry_text
else:
    entry_text = lazy_function("torchlens._history.text", "entry_text")


class LayerEntry(EntryLabels, EntryTensors, EntryCalls, EntryGraph, EntryModules, ClassicAccess):
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
