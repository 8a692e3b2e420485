"""What is around an entry: edges, where the graph begins and ends, conditions."""

from typing import Any

from torchlens._history import columns
from torchlens._history.entry_fields.reading import EntryReading
from torchlens._recording.operations import OUTPUT


class SurroundingFields(EntryReading):
    """What is around an entry: edges, where the graph begins and ends, conditions."""

    __slots__ = ()

    # -- the graph around it
    # ---------------------------------------------------------------------------------------

    @property
    def parent_layers(self) -> list[str]:
        """Labels of the entries it reads."""
        return self._one(columns.parent_layers)

    @property
    def child_layers(self) -> list[str]:
        """Labels of the entries that read it."""
        return self._one(columns.child_layers)

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
        return [
            (location, self._log.label(parent))
            for location, parent in self._one(columns.located_parents)
        ]

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
        reached = self._reachable(self._log.graph.parents)
        return set(self._labels(entry for entry in self._log.graph.inputs if entry in reached))

    @property
    def output_descendents(self) -> set[str]:
        """Labels of the outputs it leads to."""
        reached = self._reachable(self._log.graph.children)
        return set(self._labels(entry for entry in self._log.graph.outputs if entry in reached))

    @property
    def has_input_ancestor(self) -> bool:
        """Whether an input leads to it."""
        return self._one(columns.has_input_ancestor)

    @property
    def is_output_ancestor(self) -> bool:
        """Whether it leads to an output."""
        return self._one(columns.is_output_ancestor)

    @property
    def is_output_parent(self) -> bool:
        """Whether the model returns it."""
        return any(
            row.operation is OUTPUT for row in self._log.rows(self._log.graph.children[self._entry])
        )

    @property
    def min_distance_from_input(self) -> int | None:
        """Number of edges on the shortest path from an input, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return self._one(columns.min_distance_from_input)

    @property
    def max_distance_from_input(self) -> int | None:
        """Number of edges on the longest path from an input, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return self._one(columns.max_distance_from_input)

    @property
    def min_distance_from_output(self) -> int | None:
        """Number of edges on the shortest path to an output, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return self._one(columns.min_distance_from_output)

    @property
    def max_distance_from_output(self) -> int | None:
        """Number of edges on the longest path to an output, with
        `mark_input_output_distances=True`; None otherwise.
        """
        return self._one(columns.max_distance_from_output)

    # -- where it begins and ends
    # ----------------------------------------------------------------------------------

    @property
    def is_input_layer(self) -> bool:
        """Whether it is an input of the model."""
        return self._one(columns.is_input_layer)

    @property
    def is_output_layer(self) -> bool:
        """Whether it is an output of the model."""
        return self._one(columns.is_output_layer)

    @property
    def is_buffer_layer(self) -> bool:
        """Whether it is a buffer."""
        return self._one(columns.is_buffer_layer)

    @property
    def input_output_address(self) -> str | None:
        """`input.x` or `output.logits`; None for all others."""
        return self._one(columns.input_output_address)

    @property
    def buffer_address(self) -> str | None:
        """The address of the buffer: `bn1.running_mean`; None for all others."""
        return self._one(columns.buffer_address)

    @property
    def initialized_inside_model(self) -> bool:
        """Whether it was made inside the model from nothing, like `torch.zeros`."""
        return self._one(columns.initialized_inside_model)

    @property
    def terminated_inside_model(self) -> bool:
        """Whether nothing reads it, although it is not an output."""
        return self._one(columns.terminated_inside_model)

    # -- conditions
    # ----------------------------------------------------------------------------------------------

    @property
    def is_terminal_bool_layer(self) -> bool:
        """Whether an `if` (or `while`, `and`, `not`) read it."""
        return self._one(columns.is_terminal_bool_layer)

    @property
    def atomic_bool_val(self) -> bool | None:
        """What the `if` read: True or False; None if none read it."""
        return self._one(columns.atomic_bool_val)

    @property
    def in_cond_branch(self) -> bool:
        """Whether it was computed only to decide an `if`."""
        return self._one(columns.in_cond_branch)

    @property
    def cond_branch_start_children(self) -> list[str]:
        """Labels of those of its children at which the computation of a condition begins."""
        branch = self._log.graph.condition_entries
        children = self._log.graph.children[self._entry] if self._entry not in branch else ()
        return self._labels(child for child in children if child in branch)
