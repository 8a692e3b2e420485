"""Converts a history to the columns that the page reads. Each text is stored once, in `strings`;
everything else is numbers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchlens._history.backward import parameter_gradients
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.overlay import Marks, Overlay
from torchlens._history.receipt import exported_receipt
from torchlens._page.attention_columns import attention_columns
from torchlens._page.entry_columns import (
    EntryColumns,
    Places,
    Strings,
    costs_of,
    dtype_text,
    finite_number,
    shape_text,
)
from torchlens._page.folding import fold
from torchlens._page.outline import outline
from torchlens._page.part_columns import (
    PartColumns,
    link_columns,
    part_of_entries,
    residual_links,
)
from torchlens._page.part_names import KINDS, PARTS, SIDES
from torchlens._page.parts import ChosenParts, FailedCall, Outline, Part, entries_in, select
from torchlens._page.value_columns import Statistics
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.recording import Failure, References
from torchlens._recording.stored import opened_params
from torchlens._recording.symbolic import SymbolicInt
from torchlens._recording.user_code import source_line


class Carried(NamedTuple):
    """The data of a page, the parts in it by number, and for each entry the number of its part."""

    data: dict[str, Any]
    parts: list[Part]
    part_of: dict[int, int]


def page_data(
    history: ModelHistory,
    overlays: Mapping[str, Mapping[str, float]],
    title: str | None,
    has_repeats: bool = True,
) -> dict[str, Any]:
    """The data of a page. Without repeats, identical modules are not folded into one."""
    return carried_data(history, overlays, title, has_repeats).data


def carried_data(
    history: ModelHistory,
    overlays: Mapping[str, Mapping[str, float]],
    title: str | None,
    has_repeats: bool = True,
) -> Carried:
    """The data of a page, and where each entry is in it."""
    writer = _Writer(history, history._log)
    # The outline is large, and none of it is garbage before the page is written.
    return without_collector(lambda: writer.write(overlays, title, has_repeats))


class _Writer:
    def __init__(self, history: ModelHistory, log: Log) -> None:
        self.history, self.log = history, log
        self.strings = Strings()
        self.places = Places(self.strings)
        self.statistics = Statistics()
        self.entries = EntryColumns(log, self.strings, self.places, self.statistics)
        self.parts = PartColumns(log, self.strings, self.places)

    def write(
        self, overlays: Mapping[str, Mapping[str, float]], title: str | None, has_repeats: bool
    ) -> Carried:
        recording = self.log.recording
        failure = recording.failure
        failed = None if failure is None else self._failed_call(failure)
        found = outline(self.log, failed)
        fold(self.log, found, has_repeats)
        chosen = self._select(found, failed)
        parts = list(chosen.walk(found.root))
        shown = [part for part, _ in parts]
        number_of = {id(part): number for number, part in enumerate(shown)}
        costs = costs_of(self.log)
        entries = self.entries.columns(chosen, costs, failure, failed)
        left_out = self.parts.left_out(chosen, costs, number_of)
        marks = [self._overlay(name, values, shown) for name, values in overlays.items()]
        data = {
            "title": title or recording.model_name,
            "model": recording.model_name,
            "receipt": str(exported_receipt(self.log)),
            "tensors": len(self.log.graph.recorded),
            "bytes": sum(costs.bytes),
            "params": self.history.total_params,
            "paramBytes": self.history.total_params_fsize,
            "seconds": recording.seconds_forward,
            "valueless": self.entries.reasons_for_no_values,
            "note": self._note(),
            "leftOut": left_out,
            "failure": None if failure is None else self._failure(failure),
            "entries": entries,
            "parts": self.parts.columns(chosen, parts),
            "links": link_columns(found, number_of, residual_links(self.log, found)),
            "conditions": self.parts.conditions(chosen),
            "idle": self.parts.idle(shown),
            "parameters": self._params(),
            "places": self.places.lines,
            "overlays": marks,
            "kinds": KINDS,
            "partKinds": PARTS,
            "sides": SIDES,
            "attention": attention_columns(self.log, chosen),
            "statistics": self.statistics.columns(),
            "strings": list(self.strings.found),
        }
        return Carried(data, shown, part_of_entries(found.root, number_of))

    def _select(self, found: Outline, failed: FailedCall | None) -> ChosenParts:
        graph = self.log.graph
        num_entries = len(graph.recorded) + (failed is not None)
        num_aside = len(graph.inputs) + len(graph.buffers) + len(graph.outputs)
        always = -1 if failed is None else num_entries - 1
        return select(found.root, num_entries, num_entries - num_aside, always)

    def _note(self) -> str:
        """A note about the numbers on the page if sizes are symbolic."""
        sizes = {
            size
            for row in self.log.recording.rows
            for size in row.shape
            if isinstance(size, SymbolicInt)
        }
        if not sizes:
            return ""
        examples = sorted(
            f"{size} = {int(size)}" for size in sizes if size.is_known and str(size).isidentifier()
        )
        for_example = f" for the example {', '.join(examples)}" if examples else ""
        return f"Some sizes are symbolic. Bytes and FLOPs are those{for_example}."

    def _params(self) -> dict[str, list[Any]]:
        recording = self.log.recording
        params = recording.params
        recorded = parameter_gradients(self.log)  # a copy of a log has parameters without `.grad`
        gradients = [
            recorded.get(number) if param.grad is None else param.grad
            for number, param in enumerate(params)
        ]
        strings, add = self.strings, self.statistics.add
        return {
            "address": list(map(strings, recording.param_addresses[: len(params)])),
            "shape": [strings(shape_text(param.shape)) for param in params],
            "dtype": [strings(dtype_text(param.dtype)) for param in params],
            "count": [param.numel() for param in params],
            "bytes": [param.nbytes for param in params],
            "trained": [int(param.requires_grad) for param in params],
            "stat": list(map(add, opened_params(params))),
            "grad": list(map(add, gradients)),
        }

    def _overlay(self, name: str, values: Mapping[str, float], parts: list[Part]) -> dict[str, Any]:
        """A value for each part that has one, with what is inside it."""

        def find(key: str) -> list[int]:
            try:
                return self.history._lookup.many(key)
            except ValueError as error:
                raise ValueError(
                    f"The overlay {name!r} has a value for {key!r}, and no layer has that name."
                ) from error

        marks = Marks(self.log, values, find, finite_number)
        num_entries = len(self.log.graph.recorded)  # without the call that failed
        found: dict[int, float] = {}
        for number, part in enumerate(parts):
            entries = [entry for entry in entries_in(part) if entry < num_entries]
            value = marks.of(entries, part.calls)
            if value is not None:
                found[number] = float(f"{value:.6g}")
        return {
            "name": name,
            "isSum": marks.is_sum,
            "unit": values.unit if isinstance(values, Overlay) else "",
            "parts": list(found),
            "values": list(found.values()),
        }

    def _failed_call(self, failure: Failure) -> FailedCall:
        entry_of = self.log.graph.entry_of
        numbers = _numbers(failure.references)
        if not numbers:
            given = [
                own
                for call, own in self.log.recording.module_entries
                if call == failure.module_call
            ]
            numbers = given[-1] if given else []
        parents = [entry_of[number] for number in numbers if number in entry_of]
        if not parents and self.log.graph.recorded:
            parents = [len(self.log.graph.recorded) - 1]
        return FailedCall(failure.module_call, tuple(dict.fromkeys(parents)))

    def _failure(self, failure: Failure) -> dict[str, str]:
        record = self.log.recording.module_calls[failure.module_call]
        place = "" if failure.code is None else str(source_line(failure.code, failure.instruction))
        return {
            "message": failure.message,
            "operation": failure.operation.name if failure.operation else "",
            "arguments": failure.arguments,
            "module": record.address,
            "place": place,
        }


def _numbers(references: References) -> list[int]:
    found = references.values() if isinstance(references, dict) else references
    return [number for number in found if number is not None and number >= 0]
