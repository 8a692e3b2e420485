"""A file with the structure of a model: what `structure_hash` is made of, as lines to read and as a
graph to compare. Nothing in it depends on weights, times, lines of code or the machine.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torchlens._capture.made_inputs import InputKeywords
from torchlens._graph.build import assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.structure_hash import structure_hash, structure_lines
from torchlens._portable.document_reading import decisions_of, recording_of
from torchlens._portable.documents import graph_document
from torchlens._portable.python_values import PythonReader, PythonWriter
from torchlens._portable.stored_tensors import damage_reported
from torchlens._recording.recording import Recording
from torchlens._text.plain_text import printable
from torchlens._text.whole_files import write_whole
from torchlens.errors import TraceError

_FORMAT, _VERSION = "torchlens-structure", 1


class StoredStructure(NamedTuple):
    """The structure in a file."""

    hash: str
    lines: list[str]
    made_by: dict[str, Any]
    history: ModelHistory


def write_structure(history: ModelHistory, path: Path) -> None:
    """Writes the structure of a history."""
    log = history._log
    recording = _without_places(log.recording)
    lines = structure_lines(log)
    versions = history.receipt.versions
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": history.model_name,
        "structure_hash": structure_hash(log),
        "made_by": versions,
        "graph": graph_document(recording, log.graph, PythonWriter(lambda tensor, name: {})),
        "lines": lines,
    }
    head = [f"{json.dumps(name)}: {_text_of(value)}" for name, value in document.items()]
    write_whole(path, "{\n" + ",\n".join(head) + "\n}\n")


def _text_of(value: Any) -> str:
    """One line; of a list of lines, one each, so that a version control shows what changed."""
    if isinstance(value, list):
        inner = ",\n".join(f"  {json.dumps(line, ensure_ascii=False)}" for line in value)
        return f"[\n{inner}\n]"
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _without_places(recording: Recording) -> Recording:
    """The recording without what may differ between two runs of one model."""
    rows = [
        row._replace(code=None, instruction=0, gradfunc=None, seconds=0.0) for row in recording.rows
    ]
    calls = [call._replace(code=None, instruction=0) for call in recording.module_calls]
    storages = list(range(len(rows)))
    return replace(recording, rows=rows, module_calls=calls, storages=storages, failure=None)


def read_structure(path: Path) -> StoredStructure:
    """The structure in a file that `write_structure` wrote."""
    where = printable(str(path))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{where} is no file of a structure: it is not JSON ({error}).") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise TraceError(f"{where} is no file of a structure, as assert_same_structure writes it.")
    if document.get("version") != _VERSION:
        raise TraceError(f"{where} was written by another version of torchlens. Write it anew.")
    with damage_reported(path):
        graph = document["graph"]
        count = len(graph["rows"]["operation"])
        recording = recording_of(graph, [0.0] * count, PythonReader(lambda note: None))
        decisions = decisions_of(graph, recording)
        lines = [printable(str(line)) for line in document["lines"]]
        digest = printable(str(document["structure_hash"]))
        made_by = dict(document["made_by"])
    log = Log(recording, make_graph=lambda own: assemble_graph(own, decisions))
    return StoredStructure(digest, lines, made_by, ModelHistory(log))


def inputs_to_make(history: ModelHistory, path: Path, names: Sequence[str]) -> InputKeywords:
    """`input_size` and `dtypes` of inputs like those of the file: by name if the model has all of
    these `names`, otherwise in order.
    """
    recording = history._log.recording
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, Any] = {}
    for place, number in recording.inputs:
        row = recording.rows[number]
        if len(place) != 1 or not isinstance(place[0], str):
            raise ValueError(
                f"The inputs in {path.name} are not plain arguments, so they cannot be made anew. "
                "Give input_args or input_kwargs."
            )
        sizes[place[0]], dtypes[place[0]] = tuple(row.shape), row.dtype
    if not sizes:
        return {}
    if not sizes.keys() <= set(names):
        return {"input_size": list(sizes.values()), "dtypes": list(dtypes.values())}
    return {"input_size": sizes, "dtypes": dtypes}
