"""What a sink is given of a recorded step: the statistics and bins of the run's folder, with
names.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchlens._health.finding import RunFinding
from torchlens._monitor.store.bins import bin_edges, bin_order
from torchlens._monitor.store.columns import QUANTILES, Step

STATISTICS = ("mean", "std", "rms", "low", "high", "zero", "nonfinite", "dead", "saturated")
# The bin of zero has no width. Programs that draw histograms want one.
_NEAR_ZERO = 1e-38
# Weights & Biases takes no more; merged steps of a wild tensor may have as many.
_MOST_BINS = 512


class Bins(NamedTuple):
    """A histogram without gaps: `counts[i]` of the sampled elements lie between `edges[i]` and
    `edges[i + 1]`.
    """

    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class SeriesRecord:
    """One tensor of a module in one step. `module` is '' for the model itself, `name` '' where
    there is only one tensor.
    """

    module: str
    kind: str
    name: str
    statistics: Mapping[
        str, float
    ]  # by the names in STATISTICS; what means nothing here is left out
    quantiles: Mapping[float, float]
    num_elements: int
    num_sampled: int
    total: float  # the sum of what is finite in the sample
    squares: float  # the sum of its squares
    codes: np.ndarray
    code_counts: np.ndarray

    @cached_property
    def bins(self) -> Bins | None:
        """The histogram of what is finite in the sample; None if nothing is."""
        return gapless(self.codes, self.code_counts)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """A recorded step; or, with no `series`, scalars that were logged in between. `scalars` are
    (name, step, value).
    """

    step: int
    time: float
    series: list[SeriesRecord]
    scalars: list[tuple[str, int, float]]
    findings: list[RunFinding]


@dataclass(slots=True, eq=False)
class RecordedStep:
    """What those who listen to a run are told, in the writer's thread, once it is in the file."""

    step: Step | None  # None if only scalars were logged
    scalars: list[tuple[str, int, float]]
    findings: list[RunFinding]


def step_records(step: Step, key_of: Callable[[int], Any]) -> Iterator[SeriesRecord]:
    """The series of a step. `key_of` tells module, kind and name of a series by its number."""
    columns = step.columns
    values = {name: getattr(columns, name) for name in STATISTICS}
    for row, number in enumerate(columns.series.tolist()):
        key = key_of(number)
        found = {name: float(own[row]) for name, own in values.items() if not np.isnan(own[row])}
        quantiles = zip(QUANTILES.tolist(), columns.quantiles[row].tolist(), strict=True)
        yield SeriesRecord(
            key.module, key.kind, key.name, found,
            {level: value for level, value in quantiles if value == value},
            int(columns.elements[row]), int(columns.sampled[row]), float(columns.total[row]),
            float(columns.squares[row]), *columns.bins(row),
        )  # fmt: skip


def gapless(codes: np.ndarray, counts: np.ndarray) -> Bins | None:
    """Bins side by side, from those that are not empty: empty ones where there are gaps, a narrow
    one around zero.
    """
    order = np.argsort(bin_order(codes), kind="stable")
    low, high = bin_edges(codes[order])
    numbers = counts[order]
    real = np.isfinite(low) & np.isfinite(high)
    low, high, numbers = low[real], high[real], numbers[real]
    if not len(numbers):
        return None
    is_zero = low == high
    # Numbers that are nearer to zero than that share its bin's place; none is lost.
    low, high = np.where(is_zero, -_NEAR_ZERO, low), np.where(is_zero, _NEAR_ZERO, high)
    edges, found = [float(low[0])], []
    for left, right, count in zip(low.tolist(), high.tolist(), numbers.tolist(), strict=True):
        if left > edges[-1]:
            edges.append(left)
            found.append(0)
        if right > edges[-1]:
            edges.append(right)
            found.append(count)
        else:
            found[-1] += count
    edges_array, counts_array = np.array(edges), np.array(found, np.int64)
    if len(found) > _MOST_BINS:
        return _coarser(edges_array, counts_array)
    return Bins(edges_array, counts_array)


def _coarser(edges: np.ndarray, counts: np.ndarray) -> Bins:
    """Neighbours put together, so that there are few enough."""
    step = -(-len(counts) // _MOST_BINS)
    starts = np.arange(0, len(counts), step)
    return Bins(np.append(edges[starts], edges[-1]), np.add.reduceat(counts, starts))
