"""Writes the calls of a model to a trace when they end.

A small call is written in the thread that made it, a large one in the background. An error never
reaches the model's caller: it ends the writing, and is reported at the end.
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from torchlens._graph.build import build_graph
from torchlens._portable.documents import (
    call_document,
    changed_entries,
    graph_document,
    value_forms,
)
from torchlens._portable.python_values import PythonWriter
from torchlens._portable.tensor_notes import Note, TensorWriter, as_stored
from torchlens._recording.recording import Recording
from torchlens._recording.stored import StoredValue
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._trace.names import OWN_PREFIX, Names, full_name, names_in_call
from torchlens._trace.save import short_note, trace_metadata
from torchlens._trace.shards import TraceShards, bytes_tensor, json_bytes, json_tensor

# A call with no more than this is written at once: waking another thread would take longer.
_SMALL_BYTES, _SMALL_ROWS = 2 * 2**20, 1000
_FLUSH_SECONDS = 1.0  # between two flushes
_FLUSH_SHARE = 10  # and this many times what the last one took


class RepeatedCall(Protocol):
    """A call of a compiled program, which does the same each time."""

    program: Any

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""

    @property
    def num_rows(self) -> int:
        """The number of rows in the recording."""

    def recording(self) -> Recording:
        """The call as a recording."""


class Written(StoredValue):
    """Replaces a value that was written while its call was running."""

    __slots__ = ("note",)

    def __init__(self, note: Note | str | None) -> None:
        self.note = note

    def read(self) -> Any:
        raise RuntimeError("The value is in the trace that is being written.")


class CallWriter:
    """Writes calls. `is_kept(name)` says whether the value of that name in the file is written. The
    files belong to one process: in a forked child, nothing is written.
    """

    def __init__(
        self,
        path: Path,
        shard_bytes: int,
        max_bytes: int | None,
        is_kept: Callable[[str], bool] | None,
    ) -> None:
        self.num_written = 0  # of the calls; known once it is closed
        self.problem: str | None = None
        self._pid = os.getpid()
        self._shards = TraceShards(path, trace_metadata(), shard_bytes)
        self._max_bytes = max_bytes
        self._is_kept = is_kept
        self._graphs: dict[bytes, int] = {}  # numbers of the written graphs, by their digest
        self._graph_of_program: dict[Any, int] = {}
        self._names: dict[int, Names] = {}  # of calls that are running
        self._next_flush = 0.0
        self._turn, self._writing = threading.Lock(), threading.Lock()
        self._background: ThreadPoolExecutor | None = None  # until there is something to do for it
        self._waiting: Future[None] | None = None

    @property
    def is_in_a_child(self) -> bool:
        """True in a process that was forked from the one that writes."""
        return os.getpid() != self._pid

    @property
    def is_full(self) -> bool:
        return self._max_bytes is not None and self._shards.num_bytes >= self._max_bytes

    @property
    def is_open(self) -> bool:
        """Whether more is written: nothing failed, and there is room."""
        return self.problem is None and not self.is_full

    def hand(self, call: int, made: Recording | RepeatedCall, params: bool = False) -> None:
        """Takes a call that has ended. Waits for the large one before it, so that at most one
        waits to be written.
        """
        if self.is_in_a_child:
            return
        with self._turn:
            if self._waiting is not None:
                wait([self._waiting])
                self._waiting = None
            if params or _is_small(made):  # parameters change with the next step
                self._write(call, made, params)
                if self._begins_flush():
                    is_little = self._shards.gathered_bytes <= _SMALL_BYTES
                    self._flush() if is_little else self._submit(self._flush)
            else:
                self._waiting = self._submit(self._write_in_background, call, made, params)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "torchlens tail")
        return self._background.submit(work, *arguments)

    def take(
        self, call: int, recording: Recording, rows: Sequence[int]
    ) -> Mapping[int, StoredValue]:
        """Writes some values of a call that is still running."""
        if self.problem is not None or self.is_in_a_child:
            return {}
        try:
            with self._writing:
                return self._take(call, recording, rows)
        except Exception as error:  # of any kind: the model continues
            self.fail(error)
            return {}

    def fail(self, error: Exception) -> None:
        """Notes the first thing that went wrong; nothing more is written."""
        if self.problem is None:
            self.problem = f"{type(error).__name__}: {error}"

    def close(self, facts: dict[str, Any]) -> None:
        """Waits for what is being written, adds facts about the whole trace, closes the files."""
        if self.is_in_a_child:
            return
        if self._background is not None:
            self._background.shutdown()
        try:
            if self.problem is None:
                self._shards.add({f"{OWN_PREFIX}trace": json_tensor(facts)})
                self._shards.close()
        except Exception as error:  # the disk may be full
            self.fail(error)
        if self.problem is not None:
            self._shards.close_with_what_is_on_disk()
        names = self._shards.names_on_disk
        self.num_written = sum(name.startswith(f"{OWN_PREFIX}call/") for name in names)

    # -- writing -------------------------------------------------------------------------------

    def _write(self, call: int, made: Recording | RepeatedCall, params: bool) -> None:
        try:
            with self._writing:
                if self.problem is None:
                    self._write_call(call, made, params)
        except Exception as error:  # whatever it is, the model goes on
            self.fail(error)

    def _write_in_background(self, call: int, made: Recording | RepeatedCall, params: bool) -> None:
        self._write(call, made, params)
        if self._begins_flush():
            self._flush()

    def _begins_flush(self) -> bool:
        """Whether it is time to flush; True for one caller, until that flush is over."""
        if self.problem is not None or time.monotonic() < self._next_flush:
            return False
        self._next_flush = math.inf
        return True

    def _flush(self) -> None:
        start = time.monotonic()
        try:
            self._shards.flush()
        except Exception as error:  # the disk may be full
            self.fail(error)
        end = time.monotonic()
        self._next_flush = end + max(_FLUSH_SECONDS, _FLUSH_SHARE * (end - start))

    def _write_call(self, call: int, made: Recording | RepeatedCall, params: bool) -> None:
        recording = made if isinstance(made, Recording) else made.recording()
        program = None if isinstance(made, Recording) else made.program
        names = names_in_call(recording)
        written = self._take_out(call, recording, names)
        tensors = TensorWriter(self._names.pop(call, Names()).claim)
        writer = PythonWriter(tensors.add)
        graph, number = None, self._graph_of_program.get(program)
        if number is None:
            graph = graph_document(recording, build_graph(recording), writer)
        has_tensors = not tensors.is_empty  # among the arguments, each call its own
        values = value_forms(recording, names, writer, tensors)
        document = call_document(recording, names, writer, tensors, params)
        self._add(call, tensors.settle())
        # After the values were copied, so that none is taken for what it was before a change.
        document["changed"] = sorted(changed_entries(recording))
        values = list(map(short_note, values))
        for row, note in {**dict.fromkeys(document["changed"]), **written}.items():
            values[row] = note
        if graph is not None:
            number = self._number_of_graph(json_bytes(graph))
            if program is not None and not has_tensors:
                self._graph_of_program[program] = number
        listing = {"keeps_unsaved": True, "marks_distances": False}
        document |= {"graph": number, "values": values, "listing": listing, "options": None}
        self._shards.add({f"{OWN_PREFIX}call/{call}": json_tensor(document)})

    def _take_out(
        self, call: int, recording: Recording, names: Sequence[str]
    ) -> dict[int, Note | str | None]:
        """Removes the values that are not to be written from the recording; returns the notes of
        those that were written while the call was running.
        """
        written = {
            row: value.note
            for row, value in enumerate(recording.values)
            if isinstance(value, Written)
        }
        for row, name in enumerate(names):
            if row in written or not self._keeps(call, name):
                recording.values[row], recording.versions[row] = None, -1
        return written

    def _number_of_graph(self, text: bytes) -> int:
        """The number of a graph, which is written if no call before had the same."""
        digest = hashlib.sha256(text).digest()
        number = self._graphs.get(digest)
        if number is None:
            number = self._graphs[digest] = len(self._graphs) + 1
            self._shards.add({f"{OWN_PREFIX}graph/{number}": bytes_tensor(text)})
        return number

    def _take(
        self, call: int, recording: Recording, rows: Sequence[int]
    ) -> Mapping[int, StoredValue]:
        names = names_in_call(recording)
        tensors = TensorWriter(self._names.setdefault(call, Names()).claim)
        notes: dict[int, Any] = {
            row: tensors.add(recording.values[row], names[row])
            for row in rows
            if self._keeps(call, names[row])
        }
        self._add(call, tensors.settle())
        return {row: Written(short_note(notes.get(row))) for row in rows}

    def _keeps(self, call: int, name: str) -> bool:
        return self._is_kept is None or self._is_kept(full_name(call, name))

    def _add(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():  # one by one, since a full shard frees its copies
            with unseen(), NoTorchFunction():
                copy = _copied(tensor)
            self._shards.add({full_name(call, key): copy})


def _copied(tensor: Tensor) -> Tensor:
    """What is written of a tensor, in memory of its own: the model goes on with the tensor."""
    stored = as_stored(tensor)
    is_same = stored.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return stored.clone() if is_same else stored


def _is_small(made: Recording | RepeatedCall) -> bool:
    if isinstance(made, Recording):
        return len(made.rows) <= _SMALL_ROWS and _bytes_of(made) <= _SMALL_BYTES
    return made.num_rows <= _SMALL_ROWS and made.num_bytes <= _SMALL_BYTES


def _bytes_of(recording: Recording) -> int:
    """The size of the saved values, about: views count as often as there are."""
    found = 0
    for value in recording.values:
        if isinstance(value, Tensor):
            try:
                found += value.numel() * value.element_size()
            except RuntimeError:  # nested, of symbolic sizes
                continue
    return found
