"""What an entry is called."""

from torchlens._history import columns
from torchlens._history.entry_fields.reading import EntryReading
from torchlens._history.lookup import lookup_keys


class LabelFields(EntryReading):
    """What an entry is called."""

    __slots__ = ()

    @property
    def layer_label(self) -> str:
        """Its name: `conv2d_3_7`, or `conv2d_3_7:2` if the layer has several passes."""
        return self._one(columns.layer_label)

    @property
    def layer_label_w_pass(self) -> str:
        """Its name, always with the pass: `conv2d_3_7:1`."""
        return self._one(columns.layer_label_w_pass)

    @property
    def layer_label_no_pass(self) -> str:
        """The name of its layer: `conv2d_3_7`."""
        return self._one(columns.layer_label_no_pass)

    @property
    def layer_label_short(self) -> str:
        """Its short name: `conv2d_3`, or `conv2d_3:2` if the layer has several passes."""
        return self._one(columns.layer_label_short)

    @property
    def layer_label_w_pass_short(self) -> str:
        """Its short name, always with the pass: `conv2d_3:1`."""
        return self._one(columns.layer_label_w_pass_short)

    @property
    def layer_label_no_pass_short(self) -> str:
        """The short name of its layer: `conv2d_3`."""
        return self._one(columns.layer_label_no_pass_short)

    @property
    def layer_type(self) -> str:
        """The kind of operation: `conv2d`."""
        return self._one(columns.layer_type)

    @property
    def layer_type_num(self) -> int:
        """The layer's number among those of its type: 3 in `conv2d_3_7`."""
        return self._one(columns.layer_type_num)

    @property
    def layer_total_num(self) -> int:
        """The layer's number among all layers: 7 in `conv2d_3_7`; 0 for inputs and buffers."""
        return self._one(columns.layer_total_num)

    @property
    def pass_num(self) -> int:
        """Which pass of its layer it is, from 1."""
        return self._one(columns.pass_num)

    @property
    def layer_passes_total(self) -> int:
        """How many passes its layer has."""
        return self._one(columns.layer_passes_total)

    @property
    def operation_num(self) -> int:
        """Its place in the log, from 1; inputs and buffers come first."""
        return self._one(columns.operation_num)

    @property
    def lookup_keys(self) -> list[int | str]:
        """Every key that finds this entry and no other."""
        return lookup_keys(self._log, self._entry)

    @property
    def same_layer_operations(self) -> list[str]:
        """Labels of all passes of its layer, its own among them."""
        return self._labels(self._log.graph.layers[self._log.graph.layer_of[self._entry]].entries)
