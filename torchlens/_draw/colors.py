"""The colours of nodes: by kind, or by a number."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchlens._draw.items import Grouping, Item, ItemKind, is_operation
from torchlens._draw.options import DrawOptions
from torchlens._draw.scene import Legend
from torchlens._graph.costs import flops_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.overlay import Marks, Overlay
from torchlens._recording.wrappers import local_value
from torchlens._text.error_wording import got
from torchlens._text.measures import short_word
from torchlens._text.numbers import bytes_text, count_text

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
    entries = range(len(log.graph.recorded))
    if isinstance(wish, Mapping):
        marks = Marks(log, wish, lambda key: [history[key]._entry], _checked)
        values = [
            marks.of((*item.entries, *item.copies), _calls_of(log, item)) for item in grouping.items
        ]
        if isinstance(wish, Overlay):
            return values, _TEXTS[wish.unit], wish.title
        return values, _number_text, "value"
    if isinstance(wish, str):
        measure, text, title, combine = _MEASURES[short_word(wish)]
        of_entry = [measure(log, entry) for entry in entries]
    else:
        text, title, combine = _number_text, "value", _mean
        layers = (LayerEntry(log, entry) for entry in entries)
        of_entry = [_checked(wish(layer), layer.layer_label) for layer in layers]
    values = []
    for item in grouping.items:
        own = [of_entry[entry] for entry in (*item.entries, *item.copies)]
        known = [value for value in own if value is not None]
        values.append(combine(known) if known else None)
    return values, text, title


def _calls_of(log: Log, item: Item) -> list[int]:
    """The module calls that a collapsed module shows."""
    if item.kind is not ItemKind.MODULE:
        return []
    chains = [
        log.module_chain(entry)
        for entry in (*item.entries, *item.copies)
        if is_operation(log, entry)
    ]
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


def _checked(value: Any, key: Any) -> float | None:
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


def _seconds(log: Log, entry: int) -> float | None:
    if not is_operation(log, entry):
        return None
    row = log.row(entry)
    return 0.0 if row.output_index else row.seconds  # one call, however many results


def _flops(log: Log, entry: int) -> float | None:
    return flops_of(log.recording, log.row(entry)) or None


def _memory(log: Log, entry: int) -> float | None:
    return log.num_bytes(entry)


def _backward_seconds(log: Log, entry: int) -> float | None:
    seconds = LayerEntry(log, entry).backward_time_elapsed if is_operation(log, entry) else None
    return 0.0 if seconds is not None and log.row(entry).output_index else seconds


def _total_seconds(log: Log, entry: int) -> float | None:
    forward = _seconds(log, entry)
    return None if forward is None else forward + (_backward_seconds(log, entry) or 0.0)


def _flops_backward(log: Log, entry: int) -> float | None:
    return log.flops_backward((entry,))[0] or None


def _params(log: Log, entry: int) -> float | None:
    return sum(log.recording.params[number].numel() for number in log.graph.params[entry]) or None


def _calls(log: Log, entry: int) -> float | None:
    return 1.0 if is_operation(log, entry) and not log.row(entry).output_index else None


def _gradient_norm(log: Log, entry: int) -> float | None:
    gradient = log.gradient(entry)
    return (
        None
        if gradient is None
        else _checked(torch.linalg.vector_norm(local_value(gradient).float()), log.label(entry))
    )


def _seconds_text(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs" if value else "0"


def _flops_text(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}FLOP"
    return f"{value:.0f} FLOP"


def _bytes_text(value: float) -> str:
    return bytes_text(round(value))


def _number_text(value: float) -> str:
    return f"{value:.3g}"


# How an overlay's unit is written.
_TEXTS: dict[str, Callable[[float], str]] = {
    "seconds": _seconds_text,
    "bytes": _bytes_text,
    "FLOPs": _flops_text,
    "": _number_text,
}

Combine = Callable[[Sequence[float]], float]
# By name: the measure of an entry, how it is written, what it is called, and how several become
# one.
_MEASURES: dict[
    str, tuple[Callable[[Log, int], float | None], Callable[[float], str], str, Combine]
] = {
    "time": (_seconds, _seconds_text, "time", sum),
    "backward_time": (_backward_seconds, _seconds_text, "backward time", sum),
    "total_time": (_total_seconds, _seconds_text, "forward + backward time", sum),
    "memory": (_memory, _bytes_text, "memory", sum),
    "flops": (_flops, _flops_text, "FLOPs", sum),
    "flops_backward": (_flops_backward, _flops_text, "backward FLOPs", sum),
    "params": (_params, count_text, "parameters", sum),
    "calls": (_calls, count_text, "calls", sum),
    "gradient_norm": (_gradient_norm, _number_text, "gradient norm", _mean),
}
