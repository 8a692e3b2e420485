"""The folder of a run: which files there are, and what their names say.

    run.json         {"format", "run", "model", "time", "versions", "options"},
                     written once, by rank 0
    graph.json       the model as it was called (see record/graph.py), written by rank 0
    rank0.jsonl      what happened in the process of rank 0: sessions, names of series, findings,
                     problems (see lines.py)
    rank0-000001-000001-0.steps
                     recorded steps and scalars of rank 0. The files are numbered from 1. A file
                     that was merged from several has the first and the last of their numbers, and
                     how often it was merged.
    layer1.points    the points of `run.embed('layer1')` (see films/film_process.py)

A file is appended to, or written beside its place and then renamed. So readers need no locks. A
process that begins to record begins a new `.steps` file, whatever an earlier one left behind.
"""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchlens._text.whole_files import write_whole

RUN_FILE, GRAPH_FILE = "run.json", "graph.json"
FORMAT = 1
_LOG_FILE = re.compile(r"rank(\d{1,9})\.jsonl")
_STEPS_FILE = re.compile(r"rank(\d{1,9})-(\d{6,12})-(\d{6,12})-(\d{1,2})\.steps")
# A graph of a hundred thousand operations takes some 20 MB.
_MAX_JSON_BYTES = 1 << 28


class StepsFile(NamedTuple):
    """A file of recorded steps, as its name describes it."""

    first: int
    last: int
    level: int  # its steps are merged in blocks of 2 ** level


def log_path(folder: Path, rank: int) -> Path:
    """The file of what happened in the process of a rank."""
    return folder / f"rank{rank}.jsonl"


def steps_path(folder: Path, rank: int, file: StepsFile) -> Path:
    """The path of a file of steps."""
    return folder / f"rank{rank}-{file.first:06d}-{file.last:06d}-{file.level}.steps"


def files_of_ranks(folder: Path) -> dict[int, list[StepsFile]]:
    """The files of steps of each rank in order, without those that a merged file replaces."""
    found: dict[int, list[StepsFile]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("rank") or not entry.is_file(follow_symlinks=False):
                continue
            if match := _LOG_FILE.fullmatch(entry.name):
                found.setdefault(int(match[1]), [])
            elif match := _STEPS_FILE.fullmatch(entry.name):
                rank, first, last, level = map(int, match.groups())
                found.setdefault(rank, []).append(StepsFile(first, last, level))
    return {rank: _without_replaced(files) for rank, files in sorted(found.items())}


def _without_replaced(files: list[StepsFile]) -> list[StepsFile]:
    kept: list[StepsFile] = []
    for file in sorted(files, key=lambda each: (each.first, -each.last, -each.level)):
        if not kept or file.last > kept[-1].last:
            kept.append(file)
    return kept


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or the beginning of one."""
    return folder.is_dir() and ((folder / RUN_FILE).is_file() or bool(files_of_ranks(folder)))


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. OSError if it is a link, which may lead out of the folder, or a
    pipe or device, which may never end.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # as far as the system has these flags
        flags |= getattr(os, name, 0)
    file = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(file, "rb")


def write_json_file(path: Path, value: Any) -> None:
    """Writes a JSON file, whole, into a folder that is there."""
    write_whole(path, json.dumps(value, separators=(",", ":")), makes_folder=False)


def read_json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file. ValueError for anything else."""
    try:
        with open_regular(path) as stream:
            data = stream.read(_MAX_JSON_BYTES + 1)
        if len(data) > _MAX_JSON_BYTES:
            raise ValueError(f"{path.name} is larger than any that is written for a run")
        value = json.loads(data)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is not JSON: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return value
