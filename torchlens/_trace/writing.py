"""Writing safetensors files: whole, or with the tensors divided among several and an index as
Hugging Face writes it.
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchlens._trace.files import INDEX_SUFFIX
from torchlens._trace.format import Place, description, header_bytes
from torchlens._trace.tensors import Blob

SHARD_BYTES = 5_000_000_000  # as Hugging Face has it
_SMALL = 1 << 16  # bytes: smaller ones are written together
_BUFFER = 1 << 20
_MOST_PIECES = 512  # that one call of the system is given; Linux and macOS take 1024


def write_files(
    path: Path, blobs: Sequence[Blob], metadata: dict[str, str], shard_bytes: int
) -> list[Path]:
    """Writes the blobs to `path`, or to several files and an index beside it; returns what was
    written.

    Files of that name are replaced when all is written, not before.
    """
    shards = _divided(blobs, shard_bytes)
    if len(shards) == 1:
        targets = [path]
    else:
        targets = [
            path.with_name(shard_name(path.name, number, len(shards)))
            for number in range(1, len(shards) + 1)
        ]
    partial = [target.with_name(f"{target.name}.partial") for target in targets]
    try:
        for target, own in zip(partial, shards, strict=True):
            _write_file(target, own, metadata)
        if len(shards) > 1:
            index = path.with_name(path.name + INDEX_SUFFIX)
            targets.append(index)
            partial.append(index.with_name(f"{index.name}.partial"))
            maps = {
                blob.name: target.name
                for target, own in zip(targets, shards, strict=False)
                for blob in own
            }
            partial[-1].write_bytes(
                index_bytes(maps, sum(blob.num_bytes for blob in blobs), metadata)
            )
        for source, target in zip(partial, targets, strict=True):
            source.replace(target)
    except BaseException:
        remove_all(partial)
        raise
    if (
        len(shards) == 1
    ):  # an index of an earlier trace would speak of files that are not this one's
        remove_all([path.with_name(path.name + INDEX_SUFFIX)])
    else:
        remove_all([path])
    return targets


def _divided(blobs: Sequence[Blob], shard_bytes: int) -> list[list[Blob]]:
    shards: list[list[Blob]] = [[]]
    size = 0
    for blob in blobs:
        if shards[-1] and size + blob.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(blob)
        size += blob.num_bytes
    return shards


def _write_file(path: Path, blobs: Sequence[Blob], metadata: dict[str, str]) -> None:
    described, end = [], 0
    for blob in blobs:
        described.append(
            (blob.name, description(Place(blob.dtype, blob.shape, end, end + blob.num_bytes)))
        )
        end += blob.num_bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        gathered = bytearray(header_bytes(described, metadata))
        for blob in blobs:
            numbers = blob.numbers()
            if len(numbers) <= _SMALL:
                gathered += numbers
            else:
                write_all(file, gathered)
                gathered.clear()
                write_all(file, numbers)
            if len(gathered) > _BUFFER:
                write_all(file, gathered)
                gathered.clear()
        write_all(file, gathered)


def write_all(file: Any, content: bytes | bytearray | memoryview) -> None:
    """Writes all of it: one call of the system may write less."""
    with memoryview(content) as rest:
        done = 0
        while done < len(rest):
            done += os.write(file.fileno(), rest[done : done + (1 << 30)])


def write_pieces(file: Any, pieces: Sequence[memoryview]) -> None:
    """Writes them one behind the other, with as few calls of the system as can be."""
    if not hasattr(os, "writev"):  # Windows
        for piece in pieces:
            write_all(file, piece)
        return
    for first in range(0, len(pieces), _MOST_PIECES):
        own = pieces[first : first + _MOST_PIECES]
        rest = os.writev(file.fileno(), own) if own else 0
        for piece in own:  # one call of the system may write less
            if rest < len(piece):
                write_all(file, piece[rest:])
            rest = max(rest - len(piece), 0)


def shard_name(name: str, number: int, count: int) -> str:
    """`trace-00001-of-00003.safetensors`."""
    stem, dot, suffix = name.rpartition(".")
    return (
        f"{stem}-{number:05}-of-{count:05}.{suffix}" if dot else f"{name}-{number:05}-of-{count:05}"
    )


def index_bytes(maps: dict[str, str], total: int, metadata: dict[str, str]) -> bytes:
    """The index: which tensor is in which file."""
    content = {"metadata": {"total_size": total, **metadata}, "weight_map": maps}
    return json.dumps(content, indent=2, ensure_ascii=False).encode()


def remove_all(paths: Iterable[str | Path]) -> None:
    """Removes those that are there."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 (as short a time as a short trace takes, making a Path would be felt)
