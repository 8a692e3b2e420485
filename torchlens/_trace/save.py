"""Writes a history to a file."""

import os
from pathlib import Path
from typing import Any

import torch

from torchlens._history.log import Log
from torchlens._portable.documents import (
    FORMAT,
    call_document,
    graph_document,
    options_form,
    value_forms,
)
from torchlens._portable.python_values import PythonWriter
from torchlens._portable.tensor_notes import TensorWriter
from torchlens._recording.garbage_collector import without_collector
from torchlens._text.error_wording import check_count, checked_file, got
from torchlens._trace.names import OWN_PREFIX, Names, full_name, names_in_call
from torchlens._trace.shards import SAVE_SHARD_BYTES, TraceShards, json_tensor


def trace_metadata() -> dict[str, str]:
    """The metadata in the header of each file."""
    return {"format": "pt", "torchlens": FORMAT, "torch": torch.__version__}


def save_history(
    log: Log,
    path: str | os.PathLike[str],
    params: bool = False,
    max_shard_bytes: int = SAVE_SHARD_BYTES,
) -> None:
    """Writes a log to `path`. See `ModelHistory.save`."""
    target = checked_file("path", path, "trace.safetensors")
    if not isinstance(params, bool):
        raise TypeError(f"params must be True or False, got {got(params)}.")
    check_count("max_shard_bytes", max_shard_bytes, 1)
    if log.graph.part_of is not None:
        raise ValueError(
            "A part of a history cannot be saved to a file. Save the whole history, load it, and "
            "take subgraph() of it; or pickle the part."
        )
    # It makes many objects, none of them garbage.
    without_collector(lambda: _save(log, target, params, max_shard_bytes))


def _save(log: Log, target: Path, params: bool, max_shard_bytes: int) -> None:
    shards = TraceShards(target, trace_metadata(), max_shard_bytes)
    try:
        log.settle_origin()
        tensors = TensorWriter(Names().claim)
        writer = PythonWriter(tensors.add)
        recording, names = log.recording, names_in_call(log.recording)
        graph = graph_document(recording, log.graph, writer)
        values = value_forms(recording, names, writer, tensors)
        document = call_document(recording, names, writer, tensors, params)
        stored = tensors.settle()
        document |= {
            "graph": 1,
            "values": list(map(short_note, values)),
            "listing": {
                "keeps_unsaved": log.keeps_unsaved,
                "marks_distances": log.marks_distances,
            },
            "options": options_form(log.options, writer),
        }
        shards.add({full_name(1, key): tensor for key, tensor in stored.items()})
        shards.add({
            f"{OWN_PREFIX}graph/1": json_tensor(graph),
            f"{OWN_PREFIX}call/1": json_tensor(document),
        })  # fmt: skip
        shards.close()
    except BaseException:
        shards.abandon()
        raise


def short_note(note: Any) -> Any:
    """A note that says nothing but the key of the tensor, as that key."""
    return note["key"] if type(note) is dict and len(note) == 1 and "key" in note else note
