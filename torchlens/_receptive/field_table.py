"""Sizes, strides and centres of the receptive fields of all layers, as people know them from
convolutional networks: computed from layer to layer, without the borders of the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlens._graph.paths import descendants_of
from torchlens._history.log import Log
from torchlens._history.receipt import exported_receipt
from torchlens._receptive.dependence import reading_of
from torchlens._receptive.reading import Axis, ReadCall, Reading, narrow, sizes
from torchlens._recording.recording import located
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._text.grid import Column, laid_out

if TYPE_CHECKING:
    import pandas


class Span(NamedTuple):
    """What a unit reads along one dimension of the input: from stride * u + low to
    stride * u + high, where u is its place along dimension `dim`; None if all units read the same.
    """

    dim: int | None
    stride: Fraction
    low: Fraction
    high: Fraction

    @property
    def size(self) -> int:
        """The most numbers that a unit reads."""
        return floor(self.high - self.low) + 1

    @property
    def centre(self) -> Fraction:
        """The middle of what unit 0 reads."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class FieldRow:
    """The receptive field of the units of one layer, along each spatial dimension of the input.

    `size` is how many numbers a unit reads, `stride` how far apart the fields of two neighbours
    are, `centre` the middle of the first unit's field; the border of the input is not considered.
    A stride of None: all units read the same, and `size` is limited to the input.
    """

    layer: str
    module: str
    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[float | None, ...]
    centre: tuple[float, ...]


