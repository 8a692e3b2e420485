"""Explanations tested by experiment: change something in a section, run it again, and see whether
the error is gone.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from typing import Any

import torch

from torchlens._diff.divergence import Origin
from torchlens._diff.evidence import Constant, Evidence, number_text
from torchlens._diff.families import acts, family
from torchlens._diff.hypotheses import ACTIVATIONS
from torchlens._diff.subject import Subject
from torchlens._replay.replay import Instead, NotReplayableError

Tensor = torch.Tensor
_GONE = 64.0  # units of rounding: so little is left of an error that is explained
_MOST_OPERATIONS = 2000
_LONGEST_AXIS = 4096


def units_left(
    origin: Origin,
    evidence: Evidence,
    weights: dict[int, Tensor] | None = None,
    instead: dict[int, Instead] | None = None,
    given: dict[int, Tensor] | None = None,
) -> float:
    """The error that is left when the candidate's section runs with other weights, functions or
    inputs.
    """
    try:
        return evidence.units(origin, evidence.again(origin, weights, instead, given_instead=given))
    except NotReplayableError:
        return float("inf")


def _is_gone(units: float, origin: Origin) -> bool:
    return units <= _GONE and units < origin.pair.units / 2


def _left(units: float) -> str:
    return f"the error is {'0' if units == 0 else f'{units:.2g} eps'}"


def _steps(subject: Subject, entries: tuple[int, ...]) -> Iterator[tuple[str, list[int]]]:
    """The operations of a section, all passes of a layer together, with its label."""
    found: dict[str, list[int]] = {}
    for entry in entries:
        if subject.side.is_operation(entry):
            found.setdefault(subject.side.log.label_no_pass(entry), []).append(entry)
    yield from found.items()


# -- weights
# --------------------------------------------------------------------------------------------------


def turned_weights(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries each weight transposed or flipped."""
    side = evidence.theirs.side
    odd = {pair.candidate for pair in evidence.weights.odd_ones(evidence.ours.side.weights)}
    for number in _own_params(origin, evidence):
        for name, changed in _turned(side.log.recording.params[number].detach()):
            units = units_left(origin, evidence, {number: changed})
            if _is_gone(units, origin):
                alike = " others like it are;" if number in odd and name == "transposed" else ""
                yield (
                    f"weight `{side.weights[number].name}` is not {name}:{alike} {name}, "
                    f"{_left(units)}"
                )
                return


def _own_params(origin: Origin, evidence: Evidence) -> list[int]:
    params = evidence.theirs.side.log.recording.params
    return [
        number
        for number in evidence.weights_of(evidence.theirs, origin.candidate)
        if number < len(params)
    ]


