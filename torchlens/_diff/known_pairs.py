"""The pairs that are known before matching: inputs, outputs, and those that the user names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torchlens._diff.compared_model import ComparedModel
from torchlens._diff.layouts import best_layout
from torchlens._recording.operations import IDENTITY, OUTPUT
from torchlens._recording.tolerance import are_whole, comparable
from torchlens._text.error_wording import did_you_mean, got
from torchlens._text.numbers import shape_text
from torchlens.errors import CannotCompareError

_ROUNDED = 4.0  # units: an input may have been cast
_SAME_NUMBERS = 1e-6  # fingerprints of one input differ by less


# -- inputs
# --------------------------------------------------------------------------------------------------


def paired_inputs(ours: ComparedModel, theirs: ComparedModel) -> list[tuple[int, int]]:
    """Pairs of inputs that hold the same numbers; raises CannotCompareError if one of the
    reference's has no counterpart.
    """
    found: dict[int, int] = {}
    free = list(theirs.graph.inputs)
    for r in ours.graph.inputs:
        if ours.value(r) is None:
            continue
        error, c, limit = min(_input_errors(ours, r, theirs, free), default=(None, -1, 0.0))
        if error is not None and error <= limit:
            found[r] = c
            free.remove(c)
        elif error is not None or not _is_held(ours, r, theirs):
            raise CannotCompareError(_differs(ours, r, theirs, error))
    return list(found.items())


def _input_errors(
    ours: ComparedModel, r: int, theirs: ComparedModel, free: Sequence[int]
) -> Iterator[tuple[float, int, float]]:
    """The error between an input of the reference and each of the candidate's that fits, the entry
    of that, and the largest error that is rounding.
    """
    value = ours.value(r)
    for c in free:
        other = theirs.value(c)
        if value is not None and other is not None:
            error, layout = best_layout(comparable(value), comparable(other), 0.0)
            eps = 0.0 if are_whole(value, other) else max(ours.epsilon, theirs.epsilon)
            if layout is not None:
                yield error, c, _ROUNDED * eps


def _is_held(ours: ComparedModel, r: int, theirs: ComparedModel) -> bool:
    """True if the candidate has the value as a buffer, or computes it."""
    own = ours.prints[r]
    return own is not None and any(
        other is not None and own.apart(other) <= _SAME_NUMBERS for other in theirs.prints
    )


def _differs(ours: ComparedModel, r: int, theirs: ComparedModel, error: float | None) -> str:
    name = ours.log.boundary_addresses.get(r, ["input"])[0]
    mine, given = tuple(ours.rows[r].shape), theirs.graph.inputs
    for c in given:
        if theirs.value(c) is None and prod(theirs.rows[c].shape) == prod(mine):
            path = theirs.log.boundary_addresses[c][0]
            return (
                f"The candidate has no saved value of its input ({path}), so whether "
                "both models were given the same is unknown. Log it with layers_to_save='all'."
            )
    shapes = " and ".join(shape_text(tuple(theirs.rows[c].shape)) for c in given) or "no tensor"
    what = f"{name} is {shape_text(mine)}, the candidate was given {shapes}"
    if error is not None:
        what = f"the values of {name} ({shape_text(mine)}) are {error:.1e} apart"
    return f"The inputs differ: {what}. Log both models with the same input."


# -- outputs
# --------------------------------------------------------------------------------------------------


class PairedOutputs(NamedTuple):
    """Pairs of outputs, and those that only one side returns, as entries."""

    pairs: list[tuple[int, int]]
    missing: list[int]  # in the candidate
    extra: list[int]


def paired_outputs(ours: ComparedModel, theirs: ComparedModel) -> PairedOutputs:
    """Pairs outputs by their keys and attributes, the others by order; if one side has more, the
    nearest by value.
    """
    first, second = list(ours.graph.outputs), list(theirs.graph.outputs)
    are_as_many = len(first) == len(second)
    found = _same_paths(ours, theirs, are_as_many)
    if not are_as_many:
        _pair_nearest(ours, theirs, found)
    taken = set(found.values())
    rest = [r for r in first if r not in found], [c for c in second if c not in taken]
    in_order = list(zip(*rest, strict=False))
    count = len(in_order)
    return PairedOutputs(sorted([*found.items(), *in_order]), rest[0][count:], rest[1][count:])


def _same_paths(ours: ComparedModel, theirs: ComparedModel, with_places: bool) -> dict[int, int]:
    """Outputs with the same path; `with_places` also those that only have a place in a tuple."""
    of_path = {output_path(theirs, c): c for c in theirs.graph.outputs}
    found: dict[int, int] = {}
    for r in ours.graph.outputs:
        path = output_path(ours, r)
        is_named = not all(part.isdigit() for part in path.split(".")[1:])
        if (with_places or is_named) and path in of_path:
            found[r] = of_path.pop(path)
    return found


def _pair_nearest(ours: ComparedModel, theirs: ComparedModel, found: dict[int, int]) -> None:
    taken = set(found.values())
    prints = [{entry: own for entry in model.graph.outputs if (own := model.prints[entry])}
              for model in (ours, theirs)]  # fmt: skip
    apart = [(own.apart(other), r, c) for r, own in prints[0].items()
             for c, other in prints[1].items()]  # fmt: skip
    for distance, r, c in sorted(apart):
        if r not in found and c not in taken and distance < float("inf"):
            found[r] = c
            taken.add(c)


def output_path(model: ComparedModel, entry: int) -> str:
    """`output.logits`"""
    return model.log.boundary_addresses.get(entry, ["output"])[0]


def shown_by(model: ComparedModel, entry: int) -> int:
    """The entry whose value an output shows."""
    while model.rows[entry].operation in (OUTPUT, IDENTITY) and model.parents[entry]:
        entry = model.parents[entry][0]
    return entry


def saved_output(model: ComparedModel, entry: int) -> int:
    """An output, or the entry that it shows if only that was saved."""
    return entry if model.value(entry) is not None else shown_by(model, entry)


# -- names
# --------------------------------------------------------------------------------------------------

Pairs = list[tuple[int, int]]


def pairs_by_name(
    mapping: Mapping[str, str], ours: ComparedModel, theirs: ComparedModel
) -> tuple[Pairs, Pairs]:
    """The pairs of entries and of weights that `mapping` names. `*` in the names of modules, layers
    and weights matches a part: `{'h.*.ln_1': 'blocks.*.norm1'}`.
    """
    if not isinstance(mapping, Mapping) or not all(
        isinstance(name, str) for pair in mapping.items() for name in pair
    ):
        raise TypeError(
            "mapping must be a dict from names in the reference to names in the candidate, got "
            f"{got(mapping)}."
        )
    entries = _named_entries(ours), _named_entries(theirs)
    weights = _named_weights(ours), _named_weights(theirs)
    found: tuple[Pairs, Pairs] = ([], [])
    for pattern, target in mapping.items():
        matches = [_matching(pattern, target, *named) for named in (entries, weights)]
        if not any(matches):
            known = [[*entries[side], *weights[side]] for side in (0, 1)]
            raise ValueError(_unknown(pattern, target, *known))
        for pairs, new in zip(found, matches, strict=True):
            pairs.extend(new)
    return found


def _matching(pattern: str, target: str, ours: dict[str, int], theirs: dict[str, int]) -> Pairs:
    """The pairs of names that fit a pattern and its target."""
    others = {name: _translated(name, pattern, target) for name in ours}
    return [(ours[name], theirs[other]) for name, other in others.items() if other in theirs]


def _named_weights(model: ComparedModel) -> dict[str, int]:
    return {weight.name: number for number, weight in enumerate(model.weights)}


def _named_entries(model: ComparedModel) -> dict[str, int]:
    """Entries by label, and by the module (and pass) that returns them."""
    calls = model.log.recording.module_calls
    found = {model.label(entry): entry for entry in range(model.size)}
    for entry, exited in model.graph.modules_exited.items():
        for call in exited:
            if calls[call].address:
                found.setdefault(calls[call].address, entry)
                found[f"{calls[call].address}:{calls[call].pass_num}"] = entry
    return found


def _translated(name: str, pattern: str, target: str) -> str | None:
    """`blocks.3.norm1` for `h.3.ln_1`, `h.*.ln_1` and `blocks.*.norm1`; None if the pattern does
    not match.
    """
    expression = "([^.]+)".join(map(re.escape, pattern.split("*")))
    fits = re.fullmatch(expression, name)
    if fits is None:
        return None
    parts = target.split("*")
    if len(parts) - 1 != len(fits.groups()):
        return target if len(parts) == 1 else None
    return "".join(part + stars for part, stars in zip(parts, (*fits.groups(), ""), strict=True))


def _unknown(first: str, second: str, ours: list[str], theirs: list[str]) -> str:
    known = any(_translated(name, first, second) is not None for name in ours)
    name, names, whose = (second, theirs, "candidate") if known else (first, ours, "reference")
    return (
        f"mapping must name modules, layers or weights: the {whose} has none called {name!r}. "
        f"{did_you_mean(name, names)}"
    ).rstrip()
