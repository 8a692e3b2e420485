"""Residual connections: edges along which the input of a block is added to its output."""

from collections.abc import Iterator

from torchlens._history.log import Log
from torchlens._page.parts import Outline
from torchlens._recording.operation_kinds import ACTIVATIONS, DROPOUTS, NORMALISATIONS, POOLING

_ADDITIONS = frozenset({"add", "iadd", "radd"})
_LEAVING = DROPOUTS | {"clone", "contiguous", "identity", "to"}  # what comes in as it is
_RESIZING = {"getitem", "interpolate", "pad", "pixelunshuffle"}
_PROJECTING = NORMALISATIONS | POOLING | _RESIZING | {"conv1d", "conv2d", "conv3d", "linear"}
_AFFINE = _ADDITIONS | {
    "imul",
    "isub",
    "itruediv",
    "mul",
    "rmul",
    "rsub",
    "sub",
    "truediv",
}  # with a buffer, as in a frozen norm
_BEFORE_BOTH = (
    NORMALISATIONS | ACTIVATIONS | _LEAVING
)  # what a block may do to its input before the two ways part
_LONGEST_PROJECTION = 6
_PASSES_LOOKED_AT = 2
_MOST_STEPS = 3_000  # from the addition back to where the block begins
_MOST_STEPS_IN_ALL = 3_000_000

_Edge = tuple[int, int]  # parent, child


def residual_links(log: Log, outline: Outline) -> set[int]:
    """The numbers of the links that are residual.

    `x + f(x)` is one if `f` has parameters; `0.5 * x * (1 + x)`, a mask, a table of positions and a
    concatenation are none. Where the block's input has to change its shape on the way, all of that
    way is: `downsample(x) + f(x)`.
    """
    finder = _Finder(log)
    children = {
        own[0] for _, target, _ in outline.links for own in target.passes[:_PASSES_LOOKED_AT]
    }
    edges = {edge for child in sorted(children) for edge in finder.edges_into(child)}
    found = set()
    for number, (source, target, around) in enumerate(outline.links):
        if around is None and source.kind == "operation":
            made = {entry for own in source.passes for entry in own}
            read = [
                (parent, own[0])
                for own in target.passes[:_PASSES_LOOKED_AT]
                for parent in finder.parents(own[0])
            ]
            if any(edge in edges and edge[0] in made for edge in read):
                found.add(number)
    return found


class _Finder:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.steps_left = _MOST_STEPS_IN_ALL
        entry_of = log.graph.entry_of
        self.given: dict[int, set[int]] = {}  # what each call of a module was given
        for call, numbers in log.recording.module_entries:
            self.given.setdefault(call, set()).update(
                entry_of[number] for number in numbers if number in entry_of
            )
        self.given.setdefault(0, set()).update(log.graph.inputs)

    def parents(self, entry: int) -> list[int]:
        """What an entry read that comes from the model's input: neither buffers nor weights that
        are computed.
        """
        if entry >= len(self.log.graph.recorded):  # the call that failed
            return []
        comes_from_input = self.log.graph.has_input_ancestor
        return [parent for parent in self.log.graph.parents[entry] if comes_from_input[parent]]

    def edges_into(self, addition: int) -> Iterator[_Edge]:
        """The edges of the residual connection that ends in an entry, if one does."""
        terms = self.parents(addition)
        if len(terms) != 2 or self.log.row(addition).operation.layer_type not in _ADDITIONS:
            return
        given = self.given.get(self.log.row(addition).module_call, set())
        for mine, other in (terms, terms[::-1]):
            plain = self._way((mine, addition), _LEAVING, given)
            begin = next(
                (at for at, (start, _) in enumerate(plain) if self._is_made_of(other, start)), None
            )
            if begin is not None:
                yield from plain[: begin + 1]
            else:
                way = self._way((mine, addition), _LEAVING | _PROJECTING, given)
                if len(way) > len(plain) and self._is_projection(way, other, given):
                    yield from way

    def _way(self, last: _Edge, kinds: frozenset[str], given: set[int]) -> list[_Edge]:
        """Backwards over operations of some kinds that read one thing each, not beyond what the
        block was given.

        It may be given both, its input and what was made of that for the shortcut: then from the
        input.
        """
        way = [last]
        while len(way) <= _LONGEST_PROJECTION:
            at = way[-1][0]
            parents = self.parents(at)
            if len(parents) != 1 or not (
                self._kind(at) in kinds or (kinds >= _PROJECTING and self._is_affine(at))
            ):
                break
            way.append((parents[0], at))
        begins = [number for number, (start, _) in enumerate(way) if start in given]
        return way[: begins[-1] + 1] if begins else way

    def _is_affine(self, entry: int) -> bool:
        """Whether it adds or multiplies with something that does not come from the input."""
        return self._kind(entry) in _AFFINE and len(self.log.graph.parents[entry]) == 2

    def _kind(self, entry: int) -> str:
        return self.log.row(entry).operation.layer_type

    def _is_made_of(self, last: int, first: int) -> bool:
        """Whether one entry was made of another, with weights."""
        if first >= last or self.steps_left <= 0:
            return False
        steps = list(self._between(first, last))
        self.steps_left -= len(steps)
        return first in steps and any(
            self.log.graph.params[entry] for entry in steps if entry != first
        )

    def _between(self, first: int, last: int, call: int = 0) -> Iterator[int]:
        """`last` and what it was made of, back to `first`, inside a call of a module."""
        seen, pending = {last}, [last]
        while pending and len(seen) < _MOST_STEPS:
            entry = pending.pop()
            yield entry
            for parent in self.log.graph.parents[entry] if entry > first else ():
                if (
                    parent >= first
                    and parent not in seen
                    and (parent == first or self._is_inside(parent, call))
                ):
                    seen.add(parent)
                    pending.append(parent)

    def _is_projection(self, way: list[_Edge], other: int, given: set[int]) -> bool:
        """Whether a way leads from a block's input over linear steps to an addition whose other
        term is made of it, too.

        What the other term comes over is not linear, and shares no weights with the way: two gates
        that are added, or the input of a recurrent net and its last state, are none. Both ways lie
        inside the block, unlike those of a pyramid.
        """
        at, addition = way[-1][0], way[0][1]
        if at >= other or self.steps_left <= 0 or not self._begins_block(at, given):
            return False
        weights = {number for _, child in way[1:] for number in self.log.graph.params[child]}
        steps = list(self._between(at, other, self.log.row(addition).module_call))
        self.steps_left -= len(steps)
        main = [entry for entry in steps if entry != at]
        shared = weights & {number for entry in main for number in self.log.graph.params[entry]}
        kinds = {self.log.row(entry).operation.layer_type for entry in main}
        has_weights = any(self.log.graph.params[entry] for entry in main)
        return at in steps and has_weights and not shared and bool(kinds & ACTIVATIONS)

    def _is_inside(self, entry: int, call: int) -> bool:
        if call == 0:
            return True
        own = self.log.row(entry).module_call
        return call == own or call in self.log.graph.module_chains[own]

    def _begins_block(self, entry: int, given: set[int]) -> bool:
        """Whether it is what the module with the addition was given, or what that becomes before
        the two ways part.
        """
        for _ in range(_LONGEST_PROJECTION):
            if entry in given:
                return True
            parents = self.parents(entry)
            if len(parents) != 1 or self.log.row(entry).operation.layer_type not in _BEFORE_BOTH:
                return False
            entry = parents[0]
        return False
