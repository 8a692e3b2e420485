"""Stored features, opened: arrays by layer, ids, and the check against the model."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchlens._extract.exporters import Exports
from torchlens._extract.manifest import read_manifest
from torchlens._extract.shard_files import array_path, bytes_of, done_path, done_shards, read_json
from torchlens._extract.stored_array import RaggedArray, StoredArray
from torchlens._text.error_wording import did_you_mean, got, one_of
from torchlens._text.lazy_import import lazy_function
from torchlens._text.numbers import bytes_text, shape_text
from torchlens.errors import FeaturesError

# `extraction` imports this file.
recomputing = lazy_function("torchlens._extract.extraction", "recomputing")
Recompute = Callable[[Sequence[int]], Iterator[tuple[int, Mapping[str, Any]]]]


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found: `bool(result)` is True if all recomputed rows agree."""

    ids: list[Any]  # of the recomputed inputs
    num_identical: int  # rows, of all layers, with the same bits
    num_close: int  # further rows that are equal up to rounding
    different: list[tuple[Any, str]]  # (id, layer) of all others
    damaged: list[str]  # files whose checksum is wrong

    def __bool__(self) -> bool:
        return not self.different and not self.damaged

    def __str__(self) -> str:
        total = self.num_identical + self.num_close + len(self.different)
        text = (
            f"{len(self.ids)} inputs recomputed, {total} rows: {self.num_identical} identical, "
            f"{self.num_close} equal up to rounding, {len(self.different)} different."
        )
        for one, name in self.different[:5]:
            text += f"\n  different: {name!r} of input {one!r}"
        for name in self.damaged[:5]:
            text += f"\n  damaged: {name}"
        return text


class StoredBatch(NamedTuple):
    """What was run at once."""

    shard: str
    rows: range
    ids: list[Any]
    skipped: list[Any]  # the ids of inputs that failed


