"""Finds things in a trace: tensors by their names in the file, entries by any key."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import Recording
from torchlens._recording.stored import StoredParams, opened
from torchlens._trace.files import TraceFiles, damage_reported
from torchlens._trace.load import calls_of, load_call
from torchlens._trace.names import call_of, full_name, names_of_rows, param_key, without_own
from torchlens._trace.stored_tensors import stored_tensor


def read_named(files: TraceFiles, name: str) -> Any:
    """A tensor of the file, whether torchlens wrote it or not."""
    return opened(stored_tensor(files, name))


def entry_named(history: ModelHistory, key: str, call: int) -> int | None:
    """The entry that a key means: a name in the file, with the call or without it, a label, a
    module, an address.
    """
    log = history._log
    names = names_of_rows(log.recording, call)
    for entry, number in enumerate(log.graph.recorded):
        if key in (names[number], names[number].partition("/")[2]):
            return entry
    return history[key]._entry if key in history else None


def read_pattern(files: TraceFiles, pattern: str | None) -> Iterator[tuple[str, Any]]:
    """The names that fit the pattern and their values, in the order in which they were made;
    views of other tensors, which the file itself does not name, are among them.
    """
    given: set[str] = set()
    if "torchlens" in files.metadata:
        beside: list[tuple[str, Callable[[], Any]]] = []
        for call in calls_of(files):
            log = load_call(files, call)._log
            names = names_of_rows(log.recording, call)
            for number in log.graph.recorded:
                given.add(names[number])
                if log.recording.values[number] is not None and _fits(names[number], pattern):
                    yield names[number], opened(log.recording.values[number])
            with damage_reported(files.path):
                beside += _beside_rows(log.recording, call)
        for name, read in beside:
            if name not in given and _fits(name, pattern):
                value = read()
                yield name, value.detach() if isinstance(value, torch.Tensor) else value
            given.add(name)
    for name in without_own(files.names):
        if name not in given and _fits(name, pattern):
            yield name, read_named(files, name)


def _beside_rows(recording: Recording, call: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The gradients and parameters that a call has in the file: their names, and how each is
    read.
    """
    addresses, params, gradients = recording.param_addresses, recording.params, recording.gradients
    if gradients:
        names = names_of_rows(recording, call)
        yield from (
            (f"{names[number]}/grad", partial(gradients.__getitem__, number))
            for number in gradients
        )
    of_params = gradients.parameters if isinstance(gradients, Gradients) else {}
    yield from (
        (
            f"{full_name(call, param_key(addresses[number]))}/grad",
            partial(of_params.__getitem__, number),
        )
        for number in of_params
    )
    if isinstance(params, StoredParams):
        yield from (
            (full_name(call, param_key(addresses[number])), partial(params.read, number))
            for number in params.numbers
        )


def _fits(name: str, pattern: str | None) -> bool:
    """True if a name contains the pattern, or, with or without its call, matches one with `*`."""
    if pattern is None:
        return True
    if not any(sign in pattern for sign in "*?["):
        return pattern in name
    if call_of(pattern) is not None:  # it begins with the number of a call
        return fnmatchcase(name, pattern)
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)
