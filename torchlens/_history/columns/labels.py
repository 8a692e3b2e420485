"""Columns of names and numbers: what an entry is called."""

from typing import TYPE_CHECKING

from torchlens._history.columns.making import Entries, once
from torchlens._history.log import Log, picked

if TYPE_CHECKING:
    from torchlens._graph.labels import Layer


def layer_label(log: Log, entries: Entries) -> list[str]:
    return log.labels(entries)


def layer_label_w_pass(log: Log, entries: Entries) -> list[str]:
    return log.labels_w_pass(entries)


def layer_label_no_pass(log: Log, entries: Entries) -> list[str]:
    return picked(log.layer_labels, picked(log.graph.layer_of, entries))


def layer_label_short(log: Log, entries: Entries) -> list[str]:
    names, repeats = (
        layer_label_no_pass_short(log, entries),
        picked(log.repeats, picked(log.graph.layer_of, entries)),
    )
    passes = zip(names, repeats, pass_num(log, entries), strict=True)
    return [f"{name}:{number}" if is_repeated else name for name, is_repeated, number in passes]


def layer_label_w_pass_short(log: Log, entries: Entries) -> list[str]:
    names = zip(layer_label_no_pass_short(log, entries), pass_num(log, entries), strict=True)
    return [f"{name}:{number}" for name, number in names]


def layer_label_no_pass_short(log: Log, entries: Entries) -> list[str]:
    layers = log.graph.layers
    return once(picked(log.graph.layer_of, entries), lambda number: layers[number].label_short)


def _layers(log: Log, entries: Entries) -> "list[Layer]":
    return picked(log.graph.layers, picked(log.graph.layer_of, entries))


def layer_type(log: Log, entries: Entries) -> list[str]:
    return [layer.type for layer in _layers(log, entries)]


def layer_type_num(log: Log, entries: Entries) -> list[int]:
    return [layer.type_num for layer in _layers(log, entries)]


def layer_total_num(log: Log, entries: Entries) -> list[int]:
    return [layer.total_num for layer in _layers(log, entries)]


def pass_num(log: Log, entries: Entries) -> list[int]:
    return picked(log.graph.pass_of, entries)


def layer_passes_total(log: Log, entries: Entries) -> list[int]:
    return [len(layer.entries) for layer in _layers(log, entries)]


def operation_num(log: Log, entries: Entries) -> list[int]:
    return [entry + 1 for entry in entries]
