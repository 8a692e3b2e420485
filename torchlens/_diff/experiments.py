"""Reasons found by experiment: one thing in a section is changed, the entries that depend on it run
again, and if the error disappears, the change is the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations, product
from typing import Any

import torch

from torchlens._diff.compared_model import ComparedModel, family, is_activation
from torchlens._diff.evidence import Constant, Evidence, TriedChange, number_text
from torchlens._diff.known_functions import ACTIVATIONS
from torchlens._replay.replay import Instead
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
Changes = Iterator[TriedChange]
_GONE = 64.0  # units of rounding: the largest error that is left with the right change
_LONGEST_AXIS = 4096
# The largest cost of the experiments on one divergence: one for each operation, and one more for
# each hundred thousand elements that it computes.
_BUDGET = 25_000
_ELEMENTS = 100_000


def experiments(evidence: Evidence) -> Iterator[str]:
    """The first change that removes the error, as a sentence. Adds experiments that exceed the
    budget to `evidence.untried`.
    """
    if not evidence.can_run:
        return
    left = float(_BUDGET)
    for name, changes in _EXPERIMENTS.items():
        for change in changes(evidence):
            model = evidence.ours if change.of_reference else evidence.theirs
            entries = evidence.affected(change)
            left -= sum(1 + _size(model, entry) / _ELEMENTS for entry in entries)
            if left < 0:
                evidence.untried.append(name)
                break
            units = evidence.units_left(change)
            if units <= _GONE and units < evidence.pair.units / 2:
                text = "0" if units == 0 else f"{units:.2g} eps"
                yield f"{change.says}, the error is {text}"
                return


def _size(model: ComparedModel, entry: int) -> int:
    return int(torch.Size(model.rows[entry].shape).numel())


def _steps(model: ComparedModel, entries: Sequence[int]) -> Iterator[tuple[str, str, list[int]]]:
    """The operations of a section as (label, type, entries), all passes of a layer together."""
    found: dict[str, list[int]] = {}
    for entry in entries:
        if model.is_operation(entry):
            found.setdefault(model.log.label_no_pass(entry), []).append(entry)
    for label, own in found.items():
        yield label, model.type_of(own[0]), own


# -- weights
# --------------------------------------------------------------------------------------------------


def _turned_weights(evidence: Evidence) -> Changes:
    odd = {pair.candidate for pair in evidence.weights.odd_ones()}
    for number, param in _params(evidence).items():
        for name, turned in _turned(param):
            alike = " others like it are;" if number in odd and name == "transposed" else ""
            weight = evidence.theirs.weights[number].name
            yield TriedChange(f"weight `{weight}` is not {name}:{alike} {name}", {number: turned})


def _params(evidence: Evidence) -> dict[int, Tensor]:
    params = evidence.theirs.log.recording.params
    used = evidence.weights_of(evidence.theirs, evidence.candidate)
    return {number: params[number].detach() for number in used if number < len(params)}


def _turned(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    shape = weight.shape
    if len(shape) == 2 and shape[0] == shape[1]:
        yield "transposed", weight.T
    if len(shape) == 4:
        pairs = [pair for pair in ((2, 3), (0, 1)) if shape[pair[0]] == shape[pair[1]]]
        for pair in pairs:
            yield "flipped", weight.flip(pair)
        for first, second in pairs[::-1]:
            yield f"transposed in its axes {first} and {second}", weight.transpose(first, second)


def _gates(evidence: Evidence) -> Changes:
    """The gates of a recurrent cell, which are blocks of its weights, in another order."""
    kinds = {family(evidence.theirs.type_of(entry)) for entry in evidence.candidate.entries}
    if not kinds & {"sigmoid", "tanh", "recurrent"}:
        return
    params = _params(evidence)
    largest = dict.fromkeys(max(param.shape, default=1) for param in params.values())
    for count, size in product((4, 3), largest):
        if size % count == 0:
            gated = {number: param for number, param in params.items() if size in param.shape}
            yield from _other_gate_orders(count, size, gated)


def _other_gate_orders(count: int, size: int, gated: dict[int, Tensor]) -> Changes:
    for order in list(permutations(range(count)))[1:]:
        changed = {number: _in_order(param, size, order) for number, param in gated.items()}
        said = " ".join(str(place + 1) for place in order)
        yield TriedChange(f"the {count} gates are in another order: in the order {said}", changed)


def _in_order(weight: Tensor, size: int, order: tuple[int, ...]) -> Tensor:
    axis = list(weight.shape).index(size)
    parts = weight.chunk(len(order), dim=axis)
    return torch.cat([parts[place] for place in order], dim=axis)


# -- constants
# --------------------------------------------------------------------------------------------------


def _other_constants(evidence: Evidence) -> Changes:
    """Each constant of the reference in place of each constant of the candidate that it may be."""
    ours, theirs = evidence.constants_apart()
    for c in theirs:
        for r in ours:
            is_float = isinstance(c.value, float)
            if type(c.value) is type(r.value) and (is_float or c.name == r.name):
                yield TriedChange(
                    f"{r.against(c)}: with {r}", instead={c.entry: _with_constant(c, r.value)}
                )
            if isinstance(c.value, float | int) and isinstance(r.value, float) and r.value:
                inverse = 1 / r.value  # one model divides, the other multiplies
                yield TriedChange(
                    f"1/{r} in the reference, {c} in the candidate: with {number_text(inverse)}",
                    instead={c.entry: _with_constant(c, inverse)},
                )


def _with_constant(constant: Constant, value: Any) -> Instead:
    def instead(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(constant.location, int):
            args[constant.location] = value
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, constant.location: value})

    return instead


# -- operations
# --------------------------------------------------------------------------------------------------


def _left_out(evidence: Evidence) -> Changes:
    """Each operation of the reference left out, then each of the candidate."""
    for label, _, entries in _steps(evidence.ours, evidence.reference.entries):
        module = evidence.ours.module_of(entries[0])
        name = f"{label} ({module})" if module else label
        for place in (0, 1):
            yield TriedChange(
                f"the candidate leaves out {name}: without it",
                instead=dict.fromkeys(entries, _argument(place)),
                of_reference=True,
            )
    for label, _, entries in _steps(evidence.theirs, evidence.candidate.entries):
        for place in (0, 1):
            yield TriedChange(
                f"{label} is not in the reference: without it",
                instead=dict.fromkeys(entries, _argument(place)),
            )


def _argument(place: int) -> Instead:
    """Returns one of the tensors among the arguments, if it has the size of the result."""

    def instead(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors = [arg for arg in [*args, *kwargs.values()] if isinstance(arg, Tensor)]
        if not isinstance(result, Tensor) or place >= len(tensors):
            raise NotReplayableError("it has no such argument")
        return tensors[place].reshape(result.shape)  # raises if the sizes differ

    return instead


def _other_order(evidence: Evidence) -> Changes:
    """The arguments of joins, differences, quotients and products in reverse order."""
    for label, kind, entries in _steps(evidence.theirs, evidence.candidate.entries):
        if family(kind) in ("join", "sub", "div", "product"):
            text = f"{label} takes its arguments in another order: the other way round"
            yield TriedChange(text, instead=dict.fromkeys(entries, _turned_round))


def _turned_round(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], list | tuple):
        return func(type(args[0])(reversed(args[0])), *args[1:], **kwargs)
    if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        raise NotReplayableError("it has no two tensors")
    return func(args[1], args[0], *args[2:], **kwargs)


def _other_activation(evidence: Evidence) -> Changes:
    for label, kind, entries in _steps(evidence.theirs, evidence.candidate.entries):
        for name, function in ACTIVATIONS.items() if is_activation(kind) else ():
            if name != "nothing":
                applied = _applied(function)
                yield TriedChange(f"{name} in place of {label}: so",
                             instead=dict.fromkeys(entries, applied))  # fmt: skip


def _applied(function: Callable[[Tensor], Tensor]) -> Instead:
    return lambda func, args, kwargs: function(args[0])


# -- the order of elements
# --------------------------------------------------------------------------------------------------


def _other_arrangement(evidence: Evidence) -> Changes:
    """What a view of the reference shows for what a view of the candidate does, of the same
    numbers.
    """
    model = evidence.theirs
    for r, c in evidence.rearranged():
        a, b = evidence.ours.value(r), model.value(c)
        if a is not None and b is not None:
            value = a.to(b.dtype)
            text = (
                f"{model.label(c)} ({model.place_of(c)}) puts the same numbers in another order "
                f"than {evidence.ours.label(r)}: in that order"
            )
            if c in evidence.candidate.entries:
                yield TriedChange(text, instead={c: _constantly(value)})
            else:
                yield TriedChange(text, given={c: value})


def _constantly(value: Tensor) -> Instead:
    return lambda func, args, kwargs: value


def _turned_inputs(evidence: Evidence) -> Changes:
    """The inputs of a section with two axes swapped, or with one axis split in two and these
    swapped.
    """
    model = evidence.theirs
    for entry in evidence.candidate.inputs:
        value = model.value(entry)
        for name, changed in () if value is None else _rearrangements(value):
            text = f"what {model.label(entry)} ({model.place_of(entry)}) gives {name}"
            yield TriedChange(text, given={entry: changed})


def _rearrangements(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    for first, second in combinations(range(value.dim()), 2):
        if value.shape[first] == value.shape[second] > 1:
            words = f"has its axes {first} and {second} swapped: the other way round"
            yield words, value.transpose(first, second)
    for axis, size in enumerate(value.shape):
        for rows in range(2, size // 2 + 1) if 4 <= size <= _LONGEST_AXIS else ():
            if size % rows == 0:
                grid = value.unflatten(axis, (rows, size // rows)).transpose(axis, axis + 1)
                words = (
                    f"goes through {rows} x {size // rows} places along axis {axis} by columns, "
                    "not by rows: the other way round"
                )
                yield words, grid.flatten(axis, axis + 1)


# In the order in which they are tried, by the names with which they are reported as not tried.
_EXPERIMENTS: dict[str, Callable[[Evidence], Changes]] = {
    "weights transposed or flipped": _turned_weights,
    "the reference's constants": _other_constants,
    "gates in another order": _gates,
    "operations left out": _left_out,
    "arguments in another order": _other_order,
    "views in another order": _other_arrangement,
    "inputs with other axes": _turned_inputs,
    "other activations": _other_activation,
}
