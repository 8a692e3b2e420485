"""Columns of numbers in the JSON of a trace: short ones are lists, long ones the bytes of their
numbers as base64.

Ten thousand operations have a hundred thousand such numbers, and reading them as JSON would take
longer than all else.
"""

import base64
from collections.abc import Sequence
from itertools import accumulate, chain
from math import isfinite
from typing import Any

import numpy as np

from torchlens._text.plain_text import shown
from torchlens.errors import TraceError

_SHORT = 256  # numbers that stay a list
_WHOLE = ("<i1", "<i2", "<i4", "<i8")
_KINDS = frozenset({*_WHOLE, "<f8"})
_FAR = 1 << 40  # no list is as long
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
            return _packed(kind, [none if number is None else number for number in numbers]) | {
                "none": none
            }
    return numbers


def numbers_of(form: Any) -> list[Any]:
    """The way back. Whether the numbers make sense is for the caller to see."""
    if type(form) is list:
        return form
    array = _unpacked(form)
    if "none" not in form:
        return array.tolist()
    none = form["none"]
    if (array == none).all():
        return [None] * len(array)
    return [None if number == none else number for number in array.tolist()]


def times_of(form: Any) -> list[float]:
    """The way back, after seeing that all are finite numbers."""
    if type(form) is not list and "none" not in form:
        array = _unpacked(form)
        if np.isfinite(array).all():
            return array.tolist()
    numbers = numbers_of(form)
    if set(map(type, numbers)) - {int, float} or not all(map(isfinite, numbers)):
        raise TraceError("The times of a call must be numbers.")
    return numbers


def whole_numbers_of(form: Any, end: int, start: int = 0) -> list[int]:
    """The way back, after seeing that all are whole numbers from `start` on and less than `end`."""
    if type(form) is list or "none" in form:
        numbers = numbers_of(form)
        check_numbers(numbers, end, start)
        return numbers
    array = _unpacked(form)
    numbers = array.tolist()
    if array.dtype.kind != "i" or (len(array) and not (array.min() >= start and array.max() < end)):
        check_numbers(numbers, end, start)
    return numbers


def check_numbers(numbers: Sequence[Any], end: int, start: int = 0) -> None:
    """Sees that all are whole numbers from `start` on and less than `end`."""
    if not numbers:
        return
    if set(map(type, numbers)) != {int} or min(numbers) < start or max(numbers) >= end:
        raise TraceError(f"Numbers must be from {start} to {end - 1}, not {shown(list(numbers))}.")


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
    counts, flat = whole_numbers_of(form["counts"], _FAR), tuple(numbers_of(form["numbers"]))
    if not counts or sum(counts) != len(flat):
        raise TraceError("Lists that are packed must have as many numbers as they say.")
    ends = list(accumulate(counts))
    return list(map(flat.__getitem__, map(slice, [0, *ends[:-1]], ends)))


def refer_back(
    form: Any, lists: Sequence[Sequence[Any]], least: int, may_be_none: bool = False
) -> bool:
    """Whether `lists`, which were made of `form`, have only numbers from `least` on that are less
    than the place of their list, or None. Not all that do are known to: what is no number at all is
    for the caller to see."""
    is_packed = type(form) is not list and type(form["numbers"]) is not list
    try:
        if is_packed and ("none" not in form["numbers"] or may_be_none):
            packed = _unpacked(form["numbers"])
            if packed.dtype.kind != "i":
                return False
            numbers = packed.astype(np.int64)
            if "none" in form["numbers"]:
                numbers[numbers == form["numbers"]["none"]] = least
        else:
            numbers = _as_array(list(chain.from_iterable(lists)), least if may_be_none else None)
    except (OverflowError, ValueError):
        return False
    places = np.repeat(np.arange(len(lists)), list(map(len, lists)))
    return bool(np.all((numbers < places) & (numbers >= least)))


def _as_array(numbers: list[Any], none: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    types = set(map(type, numbers))
    if not types <= ({int} if none is None else _WITH_NONE):
        raise ValueError("They are not numbers.")
    return np.array(
        numbers if types <= {int} else [none if one is None else one for one in numbers], np.int64
    )


def _unpacked(form: Any) -> np.ndarray[Any, Any]:
    kind = form["packed"]
    if kind not in _KINDS:
        raise TraceError(f"Numbers cannot be packed as {shown(kind)}.")
    if type(form.get("none", 0)) is not int:
        raise TraceError(f"A whole number must stand for None, not {shown(form['none'])}.")
    return np.frombuffer(base64.b64decode(form["base64"], validate=True), kind)


def _packed(kind: str, numbers: Sequence[Any]) -> dict[str, Any]:
    return {
        "packed": kind,
        "base64": base64.b64encode(np.array(numbers, kind).tobytes()).decode("ascii"),
    }
