"""Numbers and names of layers: `conv2d_3_7:2`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its type, its number among its type, its number overall, the entries that are its
    passes, and how many passes it has (in a part of a graph, more than are there).
    """

    type: str
    type_num: int
    total_num: int
    entries: tuple[int, ...]
    num_passes: int

    @property
    def label_short(self) -> str:
        return f"{self.type}_{self.type_num}"

    @property
    def label(self) -> str:
        return f"{self.type}_{self.type_num}_{self.total_num}"


def number_layers(
    types: Sequence[str], first_of_layer: Sequence[int], num_before: int
) -> tuple[list[Layer], list[int]]:
    """The layers in order of first execution, and the layer of each entry.

    The first `num_before` entries come before all operations (inputs, buffers) and have the overall
    number 0.
    """
    firsts = list(dict.fromkeys(first_of_layer))
    number_of = dict(zip(firsts, range(len(firsts)), strict=True))
    layer_of = list(map(number_of.__getitem__, first_of_layer))
    passes: list[list[int]] = [[] for _ in firsts]
    for entry, number in enumerate(layer_of):
        passes[number].append(entry)
    layers: list[Layer] = []
    type_counts: dict[str, int] = {}
    total = 0
    for first, entries in zip(firsts, passes, strict=True):
        kind = types[first]
        type_counts[kind] = type_counts.get(kind, 0) + 1
        if first >= num_before:
            total += 1
        layers.append(
            Layer(
                kind,
                type_counts[kind],
                total if first >= num_before else 0,
                tuple(entries),
                len(entries),
            )
        )
    return layers, layer_of


def pass_numbers(layers: Sequence[Layer], num_entries: int) -> list[int]:
    """For each entry, which pass of its layer it is, from 1."""
    found = [1] * num_entries
    for layer in layers:
        if len(layer.entries) > 1:
            for number, entry in enumerate(layer.entries, start=1):
                found[entry] = number
    return found
