"""Reductions of a stream of features: what is kept does not grow with the number of inputs.

Each has `update` (a batch), `merge` (another one of its kind, which has seen other inputs) and
`result`. Rows are flattened: a unit is one number of a row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from torchlens._recording.origin import digest
from torchlens._text.error_wording import check_count

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def flat(rows: Array) -> Array:
    """(inputs, units), in float32 or float64."""
    made = rows.reshape(len(rows), -1)
    if rows.dtype == np.uint16:  # the bits of bfloat16
        return (made.astype(np.uint32) << 16).view(np.float32)
    return made if made.dtype.itemsize > 4 else made.astype(np.float32, copy=False)


# -- similarity of layers --------------------------------------------------------------------------


class CKA:
    """Linear CKA between all pairs of layers, from minibatches (Nguyen et al. 2021).

    The estimate of each batch is unbiased, so the result does not depend on the batch size; batches
    of fewer than four inputs are left out.

    >>> cka, = torchlens.extract(model, images, layers, None, into=[CKA()])
    >>> cka.result()      # a DataFrame
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self._sums: Array = np.zeros((0, 0))

    def update(self, rows: Arrays, ids: Sequence[Any] = ()) -> None:
        """Adds a batch."""
        if not rows:
            return
        if not self.layers:
            self.layers, self._sums = list(rows), np.zeros((len(rows), len(rows)))
        count = len(next(iter(rows.values())))
        if count < 4:
            return
        grams = np.stack([_gram(flat(rows[name])) for name in self.layers])
        sums = grams.sum(2)
        totals = sums.sum(1)
        whole = grams.reshape(len(grams), -1)
        own = whole @ whole.T
        own += np.outer(totals, totals) / ((count - 1) * (count - 2))
        own -= 2 * (sums @ sums.T) / (count - 2)
        self._sums += own / (count - 3)  # times count / count: larger batches count for more

    def merge(self, other: Self) -> None:
        """Adds what another one has seen."""
        self.layers = self.layers or other.layers
        self._sums = self._sums + other._sums if self._sums.size else other._sums.copy()

    def result(self) -> "pd.DataFrame":
        """The similarity of each layer with each, up to 1. An estimate may be below 0."""
        import pandas as pd

        scale = np.sqrt(np.maximum(np.diag(self._sums), 0))
        with np.errstate(invalid="ignore", divide="ignore"):
            matrix = self._sums / np.outer(scale, scale)
        return pd.DataFrame(matrix, index=self.layers, columns=self.layers)


def _gram(rows: Array) -> Array:
    """The products of the rows with each other, 0 on the diagonal."""
    rows = rows - rows.mean(0)
    gram: Array = (rows @ rows.T).astype(np.float64)
    np.fill_diagonal(gram, 0)
    return gram


# -- principal components --------------------------------------------------------------------------


class Components(NamedTuple):
    """The principal components of a layer, the largest first."""

    components: Array  # (components, units)
    variance: Array  # of each component
    ratio: Array  # of the whole variance
    mean: Array


@dataclass(slots=True)
class _Factor:
    """A low-rank description of rows: their number, mean, sum of squares, and scaled components."""

    count: int
    mean: Array
    squares: float
    scaled: Array

    def joined(self, other: "_Factor", size: int) -> "_Factor":
        """The factor of the rows of both."""
        count = self.count + other.count
        gap = self.mean - other.mean
        step = (np.sqrt(self.count * other.count / count) * gap)[None]
        stacked = np.concatenate([self.scaled, other.scaled, step])
        _, values, vectors = np.linalg.svd(stacked, full_matrices=False)
        mean = (self.mean * self.count + other.mean * other.count) / count
        squares = self.squares + other.squares + float(np.square(step).sum())
        return _Factor(count, mean, squares, (values[:, None] * vectors)[:size])


