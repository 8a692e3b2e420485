"""What looks wrong in a recorded step, by the rules and limits of the profile; told when it begins,
and when it is over.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf, isnan, prod, sqrt

import numpy as np
import torch

from torchlens._capture.model_parts import named_modules
from torchlens._health.finding import Finding, RunFinding
from torchlens._health.gradients import WeightNorms, exploding, vanishing
from torchlens._health.thresholds import THRESHOLDS
from torchlens._monitor.read.statistics import bin_counts, nonfinite_counts
from torchlens._monitor.record.bins import ZERO
from torchlens._monitor.record.series import SeriesNames
from torchlens._monitor.store.columns import HAS_NAN, SeriesKey, Step

# So many recorded steps in a row must show something before it is told; NaN is told at once, dead
# units were seen for long.
_STEPS_IN_A_ROW = 3
_AT_ONCE = frozenset({"non-finite values", "non-finite gradients", "dead units"})
# What is told once for the whole model, by where it was first seen: NaN spreads, and is not over
# where it began; and which of the weights has the largest gradient changes from step to step.
_OF_MODEL = frozenset(
    {
        "non-finite values",
        "non-finite gradients",
        "vanishing gradient",
        "zero gradients",
        "exploding gradient",
    }
)
# What comes and goes is told so many times.
_MOST_EPISODES = 3
# What a finding is seen in: a step without that cannot end it.
_SEEN_IN = {
    "non-finite values": {"parameters", "outputs", "watched"},
    "non-finite gradients": {"gradients", "parameter_gradients"},
    "dead units": {"outputs"},
    "saturated activation": {"outputs"},
    "vanishing gradient": {"parameter_gradients"},
    "zero gradients": {"parameter_gradients"},
    "exploding gradient": {"parameter_gradients"},
    "small update": {"updates"},
    "large update": {"updates"},
}
# The root mean square of what a step changes in a weight, to that of the weight itself: less, or
# more, is told.
_USUAL_UPDATES = 1e-4, 1e-2
_ZEROING = frozenset({"ReLU", "ReLU6", "Threshold", "Hardswish"})
_DEAD_ADVICE = (
    "They learn nothing. A lower learning rate, a smaller or zero bias, normalisation before the "
    "activation, or a leaky one helps."
)


class RunHealth:
    """Looks at one recorded step after the other."""

    def __init__(self, names: SeriesNames, model: torch.nn.Module) -> None:
        self._names = names
        modules = named_modules(model)
        self._kinds = {address: type(module).__name__ for address, module in modules}
        self._with_children = {address for address, module in modules if module._modules}
        self._layout: _Layout | None = None
        self._in_a_row: dict[
            tuple[str, str], tuple[int, str]
        ] = {}  # how many times, and whose it is
        self._told: dict[tuple[str, str], Finding] = {}
        self._episodes: dict[tuple[str, str], int] = {}

    def look(self, step: Step) -> list[RunFinding]:
        """What began or ended with this step."""
        if self._layout is None or not np.array_equal(self._layout.series, step.columns.series):
            self._layout = _Layout(step.columns.series, self._names.rows)
        rows = _Rows(step, self._layout)
        now: dict[tuple[str, str], Finding] = {}
        for finding in self._findings(rows):
            now[finding.kind, "" if finding.kind in _OF_MODEL else finding.where] = finding
        told: list[RunFinding] = []
        begun: dict[str, list[Finding]] = {}
        for key, finding in now.items():
            count = self._in_a_row.get(key, (0, ""))[0] + 1
            self._in_a_row[key] = count, finding.module
            is_sure = count >= _STEPS_IN_A_ROW or finding.kind in _AT_ONCE
            if is_sure and key not in self._told and self._episodes.get(key, 0) < _MOST_EPISODES:
                self._told[key] = finding
                self._episodes[key] = self._episodes.get(key, 0) + 1
                begun.setdefault(finding.kind, []).append(finding)
        for group in begun.values():
            told.append(RunFinding(step.last, _grouped(group)))
        # Of a module that this step knows nothing about (it did not run, or got no gradient),
        # nothing is over.
        seen = self._layout.kinds_of
        for key in [
            key
            for key, (_, module) in self._in_a_row.items()
            if key not in now and not _SEEN_IN[key[0]].isdisjoint(seen.get(module, ()))
        ]:
            del self._in_a_row[key]
            finding_over = self._told.pop(key, None)
            if finding_over is not None:
                told.append(RunFinding(step.last, finding_over, is_over=True))
        return told

    def _findings(self, rows: "_Rows") -> Iterable[Finding]:
        yield from _nonfinite(rows)
        suspects = rows.suspects()
        if suspects:
            for name, row in rows.of("outputs"):
                if row in suspects:
                    yield from self._activation(name, row, rows)
        weights = rows.weights()
        finite = [weight for weight in weights if weight.gradient_norm < inf]  # false for NaN, too
        largest = max((weight.gradient_norm for weight in finite), default=0.0)
        if largest > 0:
            layers = [weight for weight in finite if weight.module not in self._with_children]
            yield from vanishing(layers or finite, largest, THRESHOLDS["vanishing_ratio"])
            yield from exploding(finite, THRESHOLDS["exploding_ratio"])
        yield from _updates(rows)

    def _activation(self, name: SeriesKey, row: int, rows: "_Rows") -> Iterable[Finding]:
        columns = rows.columns
        kind = self._kinds.get(name.module, "")
        dead, saturated = float(columns.dead[row]), float(columns.saturated[row])
        if dead >= THRESHOLDS["dead_share"] and columns.low[row] == 0:
            source = rows.layout.find(name.module, "inputs", "")
            # What hands on the zeros of another (a pooling) is not to blame for them.
            if kind in _ZEROING or (source is not None and columns.low[source] < 0):
                yield Finding(
                    kind="dead units",
                    severity="warning",
                    where=name.module,
                    module=name.module,
                    number=dead,
                    threshold=THRESHOLDS["dead_share"],
                    text=f"{dead:.0%} of the units gave only zeros, in at least "
                    f"{THRESHOLDS['min_values']:.0f} values "
                    "of each that were sampled.",
                    advice=_DEAD_ADVICE,
                )
        if (
            saturated > THRESHOLDS["saturated_share"]
            and columns.sampled[row] >= THRESHOLDS["min_values"]
        ):
            yield Finding(
                kind="saturated activation",
                severity="warning",
                where=name.module,
                module=name.module,
                number=saturated,
                threshold=THRESHOLDS["saturated_share"],
                text=f"{saturated:.0%} of the sampled values of {kind} lie at its limits.",
                advice="Hardly any gradient passes through it. Smaller weights or inputs, or "
                "normalisation, help.",
            )


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


class _Rows:
    """The rows of a step, with what is asked of each."""

    def __init__(self, step: Step, layout: _Layout) -> None:
        columns = self.columns = step.columns
        self.layout = layout
        sampled = columns.sampled.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            self.rms: list[float] = np.sqrt(columns.squares / sampled).tolist()  # of the sample
        nan_counts, inf_counts = nonfinite_counts(columns)
        self.has_nan = (nan_counts > 0) | ((columns.flags & HAS_NAN) > 0)
        self.has_inf = (inf_counts > 0) | np.isinf(columns.low) | np.isinf(columns.high)
        self.bad = set(np.flatnonzero(self.has_nan | self.has_inf).tolist())

    def of(self, kind: str) -> list[tuple[SeriesKey, int]]:
        """In the order in which they first came up."""
        return self.layout.by_kind.get(kind, [])

    def suspects(self) -> set[int]:
        """Rows with dead units or saturation."""
        columns = self.columns
        is_dead, is_saturated = (
            columns.dead >= THRESHOLDS["dead_share"],
            columns.saturated > THRESHOLDS["saturated_share"],
        )
        return set(np.flatnonzero(is_dead | is_saturated).tolist())

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

    def share_with_gradient(self, row: int | None) -> float:
        """The share of a weight that has a gradient, by the row of that; all of it if the whole
        gradient is zero.
        """
        if row is None:
            return 0.0
        return 1.0 if self.columns.low[row] == self.columns.high[row] == 0 else self.moving[row]

    @cached_property
    def moving(self) -> list[float]:
        """The share of each sample that is not zero."""
        found: list[float] = (
            1 - bin_counts(self.columns, ZERO) / np.maximum(self.columns.sampled, 1)
        ).tolist()
        return found

    def nonfinite(self, kinds: Iterable[str]) -> list[tuple[SeriesKey, str, int]]:
        """Series with NaN or Inf, each with the word for it, in the order in which they first came
        up.
        """
        if not self.bad:
            return []
        return [
            (name, "NaN" if self.has_nan[row] else "Inf", row)
            for kind in kinds
            for name, row in self.of(kind)
            if row in self.bad
        ]


def _nonfinite(rows: _Rows) -> Iterable[Finding]:
    forward = rows.nonfinite(("parameters", "outputs", "watched"))
    backward = rows.nonfinite(("gradients", "parameter_gradients"))
    for found, kind, text in (
        (forward, "non-finite values", "first in the {kind} of {where}; {count} series have some."),
        (
            backward,
            "non-finite gradients",
            "first in the {kind} of {where}; {count} series have some.",
        ),
    ):
        if found:
            name, word, row = found[0]
            where = (
                f"{name.module}.{name.name}" if name.kind.startswith("parameter") else name.module
            )
            words = text.format(
                kind=name.kind.replace("_", " "), where=where or "the model", count=len(found)
            )
            number = float(rows.columns.calls[row])
            yield Finding(
                kind=kind, severity="error", where=where or "the model", module=name.module,
                number=number, threshold=0,
                text=f"{word}: {words}", advice=_NONFINITE_ADVICE[kind],
            )  # fmt: skip


_NONFINITE_ADVICE = {
    "non-finite values": "torchlens.profile(model, check='nonfinite') finds the operation.",
    "non-finite gradients": "torchlens.profile(model, check='nonfinite') finds the operation. A "
    "GradScaler that searches "
    "for its scale makes some, and skips those steps.",
}


def _updates(rows: _Rows) -> Iterable[Finding]:
    """Updates of an odd size, by what takes part in the step: what has a gradient, or changes. Few
    rows of an embedding do, and nothing of a frozen weight."""
    low, high = _USUAL_UPDATES
    columns = rows.columns
    for address, module, row, own, gradient in rows.layout.updates:
        size, share = rows.rms[own], max(rows.moving[row], rows.share_with_gradient(gradient))
        num_seen, is_all = (
            share * int(columns.sampled[row]),
            columns.sampled[row] == columns.elements[row],
        )
        if not size or not share or (num_seen < THRESHOLDS["min_values"] and not is_all):
            continue
        ratio = rows.rms[row] / sqrt(share) / size
        if isnan(ratio) or low <= ratio <= high:
            continue
        part = f" where it has a gradient ({share:.1%} of it)" if share < 0.9 else ""
        is_small = ratio < low
        yield Finding(
            kind="small update" if is_small else "large update",
            severity="info",
            where=address,
            module=module,
            number=ratio,
            threshold=low if is_small else high,
            text=f"A step changes {address} by {ratio:.1g} of its size{part} (by root mean "
            "square, sampled).",
            advice="It hardly learns: try a larger learning rate, or find what keeps its gradient "
            "small."
            if is_small
            else "That is a lot: try a smaller learning rate, or a warm-up.",
        )


def _grouped(findings: list[Finding]) -> Finding:
    """One for all that began at once: the first, or of updates the farthest off."""
    if len(findings) == 1:
        return findings[0]
    worst = findings[0]
    if worst.kind == "small update":
        worst = min(findings, key=lambda finding: finding.number)
    elif worst.kind == "large update":
        worst = max(findings, key=lambda finding: finding.number)
    others = ", ".join(finding.where for finding in findings if finding is not worst)
    others = others if len(others) < 200 else f"{others[:200]} ..."
    return replace(worst, text=f"{worst.text} And so for {len(findings) - 1} more: {others}.")
