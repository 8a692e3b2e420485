"""Pairs that the user names: modules, labels or weights, or patterns of them with `*`."""

import re
from collections.abc import Mapping

from torchlens._replay.entries import Entries
from torchlens._text.wording import did_you_mean, got


def fixed_by_name(
    mapping: Mapping[str, str], ours: Entries, theirs: Entries
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of entries and pairs of weights. `{'h.*.ln_1': 'blocks.*.norm1'}` says it of all layers
    at once.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(
            "mapping must be a dict from names in the reference to names in the candidate, got "
            f"{got(mapping)}."
        )
    entries: list[tuple[int, int]] = []
    weights: list[tuple[int, int]] = []
    names = [_named_entries(side) for side in (ours, theirs)]
    stored = [
        {weight.name: number for number, weight in enumerate(side.weights)}
        for side in (ours, theirs)
    ]
    for first, second in mapping.items():
        for name in (first, second):
            if not isinstance(name, str):
                raise TypeError(
                    f"mapping must be a dict from names to names, got {got(name)} in it."
                )
        number = len(entries) + len(weights)
        for (a, b), found in ((names, entries), (stored, weights)):
            for name, place in a.items():
                target = _translated(name, first, second)
                if target is not None and target in b:
                    found.append((place, b[target]))
        if len(entries) + len(weights) == number:
            raise ValueError(
                _unknown(first, second, [*names[0], *stored[0]], [*names[1], *stored[1]])
            )
    return entries, weights


def _named_entries(side: Entries) -> dict[str, int]:
    """Labels, and modules for what they return (the last pass of each)."""
    calls = side.log.recording.module_calls
    found = {side.label(entry): entry for entry in range(side.size)}
    for entry, exited in side.graph.modules_exited.items():
        for call in exited:
            if calls[call].address:
                found.setdefault(calls[call].address, entry)
                found[f"{calls[call].address}:{calls[call].pass_num}"] = entry
    return found


def _translated(name: str, pattern: str, target: str) -> str | None:
    """`blocks.3.norm1` for `h.3.ln_1`, of `h.*.ln_1` and `blocks.*.norm1`; None where the pattern
    does not fit.
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
