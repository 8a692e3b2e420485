"""The rows of one layer, read from its shards when they are indexed."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from torchlens._text.error_wording import got

Array = np.ndarray[Any, Any]


class StoredArray:
    """The rows of a layer for all inputs; indexing reads only what is asked for.

    >>> features['relu_3'][10:20], features['relu_3'][[3, 1000]], features['relu_3'][:, 0]

    `np.asarray(...)` reads all of it. bfloat16 is read as float32.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], shape: Sequence[int], dtype: str) -> None:
        self._files = [path for path, _ in files]
        # The first row of each file, and the number of rows.
        self._starts = [0, *accumulate(num for _, num in files)]
        self._row_shape = tuple(shape)
        self._stored = dtype
        self._open: dict[int, Array] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """(inputs, ...)."""
        return (self._starts[-1], *self._row_shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what indexing returns."""
        return np.dtype("float32" if self._stored == "bfloat16" else self._stored)

    @property
    def nbytes(self) -> int:
        """The size in memory, if all of it was read."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return f"StoredArray(shape={self.shape}, dtype={self._stored})"

    def __iter__(self) -> Iterator[Any]:
        return (row for start in range(0, len(self), 256) for row in self[start : start + 256])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("Features lie in files: reading them copies them (copy=False).")
        return self[:] if dtype is None else self[:].astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not keys or keys[0] is None or keys[0] is Ellipsis:
            if keys[:1] == (Ellipsis,) and len(keys) == self.ndim:
                return self[(slice(None), *keys[1:])]
            return np.asarray(self)[key]
        first, rest = keys[0], keys[1:]
        is_simple = all(isinstance(part, int | slice) for part in rest)
        rows, place = self._rows(first, rest if is_simple else ())
        return rows[place] if is_simple else rows[(place, *rest)]

    def _rows(self, first: Any, within: tuple[Any, ...]) -> tuple[Array, Any]:
        """The rows that the first index means, and the index that puts them in its shape."""
        if isinstance(first, slice):
            return self._slice(range(len(self))[first], within), slice(None)
        numbers = self._numbers(first)
        place = np.arange(numbers.size).reshape(numbers.shape)
        return self._gather(numbers.reshape(-1), within), place if numbers.ndim else 0

    def _numbers(self, first: Any) -> Array:
        """Row numbers from an integer, a list, an array or a mask."""
        found = np.asarray(first)
        if found.dtype == bool:
            if found.shape != (len(self),):
                raise IndexError(f"A mask must have the shape ({len(self)},), got {found.shape}.")
            return np.flatnonzero(found)
        if found.size and not np.issubdtype(found.dtype, np.integer):
            raise TypeError(
                f"Rows are chosen by a number, a slice, a list or a mask, got {got(first)}."
            )
        wrong = (found < -len(self)) | (found >= len(self))
        if wrong.any():
            at = np.atleast_1d(found)[np.atleast_1d(wrong)][0]
            raise IndexError(f"Row {at} is out of range: there are {len(self)} rows.")
        return np.where(found < 0, found + len(self), found).astype(np.int64)

    def _slice(self, rows: range, within: tuple[Any, ...]) -> Array:
        """The rows of a slice, shard by shard."""
        if rows.step != 1:
            return self._gather(np.asarray(rows, dtype=np.int64), within)
        parts = []
        for number, start in enumerate(self._starts[:-1]):
            low, high = max(rows.start, start), min(rows.stop, self._starts[number + 1])
            if low < high:
                parts.append(self._file(number)[low - start : high - start][(slice(None), *within)])
        return self._as_read(np.concatenate(parts)) if parts else self._none(within)

    def _gather(self, rows: Array, within: tuple[Any, ...]) -> Array:
        """Rows in any order."""
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        made: Array | None = None
        for number in np.unique(shard_of):
            places = np.flatnonzero(shard_of == number)
            own = rows[places] - self._starts[number]
            # Ascending, as a disk likes it.
            order = np.argsort(own, kind="stable")
            part = self._file(int(number))[own[order]][(slice(None), *within)]
            if made is None:
                made = np.empty((len(rows), *part.shape[1:]), part.dtype)
            made[places[order]] = part
        return self._none(within) if made is None else self._as_read(made)

    def _none(self, within: tuple[Any, ...]) -> Array:
        return np.empty((0, *self._row_shape), self.dtype)[(slice(None), *within)]

    def _file(self, number: int) -> Array:
        if number not in self._open:
            if len(self._open) > 64:
                self._open.clear()
            if self._starts[number] == self._starts[number + 1]:
                return np.empty((0, *self._row_shape), self.dtype)
            self._open[number] = np.load(self._files[number], mmap_mode="r", allow_pickle=False)
        return self._open[number]

    def _as_read(self, rows: Array) -> Array:
        if self._stored == "bfloat16":
            return (np.asarray(rows).astype(np.uint32) << 16).view(np.float32)
        return np.asarray(rows)


class RaggedArray:
    """The rows of a layer where inputs have different numbers of tokens.

    >>> features['h.3'][5]          # (tokens, ...) of one input
    >>> features['h.3'][10:20]      # a list of ten such arrays
    >>> features['h.3'].tokens      # all tokens of all inputs, one after the other
    """

    def __init__(self, tokens: StoredArray, lengths: StoredArray) -> None:
        self.tokens = tokens
        self._lengths = lengths

    @cached_property
    def lengths(self) -> Array:
        """The number of tokens of each input."""
        return np.asarray(self._lengths)

    @cached_property
    def _starts(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def shape(self) -> tuple[Any, ...]:
        """(inputs, None, ...): the number of tokens differs."""
        return (len(self), None, *self.tokens.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what indexing returns."""
        return self.tokens.dtype

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        return f"RaggedArray(shape={self.shape}, dtype={self.tokens._stored})"

    def __iter__(self) -> Iterator[Array]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            raise TypeError(
                "The inputs have different numbers of tokens: choose inputs first, "
                "features[layer][5][:, 0], or index all tokens, features[layer].tokens[:, 0]."
            )
        if isinstance(key, slice):
            return [self[number] for number in range(len(self))[key]]
        numbers = self._lengths._numbers(key)
        if numbers.ndim:
            return [self[int(number)] for number in numbers]
        return self.tokens[int(self._starts[numbers]) : int(self._starts[numbers + 1])]