class PCA:
    """The first principal components of each layer, from batches.

    In `into=[PCA(100)]` it is computed; as `reduce=PCA(100)` the features are stored as its
    components: the data is read once to fit them and once to project.
    """

    def __init__(self, size: int) -> None:
        check_count("size", size, 1)
        self.size = size
        self._factors: dict[str, _Factor] = {}
        self._waiting: dict[str, list[Array]] = {}

    def update(self, rows: Arrays, ids: Sequence[Any] = ()) -> None:
        """Adds a batch. It is used once there are as many rows as components."""
        for name, own in rows.items():
            waiting = self._waiting.setdefault(name, [])
            waiting.append(flat(own).astype(np.float64))
            if sum(map(len, waiting)) > self.size:
                self._use(name)

    def _use(self, name: str) -> None:
        rows = np.concatenate(self._waiting.pop(name))
        mean = rows.mean(0)
        centred = rows - mean
        factor = _Factor(len(rows), mean, float(np.square(centred).sum()), centred)
        known = self._factors.get(name)
        if known is None:
            known, factor = _Factor(0, np.zeros_like(mean), 0.0, centred[:0]), factor
        self._factors[name] = known.joined(factor, self.size)

    def finish(self) -> None:
        """Uses the rows that still wait."""
        for name in list(self._waiting):
            self._use(name)

    def merge(self, other: Self) -> None:
        """Adds what another one has seen."""
        self.finish()
        other.finish()
        for name, factor in other._factors.items():
            own = self._factors.get(name)
            self._factors[name] = factor if own is None else own.joined(factor, self.size)

    def result(self) -> dict[str, Components]:
        """The components of each layer."""
        self.finish()
        found = {}
        for name, factor in self._factors.items():
            values = np.linalg.norm(factor.scaled, axis=1)
            kept = values > values[0] * 1e-12 if len(values) else values > 0
            vectors = factor.scaled[kept] / values[kept][:, None]
            variance = np.square(values[kept]) / max(factor.count - 1, 1)
            whole = factor.squares / max(factor.count - 1, 1)
            found[name] = Components(vectors, variance, variance / whole, factor.mean)
        return found

    # -- as `reduce=` ------------------------------------------------------------------------------

    @property
    def is_fitted(self) -> bool:
        """True if it has seen rows."""
        return bool(self._factors)

    def describe(self) -> dict[str, Any]:
        """The entry of the manifest."""
        return {"kind": "principal components", "size": self.size}

    def transform(self, name: str, rows: Array) -> Array:
        """The projected rows of a layer, in float32."""
        if not hasattr(self, "_projections"):
            self._projections = self.result()
        found = self._projections[name]
        size = min(self.size, len(found.components))
        return np.asarray((flat(rows) - found.mean) @ found.components[:size].T, dtype=np.float32)

    def save(self, file: IO[bytes]) -> None:
        """Writes what was fitted, as an `.npz` file."""
        self.finish()
        arrays: dict[str, Any] = {}
        for name, factor in self._factors.items():
            head = np.asarray([factor.count, factor.squares])
            arrays |= {f"{name}|head": head, f"{name}|mean": factor.mean}
            arrays[f"{name}|scaled"] = factor.scaled
        np.savez(file, **arrays)

    def digest(self) -> str | None:
        """A digest of what was fitted."""
        self.finish()
        return digest((name, factor.scaled) for name, factor in self._factors.items())

    def load(self, path: Path) -> None:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            for name in {key.rpartition("|")[0] for key in stored.files}:
                count, squares = stored[f"{name}|head"]
                parts = stored[f"{name}|mean"], float(squares), stored[f"{name}|scaled"]
                self._factors[name] = _Factor(int(count), *parts)


# -- units -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Moment:
    """The distribution of each unit of a layer over the inputs."""

    count: int
    mean: Array
    squares: Array  # the sum of squared distances from the mean
    min: Array
    max: Array

    @property
    def var(self) -> Array:
        """The variance (of the inputs: divided by their number)."""
        return self.squares / self.count

    @property
    def std(self) -> Array:
        """The standard deviation."""
        return np.sqrt(self.var)

    def joined(self, other: "Moment") -> "Moment":
        """The moments of the inputs of both."""
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        squares = self.squares + other.squares
        squares = squares + np.square(gap) * (self.count * other.count / count)
        low, high = np.minimum(self.min, other.min), np.maximum(self.max, other.max)
        return Moment(count, mean, squares, low, high)


