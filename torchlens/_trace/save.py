"""A history into a file."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from torchlens._history.log import Log
from torchlens._recording.collector import without_collector
from torchlens._text.wording import check_count, checked_file, got
from torchlens._trace.call import call_document, options_form
from torchlens._trace.document import document_of
from torchlens._trace.names import OWN_PREFIX, Names, names_of_rows
from torchlens._trace.python_values import PythonWriter
from torchlens._trace.tensors import Blob, Tensors
from torchlens._trace.writing import SHARD_BYTES, write_files

FORMAT = "2"  # raised when something in the JSON is told in another way than before
OLDER_FORMATS = ("1",)  # that can be read; there, each column of numbers was a list


def trace_metadata() -> dict[str, str]:
    """What the header of each file says about it."""
    return {"format": "pt", "torchlens": FORMAT, "torch": torch.__version__}


def json_blob(name: str, document: Any) -> Blob:
    """JSON as a tensor of bytes."""
    return bytes_blob(name, json_bytes(document))


def json_bytes(document: Any) -> bytes:
    return _ENCODER.encode(document).encode("utf-8", "surrogatepass")


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False)


def bytes_blob(name: str, content: bytes) -> Blob:
    """Bytes as a tensor."""
    return Blob(name, "U8", (len(content),), content)


def save_history(
    log: Log, path: str | os.PathLike[str], params: bool = False, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a log to `path`. See `ModelHistory.save`."""
    target = checked_file("path", path, "trace.safetensors")
    if not isinstance(params, bool):
        raise TypeError(f"params must be True or False, got {got(params)}.")
    check_count("max_shard_bytes", max_shard_bytes, 1)
    without_collector(
        lambda: _save(log, target, params, max_shard_bytes)
    )  # it makes much that is no garbage


def _save(log: Log, target: Path, params: bool, max_shard_bytes: int) -> None:
    names = Names()
    tensors = Tensors(names.claim)
    writer = PythonWriter(tensors.add)
    recording = log.recording
    graph = document_of(recording, log.graph, writer)
    call = call_document(recording, names_of_rows(recording, 1), writer, tensors, params)
    call["graph"] = 1
    call["listing"] = {"keeps_unsaved": log.keeps_unsaved, "marks_distances": log.marks_distances}
    call["options"] = options_form(log.options, writer)
    blobs = tensors.settle()
    call["values"] = list(map(short_note, call["values"]))
    blobs += [json_blob(f"{OWN_PREFIX}graph/1", graph), json_blob(f"{OWN_PREFIX}call/1", call)]
    write_files(target, blobs, trace_metadata(), max_shard_bytes)


def short_note(note: Any) -> Any:
    """A note that says nothing but where the tensor is, as that alone."""
    return note["key"] if type(note) is dict and len(note) == 1 and "key" in note else note
