"""Features in other formats; each is written by the library for it, imported at the call."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from torchlens._extract.stored_array import RaggedArray, StoredArray
from torchlens._text.error_wording import checked_file

# The rows that are read and written at once.
_BLOCK = 1024


class Exports:
    """The methods of Features that write other formats. `layers` chooses some; None means all."""

    layers: list[str]

    @property
    def ids(self) -> list[Any]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> StoredArray | RaggedArray:
        raise NotImplementedError

    def to_arrow(self, layers: Any = None) -> Any:
        """A `pyarrow.Table` with a row for each input: `id`, and a column of lists for each layer,
        of `features[layer].shape[1:]` in order.
        """
        pa = library("pyarrow")
        columns: dict[str, Any] = {"id": pa.array(self.ids)}
        for name in self._chosen(layers):
            array = self[name]
            if isinstance(array, RaggedArray):
                rows = [row.reshape(-1) for row in array]
                offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
                flat = pa.array(np.concatenate(rows))
                columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets), flat)
            else:
                size = int(np.prod(array.shape[1:], dtype=np.int64))
                flat = pa.array(array[:].reshape(-1))
                columns[name] = pa.FixedSizeListArray.from_arrays(flat, size)
        return pa.table(columns)

    def to_dataset(self, layers: Any = None) -> Any:
        """A Hugging Face `datasets.Dataset` of the same columns."""
        datasets = library("datasets")
        return datasets.Dataset(datasets.table.InMemoryTable(self.to_arrow(layers)))

    def to_hdf5(self, path: Any, layers: Any = None) -> Path:
        """Writes an HDF5 file: a data set for each layer, `ids`, and for ragged text the lengths
        (`layer.lengths`) beside all tokens.
        """
        h5py = library("h5py")
        target = checked_file("path", path, "features.h5")
        with h5py.File(target, "w") as file:
            file.create_dataset("ids", data=_plain_ids(self.ids, h5py.string_dtype()))
            for name in self._chosen(layers):
                array = self[name]
                if isinstance(array, RaggedArray):
                    file.create_dataset(f"{name}.lengths", data=array.lengths)
                    array = array.tokens
                made = file.create_dataset(name, array.shape, array.dtype)
                for start, block in _blocks(array):
                    made[start : start + len(block)] = block
        return target

    def to_mat(self, path: Any, layers: Any = None) -> Path:
        """Writes a MATLAB file: a variable for each layer (a cell array for ragged text), and
        `ids`. Characters that no variable name can have become `_`.
        """
        io = library("scipy.io")
        target = checked_file("path", path, "features.mat")
        content: dict[str, Any] = {"ids": np.asarray(self.ids)}
        for name in self._chosen(layers):
            variable = "".join(char if char.isalnum() else "_" for char in name)
            array = self[name]
            if isinstance(array, RaggedArray):
                cells = np.empty(len(array), dtype=object)
                cells[:] = list(array)
                content[f"x_{variable}"] = cells
            else:
                content[f"x_{variable}"] = array[:]
        io.savemat(target, content, long_field_names=True)
        return target

    def to_safetensors(self, path: Any, layers: Any = None) -> Path:
        """Writes a safetensors file: a tensor for each layer, and the lengths of ragged text."""
        safetensors = library("safetensors.numpy")
        target = checked_file("path", path, "features.safetensors")
        tensors: dict[str, Any] = {}
        for name in self._chosen(layers):
            array = self[name]
            if isinstance(array, RaggedArray):
                tensors[f"{name}.lengths"] = array.lengths
                array = array.tokens
            tensors[name] = np.ascontiguousarray(array[:])
        ids = "\n".join(map(str, self.ids))
        safetensors.save_file(tensors, target, metadata={"ids": ids})
        return target

    def to_xarray(self, layers: Any = None) -> Any:
        """An `xarray.Dataset` in memory, with the ids as the coordinate `input`."""
        xarray = library("xarray")
        variables = {}
        for name in self._chosen(layers):
            array = self._regular(name, "to_xarray")
            axes = [f"{name}.{axis}" for axis in range(1, array.ndim)]
            variables[name] = (["input", *axes], array[:])
        return xarray.Dataset(variables, coords={"input": np.asarray(self.ids)})

    def to_zarr(self, path: Any, layers: Any = None) -> Path:
        """Writes a zarr group: an array for each layer, and the ids as an attribute."""
        zarr = library("zarr")
        target = Path(path).expanduser()
        group = zarr.open_group(str(target), mode="w")
        group.attrs["ids"] = self.ids
        for name in self._chosen(layers):
            array = self[name]
            if isinstance(array, RaggedArray):
                group.create_array(f"{name}.lengths", data=array.lengths)
                array = array.tokens
            chunks = (min(_BLOCK, max(1, len(array))), *array.shape[1:])
            made = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)
            for start, block in _blocks(array):
                made[start : start + len(block)] = block
        return target

    def to_rsatoolbox(self, layer: str) -> Any:
        """An `rsatoolbox.data.Dataset` of one layer: an observation for each input."""
        rsatoolbox = library("rsatoolbox")
        array = self._regular(layer, "to_rsatoolbox")
        rows = array[:].reshape(len(array), -1).astype(np.float64)
        return rsatoolbox.data.Dataset(
            rows, descriptors={"layer": layer}, obs_descriptors={"id": list(self.ids)}
        )

    def torch_dataset(self, layers: Any = None, *, shuffle: bool = False, seed: int = 0) -> Any:
        """A torch Dataset of the rows of a layer; of several layers, of dicts of them. Of ragged
        text, each token is a row.

        With `shuffle`, an IterableDataset that reads blocks of neighbouring rows in random order
        and mixes many blocks: nearly shuffled, at the speed of the disk. Each pass over it, and
        each worker of a DataLoader, has another order.
        """
        arrays = {}
        for name in self._chosen(layers):
            array = self[name]
            arrays[name] = array.tokens if isinstance(array, RaggedArray) else array
        if len({len(array) for array in arrays.values()}) > 1:
            raise ValueError("These layers have different numbers of tokens; choose one of them.")
        single = layers if isinstance(layers, str) else None
        return (_ShuffledRows if shuffle else _RowsInOrder)(arrays, single, seed)

    def _chosen(self, layers: Any) -> list[str]:
        if layers is None:
            return self.layers
        chosen = [layers] if isinstance(layers, str) else list(layers)
        for name in chosen:
            self[name]  # raises if there is none
        return chosen

    def _regular(self, name: str, method: str) -> StoredArray:
        array = self[name]
        if isinstance(array, RaggedArray):
            raise ValueError(
                f"{method}() needs one shape for all inputs, and {name!r} has different numbers of "
                "tokens. Extract it with a pool, such as pool='mean'."
            )
        return array


def library(name: str) -> Any:
    """An optional package, imported now."""
    try:
        return import_module(name)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(name.partition(".")[0], name.partition(".")[0])
        raise ImportError(
            f"This needs {package}: pip install {package}, or pip install 'torchlens[features]'."
        ) from error


def _plain_ids(ids: Sequence[Any], strings: Any) -> Any:
    if all(isinstance(one, int) for one in ids):
        return np.asarray(ids, dtype=np.int64)
    return np.asarray(list(map(str, ids)), dtype=strings)


def _blocks(array: StoredArray) -> Iterator[tuple[int, Any]]:
    for start in range(0, len(array), _BLOCK):
        yield start, array[start : start + _BLOCK]


# -- for training ----------------------------------------------------------------------------------


class _RowsInOrder(Dataset[Any]):
    """The rows by number."""

    def __init__(self, arrays: dict[str, StoredArray], single: str | None, seed: int) -> None:
        self._arrays = arrays
        self._single = single

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """Several rows at once, as a DataLoader asks for them."""
        return _as_items(self._arrays, numbers, self._single)


class _ShuffledRows(IterableDataset[Any]):
    """The rows in random order: blocks in random order, mixed in a buffer of many blocks."""

    block = 256  # rows
    num_mixed = 64  # blocks

    def __init__(self, arrays: dict[str, StoredArray], single: str | None, seed: int) -> None:
        self._arrays = arrays
        self._single = single
        self._seed = seed
        self._num_passes = 0

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        own, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        random = np.random.default_rng((self._seed, self._num_passes))
        self._num_passes += 1
        starts = random.permutation(range(0, len(self), self.block))[own::count]
        for first in range(0, len(starts), self.num_mixed):
            blocks = [
                _as_items(
                    self._arrays, range(start, min(len(self), start + self.block)), self._single
                )
                for start in sorted(starts[first : first + self.num_mixed])
            ]
            items = [item for block in blocks for item in block]
            for place in random.permutation(len(items)):
                yield items[place]


def _as_items(
    arrays: dict[str, StoredArray], numbers: Sequence[int], single: str | None
) -> list[Any]:
    key: Any = numbers
    if isinstance(numbers, range):
        key = slice(numbers.start, numbers.stop)
    rows = {name: torch.from_numpy(array[key]) for name, array in arrays.items()}
    if single is not None:
        return list(rows[single])
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
