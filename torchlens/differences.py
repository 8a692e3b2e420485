"""The public function that compares: check the options, then the comparing room."""

from collections.abc import Mapping
from numbers import Real

from torchlens.comparing import Diff, compare_histories
from torchlens.model_history import ModelHistory
from torchlens.wording import got

__all__ = ["diff"]


def diff(
    reference: ModelHistory,
    candidate: ModelHistory,
    *,
    tolerance: float = 16,
    mapping: Mapping[str, str] | None = None,
    isolate: bool = False,
) -> Diff:
    """Finds where two implementations of a model part: the first layer that computes something else from the same inputs.

    Both are histories of the same input with all values saved, of the same or another library, type or version. Which layer
    is which is found from weights, values and order, whatever they are called and in however many steps they are done.

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
    for name, value in (("reference", reference), ("candidate", candidate)):
        if not isinstance(value, ModelHistory):
            raise TypeError(f"{name} must be a ModelHistory, as log_forward_pass gives it, got {got(value)}.")
    if not isinstance(tolerance, Real) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number of units of rounding, got {got(tolerance)}.")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0 (units of rounding), got {tolerance}.")
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate must be True or False, got {got(isolate)}.")
    return compare_histories(reference, candidate, float(tolerance), mapping, isolate)
