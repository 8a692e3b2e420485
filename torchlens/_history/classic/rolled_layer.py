"""A layer with all its passes together."""

from collections.abc import Iterable, Mapping
from typing import Any

from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log


class RolledLayer:
    """A layer with all its passes together, as the classic's `RolledTensorLogEntry`.

    What the passes have in common is that of the first: `layer_type`, `tensor_shape`,
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
