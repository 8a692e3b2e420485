"""A history as the columns that the page reads. Text is kept once, in `strings`; everything else is numbers."""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchlens.capture.recording import Failure, References
from torchlens.capture.symbolic import SymbolicInt
from torchlens.capture.user_code import source_text
from torchlens.capture.valueless import why_valueless
from torchlens.capture.wrappers import local_value
from torchlens.graph.costs import flops_of
from torchlens.graph.operation_kinds import ACTIVATIONS, DROPOUTS, NORMALISATIONS, SAME_NUMBERS
from torchlens.history.backward import parameter_gradients
from torchlens.history.base_history import BaseHistory
from torchlens.history.layer_entry import LayerEntry
from torchlens.history.log import Log, SourceLine, source_line
from torchlens.history.overlay import Marks, Overlay
from torchlens.viewer.outline import FailedCall, Part, outline, walk
from torchlens.viewer.statistics import Statistics

__all__ = ["page_data"]

# What the page paints title bars by; the order is the page's.
_KINDS = ("input", "output", "module", "weights", "norm", "activation", "compute", "view", "source", "group", "failed")
_PARTS = ("operation", "module", "loop", "repeat", "step", "span")
# What the page can dim or hide.
_SIDES = ("", "buffer", "constant", "mask", "view")
# In place of the row of a tensor's statistics.
_VALUELESS = -2

_LIKE_ACTIVATIONS = ACTIVATIONS | DROPOUTS
_LIKE_VIEWS = SAME_NUMBERS | {"pixelshuffle", "to"}
_LONGEST_ARGUMENTS = 200


