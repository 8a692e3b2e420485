"""The arguments of a recorded call, with the values of its tensors."""

from typing import Any

import torch

from torchlens._history.log import Log
from torchlens._recording.functions import argument_names
from torchlens._recording.recording import located
from torchlens._replay.replay import filled


def call_arguments(log: Log, entry: int, results: tuple[int, ...] = ()) -> dict[str, Any]:
    """Name → argument of the call that made an entry. Names that torch does not tell are numbers.

    The arguments are those that were saved with the call, or else the saved values of the entries
    that it read. Raises ValueError with what must be saved if one has no value; `results` are
    further entries whose values the caller needs.
    """
    row, recording = log.row(entry), log.recording
    saved = log.saved_arguments(entry)
    missing = [number for number in results if not log.is_saved(number)]
    tensors: dict[Any, torch.Tensor] = {}
    for location, number in () if saved else located(row.references):
        source = log.graph.entry_of.get(number)
        if 0 > number >= -len(recording.params):
            tensors[location] = log.parameter(-1 - number).detach()
        elif source is None:
            raise ValueError(
                f"{log.label(entry)!r} reads a tensor that the history does not hold. Log again "
                "with save_function_args=True."
            )
        elif log.is_saved(source):
            tensors[location] = log.value(source)
        else:
            missing.append(source)
    if missing:
        labels = log.labels(sorted({*missing, *results, *log.graph.parents[entry]}))
        raise ValueError(
            f"{log.label(entry)!r} needs tensors that were not saved. Log again with "
            f"layers_to_save={labels}."
        )
    args, kwargs = saved if saved else filled(row.args, row.kwargs, tensors)
    names = argument_names(row.operation.func)
    named: dict[str, Any] = {
        names[place] if place < len(names) else str(place): value
        for place, value in enumerate(args)
    }
    return named | dict(kwargs or {})