class FieldTable:
    """The receptive fields of all layers that an input leads to; print it, or see `rows`."""

    def __init__(self, log: Log, source: str, rows: list[FieldRow]) -> None:
        self.model, self.source, self.rows = log.recording.model_name, source, rows
        self._receipt = exported_receipt(log).to_dict()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, layer: str) -> FieldRow:
        for row in self.rows:
            if layer in (row.layer, row.module):
                return row
        raise KeyError(f"No layer {layer!r} in the table of receptive fields.")

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with a row for each layer."""
        import pandas

        table = pandas.DataFrame([vars(row) for row in self.rows])
        table.attrs["receipt"] = self._receipt
        return table

    def __str__(self) -> str:
        """The layers where the field changes."""
        shown = [
            row for before, row in zip([None, *self.rows], self.rows, strict=False)
            if before is None or _numbers(before) != _numbers(row)
        ]  # fmt: skip
        columns = [
            Column("layer", [row.layer for row in shown], is_number=False),
            Column("module", [row.module for row in shown], is_number=False),
            Column("shape", ["x".join(map(str, row.shape)) for row in shown]),
            Column("size", ["x".join(map(str, row.size)) for row in shown]),
            Column("stride", ["x".join(map(_number, row.stride)) for row in shown]),
            Column("centre", [", ".join(map(_number, row.centre)) for row in shown]),
        ]
        head = f"Receptive fields of {self.model} in {self.source}"
        return "\n".join([head, *laid_out(columns, 120)])

    __repr__ = __str__


def _numbers(row: FieldRow) -> tuple[Any, ...]:
    return row.size, row.stride, row.centre


def _number(value: float | None) -> str:
    return "all" if value is None else f"{value:g}"


def table_of(log: Log, source: int | None) -> FieldTable:
    """The table of the fields in a layer, by default the only input."""
    if log.recording.framework != "torch":
        raise ValueError("Only models of PyTorch have receptive fields so far.")
    if source is None:
        if len(log.graph.inputs) != 1:
            names = ", ".join(map(log.label, log.graph.inputs)) or "none"
            raise ValueError(f"Say in which layer the fields are, with of=...; inputs: {names}.")
        (source,) = log.graph.inputs
    shape = sizes(log.row(source).shape)
    spatial = range(min(2, max(len(shape) - 1, 0)), len(shape))
    own = tuple(Span(dim, Fraction(1), Fraction(0), Fraction(0)) for dim in spatial)
    spans: dict[int, tuple[Span, ...]] = {source: own}
    is_after = descendants_of([source], log.graph.parents)
    with unseen(), NoTorchFunction():
        for entry in range(len(is_after)):
            if is_after[entry] and entry != source:
                found = _spans_of(log, entry, spans)
                if found is not None:
                    spans[entry] = found
    lengths = [shape[dim] for dim in spatial]
    rows = [_row(log, entry, own, lengths) for entry, own in spans.items()]
    return FieldTable(log, log.label(source), rows)


def _row(log: Log, entry: int, spans: Sequence[Span], lengths: list[int]) -> FieldRow:
    limited = [
        span if span.dim is not None else span._replace(
            low=max(span.low, Fraction(0)), high=min(span.high, Fraction(length - 1))
        )
        for span, length in zip(spans, lengths, strict=True)
    ]  # fmt: skip
    return FieldRow(
        log.label(entry),
        log.module_call_addresses[log.row(entry).module_call],
        sizes(log.row(entry).shape),
        tuple(span.size for span in limited),
        tuple(None if span.dim is None else float(span.stride) for span in limited),
        tuple(float(span.centre) for span in limited),
    )


def _spans_of(log: Log, entry: int, spans: dict[int, tuple[Span, ...]]) -> tuple[Span, ...] | None:
    """The fields of an entry, from those of what it reads."""
    graph, row = log.graph, log.row(entry)
    given: dict[Any, int] = dict(located(row.references))
    found: tuple[Span, ...] | None = None
    reads = graph.located_reads.get(graph.recorded[entry]) or given.items()
    for location, number in reads:
        parent = graph.entry_of.get(number, -1)
        if parent not in spans:
            continue
        argument = given.get(location, number)
        call = ReadCall(log, entry, location, argument if argument >= 0 else number)
        reading = reading_of(call)
        if reading is None:
            continue
        own, lengths = spans[parent], sizes(log.row(parent).shape)
        if call.shape != lengths:  # written through a view: all of it is read
            own = tuple(_mixed(span, lengths) for span in own)
        axes = _axes_of(reading, call, {span.dim for span in own if span.dim is not None})
        later = tuple(_moved(span, axes, call.shape) for span in own)
        found = later if found is None else tuple(
            _joined(a, b, call.out) for a, b in zip(found, later, strict=True)
        )  # fmt: skip
    return found


def _moved(span: Span, axes: Mapping[int, Axis], shape: Sequence[int]) -> Span:
    """What the units of a result read."""
    if span.dim is None:
        return span
    axis = axes.get(span.dim)
    if axis is None:
        return _mixed(span, shape)
    ends = sorted((span.stride * axis.low, span.stride * axis.high))
    return Span(axis.dim, span.stride * axis.stride, span.low + ends[0], span.high + ends[1])


def _mixed(span: Span, shape: Sequence[int]) -> Span:
    """What all units together read."""
    if span.dim is None:
        return span
    reach = span.stride * (shape[span.dim] - 1)
    low, high = span.low + min(reach, Fraction(0)), span.high + max(reach, Fraction(0))
    return Span(None, Fraction(0), low, high)


def _joined(a: Span, b: Span, shape: Sequence[int]) -> Span:
    """What units read that depend on both."""
    if (a.dim, a.stride) != (b.dim, b.stride):
        a, b = _mixed(a, shape), _mixed(b, shape)
    return a._replace(low=min(a.low, b.low), high=max(a.high, b.high))


def _axes_of(reading: Reading, call: ReadCall, dims: set[int]) -> Mapping[int, Axis]:
    if reading.axes is not None:
        return reading.axes
    return {dim: axis for dim in dims if (axis := _probed(reading, call, dim))}


def _probed(reading: Reading, call: ReadCall, dim: int) -> Axis | None:
    """Where moving elements takes a dimension: found by moving the coordinates along it."""
    if 0 in call.shape or 0 in call.out:
        return None
    steps = torch.arange(call.shape[dim], dtype=torch.float64)
    coordinates = steps.view([-1 if other == dim else 1 for other in range(len(call.shape))])
    try:
        found = reading.run(coordinates.expand(call.shape)).expand(call.out)
    except (IndexError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    found = narrow(found)
    for own, length in enumerate(found.shape):
        line = found[tuple(slice(None) if at == own else slice(1) for at in range(found.dim()))]
        values = line.flatten()
        if length < 2 or values[0] == values[1]:
            continue
        step = values[1] - values[0]
        if bool((line == found).all()) and bool((values.diff() == step).all()):
            return Axis(
                own, Fraction(int(step)), Fraction(int(values[0])), Fraction(int(values[0]))
            )
    return None
