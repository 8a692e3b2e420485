"""The series of a run: which tensor of which module, its number in the files, and its units.

Units are channels, or features. A unit is dead if it gives nothing but zero.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens._monitor.record.samples import Sample
from torchlens._monitor.store.columns import SeriesKey

# Channels lie before so many axes of space, whether there is one for the batch or not.
_BEFORE_SPACE = re.compile(r"\w*(?:Conv|ConvTranspose|Pool|InstanceNorm)([123])d")
_SECOND = re.compile(r"\w*(?:BatchNorm([123]d)?|GroupNorm)")
_LAST = re.compile(r"\w*(?:Linear|LayerNorm|RMSNorm)|Conv1D")
# Of so many uses of one module the units are counted at a time.
_MOST_USES = 64


class Units(NamedTuple):
    """What is known of the units of a module's output: the series of its input (-1: none), and
    their axis, if it is.
    """

    input: int
    axis: int | None


def unit_axis(kind: str) -> int | None:
    """The axis of the units in what a module of this class reads and returns; None if the class
    does not say.
    """
    if found := _BEFORE_SPACE.fullmatch(kind):
        return -1 - int(found[1])
    return 1 if _SECOND.fullmatch(kind) else -1 if _LAST.fullmatch(kind) else None


class _Use(NamedTuple):
    """A use of a module: the series that made its input (-1: not known), and the number of
    units.
    """

    maker: int
    num_units: int


class _Window:
    """How many elements of each unit were seen, and which units live; and what was known when
    enough had been seen.
    """

    __slots__ = ("alive", "seen", "share")

    def __init__(self, num_units: int) -> None:
        self.share = float("nan")
        self.begin(num_units)

    def begin(self, num_units: int) -> None:
        self.seen, self.alive = np.zeros(num_units, np.int64), np.zeros(num_units, bool)


class UnitActivity:
    """Which units of a series ever gave something other than zero, over as many steps as it takes
    to tell.

    A sample has few elements of each unit. They are counted until `least` of each were seen; then
    it is known which units are dead, and counting begins anew: a unit may die later. A module that
    is called in several places (one ReLU for all layers) has other units in each, which are told
    apart by what made its input, and by their number.
    """

    def __init__(self, series: Mapping[int, Units], least: float) -> None:
        self.series = series  # those that are counted; may grow
        self._least = least
        self._windows: dict[int, dict[_Use, _Window]] = {}

    def dead_shares(
        self,
        observations: Sequence[tuple[int, Sample, Any]],
        values: Sequence[np.ndarray],
        has_zeros: Sequence[bool],
    ) -> np.ndarray:
        """Of each observation, the share of its series' units that were dead when that was last
        known; of several uses, the largest. NaN before it is known, and for a series without any
        zero."""
        shares: dict[int, float] = {}
        for place, maker, axis in self._located(observations):
            number, sample, _ = observations[place]
            units = sample.plan.units_of_sample(axis)
            if units is None:
                continue
            unit_of, sizes = units
            windows = self._windows.setdefault(number, {})
            use = _Use(maker, len(sizes))
            if use not in windows:
                if not has_zeros[place]:
                    continue
                if len(windows) >= _MOST_USES:
                    del windows[next(iter(windows))]
                windows[use] = _Window(len(sizes))
            share = self._counted(windows[use], values[place], unit_of, sizes)
            shares[number] = float(np.fmax(share, shares.get(number, np.nan)))
        return np.array([shares.get(number, np.nan) for number, _, _ in observations], np.float32)

    def _counted(
        self, window: _Window, values: np.ndarray, unit_of: np.ndarray, sizes: np.ndarray
    ) -> float:
        """The share that is known when these were counted, too."""
        window.seen += sizes
        if not window.alive.all():
            window.alive[unit_of[values != 0]] = True
        known = window.seen >= self._least
        if np.count_nonzero(known) > 0.9 * len(
            sizes
        ):  # of a few units the fixed places may have nothing
            window.share = float(1 - window.alive[known].mean())
            window.begin(len(sizes))
        return window.share

    def _located(
        self, observations: Sequence[tuple[int, Sample, Any]]
    ) -> list[tuple[int, int, int | None]]:
        """(place, series that made the input, axis of the units) of each observation whose units
        are counted.

        The class of a module decides the axis. If it does not, the axis is that of the module
        before, if it has the same shape, or of the module after: an activation has the axis of the
        convolution beside it.
        """
        last: dict[int, Sample] = {}  # by series: a module is given something before it returns
        makers: dict[
            int, int
        ] = {}  # the rest is by sample: what one returns is the sample that the next is given
        axes: dict[int, int] = {}
        read_axes: dict[int, int] = {}
        found: list[tuple[int, int]] = []
        for place, (number, sample, _) in enumerate(observations):
            last[number] = sample
            units = self.series.get(number)
            if units is None:
                continue
            source = last.get(units.input)
            found.append((place, -1 if source is None else makers.get(id(source), -1)))
            makers.setdefault(id(sample), number)
            axis = units.axis
            if source is not None and axis is not None:
                read_axes.setdefault(id(source), axis)
            elif source is not None and source.plan.shape == sample.plan.shape:
                axis = axes.get(id(source))
            if axis is not None:
                axes.setdefault(id(sample), axis)
        located = []
        for place, maker in found:
            key = id(observations[place][1])
            located.append((place, maker, axes.get(key, read_axes.get(key))))
        return located


# What may be asked for with `log=`, and beside them what `run.watch` adds.
KINDS = ("inputs", "outputs", "gradients", "parameters", "parameter_gradients", "updates")
WATCHED = "watched"


class SeriesNames:
    """Gives each series a number when its first tensor is sampled."""

    def __init__(self) -> None:
        self.rows: list[SeriesKey] = []  # by number; only grows
        # Limits of bounded activations, and the units of what modules return, for the statistics.
        self.limits: dict[int, tuple[float, float]] = {}
        self.units: dict[int, Units] = {}
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    def go_on(self, known: Mapping[int, SeriesKey]) -> None:
        """Keeps the numbers of earlier sessions. Call it before any series has a number."""
        for number in range(max(known, default=-1) + 1):
            key = known.get(number, SeriesKey("", "", "", (), ""))  # its line was damaged
            self.rows.append(key)
            if key.kind:
                self._numbers[key[:3]] = number

    def known(self, module: str, kind: str, name: str) -> int:
        """The number of a series that has one; -1 otherwise."""
        return self._numbers.get((module, kind, name), -1)

    def number(self, module: str, kind: str, name: str, tensor: torch.Tensor) -> int:
        """The number of a series; `tensor` is the first that it is about."""
        key = (module, kind, name)
        found = self._numbers.get(key)
        if found is None:
            with self._lock:
                found = self._numbers.setdefault(key, len(self.rows))
                if found == len(self.rows):
                    shape = tuple(map(int, tensor.shape))
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self.rows.append(SeriesKey(*key, shape, dtype))
        return found
