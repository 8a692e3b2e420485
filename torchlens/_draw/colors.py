"""The colours of nodes: by kind, or by a number."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchlens._draw.draw_options import DrawOptions
from torchlens._draw.items import Grouping, Item, ItemKind, is_operation
from torchlens._draw.scene import Legend
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.overlay import Marks, Overlay
from torchlens._recording.wrappers import local_value
from torchlens._text.error_wording import got
from torchlens._text.measures import short_word
from torchlens._text.numbers import bytes_text, count_text, seconds_text

INPUT_FILL = "#98FB98"
OUTPUT_FILL = "#ff9999"
PARAMS_FILL = "#E6E6E6"
CONDITION_FILL = "#F7D460"
BUFFER_FILL = "#B8B8B8"
PLAIN_FILL = "white"
FAILURE_FILL = "#C62828"
GRADIENT_COLOR = "#9197F6"

# From low to high: light yellow over green to dark blue. Lightness decreases steadily, so that the
# colour-blind can read it.
_RAMP = ((255, 255, 229), (199, 233, 180), (65, 182, 196), (34, 94, 168), (8, 29, 88))


@dataclass(frozen=True, slots=True)
class Shading:
    """For each item its fill, whether its text must be light, and its value as text; None if it has
    no value.
    """

    of_item: list[tuple[str, bool, str] | None]
    legend: Legend | None


def shade(history: Any, grouping: Grouping, options: DrawOptions) -> Shading:
    """Colours the items by `vis_color_by`.

    A node of several operations has the sum of their time, memory or FLOPs, and the mean of values
    given by the caller.
    """
    wish = options.vis_color_by
    values, text, title = _item_values(history, grouping, wish)
    present = [value for value in values if value is not None]
    if not present:
        return Shading([None] * len(values), None)
    low, high = min(present), max(present)
    if text is not _number_text:
        low = 0.0
    span = high - low

    def shade_of(value: float) -> tuple[str, bool, str]:
        fraction = (value - low) / span if span else 0.0
        return _color(fraction), fraction > 0.6, f"{title}: {text(value)}"

    steps = (0.0, 0.25, 0.5, 0.75, 1.0) if span else (0.0,)
    legend = Legend(title, tuple((_color(step), text(low + step * span)) for step in steps))
    return Shading([None if value is None else shade_of(value) for value in values], legend)


def _item_values(
    history: Any, grouping: Grouping, wish: Any
) -> tuple[list[float | None], Callable[[float], str], str]:
    """The value of each item, how to write it, and what it is called."""
    log: Log = history._log
    if isinstance(wish, Mapping):
        marks = Marks(log, wish, lambda key: [history[key]._entry], _number)
        values = [marks.of(item.all_entries, _calls_of(log, item)) for item in grouping.items]
        if isinstance(wish, Overlay):
            return values, _UNITS[wish.unit], wish.title
        return values, _number_text, "value"
    if isinstance(wish, str):
        measure = _MEASURES[short_word(wish)]
    else:
        measure = _Measure(
            lambda layer: _number(wish(layer), layer.layer_label), _number_text, "value", _mean
        )
    of_entry = [measure.of(LayerEntry(log, entry)) for entry in range(len(log.graph.recorded))]
    return [_combined(measure, item, of_entry) for item in grouping.items], *measure[1:3]


def _combined(measure: "_Measure", item: Item, of_entry: Sequence[float | None]) -> float | None:
    known = [value for entry in item.all_entries if (value := of_entry[entry]) is not None]
    return measure.combine(known) if known else None


def _calls_of(log: Log, item: Item) -> list[int]:
    """The module calls that a collapsed module shows."""
    if item.kind is not ItemKind.MODULE:
        return []
    chains = [log.module_chain(entry) for entry in item.all_entries if is_operation(log, entry)]
    level = len(item.path)
    return list(dict.fromkeys(chain[level] for chain in chains if len(chain) > level))


def _color(fraction: float) -> str:
    place = min(max(fraction, 0.0), 1.0) * (len(_RAMP) - 1)
    below = min(int(place), len(_RAMP) - 2)
    mixed = (
        low + (high - low) * (place - below)
        for low, high in zip(_RAMP[below], _RAMP[below + 1], strict=True)
    )
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def _number(value: Any, key: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value.item() if isinstance(value, torch.Tensor) else value)
    # RuntimeError: a tensor of several numbers.
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"vis_color_by must give a number for {key!r}, or None for no colour, got {got(value)}."
        ) from error
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _once(layer: LayerEntry, value: float | None) -> float | None:
    """A cost of a call, at the first of its outputs; None for inputs, buffers and outputs."""
    if not is_operation(layer._log, layer._entry):
        return None
    return 0.0 if layer.iterable_output_index and value is not None else value


def _total_time(layer: LayerEntry) -> float | None:
    return _once(layer, layer.func_time_elapsed + (layer.backward_time_elapsed or 0.0))


def _gradient_norm(layer: LayerEntry) -> float | None:
    gradient = layer._log.gradient(layer._entry)
    if gradient is None:
        return None
    return _number(torch.linalg.vector_norm(local_value(gradient).float()), layer.layer_label)


def _flops_text(value: float) -> str:
    return count_text(value, "FLOP")


def _number_text(value: float) -> str:
    return f"{value:.3g}"


class _Measure(NamedTuple):
    """What nodes are coloured by: the value of an entry, how it is written, what it is called, and
    how the values of several entries become one.
    """

    of: Callable[[LayerEntry], float | None]
    text: Callable[[float], str]
    title: str
    combine: Callable[[Sequence[float]], float] = sum


_MEASURES = {
    "time": _Measure(lambda one: _once(one, one.func_time_elapsed), seconds_text, "time"),
    "backward_time": _Measure(
        lambda one: _once(one, one.backward_time_elapsed), seconds_text, "backward time"
    ),
    "total_time": _Measure(_total_time, seconds_text, "forward + backward time"),
    "memory": _Measure(lambda one: one.tensor_fsize, bytes_text, "memory"),
    "flops": _Measure(lambda one: one.flops or None, _flops_text, "FLOPs"),
    "flops_backward": _Measure(
        lambda one: one.flops_backward or None, _flops_text, "backward FLOPs"
    ),
    "params": _Measure(lambda one: one.num_params_total or None, count_text, "parameters"),
    "calls": _Measure(lambda one: _once(one, 1.0) or None, count_text, "calls"),
    "gradient_norm": _Measure(_gradient_norm, _number_text, "gradient norm", _mean),
}
# How an overlay's unit is written.
_UNITS: dict[str, Callable[[float], str]] = {
    "seconds": seconds_text, "bytes": bytes_text, "FLOPs": _flops_text, "": _number_text,
}  # fmt: skip
