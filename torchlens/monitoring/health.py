"""What looks wrong in a recorded step, by the rules and limits of the profile; told when it begins, and when it is over."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isnan, nan, sqrt
from typing import Any

import numpy as np
import torch

from torchlens.capture.parts import named_modules
from torchlens.health.finding import Finding
from torchlens.health.gradients import WeightNorms, exploding, vanishing
from torchlens.health.thresholds import THRESHOLDS
from torchlens.monitoring.columns import HAS_NAN
from torchlens.monitoring.frames import Step
from torchlens.monitoring.series import SeriesName, SeriesNames
from torchlens.monitoring.statistics import nonfinite_counts

__all__ = ["Health", "RunFinding"]

# So many recorded steps in a row must show something before it is told; NaN is told at once, dead units were seen for long.
_STEPS_IN_A_ROW = 3
_AT_ONCE = frozenset({"non-finite values", "non-finite gradients", "dead units"})
# What comes and goes is told so many times.
_MOST_EPISODES = 3
_ZEROING = frozenset({"ReLU", "ReLU6", "Threshold", "Hardswish"})
_DEAD_ADVICE = (
    "They learn nothing. A lower learning rate, a smaller or zero bias, normalisation before the activation, or a leaky "
    "one helps."
)


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A finding, and at which step it began to hold; with `is_over`, from which step on it holds no longer."""

    step: int
    finding: Finding
    is_over: bool = False

    @property
    def module(self) -> str:
        """The address of the module."""
        return self.finding.module

    @property
    def kind(self) -> str:
        """What it is: 'dead units', 'vanishing gradient', ..."""
        return self.finding.kind

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        found = {name: _plain(value) for name, value in asdict(self.finding).items()}
        return {"step": self.step, "is_over": self.is_over, **found}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "RunFinding":
        """From the file. ValueError if it is none."""
        texts = ("kind", "severity", "where", "module", "text", "advice")
        number, limit, step = value.get("number"), value.get("threshold"), value.get("step")
        if (
            not all(isinstance(value.get(name), str) for name in texts)
            or not isinstance(number, int | float)
            or not isinstance(limit, int | float | None)
            or not isinstance(step, int)
        ):
            raise ValueError("a finding without its parts")
        finding = Finding(**{name: value[name] for name in texts}, number=float(number), threshold=limit)
        return RunFinding(step, finding, bool(value.get("is_over")))

    def __str__(self) -> str:
        return f"step {self.step}: {'over: ' if self.is_over else ''}{self.finding}"


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating) else int(value) if isinstance(value, np.integer) else value


class Health:
    """Looks at one recorded step after the other."""

    def __init__(self, names: SeriesNames, model: torch.nn.Module) -> None:
        self._names = names
        modules = named_modules(model)
        self._kinds = {address: type(module).__name__ for address, module in modules}
        self._with_children = {address for address, module in modules if module._modules}
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._told: dict[tuple[str, str], Finding] = {}
        self._episodes: dict[tuple[str, str], int] = {}

    def look(self, step: Step) -> list[RunFinding]:
        """What began or ended with this step."""
        rows = _Rows(step, self._names.rows)
        now: dict[tuple[str, str], Finding] = {}
        for finding in self._findings(rows):
            now[finding.kind, finding.where] = finding
        told: list[RunFinding] = []
        begun: dict[str, list[Finding]] = {}
        for key, finding in now.items():
            count = self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
            is_sure = count >= _STEPS_IN_A_ROW or finding.kind in _AT_ONCE
            if is_sure and key not in self._told and self._episodes.get(key, 0) < _MOST_EPISODES:
                self._told[key] = finding
                self._episodes[key] = self._episodes.get(key, 0) + 1
                begun.setdefault(finding.kind, []).append(finding)
        for group in begun.values():
            told.append(RunFinding(step.last, _grouped(group)))
        # Of a module that this step knows nothing about (only something else was recorded), nothing is over.
        silent = {key for key, finding in self._told.items() if finding.module not in rows.modules}
        for key in [key for key in self._in_a_row if key not in now and key not in silent]:
            del self._in_a_row[key]
            finding_over = self._told.pop(key, None)
            if finding_over is not None:
                told.append(RunFinding(step.last, finding_over, is_over=True))
        return told

    def _findings(self, rows: "_Rows") -> Iterable[Finding]:
        yield from _nonfinite(rows)
        for number, row in rows.of("outputs"):
            yield from self._activation(number, row, rows)
        weights = rows.weights()
        finite = [weight for weight in weights if weight.gradient_norm < inf]  # false for NaN, too
        largest = max((weight.gradient_norm for weight in finite), default=0.0)
        if largest > 0:
            layers = [weight for weight in finite if weight.module not in self._with_children]
            yield from vanishing(layers or finite, largest, THRESHOLDS["vanishing_ratio"])
            yield from exploding(finite, THRESHOLDS["exploding_ratio"])
        yield from _updates(rows)

    def _activation(self, name: SeriesName, row: int, rows: "_Rows") -> Iterable[Finding]:
        columns = rows.columns
        kind = self._kinds.get(name.module, "")
        dead, saturated = float(columns.dead[row]), float(columns.saturated[row])
        if dead >= THRESHOLDS["dead_share"] and columns.low[row] == 0:
            source = rows.find(name.module, "inputs", "")
            # What hands on the zeros of another (a pooling) is not to blame for them.
            if kind in _ZEROING or (source is not None and columns.low[source] < 0):
                yield Finding(
                    kind="dead units",
                    severity="warning",
                    where=name.module,
                    module=name.module,
                    number=dead,
                    threshold=THRESHOLDS["dead_share"],
                    text=f"{dead:.0%} of the units gave only zeros, in at least {THRESHOLDS['min_values']:.0f} values "
                    "of each that were sampled.",
                    advice=_DEAD_ADVICE,
                )
        if saturated > THRESHOLDS["saturated_share"] and columns.sampled[row] >= THRESHOLDS["min_values"]:
            yield Finding(
                kind="saturated activation",
                severity="warning",
                where=name.module,
                module=name.module,
                number=saturated,
                threshold=THRESHOLDS["saturated_share"],
                text=f"{saturated:.0%} of the sampled values of {kind} lie at its limits.",
                advice="Hardly any gradient comes through there. Smaller weights or inputs, or normalisation, help.",
            )


