"""A history out of a file, value by value as they are asked for."""

from functools import partial
from itertools import compress, repeat
from typing import TypeVar

from torchlens.capture.recording import Recording
from torchlens.capture.session import CaptureOptions
from torchlens.errors import TraceError
from torchlens.graph.build import Graph, assemble_graph
from torchlens.history.base_history import BaseHistory
from torchlens.history.log import Log
from torchlens.trace.call import fill_recording, options_of
from torchlens.trace.damage import told_as_damage
from torchlens.trace.document_reading import check_reads, decisions_of, recording_of
from torchlens.trace.files import TraceFiles
from torchlens.trace.fragment import recording_of_journal
from torchlens.trace.names import OWN_PREFIX
from torchlens.trace.plain_text import printable, shown
from torchlens.trace.python_values import PythonReader
from torchlens.trace.save import FORMAT, OLDER_FORMATS
from torchlens.trace.stored_tensors import stored_tensor

__all__ = ["calls_of", "load_call"]

_History = TypeVar("_History", bound=BaseHistory)


def calls_of(files: TraceFiles) -> list[int]:
    """The numbers of the calls in a trace."""
    if "torchlens" not in files.metadata:
        raise TraceError(
            f"{printable(str(files.path))} holds tensors but no history: torchlens did not write it. Read its tensors with "
            "torchlens.read_trace(path)."
        )
    if files.metadata["torchlens"] not in (FORMAT, *OLDER_FORMATS):
        raise TraceError(
            f"{printable(str(files.path))} is of format {shown(files.metadata['torchlens'])}, and this torchlens reads "
            f"format {FORMAT}. Load it with the version that wrote it, or log the model again."
        )
    start = f"{OWN_PREFIX}call/"
    names = files.names
    words = [name.removeprefix(start) for name in compress(names, map(str.startswith, names, repeat(start)))]
    found = sorted(int(word) for word in words if word.isdigit() and word.isascii() and len(word) < 10)
    found = sorted({*found, *files.unfinished})
    if not found:
        raise TraceError(f"{printable(str(files.path))} holds no call of a model.")
    return found


def load_call(files: TraceFiles, number: int, kind: type[_History]) -> _History:
    """One call of a trace, as a history of that kind."""
    with told_as_damage(files.path):
        return _load_call(files, number, kind)


def _load_call(files: TraceFiles, number: int, kind: type[_History]) -> _History:
    if number in files.unfinished:
        return kind(Log(recording_of_journal(files, number)), CaptureOptions())
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
    return kind(log, options, bool(listing["keeps_unsaved"]))
