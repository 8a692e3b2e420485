"""One extraction: what is done already, the batches that are left, and where their rows go."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchlens._capture.selection import keys_in
from torchlens._extract.data import Inputs, Items, Stream, prefetched, source_of
from torchlens._extract.feature_store import Features, Recompute
from torchlens._extract.manifest import (
    check_same,
    digest_of_ids,
    read_manifest,
    write_manifest,
)
from torchlens._extract.pipeline import Pipeline, Processed, about_arrays
from torchlens._extract.pools import checked_dtype, checked_pool
from torchlens._extract.progress import Progress
from torchlens._extract.shard_files import (
    FolderLock,
    bytes_of,
    done_path,
    done_shards,
    read_json,
    whole_file,
)
from torchlens._extract.shard_writer import ShardWriter
from torchlens._history.sites import Site
from torchlens._recording.origin import versions_now, weights_digest
from torchlens._text.error_wording import check_choice, check_count, got
from torchlens.errors import FeaturesError

_COMPLETE = "complete"  # in `shards/`: a stream has been read to its end
_FITTED = "reduction.npz"  # a reduction that was fitted to the data


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractOptions:
    """The options of `extract`, checked."""

    ids: Any = None
    pool: Any = None
    reduce: Any = None
    dtype: Any = None
    batch_size: int | None = None
    shard_size: int = 4096
    transform: Any = None
    tokenizer: Any = None
    into: Sequence[Any] = ()
    on_error: str = "raise"
    compile: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, 1)
        check_count("shard_size", self.shard_size, 1)
        check_choice("on_error", self.on_error, ("raise", "skip"))
        for one in (*self.into, *([] if self.reduce is None else [self.reduce])):
            needed = "transform" if one is self.reduce else "update"
            if isinstance(one, type) or not hasattr(one, needed):
                name = "reduce" if one is self.reduce else "into"
                raise TypeError(
                    f"{name} must be made of reductions such as torchlens.features.PCA(100), "
                    f"got {got(one)}."
                )


class Extraction:
    """A model, its layers and a data set."""

    def __init__(self, model: Any, data: Any, layers: Any, options: ExtractOptions) -> None:
        self.options = options
        self.source = source_of(data, options.ids, options.transform, options.tokenizer)
        self.batch_size = options.batch_size or getattr(data, "batch_size", None) or 32
        self.pipeline = Pipeline(
            model,
            layers,
            checked_pool(options.pool),
            options.reduce,
            checked_dtype(options.dtype),
            options.on_error == "skip",
            options.compile,
        )
        self._layers = layers
        self.rank, self.world = _rank()
        self.tag = f"r{self.rank}of{self.world}"  # of this process, in the names of its files

    # -- stored ------------------------------------------------------------------------------------

    def store(self, folder: Path) -> Features:
        """Extracts into a folder, from where an earlier run has ended."""
        lock = FolderLock(folder, self.tag)
        try:
            stored = read_manifest(folder)
            own = self._manifest()
            if stored is not None:
                check_same(folder, stored, own)
            if stored is None or self.options.into or not Features(folder).is_complete:
                with self.pipeline.running():
                    self._store(folder, lock, stored, own)
        finally:
            lock.release()
        features = Features(folder)
        features._recompute = partial(_recomputed, self, features)
        return features

    def _store(self, folder: Path, lock: FolderLock, stored: Any, own: dict[str, Any]) -> None:
        lock.remove_leftovers()
        self._fit_reduction(folder)
        own |= self._found_out(self._first())
        if stored is not None:
            check_same(folder, stored, own)
        write_manifest(folder, own, self.tag)
        done = set(done_shards(folder))
        if self.options.into and done:
            self._reduce_again(Features(folder), done)
        progress = self._progress(sum(_num_inputs(folder, shard) for shard in done))
        writer = ShardWriter(folder, self.tag)
        try:
            self._write(done, writer, progress)
        except BaseException:
            writer.close(is_failed=True)
            raise
        finally:
            progress.close()
        writer.close()
        if isinstance(self.source, Stream):
            done_path(folder, "0").with_name(_COMPLETE).touch()

    def _write(self, done: set[str], writer: ShardWriter, progress: Progress) -> None:
        for shard, inputs, is_last in prefetched(self._pending(done)):
            if inputs is not None:
                writer.put(shard, self._process(inputs, progress))
            if is_last:
                writer.finish_shard(shard)

    def _process(self, inputs: Inputs, progress: Progress) -> Processed:
        batch = self.pipeline.process(inputs)
        for one in self.options.into:
            one.update(_arrays(batch), batch.ids)
        progress.add(len(inputs.ids) + len(inputs.failed))
        return batch

    def _progress(self, num_done: int) -> Progress:
        num = self.source.num if isinstance(self.source, Items) else None
        return Progress(num, num_done, self.options.progress)

    def _reduce_again(self, features: Features, done: set[str]) -> None:
        """Gives the reductions what an earlier run has stored, in the same batches."""
        for batch in features.batches():
            is_own = batch.shard in done and int(batch.shard) % self.world == self.rank
            if is_own and batch.ids:
                rows = {name: features.rows_of(name, batch.rows) for name in features.layers}
                for one in self.options.into:
                    one.update(rows, batch.ids)

    def _pending(self, done: set[str]) -> Iterator[tuple[str, Inputs | None, bool]]:
        """The batches that are left: the shard of each, and whether it is the last of its shard."""
        if isinstance(self.source, Stream):
            for batch in self._pending_of_stream():
                if batch[0] not in done and int(batch[0]) % self.world == self.rank:
                    yield batch
            return
        num, size = self.source.num, self.options.shard_size
        numbers: list[range] = []
        places: list[tuple[str, bool]] = []
        for shard in range(self.rank, -(-num // size), self.world):
            if _shard_name(shard) not in done:
                rows = range(shard * size, min(num, (shard + 1) * size))
                for start in range(0, len(rows), self.batch_size):
                    numbers.append(rows[start : start + self.batch_size])
                    places.append((_shard_name(shard), start + self.batch_size >= len(rows)))
        batches = self.source.batches(numbers, self.pipeline.skips)
        for (shard_name, is_last), inputs in zip(places, batches, strict=True):
            yield shard_name, inputs, is_last

    def _pending_of_stream(self) -> Iterator[tuple[str, Inputs | None, bool]]:
        """Batches of a stream go into a shard until the next would make it too large."""
        assert isinstance(self.source, Stream)
        shard = num = 0
        for inputs in self.source.batches():
            if num and num + len(inputs.ids) > self.options.shard_size:
                yield _shard_name(shard), None, True
                shard, num = shard + 1, 0
            yield _shard_name(shard), inputs, False
            num += len(inputs.ids)
        if num:
            yield _shard_name(shard), None, True

    # -- not stored --------------------------------------------------------------------------------

    def reduce_only(self) -> list[Any]:
        """Runs the data through the model and the reductions."""
        with self.pipeline.running():
            self._fit_reduction()
            self._first()
            progress = self._progress(0)
            try:
                for inputs in prefetched(self._all()):
                    self._process(inputs, progress)
            finally:
                progress.close()
        return list(self.options.into)

    def _all(self) -> Iterator[Inputs]:
        """All batches of this process."""
        if isinstance(self.source, Stream):
            yield from self.source.batches()
            return
        num, size = self.source.num, self.batch_size
        starts = range(self.rank * size, num, size * self.world)
        numbers = [range(start, min(num, start + size)) for start in starts]
        yield from self.source.batches(numbers, self.pipeline.skips)

    # -- what is known before, and after the first batch -------------------------------------------

    def _first(self) -> Processed:
        """The first batch, from which the layers are learned in every process."""
        if isinstance(self.source, Items):
            if not self.source.num:
                raise ValueError("data holds no inputs.")
            numbers = [range(min(self.batch_size, self.source.num))]
            inputs = next(iter(self.source.batches(numbers, self.pipeline.skips)))
        else:
            inputs = self.source.peek()
        return self.pipeline.first(inputs)

    def _fit_reduction(self, folder: Path | None = None) -> None:
        """Fits a reduction that must see all data before any of it can be reduced."""
        reduction = self.options.reduce
        if not hasattr(reduction, "is_fitted"):
            return
        stored = None if folder is None else folder / _FITTED
        if not reduction.is_fitted and stored is not None and stored.exists():
            reduction.load(stored)
        elif not reduction.is_fitted:
            self._fit(reduction)
        if stored is not None and not stored.exists():
            with whole_file(stored, self.tag) as file:
                reduction.save(file)

    def _fit(self, reduction: Any) -> None:
        if self.world > 1 or isinstance(self.source, Stream):
            raise ValueError(
                f"{type(reduction).__name__} must be fitted to all data first: in one process, by "
                "torchlens.extract(model, data, layers, None, into=[reduction]), then give it as "
                "reduce=. The data must be readable twice, so no iterable of batches."
            )
        self.pipeline.reduce = None
        try:
            self._first()
            for inputs in prefetched(self._all()):
                batch = self.pipeline.process(inputs)
                reduction.update(_arrays(batch), batch.ids)
        finally:
            self.pipeline.reduce = reduction

    def _manifest(self) -> dict[str, Any]:
        engines = self.pipeline.engines
        models = [type(engine.model).__name__ for engine in engines.values()]
        is_items = isinstance(self.source, Items)
        return {
            "models": models,
            "weights": [weights_digest(engine.model) for engine in engines.values()],
            "layers": described_layers(self._layers),
            **self.pipeline.describe(),
            "batch_size": self.batch_size if is_items else None,
            "shard_size": self.options.shard_size,
            "num_inputs": self.source.num if isinstance(self.source, Items) else None,
            "ids": digest_of_ids(getattr(self.source, "ids", None)),
            **self.source.description,
            "versions": versions_now(),
        }

    def _found_out(self, first: Processed) -> dict[str, Any]:
        """What only a run of the model shows."""
        if not first.ids:
            raise FeaturesError(
                f"No input of the first batch could be read: {first.skipped[0][1]}."
            )
        firsts = [engine.first for engine in self.pipeline.engines.values()]
        return {
            "structure": [first.structure_hash for first in firsts if first is not None],
            "arrays": about_arrays(first),
            "fitted": getattr(self.options.reduce, "digest", lambda: None)(),
        }


def described_layers(layers: Any) -> Any:
    """The layers as the manifest has them."""
    if isinstance(layers, Mapping):
        return {name: described_layers(own) for name, own in layers.items()}
    if callable(layers):
        return f"function {getattr(layers, '__qualname__', type(layers).__qualname__)}"
    return [_described_site(key) if isinstance(key, Site) else key for key in keys_in(layers)]


def _described_site(site: Site) -> str:
    text = f"site {site}"
    if site.directions is not None:
        text += f" {hashlib.sha256(bytes_of(site.directions.float().numpy())).hexdigest()[:16]}"
    return text


def _arrays(batch: Processed) -> dict[str, np.ndarray[Any, Any]]:
    return {name: rows.values for name, rows in batch.rows.items()}


def _shard_name(number: int) -> str:
    return f"{number:05d}"


def _num_inputs(folder: Path, shard: str) -> int:
    mark = read_json(done_path(folder, shard))
    return len(mark["ids"]) + len(mark["skipped"])


def _rank() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


# -- once more -------------------------------------------------------------------------------------


def _recomputed(
    extraction: Extraction, features: Features, rows: Sequence[int]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The values of some rows, computed in the batches in which they were computed before."""
    source = extraction.source
    if isinstance(source, Stream):
        raise ValueError(
            "verify() needs data whose inputs can be read by number: a Dataset, a tensor, a list "
            "or a folder, not an iterable of batches."
        )
    number_of = {source.id_of(number): number for number in range(source.num)}
    wanted: list[tuple[list[int], list[int]]] = []  # the rows of a batch, its inputs
    for batch in features.batches():
        own = [row for row in rows if row in batch.rows]
        if own:
            numbers = [_number_of(one, number_of) for one in (*batch.ids, *batch.skipped)]
            wanted.append((own, sorted(numbers) if batch.skipped else numbers))
    with extraction.pipeline.running():
        extraction._first()
        read = source.batches([numbers for _, numbers in wanted], extraction.pipeline.skips)
        for inputs, (own, _) in zip(read, wanted, strict=True):
            made = extraction.pipeline.process(inputs)
            places = {one: place for place, one in enumerate(made.ids)}
            for row in own:
                place = places[features.ids[row]]
                yield row, {name: _row(rows, place) for name, rows in made.rows.items()}


