"""The folder of a run: which files there are, and what their names say.

    run.json                 {"format", "run", "model", "time", "versions", "options",
    "world_size"}, written once by rank 0 graph.json               the model as it was called (see
    graph.py), written by rank 0 as soon as it is known rank0-000001-000001.seg  the segments of
    each rank (see frames.py), numbered from 1; one that was merged from several
                             has the first and the last number of those in its name
    layer1.points            the points of `run.embed('layer1')` (see
    films/film_process.py)

Nothing is ever changed in place: a file is appended to, or written beside and then renamed. So
readers need no locks, and a process that begins to record always begins a new segment, whatever an
earlier one left behind.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

RUN_FILE, GRAPH_FILE = "run.json", "graph.json"
FORMAT = 1
_SEGMENT = re.compile(r"rank(\d{1,9})-(\d{6,12})-(\d{6,12})\.seg")
# A graph of a hundred thousand operations is some 20 MB.
_MOST_JSON = 1 << 28


class SegmentFile(NamedTuple):
    """A segment, as its name describes it."""

    rank: int
    first: int
    number: int
    path: Path


def segment_path(folder: Path, rank: int, first: int, number: int) -> Path:
    """Where a segment lies."""
    return folder / f"rank{rank}-{first:06d}-{number:06d}.seg"


def segment_files(folder: Path) -> list[SegmentFile]:
    """All segments that count, by rank and number: not those that a merged one has taken the place
    of.
    """
    return _sorted_out(folder)[0]


def replaced_files(folder: Path, rank: int) -> list[Path]:
    """Segments of a rank that a merged one has taken the place of: its process was killed before it
    could remove them.
    """
    return [each.path for each in _sorted_out(folder)[1] if each.rank == rank]


def _sorted_out(folder: Path) -> tuple[list[SegmentFile], list[SegmentFile]]:
    found = []
    for entry in os.scandir(folder):
        match = _SEGMENT.fullmatch(entry.name)
        if match is not None and entry.is_file():
            rank, first, number = map(int, match.groups())
            if 0 < first <= number:
                found.append(SegmentFile(rank, first, number, folder / entry.name))
    found.sort(key=lambda each: (each.rank, each.first, -each.number))
    kept: list[SegmentFile] = []
    replaced: list[SegmentFile] = []
    for each in found:
        is_new = not kept or kept[-1].rank != each.rank or each.number > kept[-1].number
        (kept if is_new else replaced).append(each)
    return kept, replaced


def unfinished_files(folder: Path, rank: int, before: float) -> list[Path]:
    """Segments of a rank that were being merged when their process was killed, before a time."""
    found = []
    for path in folder.glob(f"rank{rank}-*.seg.tmp"):
        try:
            if path.stat().st_mtime < before:
                found.append(path)
        except FileNotFoundError:
            continue
    return found


def is_run(folder: Path) -> bool:
    """Whether there is a run in a folder, or the beginning of one."""
    return folder.is_dir() and ((folder / RUN_FILE).is_file() or bool(segment_files(folder)))


def write_json_file(path: Path, value: Any) -> None:
    """Writes a file that is there whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
    beside.replace(path)


def read_json_file(path: Path) -> dict[str, Any]:
    """A file with a JSON object; empty if there is none yet. ValueError if it is anything else."""
    try:
        if path.stat().st_size > _MOST_JSON:
            raise ValueError(f"{path.name} is larger than any that was written for a run")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is not JSON: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return value
