"""A trace file that grows: tensors are appended as they come, and the header is put in front when
it is closed.

Room for the header is kept at the start of the file: little at first, since most traces are short,
and when that is used up the file is written once more with all the room it may have. When the
header or the file would become too large, the next file begins. A file that would be mostly room is
written once more at the end, without what was left over.
"""

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from torchlens._trace.files import INDEX_SUFFIX, partial_path
from torchlens._trace.format import Place, description, filled_up, header_bytes, quoted
from torchlens._trace.journal import journal_path, line_bytes
from torchlens._trace.tensors import Blob
from torchlens._trace.writing import index_bytes, remove_all, shard_name, write_all, write_pieces

_ROOM = 1 << 20  # bytes, for the header
_LITTLE_ROOM = 1 << 14  # of a file that is short so far
_SHORT = 1 << 24  # bytes that such a file may hold, as they may have to be written once more
_MOST_ROOM = 8  # room left over that is more than one part in this many is left out at the end
_MOVED = 0  # the number of the file that takes the place of the first one
_GATHERED = 1 << 22  # bytes that are written together, at least


class _Shard:
    """One file while it is written."""

    def __init__(self, path: str, number: int, room: int) -> None:
        self.path = partial_path(path, number)
        self.number = number
        self.room = room
        self.tensors: list[tuple[str, str]] = []  # names, and what the header is going to say
        self.end = 0
        self.header = 200  # bytes that the header is going to take, at most
        self.file = FileIO(self.path, "w+")
        self.file.seek(room)
        self.result = self.path  # what is to be given the final name
        self._written = (0, 0)  # how many of the tensors, and up to which byte

    def write(self, pieces: list[memoryview]) -> None:
        """Appends the bytes of all tensors that have come since."""
        write_pieces(self.file, pieces)
        self._written = len(self.tensors), self.end

    def forget_unwritten(self) -> None:
        """Writing failed, as it does when the disk is full: what the file is going to tell of is
        what it has.
        """
        count, self.end = self._written
        del self.tensors[count:]
        self.file.seek(self.room + self.end)
        self.file.truncate()