def _turned(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if weight.dim() == 2:
        if weight.shape[0] == weight.shape[1]:
            yield "transposed", weight.T
    elif weight.dim() == 4:
        if weight.shape[2] == weight.shape[3]:
            yield "flipped", weight.flip(2, 3)
        if weight.shape[0] == weight.shape[1]:
            yield "flipped", weight.flip(0, 1)
        for first, second in ((0, 1), (2, 3)):
            if weight.shape[first] == weight.shape[second]:
                yield (
                    f"transposed in its axes {first} and {second}",
                    weight.transpose(first, second),
                )


def gates(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries the gates of a recurrent cell in another order: blocks of every weight that has
    them.
    """
    kinds = {family(evidence.theirs.side.type_of(entry)) for entry in origin.candidate.entries}
    if not kinds & {"sigmoid", "tanh", "recurrent"}:
        return
    params, chosen = evidence.theirs.side.log.recording.params, _own_params(origin, evidence)
    for count in (4, 3):
        sizes = [
            max(params[number].shape)
            for number in chosen
            if max(params[number].shape, default=1) % count == 0
        ]
        for size in dict.fromkeys(sizes):
            for order in list(permutations(range(count)))[1:]:
                changed = {
                    n: _reordered(params[n].detach(), size, order)
                    for n in chosen
                    if size in params[n].shape
                }
                units = units_left(origin, evidence, changed)
                if _is_gone(units, origin):
                    said = " ".join(str(place + 1) for place in order)
                    yield (
                        f"the {count} gates are in another order: in the order {said}, "
                        f"{_left(units)}"
                    )
                    return


def _reordered(weight: Tensor, size: int, order: tuple[int, ...]) -> Tensor:
    axis = list(weight.shape).index(size)
    parts = weight.chunk(len(order), dim=axis)
    return torch.cat([parts[place] for place in order], dim=axis)


# -- constants
# --------------------------------------------------------------------------------------------------


def other_constants(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries each constant of the reference in place of each of the candidate's that it could stand
    for.
    """
    ours, theirs = evidence.constants_apart(origin)
    for c in theirs:
        for r in ours:
            if type(c.value) is type(r.value) and (isinstance(c.value, float) or c.name == r.name):
                units = units_left(origin, evidence, None, {c.entry: _with_constant(c, r.value)})
                if _is_gone(units, origin):
                    yield f"{r.against(c)}: with {r}, {_left(units)}"
                    return
            if (
                isinstance(c.value, float | int) and isinstance(r.value, float) and r.value
            ):  # one divides, one multiplies
                inverse = 1 / r.value
                units = units_left(origin, evidence, None, {c.entry: _with_constant(c, inverse)})
                if _is_gone(units, origin):
                    yield (
                        f"1/{r} in the reference, {c} in the candidate: with "
                        f"{number_text(inverse)}, {_left(units)}"
                    )
                    return


def _with_constant(constant: Constant, value: Any) -> Instead:
    def instead(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(constant.location, int):
            args = [
                value if place == constant.location else item for place, item in enumerate(args)
            ]
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, constant.location: value})

    return instead


def other_beginning(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries zeros for what a section begins with."""
    for label, entries in _steps(evidence.theirs, origin.candidate.entries):
        if evidence.theirs.side.type_of(entries[0]) in (
            "ones",
            "oneslike",
            "full",
            "broadcastindim",
        ):
            instead: Instead = lambda func, args, kwargs: torch.zeros_like(func(*args, **kwargs))  # noqa: E731
            units = units_left(origin, evidence, None, dict.fromkeys(entries, instead))
            if _is_gone(units, origin):
                yield f"with zeros for {label}, {_left(units)}"
                return


# -- operations
# --------------------------------------------------------------------------------------------------


def left_out(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries to leave out each operation of the reference, then of the candidate, that gives the
    shape it is given.
    """
    for label, entries in _steps(evidence.ours, origin.reference.entries):
        for place in (0, 1):
            try:
                result = evidence.again(
                    origin, None, dict.fromkeys(entries, _argument(place)), of_reference=True
                )
            except NotReplayableError:
                continue
            units = evidence.units_between(origin, result)
            if _is_gone(units, origin):
                yield (
                    f"the candidate leaves out {label}{_of_module(evidence.ours, entries[0])}: "
                    f"without it, {_left(units)}"
                )
                return
    for label, entries in _steps(evidence.theirs, origin.candidate.entries):
        for place in (0, 1):
            units = units_left(origin, evidence, None, dict.fromkeys(entries, _argument(place)))
            if _is_gone(units, origin):
                yield f"{label} is not in the reference: without it, {_left(units)}"
                return


def _of_module(subject: Subject, entry: int) -> str:
    module = subject.side.module_of(entry)
    return f" ({module})" if module else ""


def _argument(place: int) -> Instead:
    """The result is one of the tensors that go in, if that has its shape."""

    def instead(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors = [arg for arg in [*args, *kwargs.values()] if isinstance(arg, Tensor)]
        if (
            not isinstance(result, Tensor)
            or place >= len(tensors)
            or tensors[place].numel() != result.numel()
        ):
            raise NotReplayableError("its shape differs from that of its input")
        return tensors[place].reshape(result.shape)

    return instead


def other_order(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries the arguments of what joins, divides, subtracts or multiplies matrices in the other
    order.
    """
    for label, entries in _steps(evidence.theirs, origin.candidate.entries):
        kind = family(evidence.theirs.side.type_of(entries[0]))
        if kind in ("join", "sub", "div", "product"):
            units = units_left(origin, evidence, None, dict.fromkeys(entries, _turned_round))
            if _is_gone(units, origin):
                yield (
                    f"{label} takes its arguments in another order: the other way round, "
                    f"{_left(units)}"
                )
                return


def _turned_round(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], list | tuple):
        return func(type(args[0])(reversed(args[0])), *args[1:], **kwargs)
    if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        raise NotReplayableError("it has no two tensors")
    return func(args[1], args[0], *args[2:], **kwargs)


def other_activation(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries other functions in place of an activation inside the section."""
    for label, entries in _steps(evidence.theirs, origin.candidate.entries):
        if not acts(evidence.theirs.side.type_of(entries[0])):
            continue
        for name, function in ACTIVATIONS.items():
            units = units_left(origin, evidence, None, dict.fromkeys(entries, _applied(function)))
            if _is_gone(units, origin) and name != "nothing":
                yield f"{name} in place of {label}: so, {_left(units)}"
                return


def _applied(function: Callable[[Tensor], Tensor]) -> Instead:
    def instead(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(args[0])

    return instead


# -- the order of elements
# ---------------------------------------------------------------------------------------------


def other_arrangement(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries what a view of the reference shows in place of what a view of the candidate does, of
    the same numbers.
    """
    for r, c in evidence.rearranged(origin):
        a, b = evidence.ours.side.value(r), evidence.theirs.side.value(c)
        assert a is not None
        assert b is not None
        value = a.to(b.dtype)
        is_inside = c in origin.candidate.entries
        instead, given = ({c: _given(value)}, None) if is_inside else (None, {c: value})
        units = units_left(origin, evidence, None, instead, given)
        if _is_gone(units, origin):
            side = evidence.theirs.side
            labels = f"{side.label(c)} ({side.place_of(c)})", evidence.ours.side.label(r)
            yield (
                f"{labels[0]} puts the same numbers in another order than {labels[1]}: in that "
                f"order, {_left(units)}"
            )
            return


def turned_inputs(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Tries what goes into a section with two axes swapped, and with the two axes that one axis may
    be made of.
    """
    side = evidence.theirs.side
    for entry in origin.candidate.inputs:
        value = side.value(entry)
        for name, changed in () if value is None else _rearrangements(value):
            units = units_left(origin, evidence, given={entry: changed})
            if _is_gone(units, origin):
                yield (
                    f"what {side.label(entry)} ({side.place_of(entry)}) gives {name}, "
                    f"{_left(units)}"
                )
                return


def _rearrangements(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    for first, second in combinations(range(value.dim()), 2):
        if value.shape[first] == value.shape[second] > 1:
            yield (
                f"has its axes {first} and {second} swapped: the other way round",
                value.transpose(first, second),
            )
    for axis, size in enumerate(value.shape):
        for rows in range(2, size // 2 + 1) if 4 <= size <= _LONGEST_AXIS else ():
            if size % rows == 0:
                grid = (
                    value.unflatten(axis, (rows, size // rows))
                    .transpose(axis, axis + 1)
                    .flatten(axis, axis + 1)
                )
                words = (
                    f"goes through {rows} x {size // rows} places along axis {axis} by columns, "
                    "not by rows"
                )
                yield f"{words}: the other way round", grid


def _given(value: Tensor) -> Instead:
    def instead(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return value

    return instead


def guarded(
    experiment: Callable[[Origin, Evidence], Iterator[str]],
) -> Callable[[Origin, Evidence], Iterator[str]]:
    """Not where nothing can run again, or too much would have to."""

    def guess(origin: Origin, evidence: Evidence) -> Iterator[str]:
        if evidence.replay is not None and len(origin.candidate.entries) <= _MOST_OPERATIONS:
            yield from experiment(origin, evidence)

    return guess


EXPERIMENTS = tuple(
    guarded(experiment)
    for experiment in (
        turned_weights, other_constants, left_out, other_order, other_arrangement, turned_inputs,
        other_activation, gates,
        other_beginning,
    )
)  # fmt: skip
