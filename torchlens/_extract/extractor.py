"""One process of many: a callable that extracts the batches it is given (Ray, Dask, Spark)."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlens._extract.data import Inputs
from torchlens._extract.extraction import described_layers
from torchlens._extract.manifest import check_same, read_manifest, write_manifest
from torchlens._extract.pipeline import Pipeline, about_arrays
from torchlens._extract.pools import checked_dtype, checked_pool
from torchlens._extract.shard_files import ShardFile, done_path, read_json
from torchlens._recording.origin import versions_now, weights_digest
from torchlens._text.error_wording import got


class Extractor:
    """Extracts each batch it is called with into a shard of its own, in a folder that many
    processes share. The shard is named by the ids, so a batch that is run again is the same shard.

    `make_model` is a function that returns the model, and is called in the process that runs it.
    A batch is a dict of arrays; the item `id` has the ids, the others are what the model takes.

    >>> rows = ray.data.read_images('images/', include_paths=True).map_batches(...)
    >>> rows.map_batches(
    ...     torchlens.features.Extractor, batch_size=256, concurrency=4,
    ...     fn_constructor_args=(make_model, ['layer4'], '/shared/features'))
    """

    def __init__(
        self,
        make_model: Any,
        layers: Any,
        path: Any,
        *,
        id_name: str = "id",
        pool: Any = None,
        reduce: Any = None,
        dtype: Any = None,
        on_error: str = "raise",
        num_threads: int | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model = make_model if isinstance(make_model, torch.nn.Module) else make_model()
        self.path = Path(path).expanduser()
        self._id = id_name
        self._layers = layers
        self._pipeline = Pipeline(
            self.model, layers, checked_pool(pool), reduce, checked_dtype(dtype), on_error == "skip"
        )
        (self.path / "shards").mkdir(parents=True, exist_ok=True)
        self._is_checked = False

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return {
            "models": [type(self.model).__name__],
            "weights": [weights_digest(self.model)],
            "layers": described_layers(self._layers),
            **self._pipeline.describe(),
            "versions": versions_now(),
        }

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the rows of a batch; returns the ledger: `id`, `shard` and `row` of each input."""
        if self._id not in batch:
            raise KeyError(
                f"A batch must have the item {self._id!r} with an id for each input, got "
                f"{', '.join(map(repr, batch))}. Name another item by id_name=."
            )
        ids = [one.item() if isinstance(one, np.generic) else one for one in batch[self._id]]
        name = _shard_of(ids)
        done = done_path(self.path, name)
        if not done.exists():
            self._write(name, ids, {key: own for key, own in batch.items() if key != self._id})
        mark = read_json(done)
        return {
            "id": np.asarray(mark["ids"]),
            "shard": np.asarray([name] * len(mark["ids"])),
            "row": np.arange(len(mark["ids"])),
        }

    def _write(self, name: str, ids: list[Any], data: Mapping[str, Any]) -> None:
        inputs = Inputs(ids, {key: _tensor(key, own) for key, own in data.items()})
        with self._pipeline.running():
            if self._is_checked:
                batch = self._pipeline.process(inputs)
            else:
                batch = self._pipeline.first(inputs)
                self._check(about_arrays(batch))
        shard = ShardFile(self.path, name, f"part{name[-12:]}")
        try:
            shard.append(batch.rows, batch.ids, batch.skipped)
            shard.finish()
        except BaseException:
            shard.drop()
            raise

    def _check(self, arrays: Mapping[str, Any]) -> None:
        """Writes the manifest, or compares with that of the other processes."""
        own = {**self._settings, "arrays": arrays}
        write_manifest(self.path, own, "part")
        stored = read_manifest(self.path)
        assert stored is not None
        check_same(self.path, stored, own)
        self._is_checked = True


def _shard_of(ids: list[Any]) -> str:
    text = "\n".join(f"{type(one).__name__} {one}" for one in ids)
    return f"part-{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:16]}"


def _tensor(name: str, value: Any) -> torch.Tensor:
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(
            f"{name!r} of the batch must be an array of numbers, got {got(value)}. Resize images "
            "to one size, or tokenize texts, in an earlier step."
        )
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
