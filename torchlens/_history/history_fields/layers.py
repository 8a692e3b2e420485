"""Lists of labels, and what the layers say of the model."""

from collections.abc import Callable, Sequence
from itertools import compress

from torchlens._history import columns
from torchlens._history.history_fields.reading import HistoryReading
from torchlens._history.log import Log


class LayerFields(HistoryReading):
    """Lists of labels, and what the layers say of the model."""

    # -- the model
    # ----------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return self._log.recording.model_name

    @property
    def model_is_recurrent(self) -> bool:
        """Whether some layer has more than one pass."""
        return self.model_max_recurrent_loops > 1

    @property
    def model_max_recurrent_loops(self) -> int:
        """The largest number of passes that a layer has."""
        return max((len(layer.entries) for layer in self._log.graph.layers), default=1)

    @property
    def model_is_branching(self) -> bool:
        """Whether some entry is read by more than one other."""
        return any(len(children) > 1 for children in self._log.graph.children)

    @property
    def model_has_conditional_branching(self) -> bool:
        """Whether an `if` (or `while`, `and`, `not`) read a tensor."""
        return bool(self._log.graph.booleans)

    # -- the layers
    # ----------------------------------------------------------------------------------------------

    @property
    def layer_labels(self) -> list[str]:
        """The label of each entry, with the pass if its layer has several."""
        return self._labels(self._log.visible)

    @property
    def layer_labels_w_pass(self) -> list[str]:
        """The label of each entry, always with the pass."""
        return self._log.labels_w_pass(self._log.visible)

    @property
    def layer_labels_no_pass(self) -> list[str]:
        """The label of each layer, without the pass: every layer once."""
        return list(dict.fromkeys(columns.layer_label_no_pass(self._log, self._log.visible)))

    @property
    def layer_num_passes(self) -> dict[str, int]:
        """Layer → its number of passes."""
        labels = columns.layer_label_no_pass(self._log, self._log.visible)
        return dict(
            zip(labels, columns.layer_passes_total(self._log, self._log.visible), strict=True)
        )

    @property
    def input_layers(self) -> list[str]:
        """Labels of the inputs."""
        return self._labels(self._log.graph.inputs)

    @property
    def output_layers(self) -> list[str]:
        """Labels of the outputs."""
        return self._labels(self._log.graph.outputs)

    @property
    def buffer_layers(self) -> list[str]:
        """Labels of the buffers that an operation reads."""
        return self._labels(self._log.graph.buffers)

    def _labels_where(self, fact: Callable[[Log, Sequence[int]], list[bool]]) -> list[str]:
        return self._labels(compress(self._everything, fact(self._log, self._everything)))

    @property
    def internally_initialized_layers(self) -> list[str]:
        """Entries made inside the model from nothing, like `torch.zeros`."""
        return self._labels_where(columns.initialized_inside_model)

    @property
    def internally_terminated_layers(self) -> list[str]:
        """Entries that nothing reads and that are not outputs."""
        return self._labels_where(columns.terminated_inside_model)

    @property
    def internally_terminated_bool_layers(self) -> list[str]:
        """Entries that an `if` read."""
        return self._labels_where(columns.is_terminal_bool_layer)

    @property
    def conditional_branch_edges(self) -> list[tuple[str, str]]:
        """The (parent, child) pairs at which the computation of a condition begins."""
        return [
            (self._log.label(parent), self._log.label(child))
            for parent, child in self._log.graph.condition_edges
        ]

    @property
    def layers_with_saved_activations(self) -> list[str]:
        """Entries with a saved tensor."""
        return self._labels_where(columns.has_saved_activations)

    @property
    def layers_with_saved_gradients(self) -> list[str]:
        """Entries with a saved gradient."""
        return self._labels_where(columns.has_saved_grad)

    @property
    def unlogged_layers(self) -> list[str]:
        """Entries that `keep_unsaved_layers=False` left out of the list."""
        listed = set(self._log.visible)
        return self._labels(entry for entry in self._everything if entry not in listed)
