"""Writes a log, without its tensors, as two documents: the graph, which calls may share, and the
data of one call. `document_reading.py` reads them. Files have them as JSON.

The rows of a recording are written as columns. What many rows share (operations, arguments, lines
of code, shapes) is in a list once, and the columns refer to it by number.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._capture.options import CaptureOptions, Transform
from torchlens._graph.build import Decisions, Graph, decided
from torchlens._portable.python_values import PythonWriter, reference_parts
from torchlens._portable.tensor_notes import TensorWriter, word_of
from torchlens._recording.operations import BOUNDARIES, Operation
from torchlens._recording.origin import LiveOrigin, Origin, versions_now
from torchlens._recording.recording import Failure, Recording, References, Row
from torchlens._recording.stored import opened, opened_params
from torchlens._recording.user_code import line_of_code

FORMAT = "3"  # goes up when the documents change their meaning
TIMES = ("seconds_forward", "seconds_total", "seconds_setup", "started_at")
# Separators of the parts of a name, and characters that a terminal cannot show.
_ODD = re.compile("[/:\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_PLAIN = frozenset({int, bool, float, str, type(None), torch.dtype, torch.device})


class _Table:
    """A list of things that occur in many rows, each once."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self.forms: list[Any] = []
        self._write = write
        self._numbers: dict[Hashable, int] = {}
        self._kept: list[Any] = []  # so that ids stay their own

    def number(self, key: Hashable, *parts: Any) -> int:
        """The number of the thing made of `parts`; things with one key are the same."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.forms)
            self.forms.append(self._write(*parts))
            self._kept.append(parts)
        return found


class _Tables:
    """The lists of what rows share."""

    def __init__(self, writer: PythonWriter) -> None:
        def arguments_form(args: Any, kwargs: Any) -> list[Any]:
            return [writer.write(args, "arguments"), writer.write(kwargs, "arguments")]

        def place_form(code: CodeType, instruction: int) -> tuple[Any, ...]:
            return *line_of_code(code, instruction), instruction

        self.operations = _Table(lambda operation: _operation_form(operation, writer))
        self.places = _Table(place_form)
        self.arguments = _Table(arguments_form)
        self.shapes = _Table(lambda shape: writer.write(tuple(shape)))
        self.words = _Table(lambda word: word)

    def operation(self, operation: Operation | None) -> int:
        return -1 if operation is None else self.operations.number(id(operation), operation)

    def place(self, code: CodeType | None, instruction: int) -> int:
        """The number of a place in the user's code; -1 if it is unknown."""
        return (
            -1 if code is None else self.places.number((id(code), instruction), code, instruction)
        )

    def argument(self, row: Row) -> int:
        if not row.args and not row.kwargs:
            return -1
        return self.arguments.number(_key_of(row), row.args, row.kwargs)

    def shape(self, shape: Sequence[Any]) -> int:
        return self.shapes.number((tuple(shape), *map(type, shape)), shape)

    def word(self, word: str | None) -> int:
        return -1 if word is None else self.words.number(word, word)

    def forms(self) -> dict[str, Any]:
        return {name: table.forms for name, table in vars(self).items()}


def graph_document(recording: Recording, graph: Graph, writer: PythonWriter) -> dict[str, Any]:
    """Everything that is not a value, a time or an option."""
    return recording_document(recording, writer) | {"graph": _decisions_form(decided(graph))}


def recording_document(recording: Recording, writer: PythonWriter) -> dict[str, Any]:
    """What `graph_document` has of a recording, without what was found out about its graph."""
    tables = _Tables(writer)
    document = {
        "model": recording.model_name,
        "framework": recording.framework,
        "rows": _columns(recording.rows, tables),
        "storages": _renumbered(recording.storages),
        "module_calls": [
            (call.address, call.pass_num, call.parent, tables.place(call.code, call.instruction))
            for call in recording.module_calls
        ],
        "module_classes": recording.module_classes,
        "module_aliases": recording.module_aliases,
        "module_entries": recording.module_entries,
        "module_exits": recording.module_exits,
        "module_parts": [
            (call, writer.write(path), number) for call, path, number in recording.module_parts
        ],
        "module_params": recording.module_params,
        "inputs": [(writer.write(path), number) for path, number in recording.inputs],
        "outputs": [(writer.write(path), number) for path, number in recording.outputs],
        "buffers": recording.buffers,
        "params": _param_forms(recording),
        "booleans": list(recording.booleans.items()),
        "reads": sorted(recording.reads),
        "leaves": sorted(recording.leaves),
        "received": sorted(recording.received),
        "sent": sorted(recording.sent),
        "edited": sorted(recording.edited),
        "joint_params": sorted(recording.joint_params),
        "other_params": list(recording.other_params.items()),
        "returns_data": recording.returns_data,
        "branches": recording.branches,
        "failure": _failure_form(recording.failure, tables),
    }
    return document | tables.forms()


