"""The public function that compares, and what it returns: check the options, then the comparing room."""

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
    """Where two histories part. Print it.

    >>> diff = torchlens.diff(reference, candidate)
    >>> diff.ok, diff.first, diff.culprits, diff.pairs, diff.unmatched
    """

    def explore(self, path: str | os.PathLike[str] | None = "diff.html") -> "Exploration":
        """Writes one HTML file with both graphs side by side: what was matched, how far apart it is, the culprits and why.

        >>> diff.explore('diff.html')
        """
        notes = {(culprit.reference, culprit.candidate): culprit for culprit in self.culprits}
        shown = []
        for pair in self.pairs:
            culprit = notes.pop((pair.reference, pair.candidate), None)
            note, colour = "", "#7bbf8e" if pair.agrees else "#f0b35e"
            if culprit is not None:
                note, colour = culprit.reason or "computes something else from the same inputs", "#d9534f"
            shown.append(shown_pair(pair.reference, pair.candidate, note=note, error=pair.error, colour=colour))
        for (reference, candidate), culprit in notes.items():
            shown.append(shown_pair(reference, candidate, note=culprit.reason, error=culprit.error, colour="#d9534f"))
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
    """Finds where two implementations of a model part: the first layer that computes something else from the same inputs.

    Both are histories, or files of them, of the same input with all values saved, of the same or another library, type or
    version. Which layer is which is found from weights, values and order, whatever they are called and in however many
    steps they are done.

    >>> print(torchlens.diff(reference, candidate))
    >>> torchlens.diff(reference, candidate).ok

    tolerance: how far apart, in units of rounding, the results of a correct layer may be; single operations of torch and
        JAX differ by at most 8.5.
    mapping: names of the reference's modules, layers or weights → the candidate's, where finding them needs help:
        `{'h.*.ln_1': 'blocks.*.norm1'}`.
    isolate: puts the reference's value in where an error begins, runs the rest of the candidate again and goes on looking,
        so that errors behind the first are found, too. Needs a history whose functions are live.

    Raises CannotCompareError where nothing was saved, or the inputs differ.
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
        raise TypeError(f"{name} must be a ModelHistory, as log_forward_pass gives it, or a file of one, got {got(value)}.")
    return value
