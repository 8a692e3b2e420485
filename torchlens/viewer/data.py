"""A history as the columns that the page reads. Text is kept once, in `strings`; everything else is numbers."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchlens.capture.collector import pause_collector, resume_collector
from torchlens.capture.recording import Failure, References
from torchlens.capture.stored import opened, opened_params
from torchlens.capture.symbolic import SymbolicInt
from torchlens.capture.user_code import source_text
from torchlens.capture.valueless import why_valueless
from torchlens.capture.wrappers import local_value
from torchlens.graph.costs import flops_of
from torchlens.history.argument_words import argument_words
from torchlens.history.backward import backward_times, parameter_gradients
from torchlens.history.base_history import BaseHistory
from torchlens.history.log import Log, SourceLine, source_line
from torchlens.history.overlay import Marks, Overlay
from torchlens.viewer.folding import fold
from torchlens.viewer.names import KINDS, PARTS, SIDES, Names
from torchlens.viewer.outline import FailedCall, Outline, Part, outline
from torchlens.viewer.residuals import residual_links
from torchlens.viewer.selection import Selection, select
from torchlens.viewer.statistics import Statistics

__all__ = ["Carried", "carried_data", "page_data"]

# In place of the row of a tensor's statistics.
_VALUELESS = -2


class Carried(NamedTuple):
    """What the page is given, the parts that it shows, by their numbers in it, and the number of the part of each entry."""

    data: dict[str, Any]
    parts: list[Part]
    part_of: dict[int, int]


def page_data(
    history: BaseHistory,
    overlays: Mapping[str, Mapping[str, float]],
    title: str | None,
    has_repeats: bool = True,
) -> dict[str, Any]:
    """Everything the page knows. Without repeats, identical modules are not folded to one."""
    return carried_data(history, overlays, title, has_repeats).data


def carried_data(
    history: BaseHistory,
    overlays: Mapping[str, Mapping[str, float]],
    title: str | None,
    has_repeats: bool = True,
) -> Carried:
    """Everything the page knows, and where each entry is in it."""
    user = object()
    try:
        pause_collector(user)  # nothing of the outline is garbage before the page is written, and it is large
        return _Writer(history, history._log).write(overlays, title, has_repeats)
    finally:
        resume_collector(user)


class _Strings:
    def __init__(self) -> None:
        self.found: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.found.setdefault(text, len(self.found))


class _Writer:
    def __init__(self, history: BaseHistory, log: Log) -> None:
        self.history, self.log = history, log
        self.strings = _Strings()
        self.statistics = Statistics()
        self.places: dict[Any, int] = {}
        self.place_lines: list[list[Any]] = []
        self.valueless = log.valueless_entries()
        self.names = Names(log)
        self.sizes: dict[Any, int] = {}
        self.flops: dict[Any, int] = {}
        self.backward_seconds = backward_times(log).seconds

    def write(self, overlays: Mapping[str, Mapping[str, float]], title: str | None, has_repeats: bool) -> Carried:
        recording = self.log.recording
        failure = recording.failure
        failed = None if failure is None else self._failed_call(failure)
        found = outline(self.log, failed)
        fold(self.log, found, has_repeats)
        num_all = len(self.log.graph.recorded) + (failed is not None)
        num_operations = num_all - len(self.log.graph.inputs) - len(self.log.graph.buffers) - len(self.log.graph.outputs)
        chosen = select(found.root, num_all, num_operations, always=num_all - 1 if failed is not None else -1)
        parts = [(part, parent) for part, parent in chosen.walk(found.root)]
        number_of = {id(part): number for number, (part, _) in enumerate(parts)}
        entries = self._entries(chosen, failure, failed)
        left_out = self._left_out(chosen, number_of)
        marks = [self._overlay(name, values, [part for part, _ in parts]) for name, values in overlays.items()]
        data = {
            "title": title or recording.model_name,
            "model": recording.model_name,
            "tensors": len(self.log.graph.recorded),
            "bytes": sum(entries["bytes"]) + (sum(left_out["bytes"]) if left_out else 0),
            "params": self.history.total_params,
            "paramBytes": self.history.total_params_fsize,
            "seconds": recording.seconds_forward,
            "valueless": ", ".join(dict.fromkeys(self.valueless.values())),
            "note": self._note(),
            "leftOut": left_out,
            "failure": None if failure is None else self._failure(failure),
            "entries": entries,
            "parts": self._parts(chosen, parts),
            "links": _links(found, number_of, residual_links(self.log, found)),
            "conditions": self._conditions(chosen),
            "idle": self._idle([part for part, _ in parts]),
            "parameters": self._params(),
            "places": self.place_lines,
            "overlays": marks,
            "kinds": KINDS,
            "partKinds": PARTS,
            "sides": SIDES,
            "statistics": self.statistics.columns(),
            "strings": list(self.strings.found),
        }
        return Carried(data, [part for part, _ in parts], _part_of_entries(found.root, number_of))

    def _note(self) -> str:
        """What is to be said of the numbers on the page where sizes are symbolic."""
        sizes = {size for row in self.log.recording.rows for size in row.shape if isinstance(size, SymbolicInt)}
        if not sizes:
            return ""
        examples = sorted(f"{size} = {int(size)}" for size in sizes if size.is_known and str(size).isidentifier())
        for_example = f" for the example {', '.join(examples)}" if examples else ""
        return f"Some sizes are symbolic. Bytes and FLOPs are those{for_example}."

    # -- entries -------------------------------------------------------------------------------------------------------

    def _entries(self, chosen: Selection, failure: Failure | None, failed: FailedCall | None) -> dict[str, list[Any]]:
        log, graph, strings = self.log, self.log.graph, self.strings
        columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "label", "shape", "dtype", "bytes", "micros", "flops", "place", "stat", "grad", "args", "parents",
                "backward", "gradnorm",
            )
        }  # fmt: skip
        dtypes: dict[torch.dtype, int] = {}
        number_of = chosen.number_of
        for entry in chosen.entries:
            if entry == len(graph.recorded):
                continue
            row = log.row(entry)
            if row.dtype not in dtypes:
                dtypes[row.dtype] = strings(str(row.dtype).removeprefix("torch."))
            parents: Sequence[int] = graph.parents[entry]
            if number_of is not None:
                parents = [number_of[parent] for parent in parents if parent in number_of]
            columns["label"].append(strings(log.label(entry)))
            columns["shape"].append(strings(_shape_text(row.shape)))
            columns["dtype"].append(dtypes[row.dtype])
            columns["bytes"].append(self._bytes(entry))
            columns["micros"].append(self._micros(entry))
            columns["flops"].append(self._flops(entry))
            columns["place"].append(self._place(row.code, row.instruction))
            is_valueless = entry in self.valueless
            columns["stat"].append(_VALUELESS if is_valueless else self.statistics.add(self._value(entry)))
            columns["grad"].append(self.statistics.add(log.gradient(entry)))
            columns["args"].append(strings(self._arguments(entry, row)))
            columns["parents"].append(parents)
            columns["backward"].append(self._backward(entry))
            columns["gradnorm"].append(_norm(log.gradient(entry)))
        if failure is not None and failed is not None:
            name = failure.operation.name if failure.operation else "raise"
            place = self._place(failure.code, failure.instruction)
            given = failed.parents if number_of is None else [number_of[own] for own in failed.parents if own in number_of]
            values = (strings(name), 0, 0, 0, 0, 0, place, -1, -1, 0, given, None, None)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return columns

    def _bytes(self, entry: int) -> int:
        if entry >= len(self.log.graph.recorded):
            return 0
        row = self.log.row(entry)
        key = (row.shape, row.dtype)
        if key not in self.sizes:
            size = self.log.num_bytes(entry)
            if -1 in row.shape:  # a nested tensor: not all of one shape are of one size
                return size
            self.sizes[key] = size
        return self.sizes[key]

    def _micros(self, entry: int) -> float:
        if entry >= len(self.log.graph.recorded):
            return 0
        row = self.log.row(entry)
        return 0 if row.output_index else round(row.seconds * 1e6, 1)

    def _flops(self, entry: int) -> int:
        if entry >= len(self.log.graph.recorded):
            return 0
        row = self.log.row(entry)
        key = (self.log.graph.layer_of[entry], row.shape)  # passes of one layer with equal results cost the same
        if key not in self.flops:
            self.flops[key] = flops_of(self.log.recording, row) or 0
        return self.flops[key]

    def _backward(self, entry: int) -> float | None:
        seconds = self.backward_seconds.get(entry)
        return None if seconds is None or self.log.row(entry).output_index else round(seconds * 1e6, 1)

    def _value(self, entry: int) -> Any:
        """The saved value; none where it was changed in place since, for then it is not the operation's any more."""
        number = self.log.graph.recorded[entry]
        value, version = self.log.recording.values[number], self.log.recording.versions[number]
        if value is not None and version >= 0 and value._version != version:
            return None
        return opened(value)

    def _arguments(self, entry: int, row: Any) -> str:
        if entry in self.log.boundary_addresses:
            return ", ".join(self.log.boundary_addresses.get(entry, []))
        return argument_words(self.log.recording, row)

    def _place(self, code: Any, instruction: int) -> int:
        if code is None:
            return -1
        key = (code, instruction)
        if key not in self.places:
            self.places[key] = len(self.place_lines)
            place = _place_text(source_line(code, instruction))
            self.place_lines.append([self.strings(place), self.strings(source_text(code, instruction))])
        return self.places[key]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _parts(self, chosen: Selection, parts: Sequence[tuple[Part, int]]) -> dict[str, list[Any]]:
        strings, names, num_entries = self.strings, self.names, len(self.log.graph.recorded)
        columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "part", "parent", "title", "path", "type", "kind", "isModule", "side", "passes", "each", "entries",
                "buffers", "params", "place",
            )
        }  # fmt: skip
        for part, parent in parts:
            own = [entry for one in part.passes for entry in one] if part.kind == "operation" else []
            if id(part) in chosen.sealed:
                own = chosen.left_out[id(part)]
            params = [number for entry in own if entry < num_entries for number in self.log.graph.params[entry]]
            buffers = part.buffers
            if chosen.number_of is not None:
                buffers = [chosen.number_of[entry] for entry in buffers]
            columns["part"].append(PARTS.index(part.kind))
            columns["parent"].append(parent)
            columns["title"].append(strings(names.title(part)))
            columns["path"].append(strings(names.path(part)))
            columns["type"].append(strings(names.type(part)))
            columns["kind"].append(KINDS.index(names.kind(part)))
            columns["isModule"].append(int(bool(part.address)))
            columns["side"].append(SIDES.index(names.side(part)))
            columns["passes"].append(part.num_passes)
            columns["each"].append(part.num_each)
            columns["entries"].append(chosen.passes(part))
            columns["buffers"].append(buffers)
            columns["params"].append(list(dict.fromkeys(params)))
            record = self.log.recording.module_calls[part.calls[0]] if part.calls and part.calls[0] else None
            columns["place"].append(self._place(record.code, record.instruction) if record else -1)
        return columns

    def _conditions(self, chosen: Selection) -> dict[str, list[Any]]:
        """What an `if` read, with its value, and the edges by which the computation of a condition begins."""
        carried = chosen.number_of
        edges, booleans = self.log.graph.condition_edges, self.log.graph.booleans.items()
        if carried is None:
            return {"edges": [list(edge) for edge in edges], "read": [[entry, int(value)] for entry, value in booleans]}
        return {
            "edges": [[carried[a], carried[b]] for a, b in edges if a in carried and b in carried],
            "read": [[carried[entry], int(value)] for entry, value in booleans if entry in carried],
        }

    def _idle(self, parts: Sequence[Part]) -> list[list[Any]]:
        """For each module that is shown, the modules in it that did not run: experts that were not chosen."""
        recording = self.log.recording
        called = {record.address for record in recording.module_calls}
        # Some modules only keep parameters or buffers, as MultiheadAttention's out_proj does; what reads those runs.
        read = [recording.param_addresses[number] for own in self.log.graph.params for number in own]
        read += [self.log.boundary_addresses[entry][0] for entry in self.log.graph.buffers]
        called |= {address.rpartition(".")[0] for address in read}
        holders = {""}  # what something that ran is in, however deep
        for address in called:
            above = address.rpartition(".")[0]
            while above not in holders:
                holders.add(above)
                above = above.rpartition(".")[0]
        box_of = {part.address: number for number, part in reversed(list(enumerate(parts))) if part.kind == "module"}
        found: dict[int, list[str]] = {}
        for address in recording.module_classes:
            above = address.rpartition(".")[0]
            if not address or address in called or above not in holders or address in holders:
                continue
            while above and above not in box_of:
                above = above.rpartition(".")[0]
            found.setdefault(box_of.get(above, 0), []).append(address)
        classes = recording.module_classes
        return [
            [number, [self.strings(name) for name in names], [self.strings(classes[name]) for name in names]]
            for number, names in found.items()
        ]

    def _left_out(self, chosen: Selection, number_of: Mapping[int, int]) -> dict[str, Any] | None:
        """How much of each part the page does not carry; None where it carries everything."""
        if chosen.number_of is None:
            return None
        columns: dict[str, Any] = {name: [] for name in ("part", "passes", "bytes", "micros", "flops", "backward")}
        for key, entries in chosen.left_out.items():
            columns["part"].append(number_of[key])
            columns["passes"].append(chosen.passes_left_out[key])
            columns["bytes"].append(sum(map(self._bytes, entries)))
            columns["micros"].append(round(sum(map(self._micros, entries)), 1))
            columns["flops"].append(sum(map(self._flops, entries)))
            columns["backward"].append(sum(self._backward(entry) or 0 for entry in entries))
        parents, children = Counter[int](), Counter[int]()
        carried = chosen.number_of
        for entry in chosen.entries:
            if entry < len(self.log.graph.recorded):
                if absent := sum(parent not in carried for parent in self.log.graph.parents[entry]):
                    parents[carried[entry]] = absent
                if absent := sum(child not in carried for child in self.log.graph.children[entry]):
                    children[carried[entry]] = absent
        return columns | {"carried": len(chosen.entries), "parents": parents, "children": children}

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _params(self) -> dict[str, list[Any]]:
        recording = self.log.recording
        params = recording.params
        heard = parameter_gradients(self.log)  # a copy of a log has parameters without `.grad`
        gradients = [heard.get(number) if param.grad is None else param.grad for number, param in enumerate(params)]
        return {
            "address": [self.strings(address) for address in recording.param_addresses[: len(params)]],
            "shape": [self.strings(_shape_text(param.shape)) for param in params],
            "dtype": [self.strings(str(param.dtype).removeprefix("torch.")) for param in params],
            "count": [param.numel() for param in params],
            "bytes": [param.numel() * param.element_size() for param in params],
            "trained": [int(param.requires_grad) for param in params],
            "stat": [self.statistics.add(param) for param in opened_params(params)],
            "grad": [self.statistics.add(gradient) for gradient in gradients],
        }

    def _overlay(self, name: str, values: Mapping[str, float], parts: list[Part]) -> dict[str, Any]:
        """A value for each part that has one, with what is inside it."""

        def find(key: str) -> list[int]:
            try:
                return self.history._lookup.many(key)
            except ValueError as error:
                raise ValueError(f"The overlay {name!r} has a value for {key!r}, and no layer has that name.") from error

        marks = Marks(self.log, values, find, _finite_number)
        found: dict[int, float] = {}
        for number, part in enumerate(parts):
            value = marks.of(_entries_in(part, len(self.log.graph.recorded)), part.calls)
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
            given = [own for call, own in self.log.recording.module_entries if call == failure.module_call]
            numbers = given[-1] if given else []
        parents = [entry_of[number] for number in numbers if number in entry_of]
        if not parents and self.log.graph.recorded:
            parents = [len(self.log.graph.recorded) - 1]
        return FailedCall(failure.module_call, tuple(dict.fromkeys(parents)))

    def _failure(self, failure: Failure) -> dict[str, str]:
        record = self.log.recording.module_calls[failure.module_call]
        place = "" if failure.code is None else _place_text(source_line(failure.code, failure.instruction))
        return {
            "message": failure.message,
            "operation": failure.operation.name if failure.operation else "",
            "arguments": failure.arguments,
            "module": record.address,
            "place": place,
        }