class _Rows:
    """The rows of a step by what they are about."""

    def __init__(self, step: Step, names: Sequence[SeriesName]) -> None:
        self.columns = step.columns
        self._by_kind: dict[str, list[tuple[SeriesName, int]]] = {}
        self._places: dict[tuple[str, str, str], int] = {}
        self.modules: set[str] = set()
        for row, number in enumerate(step.columns.series):
            name = names[int(number)]
            self._by_kind.setdefault(name.kind, []).append((name, row))
            self._places[name.module, name.kind, name.name] = row
            self.modules.add(name.module)

    def of(self, kind: str) -> list[tuple[SeriesName, int]]:
        """In the order in which they first came up."""
        return self._by_kind.get(kind, [])

    def find(self, module: str, kind: str, name: str) -> int | None:
        return self._places.get((module, kind, name))

    def rms(self, row: int) -> float:
        """Of the sample."""
        columns = self.columns
        count = float(columns.sampled[row])
        return sqrt(float(columns.squares[row]) / count) if count else nan

    def weights(self) -> list[WeightNorms]:
        """Matrices with their gradients: no biases, scales, or single vectors."""
        found = []
        has_bad = {row for _, _, row in nonfinite_rows(self, ("parameter_gradients",))}
        for name, row in self.of("parameter_gradients"):
            own = self.find(name.module, "parameters", name.name)
            if own is not None and sum(size > 1 for size in name.shape) > 1:
                count = int(np.prod(name.shape, dtype=np.int64))
                norm = inf if row in has_bad else self.rms(row) * sqrt(count)
                address = f"{name.module}.{name.name}" if name.module else name.name
                found.append(WeightNorms(address, name.module, norm, self.rms(own) * sqrt(count), count))
        return found


def nonfinite_rows(rows: _Rows, kinds: Iterable[str]) -> list[tuple[SeriesName, str, int]]:
    """Series with NaN or Inf, each with the word for it, in the order in which they first came up."""
    columns = rows.columns
    nan_counts, inf_counts = nonfinite_counts(columns)
    has_nan = (nan_counts > 0) | ((columns.flags & HAS_NAN) > 0)
    has_inf = (inf_counts > 0) | np.isinf(columns.low) | np.isinf(columns.high)
    return [
        (name, "NaN" if has_nan[row] else "Inf", row)
        for kind in kinds
        for name, row in rows.of(kind)
        if has_nan[row] or has_inf[row]
    ]


def _nonfinite(rows: _Rows) -> Iterable[Finding]:
    forward = nonfinite_rows(rows, ("parameters", "outputs", "watched"))
    backward = nonfinite_rows(rows, ("gradients", "parameter_gradients"))
    for found, kind, text in (
        (forward, "non-finite values", "first in the {kind} of {where}; {count} series have some."),
        (backward, "non-finite gradients", "first in the {kind} of {where}; {count} series have some."),
    ):
        if found:
            name, word, row = found[0]
            where = f"{name.module}.{name.name}" if name.kind.startswith("parameter") else name.module
            words = text.format(kind=name.kind.replace("_", " "), where=where or "the model", count=len(found))
            number = float(rows.columns.calls[row])
            yield Finding(
                kind=kind, severity="error", where=where or "the model", module=name.module, number=number, threshold=0,
                text=f"{word}: {words}", advice=_NONFINITE_ADVICE[kind],
            )  # fmt: skip


_NONFINITE_ADVICE = {
    "non-finite values": "torchlens.profile(model, check='nonfinite') finds the operation.",
    "non-finite gradients": "torchlens.profile(model, check='nonfinite') finds the operation. A GradScaler that looks for "
    "its scale makes some, and skips those steps.",
}


def _updates(rows: _Rows) -> Iterable[Finding]:
    for name, row in rows.of("updates"):
        own = rows.find(name.module, "parameters", name.name)
        if own is None or sum(size > 1 for size in name.shape) < 2:
            continue
        size = rows.rms(own)
        ratio = rows.rms(row) / size if size else nan
        low, high = THRESHOLDS["smallest_update"], THRESHOLDS["largest_update"]
        if isnan(ratio) or low <= ratio <= high:
            continue
        is_small = ratio < low
        address = f"{name.module}.{name.name}" if name.module else name.name
        yield Finding(
            kind="small update" if is_small else "large update",
            severity="info",
            where=address,
            module=name.module,
            number=ratio,
            threshold=low if is_small else high,
            text=f"A step changes {address} by {ratio:.1g} of its size (by root mean square, sampled).",
            advice="It hardly learns: a larger learning rate, or whatever keeps its gradient small."
            if is_small
            else "That is much: a smaller learning rate, or a warm-up.",
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