class Features(Exports):
    """The features in a folder, by layer.

    >>> features = torchlens.open_features('features/')
    >>> features.layers, len(features), features.ids[:3]
    >>> features['layer4'][10:20]
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest is None:
            is_there = "no manifest.json in it" if folder.is_dir() else "no such folder"
            raise FeaturesError(
                f"{str(folder)!r} holds no features: there is {is_there}. "
                "torchlens.extract(model, data, layers, folder) writes some."
            )
        self.path = folder
        self.manifest: dict[str, Any] = manifest
        self.layers: list[str] = list(manifest["arrays"])
        # Set by `extract`, which has the model and the data.
        self._recompute: Recompute | None = None

    @cached_property
    def _marks(self) -> dict[str, dict[str, Any]]:
        """What is known of each shard that is done, in the order of the inputs."""
        names = done_shards(self.path)
        marks = {name: read_json(done_path(self.path, name)) for name in names}
        if not self._is_parts(marks):
            return marks
        first = {name: (mark["ids"] or [""])[0] for name, mark in marks.items()}
        are_numbers = all(isinstance(one, int) for one in first.values())
        in_order = sorted(marks, key=lambda n: first[n] if are_numbers else str(first[n]))
        return {name: marks[name] for name in in_order}

    @staticmethod
    def _is_parts(names: Iterable[str]) -> bool:
        """True if the shards were made by Extractors, which name them by their ids."""
        return any(name.startswith("part-") for name in names)

    @cached_property
    def ids(self) -> list[Any]:
        """The ids of the inputs, one for each row."""
        return [one for mark in self._marks.values() for one in mark["ids"]]

    @cached_property
    def skipped(self) -> dict[Any, str]:
        """The ids of inputs that failed, each with the reason (`on_error='skip'`)."""
        return {one: reason for mark in self._marks.values() for one, reason in mark["skipped"]}

    @property
    def num_shards(self) -> int | None:
        """How many shards there are when all are done; None if that is not known."""
        num, size = self.manifest.get("num_inputs"), self.manifest.get("shard_size")
        return None if num is None or not size else -(-num // size)

    @property
    def is_complete(self) -> bool:
        """True if all shards are done, as far as that is known: an Extractor knows only its own."""
        if self.num_shards is None:
            return self._is_parts(self._marks) or (self.path / "shards" / "complete").exists()
        return len(self._marks) >= self.num_shards

    @property
    def nbytes(self) -> int:
        """The size of all arrays on disk."""
        marks = self._marks.values()
        return sum(array["bytes"] for mark in marks for array in mark["arrays"].values())

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __contains__(self, name: object) -> bool:
        return name in self.layers

    def __getitem__(self, name: str) -> StoredArray | RaggedArray:
        if name not in self.layers:
            hint = did_you_mean(name, self.layers)
            raise KeyError(f"No layer {name!r}. {hint}Stored are {one_of(self.layers)}.")
        about = self.manifest["arrays"][name]
        array = StoredArray(self._files(name, ""), about["shape"], about["dtype"])
        if not about["ragged"]:
            return array
        return RaggedArray(array, StoredArray(self._files(name, ".lengths"), (), "int64"))

    def _files(self, name: str, kind: str) -> list[tuple[Path, int]]:
        found = []
        for shard, mark in self._marks.items():
            about = mark["arrays"].get(f"{name}{kind}")
            if about is not None:
                found.append((array_path(self.path, name, shard, kind), about["rows"]))
        return found

    def batches(self) -> Iterator[StoredBatch]:
        """The batches in which the model ran."""
        start = 0
        for shard, mark in self._marks.items():
            ids, skipped = iter(mark["ids"]), iter(mark["skipped"])
            for num, num_skipped in mark["batches"]:
                failed = [one for one, _ in islice(skipped, num_skipped)]
                rows = range(start, start + num)
                yield StoredBatch(shard, rows, list(islice(ids, num)), failed)
                start += num

    def rows_of(self, name: str, rows: range) -> np.ndarray[Any, Any]:
        """Some rows of a layer; of ragged text, their tokens."""
        array, part = self[name], slice(rows.start, rows.stop)
        return np.concatenate(array[part]) if isinstance(array, RaggedArray) else array[part]

    def row_of(self, one: Any) -> int:
        """The row of an id."""
        if one not in self._row_of:
            some = ", ".join(map(repr, self.ids[:3]))
            raise KeyError(f"No input has the id {one!r}; the ids are {some}, ...")
        return self._row_of[one]

    @cached_property
    def _row_of(self) -> dict[Any, int]:
        return {one: row for row, one in enumerate(self.ids)}

    def verify(
        self, k: int = 20, *, model: Any = None, data: Any = None, seed: int = 0, **options: Any
    ) -> Verification:
        """Recomputes `k` random inputs and compares them with what is stored; also compares the
        checksums of the files they lie in.

        Features that were opened, rather than just extracted, need the model and the data, and the
        options `ids`, `transform` or `tokenizer` that `extract` was given.
        """
        recompute = self._recompute
        if model is not None or data is not None:
            recompute = recomputing(self, model, data, options)
        if recompute is None:
            raise ValueError(
                "verify() of opened features needs the model and the data that they were made of: "
                "features.verify(20, model=model, data=data)."
            )
        rows = np.random.RandomState(seed).permutation(len(self))[:k].tolist()
        return _verified(self, sorted(rows), recompute)

    def damaged(self, shards: Sequence[str] | None = None) -> list[str]:
        """The files whose checksum is not that of what was written."""
        return [
            name
            for shard in (self._marks if shards is None else shards)
            for name in _damaged(self, shard)
        ]

    def __repr__(self) -> str:
        num = self.num_shards
        state = "" if self.is_complete else ", incomplete"
        shards = f"{len(self._marks)}{'' if num is None else f' of {num}'} shards"
        first = (
            f"Features of {', '.join(self.manifest['models'])}: {len(self):,} inputs, "
            f"{len(self.layers)} layers, {bytes_text(self.nbytes)}, {shards}{state}"
        )
        if self.skipped:
            first += f", {len(self.skipped)} inputs skipped"
        lines = [first]
        for name in self.layers:
            about = self.manifest["arrays"][name]
            tokens = "tokens of " if about["ragged"] else ""
            lines.append(f"  {name}: {tokens}{shape_text(about['shape'])}, {about['dtype']}")
        return "\n".join(lines)


def _verified(features: Features, rows: list[int], recompute: Recompute) -> Verification:
    num_identical = num_close = 0
    different: list[tuple[Any, str]] = []
    for row, values in recompute(rows):
        for name in features.layers:
            stored, own = features[name][row], np.asarray(values[name])
            if np.array_equal(stored, own, equal_nan=np.issubdtype(own.dtype, np.inexact)):
                num_identical += 1
            elif stored.shape == own.shape and _are_close(stored, own):
                num_close += 1
            else:
                different.append((features.ids[row], name))
    wanted = set(rows)
    shards = {batch.shard for batch in features.batches() if wanted.intersection(batch.rows)}
    ids = [features.ids[row] for row in rows]
    damaged = features.damaged(sorted(shards))
    return Verification(ids, num_identical, num_close, different, damaged)


def _are_close(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    tolerance = 1e-2 if a.dtype.itemsize < 4 else 1e-3
    scale = float(np.abs(b.astype(np.float64)).max(initial=0))
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def _damaged(features: Features, shard: str) -> Iterator[str]:
    for key, about in features._marks[shard]["arrays"].items():
        name, kind = (key, "") if key in features.layers else (key.rpartition(".")[0], ".lengths")
        path = array_path(features.path, name, shard, kind)
        try:
            array = np.load(path, mmap_mode="r" if about["rows"] else None, allow_pickle=False)
        except (OSError, ValueError):
            yield f"{path.parent.name}/{path.name}"
            continue
        crc = 0
        step = max(1, (1 << 24) // max(1, array[:1].nbytes))
        for start in range(0, len(array), step):
            crc = zlib.crc32(bytes_of(array[start : start + step]), crc)
        if crc != about["crc32"] or len(array) != about["rows"]:
            yield f"{path.parent.name}/{path.name}"


def open_folder(path: Any) -> Features:
    """The features in a folder."""
    if not isinstance(path, str | Path) or not str(path):
        raise TypeError(f"path must name a folder of features, got {got(path)}.")
    return Features(Path(path).expanduser())
