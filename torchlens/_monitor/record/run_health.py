"""The health of a run: hands the numbers of each recorded step to the rules of `_health`."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, prod, sqrt

import numpy as np
import torch

from torchlens._capture.model_parts import named_modules
from torchlens._health.activations import ZEROING, activation_kind, dead_units, saturation
from torchlens._health.episodes import Episodes
from torchlens._health.finding import Finding, RunFinding
from torchlens._health.gradients import WeightNorms, gradient_findings, update_finding
from torchlens._health.thresholds import THRESHOLDS
from torchlens._monitor.record.series import SeriesNames
from torchlens._monitor.store.bins import MINUS_INF, NAN, PLUS_INF
from torchlens._monitor.store.columns import HAS_NAN, SeriesKey, Step

_NONFINITE_ADVICE = "torchlens.profile(model, check='nonfinite') finds the operation."
_SCALER_ADVICE = (
    f"{_NONFINITE_ADVICE} "
    "A GradScaler that searches for its scale makes some, and skips those steps."
)


class RunHealth:
    """Looks at one recorded step after the other."""

    def __init__(self, names: SeriesNames, model: torch.nn.Module) -> None:
        self._names = names
        modules = named_modules(model)
        self._kinds = {
            address: activation_kind(type(module).__name__) for address, module in modules
        }
        self._outer = {address for address, module in modules if module._modules}
        self._layout: _Layout | None = None
        self._episodes = Episodes()

    def after_step(self, step: Step) -> list[RunFinding]:
        """What began or ended with this step."""
        series = step.columns.series
        if self._layout is None or not np.array_equal(self._layout.series, series):
            self._layout = _Layout(series, self._names.rows)
        rows = _StepRows(step, self._layout)
        findings = [
            *rows.nonfinite("non-finite values", ("parameters", "outputs", "watched")),
            *rows.nonfinite("non-finite gradients", ("gradients", "parameter_gradients")),
            *rows.activations(self._kinds),
            *gradient_findings(rows.weights(), self._outer, THRESHOLDS),
            *rows.updates(),
        ]
        return self._episodes.after_step(step.last, findings, self._layout.kinds_of)


class _Layout:
    """The rows of a step by what they are about. From step to step it is mostly the same, and is
    kept.
    """

    def __init__(self, series: np.ndarray, names: Sequence[SeriesKey]) -> None:
        self.series = series
        self.by_kind: dict[str, list[tuple[SeriesKey, int]]] = {}
        self.places: dict[tuple[str, str, str], int] = {}
        for row, number in enumerate(series.tolist()):
            name = names[number]
            self.by_kind.setdefault(name.kind, []).append((name, row))
            self.places[name.module, name.kind, name.name] = row
        self.kinds_of: dict[str, set[str]] = {}  # what is known of each module
        for module, kind, _ in self.places:
            self.kinds_of.setdefault(module, set()).add(kind)
        # Matrices with their gradients, no biases or scales: (address, module, elements, gradient,
        # own row).
        self.weights = [
            (_address(name), name.module, prod(name.shape), row, own)
            for name, row in self.by_kind.get("parameter_gradients", ())
            if (own := self.find(name.module, "parameters", name.name)) is not None
            and _is_matrix(name)
        ]
        # The same with their updates: (address, module, update, own row, gradient; None if that is
        # not recorded).
        self.updates = [
            (
                _address(name),
                name.module,
                row,
                own,
                self.find(name.module, "parameter_gradients", name.name),
            )
            for name, row in self.by_kind.get("updates", ())
            if (own := self.find(name.module, "parameters", name.name)) is not None
            and _is_matrix(name)
        ]

    def find(self, module: str, kind: str, name: str) -> int | None:
        return self.places.get((module, kind, name))


def _address(name: SeriesKey) -> str:
    return f"{name.module}.{name.name}" if name.module else name.name


def _is_matrix(name: SeriesKey) -> bool:
    return sum(size > 1 for size in name.shape) > 1


class _StepRows:
    """The rows of a step, as the rules take them."""

    def __init__(self, step: Step, layout: _Layout) -> None:
        columns = self.columns = step.columns
        self.layout = layout
        with np.errstate(invalid="ignore", divide="ignore"):
            # Of the whole sample: a gradient with NaN counts as it is.
            self.rms: list[float] = np.sqrt(columns.squares / columns.sampled).tolist()
        self.has_nan = (columns.counted(NAN) > 0) | ((columns.flags & HAS_NAN) > 0)
        self.has_inf = (
            (columns.counted(PLUS_INF, MINUS_INF) > 0)
            | np.isinf(columns.low)
            | np.isinf(columns.high)
        )
        self.bad = set(np.flatnonzero(self.has_nan | self.has_inf).tolist())

    def nonfinite(self, kind: str, series_kinds: Iterable[str]) -> Iterable[Finding]:
        """The first series with NaN or Inf, in the order in which they first came up."""
        if not self.bad:
            return
        found = [
            (key, row)
            for each in series_kinds
            for key, row in self.layout.by_kind.get(each, ())
            if row in self.bad
        ]
        if found:
            key, row = found[0]
            where = (
                _address(key) if key.kind.startswith("parameter") else key.module
            ) or "the model"
            word = "NaN" if self.has_nan[row] else "Inf"
            yield Finding(
                kind=kind,
                severity="error",
                where=where,
                module=key.module,
                number=float(self.columns.calls[row]),
                threshold=0,
                text=f"{word}: first in the {key.kind.replace('_', ' ')} of {where}; {len(found)} "
                "series have some.",
                advice=_SCALER_ADVICE if kind == "non-finite gradients" else _NONFINITE_ADVICE,
            )

    def activations(self, kinds: Mapping[str, str]) -> Iterable[Finding]:
        """Dead units and saturation."""
        columns = self.columns
        suspects = ~(np.isnan(columns.dead) & np.isnan(columns.saturated))
        for key, row in self.layout.by_kind.get("outputs", ()):
            if not suspects[row]:
                continue
            kind = kinds.get(key.module, "")
            if self._makes_zeros(key.module, kind, row):
                share = float(columns.dead[row])
                text = (
                    f"{share:.0%} of the units gave only zeros, in at least "
                    f"{THRESHOLDS['min_values']:.0f} values of each that were sampled."
                )
                yield from dead_units(key.module, key.module, share, THRESHOLDS, text)
            saturated, num_sampled = float(columns.saturated[row]), int(columns.sampled[row])
            yield from saturation(key.module, key.module, kind, saturated, num_sampled, THRESHOLDS)

    def _makes_zeros(self, module: str, kind: str, row: int) -> bool:
        """Whether zeros are of the module's own making: a pooling hands on those of another."""
        columns = self.columns
        if columns.low[row] != 0:
            return False
        source = self.layout.find(module, "inputs", "")
        return kind in ZEROING or (source is not None and bool(columns.low[source] < 0))

    def weights(self) -> list[WeightNorms]:
        """Matrices with their gradients."""
        rms, bad = self.rms, self.bad
        # The sample may miss the few rows of an embedding that have a gradient. A norm is no less
        # than any element.
        largest = np.maximum(-self.columns.low, self.columns.high).tolist()
        return [
            WeightNorms(
                address,
                module,
                inf if row in bad else max(rms[row] * sqrt(count), largest[row]),
                rms[own] * sqrt(count),
                count,
            )
            for address, module, count, row, own in self.layout.weights
        ]

    def updates(self) -> Iterable[Finding]:
        """Updates of an unusual size, by the part of the weight that takes part in the step: what
        has a gradient, or changes. Few rows of an embedding do, and nothing of a frozen weight.
        """
        columns = self.columns
        for address, module, row, own, gradient in self.layout.updates:
            size, share = self.rms[own], max(self.moving[row], self._share_with_gradient(gradient))
            num_seen = share * int(columns.sampled[row])
            is_all = columns.sampled[row] == columns.elements[row]
            if size and share and (is_all or num_seen >= THRESHOLDS["min_values"]):
                ratio = self.rms[row] / sqrt(share) / size
                finding = update_finding(address, module, ratio, share)
                if finding is not None:
                    yield finding

    def _share_with_gradient(self, row: int | None) -> float:
        """The share of a weight that has a gradient, by the row of that; all of it if the whole
        gradient is zero.
        """
        if row is None:
            return 0.0
        return 1.0 if self.columns.low[row] == self.columns.high[row] == 0 else self.moving[row]

    @cached_property
    def moving(self) -> list[float]:
        """The share of each sample that is not zero."""
        found: list[float] = (1 - self.columns.zero).tolist()
        return found
