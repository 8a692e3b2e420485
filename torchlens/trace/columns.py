"""Columns of numbers in the JSON of a trace: short ones are lists, long ones the bytes of their numbers as base64.

Ten thousand operations have a hundred thousand such numbers, and reading them as JSON would take longer than all else.
"""

import base64
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from torchlens.errors import TraceError
from torchlens.trace.plain_text import shown

__all__ = ["lists_form", "lists_of", "numbers_form", "numbers_of"]

_SHORT = 256  # numbers that stay a list
_WHOLE = ("<i1", "<i2", "<i4", "<i8")
_KINDS = frozenset({*_WHOLE, "<f8"})
_WITH_NONE = frozenset({int, type(None)})


def numbers_form(numbers: Sequence[Any]) -> Any:
    """A column of numbers, or of numbers and None; anything else stays as it is."""
    types = set(map(type, numbers)) if len(numbers) >= _SHORT else set()
    if types == {float}:
        return _packed("<f8", numbers)
    if not types or not types <= _WITH_NONE:
        return numbers
    known = [number for number in numbers if number is not None] if types != {int} else numbers
    least, most = min(known, default=0), max(known, default=0)
    for kind in _WHOLE:
        limits = np.iinfo(kind)
        if limits.min < least and most <= limits.max:  # the least of all stands for None
            if types == {int}:
                return _packed(kind, numbers)
            none = int(limits.min)
            return _packed(kind, [none if number is None else number for number in numbers]) | {"none": none}
    return numbers


def numbers_of(form: Any) -> list[Any]:
    """The way back. Whether the numbers make sense is for the caller to see."""
    if type(form) is list:
        return form
    kind = form["packed"]
    if kind not in _KINDS:
        raise TraceError(f"Numbers cannot be packed as {shown(kind)}.")
    found: list[Any] = np.frombuffer(base64.b64decode(form["base64"], validate=True), kind).tolist()
    if "none" in form:
        none = form["none"]
        return [None if number == none else number for number in found]
    return found


def lists_form(lists: Sequence[Any]) -> Any:
    """A column of short lists of numbers and None; anything else stays as it is."""
    if len(lists) < _SHORT or not set(map(type, lists)) <= {list, tuple}:
        return lists
    flat = list(chain.from_iterable(lists))
    if not set(map(type, flat)) <= _WITH_NONE:
        return lists
    return {"counts": numbers_form(list(map(len, lists))), "numbers": numbers_form(flat)}


def lists_of(form: Any) -> list[Any]:
    """The way back; of what was packed, tuples."""
    if type(form) is list:
        return form
    counts, flat = numbers_of(form["counts"]), tuple(numbers_of(form["numbers"]))
    if set(map(type, counts)) != {int} or min(counts) < 0 or sum(counts) != len(flat):
        raise TraceError("Lists that are packed must have as many numbers as they say.")
    return [flat[start:end] for start, end in pairwise([0, *accumulate(counts)])]


def _packed(kind: str, numbers: Sequence[Any]) -> dict[str, Any]:
    return {"packed": kind, "base64": base64.b64encode(np.array(numbers, kind).tobytes()).decode("ascii")}
