"""The lines of a run's files. Each has a checksum and a JSON object with one key:

    9d1c60a2 {"problem":"..."}

The file of what happened in a process (`rank0.jsonl`) has these:

    session   {"session", "first_step", "rank", "time", "pid", "host", "options"}: a process begins
              to record
    series    [number, module, kind, name, shape, dtype]: what a number means in the steps
    finding   a health finding (see _health/finding.py)
    problem   a sentence about what could not be recorded

The files of steps have these:

    step      {"first", "last", "count", "time", "dropped", "rows", "codes", "counts", "width"}: a
              recorded step, or several that were merged (see `Step`). The arrays are in base64;
              "width" is how many bytes each of the counts has.
    scalars   [[name, first step, last step, mean, smallest, largest, number of values], ...],
              as the user logged them
    end       {"session", "dropped"}: the session ended properly

A line without its end is being written, or its process was killed. Other lines that do not have
their checksum, or make no sense, are left out and reported.
"""

import json
import os
from base64 import b64decode, b64encode
from binascii import crc32
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from torchlens._health.finding import RunFinding
from torchlens._monitor.store.bins import NUM_BINS
from torchlens._monitor.store.columns import (
    ROW,
    SeriesKey,
    Step,
    columns_of,
    rows_of,
)
from torchlens._monitor.store.folder import open_regular

# No longer lines are written, which bounds the memory of a reader.
_MAX_LINE_BYTES = 1 << 28
_MOST_REPORTED = 20
_MAX_NUMBER, _MAX_SERIES = 1 << 62, 1 << 22
# The exceptions of parsing damaged JSON.
_NONSENSE = (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError)
Value = TypeVar("Value")


class ScalarRow(NamedTuple):
    """A number that the user logged; or several of neighbouring steps, merged."""

    name: str
    first: int
    step: int
    mean: float
    low: float
    high: float
    num_values: int


class End(NamedTuple):
    """A session that ended properly."""

    session: str
    dropped: int  # tensors, since the last step


