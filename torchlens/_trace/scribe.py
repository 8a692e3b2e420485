"""Writes the calls of a model into a trace, in a thread of its own.

Calls are handed to it as they end. Where one has the graph of an earlier one, as the steps of a
loop mostly do, the graph is not written again. What goes wrong here never reaches the model's
caller: it ends the writing, and is told afterwards.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchlens._history.log import Log
from torchlens._history.pickling import changed_entries
from torchlens._recording.recording import Recording
from torchlens._recording.stored import StoredValue
from torchlens._trace.call import call_document
from torchlens._trace.document import document_of
from torchlens._trace.fragment import row_line
from torchlens._trace.known_graphs import (
    KnownGraph,
    is_same_graph,
    known_graph_of,
    remember,
    remembered,
)
from torchlens._trace.names import (
    OWN_PREFIX,
    Names,
    boundary_addresses,
    names_in_call,
    names_of_rows,
)
from torchlens._trace.python_values import PythonWriter
from torchlens._trace.save import bytes_blob, json_blob, json_bytes, short_note, trace_metadata
from torchlens._trace.stencils import RepeatedCall, Stencil, call_facts, stencil_of
from torchlens._trace.stream import TraceStream
from torchlens._trace.tensors import Tensors

# Bytes that may wait to be written before whoever hands over more of them has to wait.
_MOST_WAITING = 128 * 2**20
# A call with no more than this is written by whoever hands it over: waking another thread would
# take longer.
_LITTLE, _FEW_ROWS = 2 * 2**20, 1000  # bytes, rows
# A call with more bytes is told of in the journal row by row, not only when it is complete.
_FEW_GRAPHS = 8  # that a call is compared with
_LARGE = 16 * 2**20


class Handed(StoredValue):
    """In place of a value that was written while its call was running: the note of where it is."""

    __slots__ = ("note",)

    def __init__(self, note: dict[str, Any]) -> None:
        self.note = note

    def read(self) -> Any:
        raise RuntimeError("it is in the trace that is being written")


class _Job:
    """A call to be written."""

    def __init__(self, call: int, made: Recording | RepeatedCall, params: bool) -> None:
        self.call = call
        self.made = made
        self.params = params
        self.num_bytes = _bytes_of(made) if isinstance(made, Recording) else made.num_bytes
        self.num_rows = len(made.rows) if isinstance(made, Recording) else made.num_rows


class Scribe:
    """Takes calls, writes them, counts what it could not write. `is_kept` says of a name whether
    its value is written.

    The files are its process's own: in a child that was forked from it, nothing is written.
    """

    def __init__(
        self,
        path: Path,
        shard_bytes: int,
        max_bytes: int | None,
        is_kept: Callable[[str], bool] | None,
        room: int,
    ) -> None:
        self.num_written = 0
        self.problem: str | None = None
        self._pid = os.getpid()
        self._stream = TraceStream(path, trace_metadata(), shard_bytes, room)
        self._max_bytes = max_bytes
        self._is_kept = is_kept
        self._names = Names()
        self._num_graphs = 0
        self._stencils: dict[Any, Stencil | None] = {}  # of programs that were called before
        self._known: deque[tuple[int, KnownGraph]] = deque(
            maxlen=_FEW_GRAPHS
        )  # the last ones, by number
        self._turn = threading.Condition()
        self._writing = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._bytes_waiting = 0
        self._is_over = False
        self._thread: threading.Thread | None = None  # until there is something to do for it

    @property
    def is_in_a_child(self) -> bool:
        """Whether this is a copy, in a process that was forked from the one that writes."""
        return os.getpid() != self._pid

    @property
    def is_open(self) -> bool:
        """Whether more is written: nothing failed, and there is room."""
        return self.problem is None and not self.is_full

    @property
    def is_full(self) -> bool:
        return (
            self._max_bytes is not None
            and self._stream.num_bytes + self._bytes_waiting >= self._max_bytes
        )

    def hand(self, call: int, made: Recording | RepeatedCall, params: bool = False) -> None:
        """Takes a call that has ended. Waits while too much is waiting already."""
        if self.is_in_a_child:
            return
        job = _Job(call, made, params)
        if (
            job.num_bytes <= _LITTLE
            and job.num_rows <= _FEW_ROWS
            and self._thread is None
            and not self._is_over
        ):
            self._write(job)
            return
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="torchlens tail", daemon=True
                )
                self._thread.start()
            while (
                self._bytes_waiting
                and self._bytes_waiting + job.num_bytes > _MOST_WAITING
                and self.problem is None
            ):
                self._turn.wait()
            self._waiting.append(job)
            self._bytes_waiting += job.num_bytes
            self._turn.notify_all()
            while (
                params and job in self._waiting and self.problem is None
            ):  # parameters change with the next step
                self._turn.wait()

    def take(
        self, call: int, recording: Recording, numbers: Sequence[int]
    ) -> Mapping[int, StoredValue]:
        """Writes some values of a call that is still running, here and now."""
        if self.problem is not None or self.is_in_a_child:
            return {}
        try:
            with self._writing:
                return self._write_some(call, recording, numbers)
        except Exception as error:  # whatever it is, the model goes on
            self.fail(error)
            return {}

    def close(self, closing: dict[str, Any]) -> None:
        """Writes what is waiting, then what is to be said about the whole, and closes the files."""
        if self.is_in_a_child:
            return
        with self._turn:
            self._is_over = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        try:
            if self.problem is None:
                self._stream.write([json_blob(f"{OWN_PREFIX}trace", closing)], [])
            self._stream.close()
        except Exception as error:  # the disk may be full
            self.fail(error)
            self._stream.abandon()

    # -- the thread
    # ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._turn:
                while not self._waiting and not self._is_over:
                    self._turn.wait()
                if not self._waiting:
                    return
                job = self._waiting[0]
            self._write(job)
            with self._turn:
                self._waiting.popleft()
                self._bytes_waiting -= job.num_bytes
                del job
                self._turn.notify_all()

    def _write(self, job: _Job) -> None:
        try:
            if self.problem is None:
                with self._writing:
                    self._write_job(job)
                    self.num_written += 1
        except Exception as error:  # whatever it is, the model goes on
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Takes note of the first thing that went wrong; nothing more is written."""
        with self._turn:
            if self.problem is None:
                self.problem = f"{type(error).__name__}: {error}"
            self._turn.notify_all()

    # -- writing
    # ----------------------------------------------------------------------------------------------

    def _write_job(self, job: _Job) -> None:
        call, made = job.call, job.made
        if isinstance(made, Recording):
            self._write_call(call, made, job.params, job.num_bytes > _LARGE)
            return
        stencil = self._stencils.get(made.program)
        if stencil is not None and not job.params:
            self._stream.write(stencil.pieces(call, made.memory()), [], done=call)
            return
        recording, blocks = made.recording()
        number, known = self._write_call(call, recording, job.params, job.num_bytes > _LARGE)
        if made.program not in self._stencils and not changed_entries(recording):
            self._stencils[made.program] = stencil_of(recording, known.names, blocks, number)

    def _write_call(
        self, call: int, recording: Recording, params: bool, is_large: bool
    ) -> tuple[int, KnownGraph]:
        """Writes a call, and its graph if that is new; gives the graph and its number."""
        number, known = self._known_graph(recording)
        in_call = names_in_call(recording) if known is None else known.names
        names = [f"{call}/{name}" for name in in_call]
        handed = {
            row: value.note
            for row, value in enumerate(recording.values)
            if isinstance(value, Handed)
        }
        for row in handed:
            recording.values[row] = None
        self._forget_unwanted(recording, names)
        tensors = Tensors(self._names.claim)
        writer = PythonWriter(tensors.add)
        graph = None if known is not None else document_of(recording, Log(recording).graph, writer)
        document = call_document(recording, names, writer, tensors, params)
        blobs = tensors.settle()
        if known is None:
            known = known_graph_of(recording, in_call, json_bytes(graph))
            remember(known)
        made = []
        if number is None:
            number = self._num_graphs = self._num_graphs + 1
            self._known.append((number, known))
            made.append(bytes_blob(f"{OWN_PREFIX}graph/{number}", known.text))
        values = document["values"] = list(map(short_note, document["values"]))
        if is_large or handed:
            addresses = boundary_addresses(recording)
            rows = [
                row_line(recording, addresses, call, row, note)
                for row, note in enumerate(values)
                if note is not None
            ]
            self._stream.write(blobs, rows)
            blobs = []
        for row in changed_entries(recording):  # also what was changed while it was written
            values[row] = None
        for row, note in handed.items():
            values[row] = note
        document |= call_facts(sorted(changed_entries(recording)), number)
        self._stream.write(
            [*blobs, *made, json_blob(f"{OWN_PREFIX}call/{call}", document)], [], done=call
        )
        return number, known

    def _known_graph(self, recording: Recording) -> tuple[int | None, KnownGraph | None]:
        """The graph of this call, if one before had the same: its number in the file, if it is
        there already.
        """
        for number, known in self._known:
            if is_same_graph(known, recording):
                return number, known
        return None, remembered(recording)

    def _write_some(
        self, call: int, recording: Recording, numbers: Sequence[int]
    ) -> Mapping[int, StoredValue]:
        names = names_of_rows(recording, call)
        tensors = Tensors(self._names.claim)
        wanted = [
            number for number in numbers if self._is_kept is None or self._is_kept(names[number])
        ]
        notes = {number: tensors.add(recording.values[number], names[number]) for number in wanted}
        blobs = tensors.settle()
        addresses = boundary_addresses(recording)
        lines = [
            row_line(recording, addresses, call, number, short_note(note))
            for number, note in notes.items()
        ]
        self._stream.write(blobs, lines)
        gone = {number: Handed(short_note(note)) for number, note in notes.items()}
        return gone | {number: Handed(None) for number in numbers if number not in gone}  # type: ignore[arg-type]

    def _forget_unwanted(self, recording: Recording, names: Sequence[str]) -> None:
        if self._is_kept is not None:
            for number, name in enumerate(names):
                if recording.values[number] is not None and not self._is_kept(name):
                    recording.values[number], recording.versions[number] = None, -1


def _bytes_of(recording: Recording) -> int:
    """What a call keeps in memory, about: views count as often as they are."""
    found = 0
    for value in recording.values:
        if value is not None and hasattr(value, "element_size"):
            try:
                found += value.numel() * value.element_size()
            except RuntimeError:  # nested, of symbolic sizes
                continue
    return found