def _shown(part: Part, number_of: Mapping[int, int]) -> int:
    """The number of the part that the page carries for one: itself, or what it is closed in."""
    while id(part) not in number_of:
        assert part.above is not None
        part = part.above
    return number_of[id(part)]


def _part_of_entries(root: Part, number_of: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    pending = [root]
    while pending:
        part = pending.pop()
        pending += part.children
        for own in (*part.passes, part.buffers):
            for entry in own:
                found[entry] = _shown(part, number_of)
    return found


def _links(found: Outline, number_of: Mapping[int, int], residual: Collection[int]) -> dict[str, list[int]]:
    """The edges between the parts that the page carries, each once; `around` is -1 for those that go round nothing."""

    def shown(part: Part) -> int:
        return _shown(part, number_of)

    is_residual: dict[tuple[int, int, int], bool] = {}
    for number, (source, target, around) in enumerate(found.links):
        link = (shown(source), shown(target), -1 if around is None else shown(around))
        if link[0] != link[1] or link[2] == link[0]:
            is_residual[link] = is_residual.get(link, True) and number in residual
    columns = {name: [link[at] for link in is_residual] for at, name in enumerate(("from", "to", "around"))}
    return columns | {"residual": [int(is_one) for is_one in is_residual.values()]}


def _norm(gradient: torch.Tensor | None) -> float | None:
    if gradient is None or why_valueless(gradient) is not None:
        return None
    return _finite_number(f"{float(torch.linalg.vector_norm(local_value(gradient.detach()).float())):.6g}", "")


def _finite_number(value: Any, _key: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _entries_in(part: Part, num_entries: int) -> list[int]:
    """The entries of a part and of all parts inside it, without the call that failed."""
    found: list[int] = []
    pending = [part]
    while pending:
        inner = pending.pop()
        pending += inner.children
        found += [entry for own in inner.passes for entry in own if entry < num_entries]
    return found


def _numbers(references: References) -> list[int]:
    found = references.values() if isinstance(references, dict) else references
    return [number for number in found if number is not None and number >= 0]


def _place_text(line: SourceLine) -> str:
    """A place in the code; files below the working directory by the way from there."""
    file = Path(line.file)
    here = Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return f"{shown}:{line.line} in {line.function}"


def _shape_text(shape: Any) -> str:
    """`1×384`; `(384,)` for one dimension, for `× 8` is a number of passes; `scalar` for none."""
    if len(shape) == 1:
        return f"({shape[0]},)"
    return "×".join(map(str, shape)) if len(shape) else "scalar"
