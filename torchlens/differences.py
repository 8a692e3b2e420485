"""The public function `diff` and what it returns: checks the options, then calls `comparing`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from torchlens.comparing import BaseDiff, compare_histories
from torchlens.lazy_import import lazy_function
from torchlens.model_history import ModelHistory
from torchlens.traces import load
from torchlens.wording import got

if TYPE_CHECKING:
    from torchlens.viewer import Exploration

explore_together: Any = lazy_function("torchlens.viewer", "explore_together")
shown_pair: Any = lazy_function("torchlens.viewer", "Pair")

__all__ = ["Diff", "diff"]


@dataclass(frozen=True, repr=False)
class Diff(BaseDiff):
    """Where two histories diverge. Print it.

    >>> diff = torchlens.diff(reference, candidate)
    >>> diff.ok, diff.first, diff.culprits, diff.pairs, diff.unmatched
    """

    def explore(self, path: str | os.PathLike[str] | None = "diff.html") -> "Exploration":
        """Writes one HTML file with both graphs side by side: the matches, their errors, and the culprits with reasons.

        >>> diff.explore('diff.html')
        """
        notes = {(culprit.reference, culprit.candidate): culprit for culprit in self.culprits}
        shown = []
        for pair in self.pairs:
            culprit = notes.pop((pair.reference, pair.candidate), None)
            note, colour = "", "#7bbf8e" if pair.agrees else "#f0b35e"
            if culprit is not None:
                note, colour = culprit.reason or "computes something different from the same inputs", "#d9534f"
            shown.append(shown_pair(pair.reference, pair.candidate, note=note, error=pair.error, colour=colour))
        for (reference, candidate), culprit in notes.items():
            ends = reference or None, candidate or None
            shown.append(shown_pair(*ends, note=culprit.reason, error=culprit.error, colour="#d9534f"))
        names = (f"{self.reference_name} (reference)", f"{self.candidate_name} (candidate)")
        return explore_together(*self._histories, path, pairs=shown, names=names)


def diff(
    reference: ModelHistory | str | os.PathLike[str],
    candidate: ModelHistory | str | os.PathLike[str],
    *,
    tolerance: float = 16,
    mapping: Mapping[str, str] | None = None,
    isolate: bool = False,
) -> Diff:
    """Finds the first layer at which two implementations of a model compute something different from the same inputs.

    Both arguments are histories, or files of histories, of the same input with all values saved; library, dtype and version
    may differ. Layers are matched by weights, values and order, whatever their names and the number of their steps. Of a
    file with several calls, the first is compared; `load(path, call=2)` gives another.

    >>> print(torchlens.diff(reference, candidate))
    >>> torchlens.diff(reference, candidate).ok

    tolerance: how far apart, in units of rounding, the results of a correct layer may be; single operations of torch and
        JAX differ by at most 8.5.
    mapping: names of modules, layers or weights in the reference → in the candidate, for when matching needs help:
        `{'h.*.ln_1': 'blocks.*.norm1'}`.
    isolate: wherever an error begins, substitutes the reference's value, runs the rest of the candidate again and continues
        to look, so that it finds errors behind the first, too. Needs a candidate whose functions can still be called.

    Raises CannotCompareError if nothing was saved, or if the inputs differ.
    """
    ours, theirs = _history("reference", reference), _history("candidate", candidate)
    if not isinstance(tolerance, Real) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number of units of rounding, got {got(tolerance)}.")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0 (units of rounding), got {tolerance}.")
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate must be True or False, got {got(isolate)}.")
    return compare_histories(ours, theirs, float(tolerance), mapping, isolate, Diff)


def _history(name: str, value: ModelHistory | str | os.PathLike[str]) -> ModelHistory:
    if isinstance(value, str | os.PathLike):
        return load(value)
    if not isinstance(value, ModelHistory):
        raise TypeError(
            f"{name} must be a ModelHistory, as log_forward_pass returns it, or a file of one, got {got(value)}."
        )
    return value