def page_data(history: BaseHistory, overlays: Mapping[str, Mapping[str, float]], title: str | None) -> dict[str, Any]:
    """Everything the page knows."""
    log = history._log
    return _Writer(history, log).write(overlays, title)


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
        self.inputs, self.outputs, self.buffers = map(set, (log.graph.inputs, log.graph.outputs, log.graph.buffers))

    def write(self, overlays: Mapping[str, Mapping[str, float]], title: str | None) -> dict[str, Any]:
        recording = self.log.recording
        failure = recording.failure
        failed = None if failure is None else self._failed_call(failure)
        root = outline(self.log, failed)
        entries = self._entries(failure, failed)
        parts = self._parts(root, len(self.log.graph.recorded), failure)
        params = self._params()
        numbered: list[Part] = []
        walk(root, lambda part, _parent: numbered.append(part))
        marks = [self._overlay(name, values, numbered) for name, values in overlays.items()]
        return {
            "title": title or recording.model_name,
            "model": recording.model_name,
            "tensors": len(self.log.graph.recorded),
            "bytes": sum(entries["bytes"]),
            "params": self.history.total_params,
            "paramBytes": self.history.total_params_fsize,
            "seconds": recording.seconds_forward,
            "valueless": ", ".join(dict.fromkeys(self.valueless.values())),
            "note": self._note(),
            "failure": None if failure is None else self._failure(failure),
            "entries": entries,
            "parts": parts,
            "parameters": params,
            "places": self.place_lines,
            "overlays": marks,
            "kinds": _KINDS,
            "partKinds": _PARTS,
            "sides": _SIDES,
            "statistics": self.statistics.columns(),
            "strings": list(self.strings.found),
        }

    def _note(self) -> str:
        """What is to be said of the numbers on the page where sizes are symbolic."""
        sizes = {size for row in self.log.recording.rows for size in row.shape if isinstance(size, SymbolicInt)}
        if not sizes:
            return ""
        examples = sorted(f"{size} = {int(size)}" for size in sizes if size.is_known and str(size).isidentifier())
        for_example = f" for the example {', '.join(examples)}" if examples else ""
        return f"Some sizes are symbolic. Bytes and FLOPs are those{for_example}."

    # -- entries -------------------------------------------------------------------------------------------------------

    def _entries(self, failure: Failure | None, failed: FailedCall | None) -> dict[str, list[Any]]:
        log, graph, strings = self.log, self.log.graph, self.strings
        columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "label", "shape", "dtype", "bytes", "micros", "flops", "place", "stat", "grad", "args", "parents",
                "backward", "gradnorm",
            )
        }  # fmt: skip
        dtypes: dict[torch.dtype, int] = {}
        for entry in range(len(graph.recorded)):
            row = log.row(entry)
            if row.dtype not in dtypes:
                dtypes[row.dtype] = strings(str(row.dtype).removeprefix("torch."))
            columns["label"].append(strings(log.label(entry)))
            columns["shape"].append(strings(_shape_text(row.shape)))
            columns["dtype"].append(dtypes[row.dtype])
            columns["bytes"].append(log.num_bytes(entry))
            columns["micros"].append(0 if row.output_index else round(row.seconds * 1e6, 1))
            columns["flops"].append(flops_of(log.recording, row) or 0)
            columns["place"].append(self._place(row.code, row.instruction))
            is_valueless = entry in self.valueless
            columns["stat"].append(_VALUELESS if is_valueless else self.statistics.add(self._value(entry)))
            columns["grad"].append(self.statistics.add(log.gradient(entry)))
            columns["args"].append(strings(self._arguments(entry, row)))
            columns["parents"].append(graph.parents[entry])
            seconds = LayerEntry(log, entry).backward_time_elapsed
            columns["backward"].append(None if seconds is None or row.output_index else round(seconds * 1e6, 1))
            columns["gradnorm"].append(_norm(log.gradient(entry)))
        if failure is not None and failed is not None:
            name = failure.operation.name if failure.operation else "raise"
            place = self._place(failure.code, failure.instruction)
            values = (strings(name), 0, 0, 0, 0, 0, place, -1, -1, 0, failed.parents, None, None)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return columns

    def _value(self, entry: int) -> Any:
        """The saved value; none where it was changed in place since, for then it is not the operation's any more."""
        number = self.log.graph.recorded[entry]
        value, version = self.log.recording.values[number], self.log.recording.versions[number]
        if value is not None and version >= 0 and value._version != version:
            return None
        return value

    def _arguments(self, entry: int, row: Any) -> str:
        if entry in self.inputs or entry in self.outputs or entry in self.buffers:
            return ", ".join(self.log.boundary_addresses.get(entry, []))
        if not row.kwargs and all(arg is None for arg in row.args):
            return ""
        shown = [_argument_text(arg) for arg in row.args]
        shown += [f"{name}={_argument_text(arg)}" for name, arg in (row.kwargs or {}).items()]
        text = ", ".join(shown)
        return text if len(text) <= _LONGEST_ARGUMENTS else f"{text[:_LONGEST_ARGUMENTS]}…"

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

    def _parts(self, root: Part, num_entries: int, failure: Failure | None) -> dict[str, list[Any]]:
        strings = self.strings
        names = (
            "part",
            "parent",
            "title",
            "path",
            "type",
            "kind",
            "side",
            "passes",
            "entries",
            "buffers",
            "params",
            "place",
        )
        columns: dict[str, list[Any]] = {name: [] for name in names}

        def visit(part: Part, parent: int) -> None:
            is_operation = part.kind == "operation"
            params: list[int] = []
            if is_operation:
                for own in part.passes:
                    for entry in own:
                        params += self.log.graph.params[entry] if entry < num_entries else ()
            columns["part"].append(_PARTS.index(part.kind))
            columns["parent"].append(parent)
            columns["title"].append(strings(self._title(part, num_entries, failure)))
            columns["path"].append(strings(self._path(part)))
            columns["type"].append(strings(self._type(part, num_entries, failure)))
            columns["kind"].append(_KINDS.index(self._kind(part, num_entries)))
            columns["side"].append(_SIDES.index(self._side(part, num_entries)))
            columns["passes"].append(part.num_passes)
            columns["entries"].append(part.passes)
            columns["buffers"].append(part.buffers)
            columns["params"].append(list(dict.fromkeys(params)))
            record = self.log.recording.module_calls[part.calls[0]] if part.calls and part.calls[0] else None
            columns["place"].append(self._place(record.code, record.instruction) if record else -1)

        walk(root, visit)
        return columns

    def _address(self, part: Part) -> str:
        is_one_of_many = part.num_passes == 1 and self.log.graph.module_tree.num_passes.get(part.address, 1) > 1
        return f"{part.address}:{part.pass_num}" if is_one_of_many else part.address

    def _title(self, part: Part, num_entries: int, failure: Failure | None) -> str:
        if part.kind == "operation":
            entry = part.passes[0][0]
            if entry >= num_entries:
                name = failure.operation.name if failure and failure.operation else "raise"
                return part.address or name
            if part.address:
                return self._address(part)
            if entry in self.log.boundary_addresses:
                return self.log.boundary_addresses[entry][0]
            return self.log.label_no_pass(entry)
        if part.kind == "module":
            return self._address(part) or self.log.recording.model_name
        if part.kind == "loop":
            return f"loop of {len(part.children)}"
        if part.kind == "step":
            return self._title(part.children[0], num_entries, failure)
        first, last = part, part
        while first.kind in ("repeat", "span", "step"):
            first = first.children[0]
        while last.kind in ("repeat", "span", "step"):
            last = last.children[-1]
        head, tail = (self._title(end, num_entries, failure) for end in (first, last))
        return f"{head} … {_unshared(head, tail)}"

    def _path(self, part: Part) -> str:
        """The attribute path: of a module its own, of an operation that of the module it ran in."""
        if part.address or part.kind != "operation":
            return self._address(part)
        entry = part.passes[0][0]
        if entry in self.buffers:
            return self.log.boundary_addresses[entry][0]
        if entry < len(self.log.graph.recorded):
            return self.log.recording.module_calls[self.log.row(entry).module_call].address
        failure = self.log.recording.failure
        return self.log.recording.module_calls[failure.module_call].address if failure else ""

    def _type(self, part: Part, num_entries: int, failure: Failure | None) -> str:
        classes = self.log.recording.module_classes
        if part.kind == "operation":
            if part.address:
                return classes.get(part.address, "")
            entry = part.passes[0][0]
            if entry >= num_entries:
                return failure.operation.name if failure and failure.operation else "raise"
            return self.log.row(entry).operation.name
        if part.kind == "module":
            return classes.get(part.address, self.log.recording.model_name)
        found = dict.fromkeys(self._type(child, num_entries, failure) for child in part.children)
        if part.kind == "repeat" and len(found) == 1 and part.children[0].kind != "span":
            return next(iter(found))
        while part.children[0].kind == "span":
            part = part.children[0]
        found = dict.fromkeys(self._type(child, num_entries, failure) for child in part.children)
        return ", ".join(list(found)[:3]) + (" …" if len(found) > 3 else "")

    def _kind(self, part: Part, num_entries: int) -> str:
        if part.kind == "module":
            return "module"
        if part.kind != "operation":
            return "group"
        entry = part.passes[0][0]
        if entry >= num_entries:
            return "failed"
        if entry in self.inputs:
            return "input"
        if entry in self.outputs:
            return "output"
        name = self.log.row(entry).operation.layer_type
        if name in NORMALISATIONS:
            return "norm"
        if self.log.graph.params[entry]:
            return "weights"
        if entry in self.buffers or not self._depends_on_input(part):
            return "source"
        return "activation" if name in _LIKE_ACTIVATIONS else "view" if name in _LIKE_VIEWS else "compute"

    def _side(self, part: Part, num_entries: int) -> str:
        if part.kind != "operation" or part.passes[0][0] >= num_entries:
            return ""
        entry = part.passes[0][0]
        if entry in self.buffers:
            return "buffer"
        if entry in self.inputs or entry in self.outputs or self.log.graph.params[entry]:
            return ""
        if self.log.row(entry).dtype is torch.bool:
            return "mask"
        if not self._depends_on_input(part):
            return "constant"
        return "view" if self.log.row(entry).operation.layer_type in _LIKE_VIEWS else ""

    def _depends_on_input(self, part: Part) -> bool:
        return any(self.log.graph.has_input_ancestor[entry] for own in part.passes for entry in own)

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
            "stat": [self.statistics.add(param) for param in params],
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


