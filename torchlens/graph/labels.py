"""Numbers and names of layers: `conv2d_3_7:2`."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layer", "number_layers"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its type, its number among its type, its number overall, the entries that are its passes."""

    type: str
    type_num: int
    total_num: int
    entries: tuple[int, ...]

    @property
    def label_short(self) -> str:
        return f"{self.type}_{self.type_num}"

    @property
    def label(self) -> str:
        return f"{self.type}_{self.type_num}_{self.total_num}"


def number_layers(
    types: Sequence[str], first_of_layer: Sequence[int], is_before: Sequence[bool]
) -> tuple[list[Layer], list[int]]:
    """The layers in order of first execution, and the layer of each entry.

    Entries that come before all operations (inputs, buffers) have the overall number 0.
    """
    passes: dict[int, list[int]] = {}
    for entry, first in enumerate(first_of_layer):
        passes.setdefault(first, []).append(entry)
    layers: list[Layer] = []
    layer_of = [0] * len(types)
    type_counts: dict[str, int] = {}
    total = 0
    for first, entries in passes.items():
        kind = types[first]
        type_counts[kind] = type_counts.get(kind, 0) + 1
        if not is_before[first]:
            total += 1
        for entry in entries:
            layer_of[entry] = len(layers)
        layers.append(Layer(kind, type_counts[kind], 0 if is_before[first] else total, tuple(entries)))
    return layers, layer_of
