"""The data that a history and its entries share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._capture.memory.process_memory import finalize, freed_memory
from torchlens._capture.options import CaptureOptions
from torchlens._recording.counted_writes import count_writes
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.origin import LiveOrigin, Origin, version_of
from torchlens._recording.recording import Recording, Row
from torchlens._recording.stored import StoredParams, opened
from torchlens._recording.symbolic import SymbolicInt
from torchlens._recording.trees import path_text
from torchlens._recording.user_code import SourceLine, source_line, warn_caller
from torchlens._recording.wrappers import why_valueless
from torchlens._text.lazy_import import lazy_function, lazy_functions
from torchlens.errors import ValueChangedError

if TYPE_CHECKING:
    from torchlens._graph.build import Graph, build_graph
    from torchlens._graph.costs import (
        reached_backward_flops,
        reached_by_gradients,
        repeated_in_backward,
    )
    from torchlens._graph.paths import (
        Distances,
        distances_from_inputs,
        distances_to_outputs,
        most_passes_of_a_loop,
        sets_behind,
    )
    from torchlens._portable.pickling import (
        Format,
        PackedLog,
        copied_deeply,
        packed,
        unpacked,
    )
else:
    build_graph = lazy_function("torchlens._graph.build", "build_graph")
    reached_backward_flops, reached_by_gradients, repeated_in_backward = lazy_functions(
        "torchlens._graph.costs",
        "reached_backward_flops",
        "reached_by_gradients",
        "repeated_in_backward",
    )
    distances_from_inputs, distances_to_outputs, most_passes_of_a_loop, sets_behind = (
        lazy_functions(
            "torchlens._graph.paths",
            "distances_from_inputs",
            "distances_to_outputs",
            "most_passes_of_a_loop",
            "sets_behind",
        )
    )
    Format, copied_deeply, packed, unpacked = lazy_functions(
        "torchlens._portable.pickling",
        "Format",
        "copied_deeply",
        "packed",
        "unpacked",
    )


_Value = TypeVar("_Value")

# What is known about a graph until it is replaced.
_OF_THE_GRAPH = (
    "inputs_above", "outputs_below", "most_loops", "layer_labels", "repeats", "from_input",
    "to_output",
)  # fmt: skip


class Log:
    """A recording, the options it was made with, its graph (built at first use), and what is
    derived from them on demand.
    """

    def __init__(
        self,
        recording: Recording,
        options: CaptureOptions | None = None,
        *,
        graph: "Graph | None" = None,
        marks_distances: bool = False,
        keeps_unsaved: bool = True,
        make_graph: "Callable[[Recording], Graph]" = build_graph,
    ) -> None:
        self.recording = recording
        self.options = options or CaptureOptions(saves=False)
        self.marks_distances = marks_distances
        self.keeps_unsaved = keeps_unsaved
        self._graph = graph
        self._make_graph = make_graph
        self._visible: Sequence[int] | None = None
        # The history of this log. The reference is weak: a circle would delay freeing the tensors.
        self.history: Callable[[], Any] = lambda: None
        # Cache of `backward.backward_times`: the state it was computed from, and the result.
        self.backward_times: tuple[Any, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        graph = self.graph  # built first, because it depends on what packing leaves out
        self.settle_origin()
        kept = (graph, self.marks_distances, self.keeps_unsaved)
        return _unpickled_log, (Format(), packed(self.recording, self.options), *kept)

    def __copy__(self) -> "Log":
        """Another log of the same tensors: the lists that hold them are its own."""
        recording = self.recording
        lists = {
            name: copy(getattr(recording, name))
            for name in ("values", "versions", "saved_args", "slices")
        }
        return self._with(replace(recording, **lists), self._graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Log":
        self.settle_origin()
        return self._with(copied_deeply(self.recording, self.options, memo), self.graph)

    def _with(self, recording: Recording, graph: "Graph | None") -> "Log":
        return Log(
            recording,
            self.options,
            graph=graph,
            marks_distances=self.marks_distances,
            keeps_unsaved=self.keeps_unsaved,
            make_graph=self._make_graph,
        )

    def __del__(self) -> None:
        """Frees the tensors, and returns free memory to the system if there is much of it."""
        finalize(self._free)

    def _free(self) -> None:
        freed_memory().drop(self.__dict__.clear)

    def take(self, recording: Recording) -> None:
        """Replaces the recording by that of another run of the same operations, and frees the old
        values.
        """
        if recording.branches or self.recording.branches:  # threads: rows may have other numbers
            self._graph, self._make_graph = None, build_graph
            for known in ("module_names", "module_call_addresses", *_OF_THE_GRAPH):
                self.__dict__.pop(known, None)
        freed_memory().drop(partial(setattr, self, "recording", recording))

    def settle_origin(self) -> Origin:
        """The digests of weights and inputs, computed once; then their tensors are let go."""
        recording = self.recording
        if isinstance(recording.origin, LiveOrigin):
            recording.origin = recording.origin.settled(self._input_as_given)
        return recording.origin

    def _input_as_given(self, number: int) -> torch.Tensor | None:
        """The saved value of an input (a row of the recording), unless it was transformed."""
        value, version = self.recording.values[number], self.recording.versions[number]
        if self.options.transform is not None or not isinstance(value, torch.Tensor):
            return None
        return value if version in (-1, version_of(value)) else None

    def free_values(self) -> None:
        """Releases all saved tensors, gradients and arguments."""

        def free() -> None:
            recording.values[:] = [None] * len(recording.values)
            recording.versions[:] = [-1] * len(recording.versions)
            recording.gradients.clear()
            recording.slices.clear()
            recording.saved_args.clear()
            recording.output = None

        recording = self.recording
        freed_memory().drop(free)

    @property
    def graph(self) -> "Graph":
        if self._graph is None:
            self._graph = without_collector(lambda: self._make_graph(self.recording))
            if not self._graph.is_exact:
                warn_caller(
                    "torchlens: parts of a tensor were written in too irregular a pattern to "
                    "follow (as_strided, or a huge diagonal): some operations may list parents "
                    "that they do not read."
                )
        return self._graph

    @property
    def visible(self) -> Sequence[int]:
        """The entries that the history lists."""
        if self._visible is None:
            everything = range(len(self.graph.recorded))
            self._visible = (
                everything if self.keeps_unsaved else list(filter(self.is_saved, everything))
            )
        return self._visible

    def note_values_changed(self) -> None:
        """Forgets what was derived from the saved values."""
        self._visible = None
        for known in ("reached_by_gradients", "_is_anything_reached"):
            self.__dict__.pop(known, None)

    @cached_property
    def reached_by_gradients(self) -> list[bool]:
        return reached_by_gradients(self.recording, self.graph)

    @cached_property
    def _is_anything_reached(self) -> bool:
        return any(self.reached_by_gradients)

    @cached_property
    def repeated_in_backward(self) -> frozenset[int]:
        return repeated_in_backward(self.recording)

    @cached_property
    def from_input(self) -> "Distances | None":
        return (
            distances_from_inputs(self.graph.inputs, self.graph.parents)
            if self.marks_distances
            else None
        )

    @cached_property
    def to_output(self) -> "Distances | None":
        return (
            distances_to_outputs(self.graph.outputs, self.graph.children)
            if self.marks_distances
            else None
        )

    def row(self, entry: int) -> Row:
        return self.recording.rows[self.graph.recorded[entry]]

    def rows(self, entries: Sequence[int]) -> list[Row]:
        return picked(self.recording.rows, picked(self.graph.recorded, entries))

    # -- labels ------------------------------------------------------------------------------------

    def label_no_pass(self, entry: int) -> str:
        return self.layer_labels[self.graph.layer_of[entry]]

    def label_w_pass(self, entry: int) -> str:
        return self.labels_w_pass((entry,))[0]

    def label(self, entry: int) -> str:
        return self.labels((entry,))[0]

    def labels(self, entries: Sequence[int]) -> list[str]:
        """The labels of entries, with the pass if the layer has several."""
        layers, passes = picked(self.graph.layer_of, entries), picked(self.graph.pass_of, entries)
        names, repeats = self.layer_labels, self.repeats
        return [
            f"{names[layer]}:{number}" if repeats[layer] else names[layer]
            for layer, number in zip(layers, passes, strict=True)
        ]

    def labels_w_pass(self, entries: Sequence[int]) -> list[str]:
        names = picked(self.layer_labels, picked(self.graph.layer_of, entries))
        return [
            f"{name}:{number}"
            for name, number in zip(names, picked(self.graph.pass_of, entries), strict=True)
        ]

    def num_passes(self, entry: int) -> int:
        return self.graph.layers[self.graph.layer_of[entry]].num_passes

    @cached_property
    def layer_labels(self) -> list[str]:
        return [layer.label for layer in self.graph.layers]

    @cached_property
    def inputs_above(self) -> list[int]:
        """For each entry, the inputs that lead to it, as bits."""
        parents = self.graph.parents
        return sets_behind(self.graph.inputs, parents, range(len(parents)))

    @cached_property
    def outputs_below(self) -> list[int]:
        """For each entry, the outputs that it leads to, as bits."""
        children = self.graph.children
        return sets_behind(self.graph.outputs, children, reversed(range(len(children))))

    @cached_property
    def most_loops(self) -> int:
        layers = [layer.entries for layer in self.graph.layers]
        return most_passes_of_a_loop(layers, self.graph.parents)

    @cached_property
    def repeats(self) -> list[bool]:
        """Whether each layer has several passes."""
        return [layer.num_passes > 1 for layer in self.graph.layers]

    # -- values ------------------------------------------------------------------------------------

    def is_saved(self, entry: int) -> bool:
        return self.recording.values[self.graph.recorded[entry]] is not None

    def are_saved(self, entries: Sequence[int]) -> list[bool]:
        values = picked(self.recording.values, picked(self.graph.recorded, entries))
        return [value is not None for value in values]

    def value(self, entry: int) -> Any:
        """The saved value, or None; raises if it was changed in place after the pass."""
        number = self.graph.recorded[entry]
        if self.recording.versions[number] < 0:
            count_writes(self.recording, number)
        value = self.recording.values[number]
        version = self.recording.versions[number]
        if version >= 0 and value._version != version:
            raise ValueChangedError(
                f"The saved tensor of layer {self.label(entry)!r} was changed in place after the "
                "forward pass, so its value at the time is lost. Clone a saved tensor before "
                "changing it."
            )
        return opened(value)

    def saved_arguments(self, entry: int) -> tuple[Any, Any] | None:
        """The saved arguments of a call; raises if one of its parameters was changed since."""
        number = self.graph.recorded[entry]
        saved = self.recording.saved_args.get(number)
        changed = None if saved is None else self.recording.changed_param(number)
        if changed is not None:
            raise ValueChangedError(
                f"{self.recording.param_addresses[changed]!r}, an argument of "
                f"{self.label(entry)!r}, was changed in place after the forward pass, so its "
                "value at the time is lost. Clone the parameters before changing them."
            )
        return saved

    def parameter(self, number: int) -> torch.nn.Parameter:
        """A parameter with its values, if they are known; those of `recording.params` may be on the
        meta device.
        """
        params = self.recording.params
        return params.read(number) if isinstance(params, StoredParams) else params[number]

    def valueless_entries(self) -> dict[int, str]:
        """The entries whose saved tensor has no values, and why."""
        found = enumerate(picked(self.recording.values, self.graph.recorded))
        reasons = ((entry, why_valueless(value)) for entry, value in found if value is not None)
        return {entry: reason for entry, reason in reasons if reason is not None}

    def gradient(self, entry: int) -> torch.Tensor | None:
        if self.missing_gradient(entry) is not None:
            return None
        return self.recording.gradients.get(self.graph.recorded[entry])

    def gradients(self, entries: Sequence[int]) -> list[torch.Tensor | None]:
        if not self.recording.gradients:
            return [None] * len(entries)
        return list(map(self.gradient, entries))

    def missing_gradient(self, entry: int) -> str | None:
        gradients = self.recording.gradients
        if not isinstance(gradients, Gradients):
            return None
        return gradients.missing.get(self.graph.recorded[entry])

    def flops_backward(self, entries: Sequence[int]) -> list[int | None]:
        is_reached, repeated = self.reached_by_gradients, self.repeated_in_backward
        if not self._is_anything_reached:
            return [0] * len(entries)
        return reached_backward_flops(self.recording, self.graph, entries, is_reached, repeated)

    def num_bytes(self, entry: int) -> int:
        return self.sizes((entry,))[0]

    def sizes(self, entries: Sequence[int]) -> list[int]:
        """The bytes of the elements of each tensor."""
        known = _Sizes()
        sizes = list(map(known.__getitem__, map(attrgetter("shape", "dtype"), self.rows(entries))))
        if None not in known.values():
            return sizes  # type: ignore[return-value] # there is no None
        found = zip(entries, sizes, strict=True)
        return [self._held_bytes(entry) if size is None else size for entry, size in found]

    def _held_bytes(self, entry: int) -> int:
        """The bytes of a nested tensor whose sizes vary: they are known only from its value."""
        value = opened(self.recording.values[self.graph.recorded[entry]])
        if not isinstance(value, torch.Tensor):
            return 0
        held = value.values() if value.layout is torch.jagged else value
        return held.numel() * value.element_size()

    # -- modules -----------------------------------------------------------------------------------

    def module_pass(self, call: int) -> str:
        return self.module_names[call]

    def module_passes(self, calls: Iterable[int]) -> list[str]:
        return list(map(self.module_names.__getitem__, calls))

    @cached_property
    def module_names(self) -> list[str]:
        """`address:pass` of every module call."""
        return [f"{record.address}:{record.pass_num}" for record in self.recording.module_calls]

    @cached_property
    def module_call_addresses(self) -> list[str]:
        return [record.address for record in self.recording.module_calls]

    def module_chain(self, entry: int) -> tuple[int, ...]:
        return self.graph.module_chains[self.row(entry).module_call]

    # -- source code -------------------------------------------------------------------------------

    def call_stack(self, entry: int) -> list[SourceLine]:
        """The source line that called the operation, then those that called the modules around it,
        innermost first.
        """
        return list(
            dict.fromkeys(
                source_line(code, instruction)
                for code, instruction in self._places(self.row(entry))
            )
        )

    def innermost_place(self, row: Row) -> tuple[CodeType | None, int]:
        """The code and instruction of the innermost line, not yet looked up; None without code."""
        return next(self._places(row), (None, 0))

    def _places(self, row: Row) -> Iterator[tuple[CodeType, int]]:
        calls = [
            self.recording.module_calls[call]
            for call in reversed(self.graph.module_chains[row.module_call])
        ]
        places = [
            (row.code, row.instruction),
            *((record.code, record.instruction) for record in calls),
        ]
        return ((code, instruction) for code, instruction in places if code is not None)

    # -- addresses ---------------------------------------------------------------------------------

    @cached_property
    def boundary_addresses(self) -> dict[int, list[str]]:
        """Input, output and buffer addresses by entry."""
        entry_of = self.graph.entry_of
        found: dict[int, list[str]] = {}
        named = [
            *((path_text("input", path), number) for path, number in self.recording.inputs),
            *((path_text("output", path), number) for path, number in self.recording.outputs),
            *self.recording.buffers,
        ]
        for address, number in named:
            if number in entry_of:
                found.setdefault(entry_of[number], []).append(address)
        return found


class _Sizes(dict[tuple[Any, torch.dtype], int | None]):
    """Bytes by shape and dtype, computed at the first lookup: a long log has few shapes. None if
    the sizes vary.
    """

    def __missing__(self, kind: tuple[Any, torch.dtype]) -> int | None:
        shape, dtype = kind
        count = prod(shape)
        is_varying = -1 in shape and not isinstance(count, SymbolicInt)
        size = self[kind] = None if is_varying else count * dtype.itemsize
        return size


def _unpickled_log(
    _: None, parts: "PackedLog", graph: "Graph", marks_distances: bool, keeps_unsaved: bool
) -> Log:
    recording, options = unpacked(parts)
    return Log(
        recording,
        options,
        graph=graph,
        marks_distances=marks_distances,
        keeps_unsaved=keeps_unsaved,
    )


def picked(values: Sequence[_Value], places: Sequence[int]) -> list[_Value]:
    """The values at these places, which are not negative."""
    if len(places) == 1:
        return [values[places[0]]]
    if isinstance(places, range) and places.step == 1:
        return list(values[places.start : places.stop])
    return list(map(values.__getitem__, places))