def _columns(rows: Sequence[Row], tables: _Tables) -> dict[str, list[Any]]:
    return {
        "operation": [tables.operation(row.operation) for row in rows],
        "argument": [tables.argument(row) for row in rows],
        "module_call": [row.module_call for row in rows],
        "place": [tables.place(row.code, row.instruction) for row in rows],
        "output_index": [row.output_index for row in rows],
        "shape": [tables.shape(row.shape) for row in rows],
        "dtype": [tables.word(word_of(row.dtype)) for row in rows],
        "gradfunc": [tables.word(row.gradfunc) for row in rows],
        "references": [references_form(row.references) for row in rows],
    }


def _param_forms(recording: Recording) -> list[Any]:
    params = zip(recording.params, recording.param_addresses, strict=False)
    return [
        (address, word_of(param.dtype), _param_shape(param), recording.is_trained(number))
        for number, (param, address) in enumerate(params)
    ]


def _decisions_form(decisions: Decisions) -> dict[str, Any]:
    return {
        "recorded": decisions.recorded,
        "reads": decisions.reads,
        "first_of_layer": decisions.first_of_layer,
        "located_reads": [
            (number, [(_location(at), read) for at, read in own])
            for number, own in decisions.located_reads.items()
        ],
        "is_exact": decisions.is_exact,
    }


def _key_of(row: Row) -> Hashable:
    """Equal for equal arguments: how they print, if that says all; otherwise which objects they
    are.
    """
    if _prints_in_full(row.args) and _prints_in_full(row.kwargs):
        return repr(row.args), repr(row.kwargs)
    return id(row.args), id(row.kwargs)


def _prints_in_full(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is tuple or kind is list:
        return all(map(_prints_in_full, value))
    return kind is dict and all(
        type(key) is str and _prints_in_full(item) for key, item in value.items()
    )


def _operation_form(operation: Operation, writer: PythonWriter) -> Any:
    if BOUNDARIES.get(operation.name) is operation:
        return operation.name
    return [
        _function_parts(operation, writer), operation.name, operation.layer_type,
        operation.kind.value, operation.written, operation.argument_names, operation.writes_if,
        operation.has_output,
    ]  # fmt: skip


def _function_parts(operation: Operation, writer: PythonWriter) -> Any:
    """What `PythonReader.function` makes the function of an operation of."""
    if writer.objects is not None:
        return writer.objects.keep(operation.func, is_function=True)
    parts = _PARTS.get(operation)
    if parts is None:
        parts = _PARTS[operation] = reference_parts(operation.func)
    return parts


# How the function of an operation is found by name, which takes a while to find out.
_PARTS: WeakKeyDictionary[Operation, list[Any]] = WeakKeyDictionary()


def references_form(references: References) -> Any:
    if isinstance(references, dict):
        return {"at": [(_location(place), number) for place, number in references.items()]}
    return references


def _location(place: Any) -> Any:
    return list(place) if isinstance(place, tuple) else place


def _param_shape(param: torch.nn.Parameter) -> Any:
    if isinstance(param, torch.nn.UninitializedParameter):
        return None
    return [int(size) for size in param.shape]


def _failure_form(failure: Failure | None, tables: _Tables) -> list[Any] | None:
    if failure is None:
        return None
    return [
        failure.message,
        failure.module_call,
        tables.place(failure.code, failure.instruction),
        tables.operation(failure.operation),
        failure.arguments,
        references_form(failure.references),
    ]


def _renumbered(storages: Iterable[int]) -> list[int]:
    """Small numbers for memory; what has none of its own keeps a negative one."""
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(storage, len(numbers) if storage >= 0 else -1 - len(numbers))
        for storage in storages
    ]


