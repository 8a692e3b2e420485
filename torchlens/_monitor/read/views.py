"""The user's view of a recorded run: modules, series, histograms, scalars."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens._monitor.store.bins import (
    MINUS_INF,
    NAN,
    NUM_BINS,
    PLUS_INF,
    bin_edges,
    bin_order,
)
from torchlens._monitor.store.columns import (
    QUANTILES,
    RANGE_IS_EXACT,
    SeriesKey,
    Step,
)
from torchlens._monitor.store.lines import ScalarRow

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """The number of sampled elements in each bin. Bins without elements are left out."""

    step: int
    low: np.ndarray  # lower edges; zero has a bin of its own, whose edges are both 0
    high: np.ndarray  # upper edges
    counts: np.ndarray
    num_nan: int
    num_plus_inf: int
    num_minus_inf: int
    num_elements: int  # in the tensors
    num_sampled: int  # of these, in the sample

    @property
    def is_exact(self) -> bool:
        """Whether every element was counted, not only a sample."""
        return self.num_elements == self.num_sampled

    def linear(
        self, num_bins: int = 64, low: float | None = None, high: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(edges, counts) of bins of equal width. Elements are assumed to be spread evenly over
        their original bin.
        """
        if not len(self.counts):
            return np.linspace(
                0.0 if low is None else low, 1.0 if high is None else high, num_bins + 1
            ), np.zeros(num_bins)
        start = float(self.low.min()) if low is None else low
        end = float(self.high.max()) if high is None else high
        if not end > start:
            end = start + max(abs(start) * 1e-6, 1e-12)
        edges = np.linspace(start, end, num_bins + 1)
        found = np.zeros(num_bins)
        for left, right, count in zip(self.low, self.high, self.counts, strict=True):
            if right > left:
                inside = np.clip(edges, left, right)
                found += count * np.diff(inside) / (right - left)
            elif start <= left <= end:
                found[min(int((left - start) / (end - start) * num_bins), num_bins - 1)] += count
        return edges, found


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Histograms over steps: `counts[i, j]` of the elements at `steps[i]` lie between `low[j]` and
    `high[j]`.
    """

    steps: np.ndarray
    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray


class Series:
    """One tensor of a module over the recorded steps. Arrays have one number for each of `steps`.

    >>> r['fc'].outputs.histogram(step=100)
    >>> r['fc'].parameter_gradients['weight'].rms
    """

    def __init__(self, key: SeriesKey, number: int, steps: Sequence[Step]) -> None:
        self.key = key
        self._number = number
        self._steps = steps

    @cached_property
    def _rows(self) -> list[tuple[Step, int]]:
        """(step, row) for each step that has a row of this series."""
        places = [(step, step.columns.row_of(self._number)) for step in self._steps]
        return [(step, row) for step, row in places if row is not None]

    @property
    def steps(self) -> np.ndarray:
        """The steps at which the series was recorded; of merged steps, the last."""
        return np.array([step.last for step, _ in self._rows], np.int64)

    @property
    def first_steps(self) -> np.ndarray:
        """The first step of each merged group; the same as `steps` where nothing was merged."""
        return np.array([step.first for step, _ in self._rows], np.int64)

    def _column(self, name: str, dtype: type = np.float64) -> np.ndarray:
        return np.array([getattr(step.columns, name)[row] for step, row in self._rows], dtype)

    @property
    def low(self) -> np.ndarray:
        """The smallest element: of all if `is_range_exact`, else of the sample."""
        return self._column("low")

    @property
    def high(self) -> np.ndarray:
        """The largest element: of all if `is_range_exact`, else of the sample."""
        return self._column("high")

    @property
    def is_range_exact(self) -> np.ndarray:
        """Whether `low` and `high` cover all elements, not only the sample."""
        return (self._column("flags", np.uint8) & RANGE_IS_EXACT) > 0

    @property
    def mean(self) -> np.ndarray:
        """The mean of the finite elements in the sample."""
        return self._column("mean")

    @property
    def rms(self) -> np.ndarray:
        """The root mean square of the finite elements in the sample."""
        return self._column("rms")

    @property
    def std(self) -> np.ndarray:
        """The standard deviation of the finite elements in the sample."""
        return self._column("std")

    @property
    def norm(self) -> np.ndarray:
        """The 2-norm of a tensor, estimated: its rms times the root of its number of elements."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.rms * np.sqrt(self.num_elements / np.maximum(self.num_calls, 1))

    @property
    def zero(self) -> np.ndarray:
        """The share of the sample that is exactly zero."""
        return self._column("zero")

    @property
    def nonfinite(self) -> np.ndarray:
        """The share of the sample that is NaN or infinite. A tiny number if there are such
        elements, but only outside the sample.
        """
        return self._column("nonfinite")

    @property
    def dead(self) -> np.ndarray:
        """The share of units that are always zero. NaN if the series has no units, or before 64
        values of each were sampled.
        """
        return self._column("dead")

    @property
    def saturated(self) -> np.ndarray:
        """The share of the sample that lies at the limits of the activation; NaN if it has none."""
        return self._column("saturated")

    @property
    def quantiles(self) -> np.ndarray:
        """One row for each step, with the quantiles 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95 and
        0.99 of the sample.
        """
        return self._column("quantiles", np.float32).reshape(-1, len(QUANTILES))

    @property
    def num_calls(self) -> np.ndarray:
        """The number of sampled tensors."""
        return self._column("calls", np.int64)

    @property
    def num_elements(self) -> np.ndarray:
        """The total number of elements of these tensors."""
        return self._column("elements", np.int64)

    @property
    def num_sampled(self) -> np.ndarray:
        """How many of these elements were sampled."""
        return self._column("sampled", np.int64)

    def histogram(self, step: int | None = None) -> Histogram:
        """The histogram of the last recorded step, or of the last one up to `step`."""
        if not self._rows:
            raise ValueError(f"Nothing was recorded of {self} yet.")
        chosen, row = self._rows[self._place(step)]
        columns = chosen.columns
        codes, counts = columns.bins(row)
        low, high = bin_edges(codes)
        order = np.argsort(bin_order(codes), kind="stable")
        real = order[np.isfinite(low[order])]
        special = {code: int(counts[codes == code].sum()) for code in (NAN, PLUS_INF, MINUS_INF)}
        return Histogram(
            chosen.last, low[real], high[real], counts[real], special[NAN], special[PLUS_INF],
            special[MINUS_INF],
            int(columns.elements[row]), int(columns.sampled[row]),
        )  # fmt: skip

    def heat_map(self) -> HeatMap:
        """All histograms in common bins: every finite bin that any of them uses, in ascending
        order.
        """
        parts = [step.columns.bins(row) for step, row in self._rows]
        codes = np.unique(np.concatenate([np.zeros(0, np.uint16), *(own for own, _ in parts)]))
        codes = codes[~np.isin(codes, (NAN, PLUS_INF, MINUS_INF))]
        places = np.zeros(NUM_BINS, np.int64)
        codes = codes[np.argsort(bin_order(codes), kind="stable")]
        places[codes] = np.arange(len(codes))
        counts = np.zeros((len(parts), len(codes)), np.int64)
        for line, (own, numbers) in enumerate(parts):
            is_real = np.isin(own, codes)
            counts[line, places[own[is_real]]] = numbers[is_real]
        low, high = bin_edges(codes)
        return HeatMap(self.steps, low, high, counts)

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row for each step."""
        import pandas

        table: dict[str, Any] = {
            "module": self.key.module, "kind": self.key.kind, "name": self.key.name,
            "first_step": self.first_steps,
            "step": self.steps, "calls": self.num_calls, "elements": self.num_elements,
            "sampled": self.num_sampled,
            "low": self.low, "high": self.high, "is_range_exact": self.is_range_exact,
            "mean": self.mean, "std": self.std,
            "rms": self.rms, "norm": self.norm, "zero": self.zero, "nonfinite": self.nonfinite,
            "dead": self.dead,
            "saturated": self.saturated,
        }  # fmt: skip
        quantiles = self.quantiles
        table.update({f"q{share:g}": quantiles[:, place] for place, share in enumerate(QUANTILES)})
        return pandas.DataFrame(table)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return (
            f"<Series {self}: {len(self)} steps, {'x'.join(map(str, self.key.shape)) or 'scalar'} "
            f"{self.key.dtype}>"
        )

    def __str__(self) -> str:
        name = f"[{self.key.name!r}]" if self.key.name else ""
        return f"{self.key.module or 'the model'!r} {self.key.kind}{name}"

    def _place(self, step: int | None) -> int:
        if step is None:
            return len(self._rows) - 1
        for place, (own, _) in enumerate(self._rows):
            if own.first <= step <= own.last:
                return place
        return max(int(np.searchsorted(self.steps, step, side="right")) - 1, 0)


class SeriesMap(Mapping[str, Series]):
    """The series of one kind by name: the name of a parameter, or the position ('0', '1') or key of
    a tensor that a module takes or returns.

    Attributes are forwarded to the first series, often the only one: `r['fc'].outputs.rms`.
    """

    def __init__(self, series: Mapping[str, Series]) -> None:
        self._series = dict(series)

    def __getitem__(self, name: str) -> Series:
        if name not in self._series:
            raise KeyError(f"There is no {name!r} here, but {', '.join(map(repr, self._series))}.")
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(next(iter(self._series.values())), name)

    def __repr__(self) -> str:
        return f"<SeriesMap {', '.join(map(repr, self._series.values()))}>"


class ModuleView:
    """What was recorded of a module (or of a watched tensor), by kind: `.inputs`, `.outputs`,
    `.gradients`, `.parameters`, `.parameter_gradients`, `.updates`, `.watched`. A kind that was not
    recorded raises AttributeError."""

    def __init__(self, address: str, kinds: Mapping[str, SeriesMap]) -> None:
        self.address = address
        self.kinds = dict(kinds)

    def __getattr__(self, name: str) -> SeriesMap:
        kinds = self.__dict__.get("kinds", {})
        if name not in kinds:
            there = f"Available: {', '.join(kinds)}." if kinds else ""
            raise AttributeError(
                f"No {name} were recorded of {self.__dict__.get('address')!r}. {there}".rstrip()
            )
        found: SeriesMap = kinds[name]
        return found

    def __dir__(self) -> list[str]:
        return ["address", "kinds", "update_ratio", *self.kinds]

    def update_ratio(self, name: str = "weight") -> tuple[np.ndarray, np.ndarray]:
        """(steps, ratios): the RMS of the change in each step divided by the RMS of the
        parameter.
        """
        updates, values = self.updates[name], self.parameters[name]
        steps, own, theirs = np.intersect1d(updates.steps, values.steps, return_indices=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio: np.ndarray = updates.rms[own] / values.rms[theirs]
        return steps, ratio

    def __repr__(self) -> str:
        return f"<ModuleView {self.address!r}: {', '.join(self.kinds)}>"


class Scalars:
    """Numbers logged under a name. Where the oldest were merged, `values` are means."""

    def __init__(self, name: str, rows: Sequence[ScalarRow]) -> None:
        self.name = name
        self.steps = np.array([row.step for row in rows], np.int64)
        self.values = np.array([row.mean for row in rows], np.float64)
        self.low = np.array([row.low for row in rows], np.float64)
        self.high = np.array([row.high for row in rows], np.float64)
        self.counts = np.array([row.num_values for row in rows], np.int64)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"<Scalars {self.name!r}: {len(self)} steps>"