def _unshared(first: str, second: str) -> str:
    """The address `second` from where it differs from `first`: `h.11` after `model.h.0`."""
    heads, tails = first.split("."), second.split(".")
    same = 0
    while same < min(len(heads), len(tails)) - 1 and heads[same] == tails[same]:
        same += 1
    return ".".join(tails[max(0, same - 1) :]) if same > 1 else second


def _place_text(line: SourceLine) -> str:
    """A place in the code; files below the working directory by the way from there."""
    file = Path(line.file)
    here = Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return f"{shown}:{line.line} in {line.function}"


def _shape_text(shape: Any) -> str:
    return "×".join(map(str, shape)) if len(shape) else "scalar"


def _argument_text(value: Any) -> str:
    """An argument as one would write it; tensors, which the log has as None, as a dot."""
    if value is None:
        return "·"
    if isinstance(value, slice):
        ends = ["" if end is None else str(end) for end in (value.start, value.stop, value.step)]
        return ":".join(ends[:2] if not ends[2] else ends)
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_argument_text, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if value is Ellipsis:
        return "…"
    if isinstance(value, int | float | str | bool | torch.SymFloat | torch.SymBool | torch.dtype | torch.device):
        return repr(value).removeprefix("torch.")
    return value.__name__ if inspect.isfunction(value) or inspect.isclass(value) else type(value).__name__