def line_of(key: str, value: Any) -> bytes:
    """A line of a file, with its checksum."""
    text = json.dumps({key: value}, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def _object_of(line: bytes) -> dict[str, Any]:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % crc32(text):
        raise ValueError("it does not have its checksum")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("it is not an object with one key")
    return value


class LineFile(Generic[Value]):
    """Reads a file of lines that grows, or is replaced by another of the same name. `parse` makes a
    value of each line's key and content, and may raise any of `_NONSENSE` for a damaged line.
    """

    def __init__(self, path: Path, parse: Callable[[str, Any], Value]) -> None:
        self.path = path
        self._parse = parse
        self._identity = (0, 0)  # device and inode
        self._forget()

    def _forget(self) -> None:
        self.values: list[Value] = []
        self.damage: list[str] = []
        self.is_torn = False
        self._offset = self._size = 0

    def read_on(self) -> bool:
        """Reads what was added since the last call; returns whether there was anything."""
        try:
            stream = open_regular(self.path)
        except FileNotFoundError:
            raise
        except OSError as error:
            return self._fail(error)
        with stream:
            status = os.fstat(stream.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._size:
                self._identity = identity
                self._forget()
            elif status.st_size == self._size:
                return False
            stream.seek(self._offset)
            while (line := stream.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                self._take(line)
                self._offset += len(line)
            self.is_torn = bool(line)
            self._size = max(status.st_size, self._offset + len(line))
        return True

    def _fail(self, error: OSError) -> bool:
        """Reports a file that cannot be read, once."""
        sentence = f"{self.path.name} cannot be read: {error.strerror}"
        is_new = sentence not in self.damage
        if is_new:
            self.damage.append(sentence)
        return is_new

    def _take(self, line: bytes) -> None:
        if line == b"\n":  # after a line without its end, a new session begins another
            return
        try:
            ((key, value),) = _object_of(line).items()
            self.values.append(self._parse(key, value))
        except _NONSENSE as error:
            if len(self.damage) < _MOST_REPORTED:
                self.damage.append(
                    f"{self.path.name}: the line at byte {self._offset:,} is left out: {error}"
                )


def append(path: Path, data: bytes, *, creates: bool = True) -> None:
    """Appends lines: all or, if the disk is full, none."""
    flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if creates else 0)
    file = os.open(path, flags, 0o644)
    try:
        start = os.fstat(file).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError:
            os.ftruncate(file, start)
            raise
    finally:
        os.close(file)


# -- what happened ---------------------------------------------------------------------------------


def parse_event(key: str, value: Any) -> Any:
    """The content of a line of `rank0.jsonl`: a session (dict), the name of a series (number and
    key), a finding, or a problem (text).
    """
    if key == "session":
        _checked(value["first_step"])
        return {**value, "session": str(value["session"]), "time": float(value["time"])}
    if key == "series":
        number, module, kind, name, shape, dtype = value
        shape = tuple(map(_checked, shape))
        return _checked(number, _MAX_SERIES), SeriesKey(
            str(module), str(kind), str(name), shape, str(dtype)
        )
    if key == "finding":
        _checked(value["step"])
        return RunFinding.from_json(value)
    if key == "problem":
        return str(value)
    raise ValueError(f"it has an unknown key: {key!r}")


def _checked(number: Any, limit: int = _MAX_NUMBER) -> int:
    if not isinstance(number, int) or not 0 <= number < limit:
        raise ValueError("it has a number out of range")
    return number


# -- steps -----------------------------------------------------------------------------------------


def step_line(step: Step) -> bytes:
    """The line of a recorded step."""
    columns = step.columns
    counts = columns.counts
    width = np.min_scalar_type(int(counts.max(initial=0))).itemsize
    return line_of(
        "step",
        {
            "first": step.first, "last": step.last, "count": step.count, "time": step.time,
            "dropped": step.dropped,
            "rows": _text(rows_of(columns)),
            "codes": _text(columns.codes.astype("<u2")),
            "counts": _text(counts.astype(f"<u{width}")),
            "width": width,
        },
    )  # fmt: skip


def parse_record(key: str, value: Any) -> Step | list[ScalarRow] | End:
    """The content of a line of a file of steps."""
    if key == "step":
        return _parse_step(value)
    if key == "scalars":
        return [
            ScalarRow(
                str(name), _checked(first), _checked(step), float(mean), float(low), float(high),
                _checked(num_values),
            )
            for name, first, step, mean, low, high, num_values in value
        ]  # fmt: skip
    if key == "end":
        return End(str(value["session"]), _checked(value["dropped"]))
    raise ValueError(f"it has an unknown key: {key!r}")


def _parse_step(value: dict[str, Any]) -> Step:
    first, last, count, dropped = (
        _checked(value[name]) for name in ("first", "last", "count", "dropped")
    )
    if not first <= last or not 0 < count <= last - first + 1:
        raise ValueError("its numbers contradict each other")
    if value["width"] not in (1, 2, 4, 8):
        raise ValueError("its counts have no known width")
    rows = _array(value["rows"], ROW)
    codes = _array(value["codes"], np.dtype("<u2"))
    counts = _array(value["counts"], np.dtype(f"<u{value['width']}")).astype("<u8")
    _check_rows(rows, codes, counts)
    columns = columns_of(rows, codes, counts)
    return Step(first, last, count, float(value["time"]), dropped, columns)


def _check_rows(rows: np.ndarray, codes: np.ndarray, counts: np.ndarray) -> None:
    if int(rows["num_bins"].sum(dtype=np.int64)) != len(codes) or len(codes) != len(counts):
        raise ValueError("its rows do not fit its bins")
    if (np.diff(rows["series"].astype("i8")) <= 0).any():
        raise ValueError("its series are not in order")
    if len(codes) and int(codes.max()) >= NUM_BINS:
        raise ValueError("it has bins that do not exist")


def _text(array: np.ndarray) -> str:
    return b64encode(array.tobytes()).decode()


def _array(text: str, dtype: np.dtype[Any]) -> np.ndarray:
    return np.frombuffer(b64decode(text, validate=True), dtype)
