"""Writing a trace: shards of bounded size, each written whole and then renamed into place.

The shards lie in a folder beside the trace (`run.safetensors.partial`) until it is closed. Then one
shard becomes the trace itself; several get an index as Hugging Face writes it.
"""

import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlens._portable.tensor_notes import as_stored, word_of
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._trace.files import INDEX_SUFFIX, partial_folder, safetensors_package

SAVE_SHARD_BYTES = 5_000_000_000  # of a history that is in memory anyway; as Hugging Face has it
TAIL_SHARD_BYTES = 256 * 2**20  # of a recording, which holds this much in memory


class _Shard(NamedTuple):
    """A shard on disk."""

    path: Path
    names: list[str]
    num_bytes: int  # of its tensors


class TraceShards:
    """Gathers tensors, and writes them when there are enough of them for a shard.

    `flush` writes the gathered tensors before that; they stay, and are written again with those
    that follow, until the shard is full. It may run in another thread than `add`.
    """

    def __init__(self, target: Path, metadata: dict[str, str], shard_bytes: int) -> None:
        safetensors_package()
        self.target = target
        self.num_bytes = 0
        self._metadata = metadata
        self._shard_bytes = shard_bytes
        self._folder = partial_folder(target)
        self._shards: list[_Shard] = []  # full ones
        self._flushed: _Shard | None = None  # what is on disk of the one that is being filled
        self._gathered: dict[str, Tensor] = {}
        self.gathered_bytes = 0
        self._disk = threading.Lock()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes tensors, which must not change until they are written."""
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._gathered and self.gathered_bytes + size > self._shard_bytes:
                self._finish_shard()
            self._gathered[name] = tensor
            self.gathered_bytes += size
            self.num_bytes += size
        if self.gathered_bytes >= self._shard_bytes:
            self._finish_shard()

    def flush(self) -> None:
        """Writes what is gathered."""
        with self._disk:
            self._write_gathered()

    def _write_gathered(self) -> None:
        tensors = dict(self._gathered)
        if tensors:
            path = self._folder / f"{len(self._shards) + 1:05}.safetensors"
            _write_file(path, tensors, self._metadata)
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            self._flushed = _Shard(path, list(tensors), num_bytes)

    def _finish_shard(self) -> None:
        with self._disk:
            self._write_gathered()
            if self._flushed is not None:
                self._shards.append(self._flushed)
            self._gathered, self.gathered_bytes, self._flushed = {}, 0, None

    def close(self) -> None:
        """Writes the rest, and gives the shards their final names."""
        self._finish_shard()
        self._publish()

    def close_with_what_is_on_disk(self) -> None:
        """Gives the written shards their final names; for when writing failed."""
        self._shards += [] if self._flushed is None else [self._flushed]
        if self._shards:
            self._publish()
        self.abandon()

    @property
    def names_on_disk(self) -> list[str]:
        """The names of the tensors in the shards of a trace that was closed."""
        return [name for shard in self._shards for name in shard.names]

    def abandon(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self) -> None:
        target, shards = self.target, self._shards
        index = target.with_name(target.name + INDEX_SUFFIX)
        if len(shards) == 1:
            shards[0].path.replace(target)
            index.unlink(missing_ok=True)
        else:
            maps: dict[str, str] = {}
            for number, shard in enumerate(shards, start=1):
                name = shard_name(target.name, number, len(shards))
                _link(shard.path, target.with_name(name))
                maps |= dict.fromkeys(shard.names, name)
            total = sum(shard.num_bytes for shard in shards)
            content = {"metadata": {"total_size": total, **self._metadata}, "weight_map": maps}
            text = json.dumps(content, indent=2, ensure_ascii=False)
            written = self._folder / index.name
            written.write_text(text, encoding="utf-8")
            written.replace(index)
            target.unlink(missing_ok=True)
        self.abandon()


def _write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    package = safetensors_package()
    with unseen(), NoTorchFunction():
        stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
    specs = {
        name: package.TensorSpec(
            dtype=word_of(tensor.dtype),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in stored.items()
    }
    temporary = path.with_suffix(".writing")
    package.serialize_file(specs, temporary, metadata)
    temporary.replace(path)


def _link(path: Path, target: Path) -> None:
    """Gives a file another name beside its own, so that a kill before the index is written leaves
    the folder complete; a new name where the file system has no links.
    """
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(path)
    except OSError:
        path.replace(target)


def shard_name(name: str, number: int, count: int) -> str:
    """`trace-00001-of-00003.safetensors`."""
    stem, dot, suffix = name.rpartition(".")
    middle = f"-{number:05}-of-{count:05}"
    return f"{stem}{middle}.{suffix}" if dot else f"{name}{middle}"


def json_tensor(document: Any) -> Tensor:
    """A JSON document as a tensor of bytes."""
    return bytes_tensor(json_bytes(document))


def json_bytes(document: Any) -> bytes:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, check_circular=False)
    return text.encode("utf-8", "surrogatepass")


def bytes_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