def changed_entries(recording: Recording) -> set[int]:
    """Entries whose value was changed in place since it was saved."""
    pairs = enumerate(zip(recording.values, recording.versions, strict=True))
    return {
        number for number, (value, version) in pairs if version >= 0 and value._version != version
    }


def plain_name(text: str) -> str:
    """A part of a name in a file."""
    return _ODD.sub("_", text)


def param_key(address: str) -> str:
    """The name of a parameter, which belongs to no call."""
    return f"/params/{plain_name(address)}"


# -- one call --------------------------------------------------------------------------------------


def value_forms(
    recording: Recording, names: Sequence[str], writer: PythonWriter, tensors: TensorWriter
) -> list[Any]:
    """The form of each saved value: the note of a tensor, or any other value as {"value": ...}."""

    def form(value: Any, name: str) -> Any:
        if type(value) is Tensor:
            return tensors.add(value, name)
        value = opened(value)
        if value is None:
            return None
        made = writer.write(value, name)
        is_tensor = type(made) is dict and "tensor" in made
        return made["tensor"] if is_tensor else {"value": made}

    return list(map(form, recording.values, names))


def call_document(
    recording: Recording,
    names: Sequence[str],
    writer: PythonWriter,
    tensors: TensorWriter,
    params: bool,
) -> dict[str, Any]:
    """The data of one call beside its values; complete once the tensors are settled."""
    own_params = zip(opened_params(recording.params), recording.param_addresses, strict=False)
    return {
        "arguments": [
            (number, writer.write(arguments, f"{names[number]}/args"))
            for number, arguments in recording.saved_args.items()
            if recording.changed_param(number) is None  # else the values are lost
        ],
        "gradients": _gradients_form(recording, names, tensors),
        "params": [tensors.add(param, param_key(address)) for param, address in own_params]
        if params
        else None,
        "seconds": [row.seconds for row in recording.rows],
        **{name: getattr(recording, name) for name in TIMES},
        "random_seed": recording.random_seed,
        "warnings": recording.warnings,
        "origin": _origin_form(recording.origin),
        "changed": sorted(changed_entries(recording)),
    }


def _origin_form(origin: Origin | LiveOrigin) -> dict[str, Any]:
    """Of a call in a training loop, the digests are not computed."""
    if isinstance(origin, LiveOrigin):
        origin = Origin(versions=versions_now(origin.framework))
    return {"weights": origin.weights, "inputs": origin.inputs, "versions": origin.versions}


def _gradients_form(
    recording: Recording, names: Sequence[str], tensors: TensorWriter
) -> dict[str, Any]:
    gradients: Any = recording.gradients
    own = [(row, tensors.add(value, f"{names[row]}/grad")) for row, value in gradients.items()]
    if not isinstance(gradients, Gradients):
        return {"own": own}
    addresses = recording.param_addresses
    return {
        "own": own,
        "collected": {
            "parameters": [
                (number, tensors.add(gradient, f"{param_key(addresses[number])}/grad"))
                for number, gradient in gradients.parameters.items()
            ],
            "arrivals": gradients.arrivals,
            "owners": list(gradients.owners.items()),
            "uncertain": sorted(gradients.uncertain),
            "complete": sorted(gradients.complete),
            "has_checkpoint": gradients.has_checkpoint,
            "missing": list(gradients.missing.items()),
            "outside": gradients.outside,
            "runs": gradients.watch.runs,
        },
    }


def options_form(options: CaptureOptions | None, writer: PythonWriter) -> Any:
    """The options of a log, as far as a finished one needs them."""
    if options is None:
        return None
    transform = options.transform
    form: Any = None
    if isinstance(transform, Transform):
        postfunc = transform.activation_postfunc
        form = {
            "detach": transform.detach_saved_tensors,
            "device": str(transform.output_device),
            "postfunc": None if postfunc is None else writer.function(postfunc),
        }
    elif transform is not None:
        form = writer.function(transform)
    return {
        "keeps_args": options.keeps_args,
        "keeps_gradients": options.keeps_gradients,
        "transform": form,
    }
