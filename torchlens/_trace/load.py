"""Loads a history from a file; each value is read when it is asked for."""

import os
from functools import partial

from torch import Tensor

from torchlens._graph.build import Graph, assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import Recording
from torchlens._recording.user_code import warn_caller
from torchlens._text.plain_text import printable, shown
from torchlens._text.wording import check_count
from torchlens._trace.document_reading import (
    decisions_of,
    fill_recording,
    options_of,
    recording_of,
)
from torchlens._trace.files import TraceFiles, damage_reported, open_trace
from torchlens._trace.names import OWN_PREFIX, call_of, full_name
from torchlens._trace.python_values import PythonReader
from torchlens._trace.save import FORMAT
from torchlens._trace.stored_tensors import stored_tensor
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


class CallFiles:
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
