"""Loads a history from a file, or reads values by name; a value is read when it is asked for."""

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor

from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._graph.build import Graph, assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._portable.document_reading import (
    decisions_of,
    fill_recording,
    options_of,
    recording_of,
)
from torchlens._portable.documents import FORMAT, param_key
from torchlens._portable.python_values import PythonReader
from torchlens._portable.stored_tensors import TensorSource, damage_reported, stored_tensor
from torchlens._recording.recording import Recording
from torchlens._recording.stored import StoredParams, opened
from torchlens._recording.user_code import warn_caller
from torchlens._text.error_wording import check_count
from torchlens._text.plain_text import printable, shown
from torchlens._trace.files import TraceFiles, open_trace
from torchlens._trace.names import (
    OWN_PREFIX,
    call_of,
    full_name,
    names_of_rows,
    without_own,
)
from torchlens.errors import TraceError

_CALL = f"{OWN_PREFIX}call/"


def calls_of(files: TraceFiles) -> list[int]:
    """The numbers of the calls that a trace has in full."""
    where = printable(str(files.path))
    if "torchlens" not in files.metadata:
        raise TraceError(
            f"{where} holds tensors but no history: torchlens did not write it. Read its tensors "
            "with torchlens.read_trace(path)."
        )
    if files.metadata["torchlens"] != FORMAT:
        raise TraceError(
            f"{where} is of format {shown(files.metadata['torchlens'])}, and this torchlens reads "
            f"format {FORMAT}. Load it with the version that wrote it, or log the model again."
        )
    names = [name for name in files.names if name.startswith(_CALL)]
    calls = [call_of(name.removeprefix(_CALL)) for name in names]
    return sorted(call for call in calls if call is not None)


def missing_from(files: TraceFiles) -> list[str]:
    """What an unfinished trace lacks, in words."""
    if files.is_closed:
        return []
    known = set(calls_of(files))
    begun: dict[int, int] = {}
    for name in files.names:
        call = call_of(name)
        if call is not None and call not in known:
            begun[call] = begun.get(call, 0) + 1
    return [
        f"the graph of call {call}, of which {count} tensors are there for read_trace"
        for call, count in sorted(begun.items())
    ] or ["whatever came after its last call"]


def load_trace(path: str | os.PathLike[str], call: int | None) -> ModelHistory:
    """One call of a trace; see `torchlens.load`."""
    files = open_trace(path)
    calls, name = calls_of(files), printable(files.path.name)
    missing = "; ".join(missing_from(files))
    if not calls:
        rest = f" It was not closed. Missing: {missing}." if missing else ""
        raise TraceError(f"{printable(str(files.path))} holds no complete call of a model.{rest}")
    if call is None:
        call = calls[0]
        if len(calls) > 1:
            warn_caller(
                f"torchlens: {name} holds {len(calls)} calls of the model, and this is the first. "
                f"Choose with load(path, call=...), from {calls[0]} to {calls[-1]}."
            )
    if missing:
        warn_caller(f"torchlens: {name} was not closed. Missing: {missing}.")
    check_count("call", call, 1)
    if call not in calls:
        raise ValueError(
            f"call must be one of those in {name}, {calls[0]} to {calls[-1]}, got {call}."
        )
    return load_call(files, call)


class CallFiles(TensorSource):
    """The tensors of one call by the keys that its documents have for them."""

    def __init__(self, files: TraceFiles, call: int) -> None:
        self.path = files.path
        self._files = files
        self._call = call

    def read(self, key: str) -> Tensor:
        return self._files.read(full_name(self._call, str(key)))


def load_call(files: TraceFiles, number: int) -> ModelHistory:
    """One call of a trace, as a history."""
    with damage_reported(files.path):
        document = files.json(f"{_CALL}{number}")
        graph = files.json(f"{OWN_PREFIX}graph/{document['graph']}")
        own = CallFiles(files, number)
        reader = PythonReader(partial(stored_tensor, own))
        recording = recording_of(graph, document["seconds"], reader)
        fill_recording(recording, document, own, reader)
        decisions = decisions_of(graph, recording)
        options = options_of(document["options"], recording.random_seed, reader)
        listing = document["listing"]

    def make_graph(recording: Recording) -> Graph:
        with damage_reported(files.path):
            return assemble_graph(recording, decisions)

    log = Log(
        recording,
        options,
        marks_distances=bool(listing["marks_distances"]),
        keeps_unsaved=bool(listing["keeps_unsaved"]),
        make_graph=make_graph,
    )
    return ModelHistory(log)


# -- values by name ------------------------------------------------------------------------------


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
    for name, read in _all_values(files):
        if name not in given and _fits(name, pattern):
            yield name, read()
        given.add(name)


def _all_values(files: TraceFiles) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All values: names, some of them more than once, and how each is read."""
    if "torchlens" in files.metadata:
        beside: list[tuple[str, Callable[[], Any]]] = []
        for call in calls_of(files):
            log = load_call(files, call)._log
            names, values = names_of_rows(log.recording, call), log.recording.values
            for number in log.graph.recorded:
                if values[number] is not None:
                    yield names[number], partial(opened, values[number])
            with damage_reported(files.path):
                beside += _beside_rows(log.recording, call)
        yield from beside
    for name in without_own(files.names):
        yield name, partial(read_named, files, name)


def _beside_rows(recording: Recording, call: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The gradients and parameters that a call has in the file: their names, and how each is
    read.
    """

    def name_of_param(number: int) -> str:
        return full_name(call, param_key(recording.param_addresses[number]))

    params, gradients = recording.params, recording.gradients
    names = names_of_rows(recording, call) if gradients else []
    for number in gradients:
        yield f"{names[number]}/grad", partial(_detached, gradients.__getitem__, number)
    of_params = gradients.parameters if isinstance(gradients, Gradients) else {}
    for number in of_params:
        yield f"{name_of_param(number)}/grad", partial(_detached, of_params.__getitem__, number)
    if isinstance(params, StoredParams):
        for number in params.numbers:
            yield name_of_param(number), partial(_detached, params.read, number)


def _detached(read: Callable[[int], Any], number: int) -> Any:
    value = read(number)
    return value.detach() if isinstance(value, Tensor) else value


def _fits(name: str, pattern: str | None) -> bool:
    """True if a name contains the pattern, or, with or without its call, matches one with `*`."""
    if pattern is None:
        return True
    if not any(sign in pattern for sign in "*?["):
        return pattern in name
    if call_of(pattern) is not None:  # it begins with the number of a call
        return fnmatchcase(name, pattern)
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)
