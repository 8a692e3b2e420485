"""Columns of the tensor itself and of its gradient."""

import torch

from torchlens._history.backward import backward_times
from torchlens._history.columns.making import Entries, nice_sizes
from torchlens._history.log import Log, picked
from torchlens._recording.regions import shape_of


def has_saved_activations(log: Log, entries: Entries) -> list[bool]:
    return [
        value is not None
        for value in picked(log.recording.values, picked(log.graph.recorded, entries))
    ]


def tensor_shape(log: Log, entries: Entries) -> list[tuple[int, ...]]:
    return list(map(tuple, log.fields(entries).shape))


def tensor_dtype(log: Log, entries: Entries) -> list[torch.dtype]:
    return list(log.fields(entries).dtype)


def tensor_fsize(log: Log, entries: Entries) -> list[int]:
    return log.sizes(entries)


def tensor_fsize_nice(log: Log, entries: Entries) -> list[str]:
    return nice_sizes(log.sizes(entries))


def grad_contents(log: Log, entries: Entries) -> list[torch.Tensor | None]:
    return (
        [log.gradient(entry) for entry in entries]
        if log.recording.gradients
        else [None] * len(entries)
    )


def has_saved_grad(log: Log, entries: Entries) -> list[bool]:
    return (
        [log.has_gradient(entry) for entry in entries]
        if log.recording.gradients
        else [False] * len(entries)
    )


def grad_shape(log: Log, entries: Entries) -> list[tuple[int, ...] | None]:
    return [
        None if gradient is None else tuple(shape_of(gradient))
        for gradient in grad_contents(log, entries)
    ]


def backward_time_elapsed(log: Log, entries: Entries) -> list[float | None]:
    return list(map(backward_times(log).seconds.get, entries))


def backward_order(log: Log, entries: Entries) -> list[int | None]:
    return list(map(backward_times(log).order.get, entries))
