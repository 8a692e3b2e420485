"""Residual connections: where the input of a block is added to its output.

`x + f(x)` is one if `f` has parameters; `0.5 * x * (1 + x)`, a mask, a table of positions and a
concatenation are none. The input may change its shape on the way, as in `downsample(x) + f(x)`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._recording.operation_kinds import ACTIVATIONS, DROPOUTS, NORMALISATIONS, POOLING

_ADDITIONS = frozenset({"add", "iadd", "radd"})
_UNCHANGING = DROPOUTS | {"clone", "contiguous", "identity", "to"}
_RESIZING = {"getitem", "interpolate", "pad", "pixelunshuffle"}
_PROJECTING = NORMALISATIONS | POOLING | _RESIZING | {"conv1d", "conv2d", "conv3d", "linear"}
# With a buffer, as in a frozen norm.
_AFFINE = _ADDITIONS | {"imul", "isub", "itruediv", "mul", "rmul", "rsub", "sub", "truediv"}
# What a block may do to its input before the two ways part.
_BEFORE_BOTH = NORMALISATIONS | ACTIVATIONS | _UNCHANGING
_LONGEST_PROJECTION = 6
_MOST_STEPS = 3_000  # from the addition back to where the block begins
_MOST_STEPS_IN_ALL = 3_000_000

_Edge = tuple[int, int]  # parent, child


class Residual(NamedTuple):
    """A residual connection: `end` adds what `block` makes of `start` to `start` itself.

    `carried` are the entries that `start` passes on its way around the block, such as a projection;
    it is often empty.
    """

    start: LayerEntry
    end: LayerEntry
    block: list[LayerEntry]
    carried: list[LayerEntry]


def residuals(log: Log) -> list[Residual]:
    """All residual connections, in the order of their ends."""
    finder = ResidualFinder(log)
    found = []
    for addition in log.visible:
        edges = finder.edges_into(addition)
        if edges:
            start, carried = edges[-1][0], [parent for parent, _ in edges[-2::-1]]
            block = finder.block(start, addition, carried)
            entries = [[LayerEntry(log, entry) for entry in own] for own in (block, carried)]
            found.append(Residual(LayerEntry(log, start), LayerEntry(log, addition), *entries))
    return found


class ResidualFinder:
    """Finds the residual connection that ends in an addition, with a bound on the steps in all."""

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
        """The parents of an entry that depend on the model's input."""
        if entry >= len(self.log.graph.recorded):  # the call that failed
            return []
        comes_from_input = self.log.graph.has_input_ancestor
        return [parent for parent in self.log.graph.parents[entry] if comes_from_input[parent]]

    def edges_into(self, addition: int) -> list[_Edge]:
        """The edges of the residual connection that ends in an entry, from there back to its start;
        empty if none ends there.
        """
        terms = self.parents(addition)
        if len(terms) != 2 or self.log.row(addition).operation.layer_type not in _ADDITIONS:
            return []
        given = self.given.get(self.log.row(addition).module_call, set())
        for mine, other in (terms, terms[::-1]):
            plain = self._way((mine, addition), _UNCHANGING, given)
            begin = next(
                (at for at, (start, _) in enumerate(plain) if self._is_made_of(other, start)), None
            )
            if begin is not None:
                return plain[: begin + 1]
            way = self._way((mine, addition), _UNCHANGING | _PROJECTING, given)
            if len(way) > len(plain) and self._is_projection(way, other, given):
                return way
        return []

    def block(self, start: int, addition: int, carried: Iterable[int]) -> list[int]:
        """The entries on the ways from the start to the addition, without those carried."""
        around = {*carried, addition}
        on_way = {start}
        for entry in sorted({*self._between(start, addition)} - around):
            if not on_way.isdisjoint(self.log.graph.parents[entry]):
                on_way.add(entry)
        return sorted(on_way - {start})

    def _way(self, last: _Edge, kinds: frozenset[str], given: set[int]) -> list[_Edge]:
        """The edges from an addition backward over operations of some kinds with one parent each,
        up to the first input of the block.
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
        """True if it adds or multiplies by something that does not depend on the input."""
        return self._kind(entry) in _AFFINE and len(self.log.graph.parents[entry]) == 2

    def _kind(self, entry: int) -> str:
        return self.log.row(entry).operation.layer_type

    def _is_made_of(self, last: int, first: int) -> bool:
        """True if one entry was made of another, with weights."""
        return bool(self._params_of(self._between(first, last)))

    def _between(self, first: int, last: int, call: int = 0) -> list[int]:
        """The entries on the ways from `first` to `last` inside a call of a module, with others
        that `last` was made of; empty if no way leads back to `first`.
        """
        if first >= last or self.steps_left <= 0:
            return []
        seen, pending = {last}, [last]
        found = []
        while pending and len(seen) < _MOST_STEPS:
            entry = pending.pop()
            found.append(entry)
            if entry == first:
                continue
            for parent in self.log.graph.parents[entry]:
                is_on_way = parent == first or (parent > first and self._is_inside(parent, call))
                if is_on_way and parent not in seen:
                    seen.add(parent)
                    pending.append(parent)
        self.steps_left -= len(found)
        return [entry for entry in found if entry != first] if first in found else []

    def _params_of(self, entries: Iterable[int]) -> set[int]:
        return {number for entry in entries for number in self.log.graph.params[entry]}

    def _is_projection(self, way: list[_Edge], other: int, given: set[int]) -> bool:
        """True if a way leads from a block's input over linear steps to an addition whose other
        term is made of that input, too.

        The other term must be made by a nonlinear function that shares no weights with the way:
        two gates that are added, or the input of a recurrent net and its last state, are no
        residual connection. Both ways lie inside the block, unlike those of a feature pyramid.
        """
        at, addition = way[-1][0], way[0][1]
        if not self._begins_block(at, given):
            return False
        main = self._between(at, other, self.log.row(addition).module_call)
        weights = self._params_of(main)
        shared = weights & self._params_of(child for _, child in way[1:])
        return bool(weights) and not shared and not ACTIVATIONS.isdisjoint(map(self._kind, main))

    def _is_inside(self, entry: int, call: int) -> bool:
        if call == 0:
            return True
        own = self.log.row(entry).module_call
        return call == own or call in self.log.graph.module_chains[own]

    def _begins_block(self, entry: int, given: set[int]) -> bool:
        """True if it is an input of the module with the addition, or made of one before the two
        ways part.
        """
        for _ in range(_LONGEST_PROJECTION):
            if entry in given:
                return True
            parents = self.parents(entry)
            if len(parents) != 1 or self.log.row(entry).operation.layer_type not in _BEFORE_BOTH:
                return False
            entry = parents[0]
        return False