class TraceStream:
    """Writes blobs, and what the journal says of them, to the files of one trace. For one thread at
    a time.
    """

    def __init__(
        self, path: Path, metadata: dict[str, str], shard_bytes: int, room: int = _ROOM
    ) -> None:
        self.path = path
        self.num_bytes = 0
        self._metadata = metadata
        self._shard_bytes = shard_bytes
        self._room = room
        self._text = text = str(path)
        self._pending: list[
            memoryview
        ] = []  # bytes of the last file that are going to be written together
        self._num_pending = 0
        self._outgrown: _Shard | None = None  # stays until all is done: the journal speaks of it
        # First, so that an old one does not speak of the new file.
        self._journal = _new_file(journal_path(text))
        remove_all(_leftovers(text))
        self._shards = [_Shard(text, 1, min(room, _LITTLE_ROOM))]
        write_all(self._journal, line_bytes(dict(metadata)))

    def write(
        self, blobs: Sequence[Blob], notes: list[dict[str, Any]], done: int | None = None
    ) -> None:
        """Appends blobs, then tells the journal of them: of each where it lies, and what `notes`
        say of the rows.

        `done` is the number of a call that is complete with this.
        """
        try:
            self._write(blobs, notes, done)
        except BaseException:
            self._pending = []
            self._shards[-1].forget_unwritten()
            raise

    def _write(self, blobs: Sequence[Blob], notes: list[dict[str, Any]], done: int | None) -> None:
        lines = list(
            map(line_bytes, notes)
        )  # first, so that each tensor that the journal has comes with what made it
        for blob in blobs:
            size, name = blob.num_bytes, blob.name
            entry_bytes = (
                2 * len(name.encode()) + 60 + 21 * (len(blob.shape) + 2)
            )  # in the header, at most
            shard = self._shard_for(size, entry_bytes)
            start = shard.end
            end = shard.end = start + size
            described = description(Place(blob.dtype, blob.shape, start, end))
            shard.tensors.append((name, described))
            shard.header += entry_bytes
            self.num_bytes += size
            self._pending.append(blob.numbers())
            self._num_pending += size
            if self._num_pending > _GATHERED:
                self._flush()
            line = (
                f'{{"name":{quoted(name)},{described},"file":{shard.number},"data":{shard.room}}}\n'
            )
            lines.append(line.encode("utf-8", "surrogatepass"))
        self._flush()
        if done is not None:
            lines.append(b'{"done":%d}\n' % done)
        write_all(self._journal, b"".join(lines))

    def _shard_for(self, num_bytes: int, entry_bytes: int) -> _Shard:
        shard = self._shards[-1]
        if shard.room < self._room and (
            shard.end + num_bytes > _SHORT or shard.header + entry_bytes > shard.room
        ):
            self._flush()
            shard = self._move(shard)
        is_full = (
            shard.end + num_bytes > self._shard_bytes or shard.header + entry_bytes > shard.room
        )
        if not is_full or not shard.tensors:
            return shard
        self._flush()
        _finish(shard, self._metadata)
        self._shards.append(_Shard(self._text, max(shard.number, 1) + 1, self._room))
        return self._shards[-1]

    def _flush(self) -> None:
        self._shards[-1].write(self._pending)
        self._pending, self._num_pending = [], 0

    def _move(self, shard: _Shard) -> _Shard:
        """Goes on in a file with more room for the header, which begins with all that the other
        has.
        """
        moved = _Shard(self._text, _MOVED, self._room)
        shard.file.seek(shard.room)
        write_all(moved.file, shard.file.read(shard.end))
        shard.file.close()
        moved.tensors, moved.end, moved.header = shard.tensors, shard.end, shard.header
        moved.write([])
        self._outgrown, self._shards[-1] = shard, moved
        return moved

    def close(self) -> None:
        """Puts the header in front, gives the files their names, and lets go of the journal."""
        _finish(self._shards[-1], self._metadata)
        count = len(self._shards)
        index = self._text + INDEX_SUFFIX
        if count == 1:
            _rename(self._shards[0].result, self._text)
            remove_all([index])
        else:
            maps: dict[str, str] = {}
            for number, shard in enumerate(self._shards, start=1):
                target = self.path.with_name(shard_name(self.path.name, number, count))
                _rename(shard.result, str(target))
                maps |= {name: target.name for name, _ in shard.tensors}
            Path(index).write_bytes(index_bytes(maps, self.num_bytes, self._metadata))
            remove_all([self._text])
        self._journal.close()
        outgrown = [] if self._outgrown is None else [self._outgrown.path]
        copied = [shard.path for shard in self._shards if shard.result is not shard.path]
        remove_all([journal_path(self._text), *outgrown, *copied])

    def abandon(self) -> None:
        """Leaves the files as they are, for whoever reads the journal."""
        for shard in self._shards:
            shard.file.close()
        self._journal.close()


def _finish(shard: _Shard, metadata: dict[str, str]) -> None:
    """Puts the header in front of a file, or of a copy without the room that is left over.

    The journal speaks of the file as it was, which stays until all is done.
    """
    file = shard.file
    header = header_bytes(shard.tensors, metadata)
    if (shard.room - len(header)) * _MOST_ROOM <= shard.end:
        file.seek(0)
        write_all(file, filled_up(header, shard.room))
    else:
        file.seek(shard.room)
        content = file.read(shard.end)
        shard.result = f"{shard.path}.closing"
        with FileIO(shard.result, "w") as smaller:
            write_all(smaller, header)
            write_all(smaller, content)
    file.close()


def _new_file(path: str) -> FileIO:
    try:
        return FileIO(path, "w")
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return FileIO(path, "w")


def _rename(source: str, target: str) -> None:
    """Gives a file its name. What had the name before goes first: file systems that see a file
    replace another write it to the disk before they go on, which takes milliseconds; and until this
    is done, the journal has all there is."""
    remove_all([target])
    os.rename(source, target)  # noqa: PTH104 (as in remove_all)


def _leftovers(path: str) -> list[str]:
    """What an earlier trace of this name left behind unfinished, and what this one does not begin
    with itself.
    """
    found = [partial_path(path, _MOVED)]
    number = 2
    while os.path.exists(partial_path(path, number)):  # noqa: PTH110 (likewise)
        found.append(partial_path(path, number))
        number += 1
    return found
