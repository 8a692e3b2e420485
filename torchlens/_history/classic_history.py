"""The fields of the classic TorchLens's history that `ModelHistory` itself does not have: each
public function is one.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

from torchlens._history.classic_entry import operation_equivalence_type
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._recording.functions import argument_names

_Value = TypeVar("_Value")


class RolledLayer:
    """A layer with all its passes together, like the classic's `RolledTensorLogEntry`.

    Fields that the passes share are those of the first pass: `layer_type`, `tensor_shape`,
    `modules_exited`, ...
    """

    __slots__ = ("_layer", "_log")

    def __init__(self, log: Log, layer: int) -> None:
        self._log = log
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._passes()[0], name)

    def __repr__(self) -> str:
        return f"<RolledLayer {self.layer_label}>"

    def _passes(self) -> list[LayerEntry]:
        return [
            LayerEntry(self._log, entry) for entry in self._log.graph.layers[self._layer].entries
        ]

    def _layers_per_pass(self, edges: Any) -> dict[int, list[str]]:
        """Pass → layers at the other end of its edges."""
        return {
            number: _unique(self._log.label_no_pass(other) for other in edges[entry._entry])
            for number, entry in enumerate(self._passes(), start=1)
        }

    @property
    def layer_label(self) -> str:
        """The label of the layer."""
        return self._log.layer_labels[self._layer]

    @property
    def parent_layers_per_pass(self) -> dict[int, list[str]]:
        """Pass → layers it reads."""
        return self._layers_per_pass(self._log.graph.parents)

    @property
    def child_layers_per_pass(self) -> dict[int, list[str]]:
        """Pass → layers that read it."""
        return self._layers_per_pass(self._log.graph.children)

    @property
    def parent_passes_per_layer(self) -> dict[str, list[int]]:
        """Layer → passes that read it."""
        return _turned(self.parent_layers_per_pass)

    @property
    def child_passes_per_layer(self) -> dict[str, list[int]]:
        """Layer → passes that it reads."""
        return _turned(self.child_layers_per_pass)

    @property
    def parent_layers(self) -> list[str]:
        """Layers that some pass reads."""
        return list(self.parent_passes_per_layer)

    @property
    def child_layers(self) -> list[str]:
        """Layers that read some pass."""
        return list(self.child_passes_per_layer)

    @property
    def edges_vary_across_passes(self) -> bool:
        """Whether passes read, or are read by, different layers."""
        sides = (self.parent_layers_per_pass, self.child_layers_per_pass)
        return any(own != side[1] for side in sides for own in side.values())

    @property
    def parent_layer_arg_locs(self) -> dict[str, dict[Any, set[str]]]:
        """Which argument each layer is that some pass reads."""
        found: dict[str, dict[Any, set[str]]] = {"args": {}, "kwargs": {}}
        for entry in self._passes():
            for location, label in entry._located_parents():
                head = location[0] if isinstance(location, tuple) else location
                places = found["kwargs" if isinstance(head, str) else "args"]
                places.setdefault(location, set()).add(label.partition(":")[0])
        return found

    @property
    def bottom_level_submodule_passes_exited(self) -> set[str]:
        """Calls of modules without modules inside that returned a pass."""
        return {
            name
            for entry in self._passes()
            if (name := entry.bottom_level_submodule_pass_exited) is not None
        }


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _turned(layers: Mapping[int, list[str]]) -> dict[str, list[int]]:
    """Layer → passes, from pass → layers."""
    found: dict[str, list[int]] = {}
    for number, names in layers.items():
        for name in names:
            found.setdefault(name, []).append(number)
    return found


def _remembered(field: Callable[[ModelHistory], _Value]) -> Callable[[ModelHistory], _Value]:
    """A field that is computed once and cached: code for the classic indexes it in loops."""

    @wraps(field)
    def read(history: ModelHistory) -> _Value:
        known = history.__dict__.setdefault("_classic", {})
        listed = history._log.visible
        if known.get(field.__name__, (None,))[0] is not listed:
            known[field.__name__] = (listed, field(history))
        value: _Value = known[field.__name__][1]
        return value

    return read


# -- lists and dicts -------------------------------------------------------------------------------


@_remembered
def layer_dict_main_keys(history: ModelHistory) -> dict[str, LayerEntry]:
    """Label → entry."""
    return {entry.layer_label: entry for entry in history}


@_remembered
def layer_dict_all_keys(history: ModelHistory) -> dict[int | str, LayerEntry]:
    """Every key → the entry it finds."""
    return {key: entry for entry in history for key in entry.lookup_keys}


@_remembered
def layer_list_rolled(history: ModelHistory) -> list[RolledLayer]:
    """An object per layer, all passes together."""
    return [RolledLayer(history._log, layer) for layer in range(len(history._log.graph.layers))]


@_remembered
def layer_dict_rolled(history: ModelHistory) -> dict[str, RolledLayer]:
    """Label of a layer → its object, all passes together."""
    return {layer.layer_label: layer for layer in layer_list_rolled(history)}


@_remembered
def layers_computed_with_params(history: ModelHistory) -> dict[str, list[str]]:
    """First pass of each layer with parameters → all its passes."""
    graph = history._log.graph
    labels = [
        history._labels(layer.entries) for layer in graph.layers if graph.params[layer.entries[0]]
    ]
    return {passes[0]: passes for passes in labels}


@_remembered
def layers_where_internal_branches_merge_with_input(history: ModelHistory) -> list[str]:
    """Labels of entries that read both something that an input leads to and something that no input
    leads to.
    """
    leads = {entry.layer_label: entry.has_input_ancestor for entry in history}
    return [
        entry.layer_label
        for entry in history
        if entry.has_input_ancestor
        and not all(leads.get(parent, True) for parent in entry.parent_layers)
    ]


@_remembered
def same_layer_operations(history: ModelHistory) -> dict[str, list[str]]:
    """Layer → all its passes."""
    return {layer.label: history._labels(layer.entries) for layer in history._log.graph.layers}


@_remembered
def equivalent_operations(history: ModelHistory) -> dict[str, set[str]]:
    """What an operation does → all operations that do the same, whether or not they are one
    layer.
    """
    found: dict[str, set[str]] = {}
    for entry in (LayerEntry(history._log, number) for number in range(history.num_tensors_total)):
        found.setdefault(operation_equivalence_type(entry), set()).add(entry.layer_label)
    return found


def buffer_num_passes(history: ModelHistory) -> dict[str, int]:
    """Address of a buffer that is read → 1."""
    return {
        LayerEntry(history._log, buffer).buffer_address or "": 1
        for buffer in history._log.graph.buffers
    }


def has_saved_gradients(history: ModelHistory) -> bool:
    """Whether some entry has a gradient."""
    return bool(history.layers_with_saved_gradients)


def func_argnames(history: ModelHistory) -> dict[str, tuple[str, ...]]:
    """Name of each function in the log → the names of its arguments."""
    rows = (history._log.row(entry) for entry in range(history.num_tensors_total))
    operations = dict.fromkeys(row.operation for row in rows)
    return {operation.name: argument_names(operation.func) for operation in operations}


# -- modules ---------------------------------------------------------------------------------------


def module_num_tensors(history: ModelHistory) -> dict[str, int]:
    """Module address → how many tensors were computed inside it."""
    return {address: len(labels) for address, labels in history.module_layers.items()}


@_remembered
def module_pass_layers(history: ModelHistory) -> dict[str, list[str]]:
    """Call of a module → labels of the tensors computed inside it."""
    log = history._log
    found: dict[str, list[str]] = {name: [] for name in history.module_passes}
    for entry in range(history.num_tensors_total):
        for call in log.module_chain(entry):
            found[log.module_pass(call)].append(log.label(entry))
    return found


def module_pass_num_tensors(history: ModelHistory) -> dict[str, int]:
    """Call of a module → how many tensors were computed inside it."""
    return {name: len(labels) for name, labels in module_pass_layers(history).items()}


@_remembered
def module_pass_children(history: ModelHistory) -> dict[str, list[str]]:
    """Call of a module → the calls made inside it."""
    log = history._log
    found: dict[str, list[str]] = {name: [] for name in history.module_passes}
    for number, call in enumerate(log.recording.module_calls):
        if number and call.parent:
            found[log.module_pass(call.parent)].append(log.module_pass(number))
    return found


def top_level_module_passes(history: ModelHistory) -> list[str]:
    """The calls that the model itself makes."""
    calls = history._log.recording.module_calls
    return [
        history._log.module_pass(number)
        for number, call in enumerate(calls)
        if number and not call.parent
    ]


# -- time ------------------------------------------------------------------------------------------


def pass_start_time(history: ModelHistory) -> float:
    """When the pass began, in seconds since 1970."""
    return history._log.recording.started_at


def pass_end_time(history: ModelHistory) -> float:
    """When the pass ended."""
    return pass_start_time(history) + history.elapsed_time_total


def elapsed_time_setup(history: ModelHistory) -> float:
    """Seconds before the call of the model."""
    return history._log.recording.seconds_setup


def elapsed_time_cleanup(history: ModelHistory) -> float:
    """Seconds after the call of the model."""
    return max(
        0.0,
        history.elapsed_time_total
        - history.elapsed_time_forward_pass
        - elapsed_time_setup(history),
    )
