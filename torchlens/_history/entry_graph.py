"""The graph and the modules around an entry."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Self

from torchlens._history.field import EntryFields, ManyEntries, field
from torchlens._history.log import picked
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import located

if TYPE_CHECKING:
    from torchlens._graph.paths import Distances

_BOUNDARIES = (INPUT, OUTPUT, BUFFER)


class EntryGraph(EntryFields):
    """The graph around an entry: its edges, where the graph begins and ends, conditions."""

    __slots__ = ()

    # -- the graph around it -----------------------------------------------------------------------

    @field
    def parent_layers(self) -> list[list[str]]:
        """Labels of the entries it reads."""
        return _labels(self, picked(self._log.graph.parents, self._numbers))

    @field
    def child_layers(self) -> list[list[str]]:
        """Labels of the entries that read it."""
        return _labels(self, picked(self._log.graph.children, self._numbers))

    def _others(self, numbers: Iterable[int]) -> "list[Self]":
        return [type(self)(self._log, number) for number in numbers]

    @property
    def parents(self) -> "list[Self]":
        """The entries it reads."""
        return self._others(self._log.graph.parents[self._entry])

    @property
    def children(self) -> "list[Self]":
        """The entries that read it."""
        return self._others(self._log.graph.children[self._entry])

    def ancestors(self) -> "list[Self]":
        """All entries that lead to it, in order."""
        return self._others(sorted(self._reachable(self._log.graph.parents) - {self._entry}))

    def descendants(self) -> "list[Self]":
        """All entries that it leads to, in order."""
        return self._others(sorted(self._reachable(self._log.graph.children) - {self._entry}))

    @property
    def sibling_layers(self) -> list[str]:
        """Labels of the other children of its parents."""
        graph = self._log.graph
        found = (child for parent in graph.parents[self._entry] for child in graph.children[parent])
        return self._labels(dict.fromkeys(child for child in found if child != self._entry))

    @property
    def spouse_layers(self) -> list[str]:
        """Labels of the other parents of its children."""
        graph = self._log.graph
        found = (parent for child in graph.children[self._entry] for parent in graph.parents[child])
        return self._labels(dict.fromkeys(parent for parent in found if parent != self._entry))

    @property
    def has_parents(self) -> bool:
        """Whether it reads any entry."""
        return bool(self._log.graph.parents[self._entry])

    @property
    def has_children(self) -> bool:
        """Whether any entry reads it."""
        return bool(self._log.graph.children[self._entry])

    @property
    def has_siblings(self) -> bool:
        """Whether its parents have other children."""
        return bool(self.sibling_layers)

    @property
    def has_spouses(self) -> bool:
        """Whether its children have other parents."""
        return bool(self.spouse_layers)

    @property
    def parent_layer_arg_locs(self) -> dict[str, dict[Any, Any]]:
        """Which argument each parent is: `{'args': {0: 'conv2d_1_1', (1, 0): ...}, 'kwargs':
        {...}}`.

        An argument that several operations wrote to has the list of them.
        """
        places: dict[str, dict[Any, Any]] = {"args": {}, "kwargs": {}}
        for location, label in self._located_parents():
            head = location[0] if isinstance(location, tuple) else location
            found = places["kwargs" if isinstance(head, str) else "args"]
            known = found.get(location)
            found[location] = (
                label if known is None else [*([known] if isinstance(known, str) else known), label]
            )
        return places

    def _located_parents(self) -> list[tuple[Any, str]]:
        """Each parent, and which argument it is."""
        (reads,) = located_parents(self)
        return [(location, self._log.label(parent)) for location, parent in reads]

    def _reachable(self, edges: Any) -> set[int]:
        seen = {self._entry}
        pending = [self._entry]
        while pending:
            for entry in edges[pending.pop()]:
                if entry not in seen:
                    seen.add(entry)
                    pending.append(entry)
        return seen

    @property
    def input_ancestors(self) -> set[str]:
        """Labels of the inputs that lead to it."""
        above = self._log.inputs_above[self._entry]
        return self._marked(self._log.graph.inputs, above)

    @property
    def output_descendents(self) -> set[str]:
        """Labels of the outputs it leads to."""
        below = self._log.outputs_below[self._entry]
        return self._marked(self._log.graph.outputs, below)

    def _marked(self, entries: Sequence[int], bits: int) -> set[str]:
        return set(self._labels(entry for k, entry in enumerate(entries) if bits >> k & 1))

    @field
    def has_input_ancestor(self) -> list[bool]:
        """Whether an input leads to it."""
        return picked(self._log.graph.has_input_ancestor, self._numbers)

    @field
    def is_output_ancestor(self) -> list[bool]:
        """Whether it leads to an output."""
        return picked(self._log.graph.is_output_ancestor, self._numbers)

    @property
    def is_output_parent(self) -> bool:
        """Whether the model returns it."""
        children = self._log.rows(self._log.graph.children[self._entry])
        return any(row.operation is OUTPUT for row in children)

    @field
    def min_distance_from_input(self) -> list[int | None]:
        """Number of edges on the shortest path from an input, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return _distances(self, self._log.from_input, 0)

    @field
    def max_distance_from_input(self) -> list[int | None]:
        """Number of edges on the longest path from an input, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return _distances(self, self._log.from_input, 1)

    @field
    def min_distance_from_output(self) -> list[int | None]:
        """Number of edges on the shortest path to an output, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return _distances(self, self._log.to_output, 0)

    @field
    def max_distance_from_output(self) -> list[int | None]:
        """Number of edges on the longest path to an output, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return _distances(self, self._log.to_output, 1)

    # -- where it begins and ends ------------------------------------------------------------------

    @field
    def is_input_layer(self) -> list[bool]:
        """Whether it is an input of the model."""
        return [operation is INPUT for operation in self._rows.operation]

    @field
    def is_output_layer(self) -> list[bool]:
        """Whether it is an output of the model."""
        return [operation is OUTPUT for operation in self._rows.operation]

    @field
    def is_buffer_layer(self) -> list[bool]:
        """Whether it is a buffer."""
        return [operation is BUFFER for operation in self._rows.operation]

    @field
    def input_output_address(self) -> list[str | None]:
        """`input.x` or `output.logits`; None for all others."""
        boundaries = zip(boundary_addresses(self), self._rows.operation, strict=True)
        return [None if operation is BUFFER else address for address, operation in boundaries]

    @field
    def buffer_address(self) -> list[str | None]:
        """The address of the buffer: `bn1.running_mean`; None for all others."""
        boundaries = zip(boundary_addresses(self), self._rows.operation, strict=True)
        return [address if operation is BUFFER else None for address, operation in boundaries]

    @field
    def initialized_inside_model(self) -> list[bool]:
        """Whether it was made inside the model from nothing, like `torch.zeros`."""
        parents = picked(self._log.graph.parents, self._numbers)
        return [
            not own and operation not in _BOUNDARIES
            for own, operation in zip(parents, self._rows.operation, strict=True)
        ]

    @field
    def terminated_inside_model(self) -> list[bool]:
        """Whether nothing reads it, although it is not an output."""
        children = picked(self._log.graph.children, self._numbers)
        return [
            not own and operation is not OUTPUT
            for own, operation in zip(children, self._rows.operation, strict=True)
        ]

    # -- conditions --------------------------------------------------------------------------------

    @field
    def is_terminal_bool_layer(self) -> list[bool]:
        """Whether an `if` (or `while`, `and`, `not`) read it."""
        return list(map(self._log.graph.booleans.__contains__, self._numbers))

    @field
    def atomic_bool_val(self) -> list[bool | None]:
        """What the `if` read: True or False; None if none read it."""
        recorded = picked(self._log.graph.recorded, self._numbers)
        return list(map(self._log.recording.booleans.get, recorded))

    @field
    def in_cond_branch(self) -> list[bool]:
        """Whether it was computed only to decide an `if`."""
        return list(map(self._log.graph.condition_entries.__contains__, self._numbers))

    @property
    def cond_branch_start_children(self) -> list[str]:
        """Labels of those of its children at which the computation of a condition begins."""
        branch = self._log.graph.condition_entries
        children = self._log.graph.children[self._entry] if self._entry not in branch else ()
        return self._labels(child for child in children if child in branch)


class EntryModules(EntryFields):
    """The modules that an entry was computed in, given to and returned by."""

    __slots__ = ()

    @field
    def containing_module_origin(self) -> list[str | None]:
        """The innermost module that was running, as `address:pass`; None in the model itself."""
        names = self._log.module_names
        return [names[call] if call else None for call in self._rows.module_call]

    @field
    def containing_modules_origin_nested(self) -> list[list[str]]:
        """All modules that were running, as `address:pass`, outermost first."""
        chains, names = self._log.graph.module_chains, self._log.module_names
        return [
            [names[outer] for outer in chains[call]] if call else []
            for call in self._rows.module_call
        ]

    @field
    def module_nesting_depth(self) -> list[int]:
        """How many nested modules were running."""
        chains = self._log.graph.module_chains
        return [len(chains[call]) for call in self._rows.module_call]

    @field
    def modules_entered(self) -> list[list[str]]:
        """Addresses of the modules it was given to."""
        return _names(self, self._log.graph.modules_entered, self._log.module_call_addresses)

    @field
    def module_passes_entered(self) -> list[list[str]]:
        """The module calls it was given to, as `address:pass`."""
        return _names(self, self._log.graph.modules_entered, self._log.module_names)

    @field
    def modules_exited(self) -> list[list[str]]:
        """Addresses of the modules that returned it, innermost first."""
        return _names(self, self._log.graph.modules_exited, self._log.module_call_addresses)

    @field
    def module_passes_exited(self) -> list[list[str]]:
        """The module calls that returned it, as `address:pass`, innermost first."""
        return _names(self, self._log.graph.modules_exited, self._log.module_names)

    @field
    def is_submodule_input(self) -> list[bool]:
        """Whether it was given to a module."""
        return list(map(self._log.graph.modules_entered.__contains__, self._numbers))

    @field
    def is_submodule_output(self) -> list[bool]:
        """Whether a module returned it."""
        return list(map(self._log.graph.modules_exited.__contains__, self._numbers))

    @field
    def bottom_level_submodule_pass_exited(self) -> list[str | None]:
        """The module without modules inside that returned it, as `address:pass`; None if none
        did.
        """
        names = self._log.module_names
        return [None if call is None else names[call] for call in _bottom_calls_exited(self)]

    @field
    def is_bottom_level_submodule_output(self) -> list[bool]:
        """Whether a module without modules inside returned it."""
        return [call is not None for call in _bottom_calls_exited(self)]


def located_parents(entries: EntryFields | ManyEntries) -> list[list[tuple[Any, int]]]:
    """The entries that each entry reads, with the argument that each of them is."""
    log = entries._log
    recorded = picked(log.graph.recorded, entries._numbers)
    found = []
    for number, references in zip(recorded, entries._rows.references, strict=True):
        reads: Iterable[tuple[Any, int | None]]
        if number in log.graph.located_reads:
            reads = log.graph.located_reads[number]
        else:
            reads = enumerate(references) if type(references) is tuple else located(references)
        entry_of = log.graph.entry_of
        found.append(
            [
                (location, entry_of[parent])
                for location, parent in reads
                if parent is not None and parent in entry_of
            ]
        )
    return found


def boundary_addresses(entries: EntryFields | ManyEntries) -> list[str | None]:
    """The address of each input, output and buffer; None for all others."""
    addresses = entries._log.boundary_addresses
    return [addresses[entry][0] if entry in addresses else None for entry in entries._numbers]


def _labels(entries: EntryFields, groups: Sequence[Sequence[int]]) -> list[list[str]]:
    """The labels of each group; all of them are made at once, then cut."""
    labels = entries._log.labels(list(chain.from_iterable(groups)))
    sizes = list(map(len, groups))
    return [labels[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _distances(entries: EntryFields, distances: "Distances | None", which: int) -> list[int | None]:
    if distances is None:
        return [None] * len(entries._numbers)
    known = picked(distances, entries._numbers)
    return [None if pair is None else pair[which] for pair in known]


def _names(
    entries: EntryFields, calls: Mapping[int, Sequence[int]], names: Sequence[str]
) -> list[list[str]]:
    """The names of the module calls of each entry."""
    found = map(calls.get, entries._numbers)
    return [[names[call] for call in own] if own else [] for own in found]


def _bottom_calls_exited(entries: EntryFields) -> list[int | None]:
    log = entries._log
    children, addresses = log.graph.module_tree.children, log.module_call_addresses
    return [
        next((call for call in own if not children[addresses[call]]), None) if own else None
        for own in map(log.graph.modules_exited.get, entries._numbers)
    ]
