"""NaN and Inf: ranges of values, where they went wrong, and the rules by which that is decided."""

from torchlens.nonfinite.quick_look import has_nonfinite
from torchlens.nonfinite.record import NonFinite
from torchlens.nonfinite.rules import FROM_OUTSIDE, HINT, Given, Origin, Origins, numbers_in
from torchlens.nonfinite.values import ValueRange, has_numbers, is_finite, value_range

__all__ = [
    "FROM_OUTSIDE",
    "HINT",
    "Given",
    "NonFinite",
    "Origin",
    "Origins",
    "ValueRange",
    "has_nonfinite",
    "has_numbers",
    "is_finite",
    "numbers_in",
    "value_range",
]
