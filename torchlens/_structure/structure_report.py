"""Whether a model has the structure that a file says, in words."""

from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from torchlens._history.correspondence import match
from torchlens._history.model_history import ModelHistory
from torchlens._history.structure_hash import structure_hash, structure_lines
from torchlens._page.differences import Difference, find_differences
from torchlens._page.page_data import carried_data
from torchlens._page.pairs import Side, matched_pairs
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._structure.structure_file import StoredStructure

_MOST_LISTED = 20


@dataclass(frozen=True)
class StructureReport:
    """The result of a check; print it. `differences` has a line each, the most telling ones."""

    path: Path
    model: str
    expected: str
    found: str
    differences: list[str] = field(default_factory=list)
    made_by: str = ""

    @property
    def ok(self) -> bool:
        """Whether the structures are equal."""
        return self.expected == self.found

    def __str__(self) -> str:
        if self.ok:
            return f"{self.model} has the structure in {self.path.name} ({self.found})."
        lines = "\n".join(f"  {line}" for line in self.differences)
        return (
            f"{self.model} has another structure than {self.path.name} says ({self.found}, there "
            f"{self.expected}{self.made_by}):\n{lines}\n"
            "If that is intended, write the file anew: update=True, the environment variable "
            "TORCHLENS_UPDATE=1, or torchlens check --update."
        )


def structure_report(stored: StoredStructure, history: ModelHistory, path: Path) -> StructureReport:
    """Compares a model with the structure in a file."""
    found = structure_hash(history._log)
    if found == stored.hash:
        return StructureReport(path, history.model_name, stored.hash, found)
    versions = ", ".join(f"{name} {number}" for name, number in stored.made_by.items())
    return StructureReport(
        path,
        history.model_name,
        stored.hash,
        found,
        _differences(stored, history),
        f", by {versions}",
    )


def _differences(stored: StoredStructure, history: ModelHistory) -> list[str]:
    a, b = stored.history, history
    with unseen(), NoTorchFunction():
        sides = Side(a, carried_data(a, {}, "file")), Side(b, carried_data(b, {}, "model"))
        found = find_differences(*sides, matched_pairs(*sides, match(a, b)))
    listed = [
        one for one in found if one.is_listed and not one.follows and one.words.keys() - _VALUES
    ]
    words = [_line(one, sides) for one in listed[:_MOST_LISTED]]
    rest = len(listed) - len(words)
    following = sum(one.follows for one in found)
    if rest:
        words.append(f"and {rest} more")
    if following:
        words.append(f"(results that differ in shape or dtype because of these: {following})")
    return words or _differing_lines(stored.lines, structure_lines(history._log))


_VALUES = {"values", "weights"}


def _line(difference: Difference, sides: tuple[Side, Side]) -> str:
    words = [
        f"{kind}: {text}" if text else kind
        for kind, text in difference.words.items()
        if kind not in _VALUES
    ]
    names = [
        _name_of(side, number)
        for side, number in zip(sides, (difference.a, difference.b), strict=True)
        if number >= 0
    ]
    return f"{' → '.join(dict.fromkeys(names))}: {'; '.join(words)}"


def _name_of(side: Side, number: int) -> str:
    """`layer1.0 (conv2d_3_7)`: the address of a part and the label of its first entry."""
    part, log = side.carried.parts[number], side.history._log
    label = ""
    if part.passes and part.passes[0][0] < len(log.graph.recorded):
        entry = part.passes[0][0]
        label = log.label(entry).partition(":")[0]
        call = log.row(entry).module_call
        address = part.address or log.recording.module_calls[call].address
    else:
        address = part.address
    return f"{address} ({label})" if address and label else address or label or part.kind


def _differing_lines(before: list[str], after: list[str]) -> list[str]:
    """The first lines of the structure that differ, where no operation by itself does: their order,
    what they read, or an output.
    """
    found: list[str] = []
    for tag, a, a_end, b, b_end in SequenceMatcher(None, before, after, False).get_opcodes():
        if tag != "equal":
            found += [f"- {line}" for line in before[a:a_end]]
            found += [f"+ {line}" for line in after[b:b_end]]
    rest = len(found) - _MOST_LISTED
    return [*found[:_MOST_LISTED], f"and {rest} more lines"] if rest > 0 else found