class Moments:
    """Mean, variance, least and largest value of each unit."""

    def __init__(self) -> None:
        self._found: dict[str, Moment] = {}

    def update(self, rows: Arrays, ids: Sequence[Any] = ()) -> None:
        """Adds a batch."""
        for name, own in rows.items():
            if len(own):
                wide = flat(own).astype(np.float64)
                mean = wide.mean(0)
                squares = np.square(wide - mean).sum(0)
                self._add(name, Moment(len(own), mean, squares, wide.min(0), wide.max(0)))

    def _add(self, name: str, moment: Moment) -> None:
        known = self._found.get(name)
        self._found[name] = moment if known is None else known.joined(moment)

    def merge(self, other: Self) -> None:
        """Adds what another one has seen."""
        for name, moment in other._found.items():
            self._add(name, moment)

    def result(self) -> dict[str, Moment]:
        """The moments of each layer."""
        return dict(self._found)


class TopInputs:
    """The inputs with the largest values of each unit. Use `pool='max'` for those of channels."""

    def __init__(self, k: int = 10) -> None:
        check_count("k", k, 1)
        self.k = k
        self._found: dict[str, tuple[Array, Array]] = {}

    def update(self, rows: Arrays, ids: Sequence[Any]) -> None:
        """Adds a batch."""
        for name, own in rows.items():
            if len(own) != len(ids):
                raise ValueError(
                    f"{name!r} has {len(own)} tokens for {len(ids)} inputs: give a pool, such as "
                    "pool='max', to rank inputs by it."
                )
            values = flat(own)
            names = np.empty(len(ids), dtype=object)
            names[:] = list(ids)
            self._add(name, values, np.broadcast_to(names[:, None], values.shape))

    def _add(self, name: str, values: Array, ids: Array) -> None:
        if name in self._found:
            values = np.concatenate([self._found[name][0], values])
            ids = np.concatenate([self._found[name][1], ids])
        order = np.argsort(-values, axis=0, kind="stable")[: self.k]
        self._found[name] = np.take_along_axis(values, order, 0), np.take_along_axis(ids, order, 0)

    def merge(self, other: Self) -> None:
        """Adds what another one has seen."""
        for name, (values, ids) in other._found.items():
            self._add(name, values, ids)

    def result(self) -> dict[str, tuple[Array, Array]]:
        """For each layer the values and the ids, (k, units), the largest first."""
        return dict(self._found)


class UnitCheck(NamedTuple):
    """The units of a layer that say nothing, or nothing of their own."""

    dead: Array  # units that are 0 for every input
    constant: Array  # units with one value for every input, dead ones included
    duplicates: list[list[int]]  # groups of units, not constant, that are equal for every input


class IdleUnits:
    """Units that are dead, constant, or equal to others for every input."""

    def __init__(self) -> None:
        self._moments = Moments()
        # The sum of the values, each times a number that its input alone decides.
        self._sketches: dict[str, Array] = {}

    def update(self, rows: Arrays, ids: Sequence[Any]) -> None:
        """Adds a batch."""
        self._moments.update(rows)
        for name, own in rows.items():
            per_row = [f"{one}" for one in ids]
            if len(own) != len(ids):  # tokens
                per_row = [f"{ids[0]}/{place}" for place in range(len(own))]
            weights = np.stack([_weights(one) for one in per_row])
            made = np.einsum("ij,ik->jk", weights, flat(own).astype(np.float64))
            self._sketches[name] = self._sketches.get(name, 0) + made

    def merge(self, other: Self) -> None:
        """Adds what another one has seen."""
        self._moments.merge(other._moments)
        for name, sketch in other._sketches.items():
            self._sketches[name] = self._sketches.get(name, 0) + sketch

    def result(self) -> dict[str, UnitCheck]:
        """What was found in each layer."""
        found = {}
        for name, moment in self._moments.result().items():
            is_constant = moment.min == moment.max
            scale = max(float(np.abs(self._sketches[name]).max(initial=0)), 1e-300)
            groups: dict[bytes, list[int]] = {}
            rounded = np.round(self._sketches[name].T / scale, 9) + 0.0
            for unit in np.flatnonzero(~is_constant):
                groups.setdefault(rounded[unit].tobytes(), []).append(int(unit))
            found[name] = UnitCheck(
                np.flatnonzero(is_constant & (moment.max == 0)),
                np.flatnonzero(is_constant),
                [group for group in groups.values() if len(group) > 1],
            )
        return found


def _weights(one: str) -> Array:
    """Two numbers between -1 and 1 that an id decides."""
    digest = hashlib.blake2b(one.encode(errors="backslashreplace"), digest_size=16).digest()
    return np.frombuffer(digest, dtype=np.int64) / float(1 << 63)
