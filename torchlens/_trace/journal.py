"""A trace that is being written: what is in it stands in a journal beside it, line by line, until
it is closed.

A line is written when the bytes it speaks of are. So if the process is killed, whatever the journal
has can be read: each tensor, the operation that made it, its module, and what the operation was
given.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchlens._text.plain_text import printable, shown
from torchlens._trace.files import OpenFile, TraceFiles, partial_path, shard_glob
from torchlens._trace.format import HEADER_LIMIT, Place, checked_place
from torchlens._trace.header import header_of_places
from torchlens.errors import TraceError


def journal_path(path: str | Path) -> str:
    return f"{path}.journal"


def line_bytes(line: dict[str, Any]) -> bytes:
    return _ENCODER.encode(line).encode("utf-8", "surrogatepass") + b"\n"


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def tells_of_tensors(journal: Path) -> bool:
    """Whether there is anything behind the first line."""
    with journal.open("rb") as file:
        return file.readline(1 << 16).endswith(b"\n") and bool(file.read(1))


def open_unfinished(path: Path) -> TraceFiles:
    """What can be read of a trace that was not closed."""
    journal = OpenFile(Path(journal_path(path)))
    if journal.num_bytes > HEADER_LIMIT * 10:
        raise TraceError(
            f"The journal of {printable(str(path))} has {journal.num_bytes} bytes, more than are "
            "read."
        )
    lines = list(_lines(journal.read(0, journal.num_bytes).numpy().tobytes()))
    if not lines:
        raise TraceError(f"The trace {printable(str(path))} was begun, and nothing is in it yet.")
    if "torchlens" not in lines[0]:
        raise TraceError(f"{printable(str(journal.path))} is not the journal of a trace.")
    metadata = {key: str(value) for key, value in lines[0].items()}
    files: dict[
        int, tuple[OpenFile, int, dict[str, Place]]
    ] = {}  # where the data starts, and what is in it
    known: set[str] = set()
    unfinished: dict[int, list[dict[str, Any]]] = {}
    for line in lines[1:]:
        try:
            if "name" in line:
                shard, data = line["file"], line["data"]
                if shard not in files:
                    files[shard] = (_shard(path, shard), data, {})
                file, start, places = files[shard]
                places[line["name"]] = checked_place(line["name"], line, file.num_bytes - start)
                known.add(line["name"])
            if "row" in line:
                unfinished.setdefault(line["call"], []).append(line)
            if "done" in line:
                unfinished.pop(line["done"], None)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"A line of {printable(str(journal.path))} makes no sense: {shown(str(error))}."
            ) from None
    headers = [
        (file, header_of_places(places, metadata, data)) for file, data, places in files.values()
    ]
    found = TraceFiles(path, headers, metadata)
    for call, rows in unfinished.items():  # a row is told of before its bytes are
        unfinished[call] = [row for row in rows if all(key in known for key in _keys(row["value"]))]
    unfinished = found.unfinished = {call: rows for call, rows in unfinished.items() if rows}
    found.missing = [_words(call, rows) for call, rows in unfinished.items()]
    if not found.missing:
        found.missing = ["whatever came after its last call; it was not closed"]
    return found


def _keys(note: Any) -> Iterator[Any]:
    """The names of the tensors that a value consists of."""
    if isinstance(note, str):
        yield note
    elif isinstance(note, dict):
        yield from [note["key"]] if "key" in note else ()
        for part in note.get("parts", {}).values():
            yield from _keys(part)


def _words(call: int, rows: list[dict[str, Any]]) -> str:
    module = rows[-1].get("modules") or [""]
    after = f"{rows[-1].get('operation')} in {module[-1] or 'the model'}"
    return f"the rest of call {call}, after {len(rows)} tensors, the last of them by {shown(after)}"


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines that were written to their end."""
    for line in content.split(b"\n")[:-1]:
        try:
            form = json.loads(line)
        except (ValueError, RecursionError):
            return  # cut short by whatever ended the process; nothing after it was promised
        if not isinstance(form, dict):
            return
        yield form


def _shard(path: Path, number: Any) -> OpenFile:
    if type(number) is not int or not 0 <= number <= 99_999:
        raise TraceError(f"There is no file number {shown(number)} of a trace.")
    final = max(number, 1)  # 0 takes the place of 1 when that has become too small
    partial = Path(partial_path(path, number))
    for candidate in (partial, path if final == 1 else None, *shard_glob(path, final)):
        if candidate is not None and candidate.exists():
            return OpenFile(candidate)
    raise TraceError(f"{printable(partial.name)} is not there; the journal speaks of it.")
