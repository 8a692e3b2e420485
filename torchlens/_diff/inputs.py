"""Whether both models were given the same input."""

from math import prod

from torchlens._diff.layouts import best_layout
from torchlens._diff.subject import Subject
from torchlens._recording.relative_error import are_whole, comparable
from torchlens._text.numbers import shape_text
from torchlens.errors import CannotCompareError

_ROUNDED = 4.0  # units: an input may have been cast


def paired_inputs(ours: Subject, theirs: Subject) -> list[tuple[int, int]]:
    """Pairs of inputs that hold the same numbers; an error where one of the reference's has
    none.
    """
    found: list[tuple[int, int]] = []
    free = list(theirs.side.graph.inputs)
    for r in ours.side.graph.inputs:
        value = ours.side.value(r)
        if value is None:
            continue
        eps = max(ours.side.epsilon, theirs.side.epsilon)
        best, nearest, limit = None, float("inf"), 0.0
        for c in free:
            other = theirs.side.value(c)
            if other is None or other.numel() != value.numel():
                continue
            error, layout = best_layout(comparable(value), comparable(other), 0.0)
            if layout is not None and error < nearest:
                best, nearest, limit = c, error, 0.0 if are_whole(value, other) else _ROUNDED * eps
        if best is None and _is_held(ours, r, theirs):
            continue
        if best is None or nearest > limit:
            raise CannotCompareError(
                _differs(ours, r, theirs, nearest if best is not None else None)
            )
        found.append((r, best))
        free.remove(best)
    return found


def _is_held(ours: Subject, r: int, theirs: Subject) -> bool:
    """Whether the candidate has it in another place: as a buffer, or made inside."""
    own = ours.prints[r]
    everywhere = (theirs.prints[c] for c in range(theirs.side.size))
    return own is not None and any(
        print_ is not None and own.apart(print_) <= 1e-6 for print_ in everywhere
    )


def _differs(ours: Subject, r: int, theirs: Subject, error: float | None) -> str:
    name = ours.side.log.boundary_addresses.get(r, ["input"])[0]
    size = prod(ours.side.rows[r].shape)
    for c in theirs.side.graph.inputs:
        if theirs.side.value(c) is None and prod(theirs.side.rows[c].shape) == size:
            path = theirs.side.log.boundary_addresses[c][0]
            return (
                f"The candidate has no saved value of its input ({path}), so nobody can tell "
                "whether both models were given the same. Log it with layers_to_save='all'."
            )
    shapes = [shape_text(tuple(theirs.side.rows[c].shape)) for c in theirs.side.graph.inputs]
    mine = shape_text(tuple(ours.side.rows[r].shape))
    if error is None:
        given = (
            f"the candidate was given {' and '.join(shapes)}"
            if shapes
            else "the candidate was given no tensor"
        )
        what = f"{name} is {mine}, {given}"
    else:
        what = f"the values of {name} ({mine}) are {error:.1e} apart"
    return f"The inputs differ: {what}. Log both models with the same input."
