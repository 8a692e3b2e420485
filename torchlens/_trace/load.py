"""A history out of a file, value by value as they are asked for."""

import os
from functools import partial
from itertools import compress, repeat

from torchlens._capture.options import CaptureOptions
from torchlens._graph.build import Graph, assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import Recording
from torchlens._recording.user_code import warn_caller
from torchlens._text.plain_text import printable, shown
from torchlens._text.wording import check_count
from torchlens._trace.call import fill_recording, options_of
from torchlens._trace.damage import told_as_damage
from torchlens._trace.document_reading import check_reads, decisions_of, recording_of
from torchlens._trace.files import TraceFiles
from torchlens._trace.fragment import recording_of_journal
from torchlens._trace.names import OWN_PREFIX
from torchlens._trace.opening import open_trace
from torchlens._trace.python_values import PythonReader
from torchlens._trace.save import FORMAT, OLDER_FORMATS
from torchlens._trace.stored_tensors import stored_tensor
from torchlens.errors import TraceError


def calls_of(files: TraceFiles) -> list[int]:
    """The numbers of the calls in a trace."""
    if "torchlens" not in files.metadata:
        raise TraceError(
            f"{printable(str(files.path))} holds tensors but no history: torchlens did not write "
            "it. Read its tensors with torchlens.read_trace(path)."
        )
    if files.metadata["torchlens"] not in (FORMAT, *OLDER_FORMATS):
        raise TraceError(
            f"{printable(str(files.path))} is of format {shown(files.metadata['torchlens'])}, and "
            f"this torchlens reads format {FORMAT}. Load it with the version that wrote it, or log "
            "the model again."
        )
    start = f"{OWN_PREFIX}call/"
    names = files.names
    words = [
        name.removeprefix(start)
        for name in compress(names, map(str.startswith, names, repeat(start)))
    ]
    found = sorted(
        int(word) for word in words if word.isdigit() and word.isascii() and len(word) < 10
    )
    found = sorted({*found, *files.unfinished})
    if not found:
        raise TraceError(f"{printable(str(files.path))} holds no call of a model.")
    return found


def load_trace(path: str | os.PathLike[str], call: int | None) -> ModelHistory:
    """A call of a trace by its path; see `torchlens.load`."""
    files = open_trace(path)
    calls = calls_of(files)
    if call is None:
        call = calls[0]
        if len(calls) > 1:
            warn_caller(
                f"torchlens: {printable(files.path.name)} holds {len(calls)} calls of the model, "
                f"and this is the first. Choose with load(path, call=...), from {calls[0]} to "
                f"{calls[-1]}."
            )
    if files.missing:
        warn_caller(
            f"torchlens: {printable(files.path.name)} was not closed. Missing: "
            f"{'; '.join(files.missing)}."
        )
    check_count("call", call, 1)
    if call not in calls:
        raise ValueError(
            f"call must be one of those in {printable(files.path.name)}, {calls[0]} to "
            f"{calls[-1]}, got {call}."
        )
    return load_call(files, call)


def load_call(files: TraceFiles, number: int) -> ModelHistory:
    """One call of a trace, as a history."""
    with told_as_damage(files.path):
        return _load_call(files, number)


def _load_call(files: TraceFiles, number: int) -> ModelHistory:
    if number in files.unfinished:
        return ModelHistory(Log(recording_of_journal(files, number)), CaptureOptions())
    document = files.text(f"{OWN_PREFIX}call/{number}")
    graph = files.text(f"{OWN_PREFIX}graph/{document['graph']}")
    reader = PythonReader(partial(stored_tensor, files))
    recording = recording_of(graph, document["seconds"], reader)
    fill_recording(recording, document, files, reader)
    decisions = decisions_of(graph, len(recording.rows))
    check_reads(recording, decisions)

    def make_graph(own: Recording) -> Graph:
        with told_as_damage(files.path):
            return assemble_graph(own, decisions)

    listing = document["listing"]
    log = Log(recording, marks_distances=bool(listing["marks_distances"]), make_graph=make_graph)
    options = options_of(document["options"], recording.random_seed, reader)
    return ModelHistory(log, options, bool(listing["keeps_unsaved"]))