def _number_of(one: Any, number_of: Mapping[Any, int]) -> int:
    if one not in number_of:
        raise ValueError(f"The data has no input {one!r}. Give ids= as when it was extracted.")
    return number_of[one]


def _row(rows: Any, place: int) -> np.ndarray[Any, Any]:
    values = rows.values
    if rows.lengths is not None:
        start = int(rows.lengths[:place].sum())
        values = values[start : start + int(rows.lengths[place])]
    else:
        values = values[place]
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values)


def recomputing(features: Features, model: Any, data: Any, given: Mapping[str, Any]) -> Recompute:
    """Recomputes rows of opened features with a model and data."""
    about = features.manifest
    text = str([about["layers"], about["pool"]])
    if about["reduce"] is not None or "'function " in text or "'site " in text:
        raise ValueError(
            "These features were made with a function, a site or a reduction, which a folder does "
            "not store. Call torchlens.extract(...) again as before: it finds everything done, and "
            "returns features that can be verified."
        )
    options = ExtractOptions(
        pool=about["pool"], dtype=about["dtype"], on_error="skip" if features.skipped else "raise",
        **given,
    )  # fmt: skip
    extraction = Extraction(model, data, about["layers"], options)
    own = extraction._manifest()
    same = ("weights", "num_inputs", "ids", "transform", "tokenizer")
    check_same(features.path, about, {name: own[name] for name in same if name in about})
    return partial(_recomputed, extraction, features)
