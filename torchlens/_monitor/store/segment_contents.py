"""What one segment says, read as far as it is good, and further when more was written."""

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchlens._health.finding import RunFinding
from torchlens._monitor.read.views import SeriesKey
from torchlens._monitor.store.folder import SegmentFile
from torchlens._monitor.store.frames import (
    Damage,
    Frame,
    Kind,
    Step,
    before_of,
    parse_json,
    read_frames,
    unpack_step,
)

_MOST_SERIES = 1 << 20
_MOST_BAD = 20


class Drop(NamedTuple):
    """Tensors that came too fast to be written."""

    rank: int
    step: int
    observations: int


@dataclass(slots=True, eq=False)
class SegmentContents:
    """What is known of one file."""

    rank: int
    identity: tuple[int, int] = (0, 0)  # device and inode: a file that was written anew is another
    offset: int = 0
    session: str = ""  # the last one in it
    before: tuple[int, int] = (0, 0)  # what the sessions before that one had offered and dropped
    names: dict[int, SeriesKey] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    scalars: list[list[Any]] = field(default_factory=list)
    findings: list[RunFinding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    damage: Damage | None = None
    bad: list[str] = field(default_factory=list)  # frames that are whole but make no sense


def read_segment(file: SegmentFile, known: SegmentContents | None) -> tuple[SegmentContents, bool]:
    """What a file says, and whether it says more than what was known of it."""
    with file.path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        identity = (status.st_dev, status.st_ino)
        if known is None or known.identity != identity or status.st_size < known.offset:
            known = SegmentContents(file.rank, identity)
        elif status.st_size == known.offset or (
            known.damage is not None and not known.damage.is_torn
        ):
            return known, False
        stream.seek(known.offset)
        data = stream.read()
    before = known.offset
    known.damage = None
    for frame in read_frames(data):
        if isinstance(frame, Damage):
            known.damage = Damage(before + frame.offset, frame.reason, frame.is_torn)
            break
        known.offset = before + frame.end
        try:
            _add(known, frame)
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            OverflowError,
            AttributeError,
        ) as error:
            if len(known.bad) < _MOST_BAD:
                known.bad.append(
                    f"rank{file.rank}, segment {file.number}: a frame makes no sense: {error}"
                )
    return known, known.offset > before or not before


def _add(segment: SegmentContents, frame: Frame) -> None:
    """Takes note of what a frame says. Raises one of the errors of wrong data if it says nothing
    sensible.
    """
    kind, payload, _ = frame
    if kind == Kind.SEGMENT:
        head = parse_json(payload, dict)
        segment.session, segment.before = str(head["session"]), before_of(head)
    elif kind == Kind.SESSION:
        value = parse_json(payload, dict)
        segment.sessions.append(
            {
                **value,
                "session": str(value["session"]),
                "first_step": int(value["first_step"]),
                "time": float(value["time"]),
            }
        )
    elif kind == Kind.NAMES:
        for row in parse_json(payload, list):
            number, module, series_kind, name, shape, dtype = row
            if len(segment.names) < _MOST_SERIES:
                segment.names[int(number)] = SeriesKey(
                    str(module), str(series_kind), str(name), tuple(map(int, shape)), str(dtype)
                )
    elif kind == Kind.STEP:
        segment.steps.append(unpack_step(payload))
    elif kind == Kind.SCALARS:
        for name, step, mean, low, high, count in parse_json(payload, list):
            segment.scalars.append(
                [str(name), int(step), float(mean), float(low), float(high), int(count)]
            )
    elif kind == Kind.FINDING:
        segment.findings.append(RunFinding.from_json(parse_json(payload, dict)))
    elif kind == Kind.PROBLEM:
        segment.problems.append(str(parse_json(payload, dict)["text"]))
    elif kind == Kind.DROPPED:
        value = parse_json(payload, dict)
        segment.drops.append(Drop(segment.rank, int(value["step"]), int(value["observations"])))
    elif kind == Kind.END:
        value = parse_json(payload, dict)
        segment.end = {name: int(value[name]) for name in ("offered", "recorded", "dropped")}
