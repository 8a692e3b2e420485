"""A recording and its graph as JSON, apart from values; `document_reading.py` is the way back.

What a log says stands in columns, and what stands in many places (operations, arguments, lines of
code, shapes) stands once, in a list, and is told by its number.
"""

from collections.abc import Callable, Hashable, Iterable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchlens._graph.build import Graph, decided
from torchlens._recording.operations import BOUNDARIES, Operation
from torchlens._recording.recording import Failure, Recording, References, Row
from torchlens._recording.user_code import line_of_code
from torchlens._trace.columns import lists_form, numbers_form
from torchlens._trace.python_values import PythonWriter, reference_parts
from torchlens._trace.tensors import word_of


class _Table:
    """Things that stand in many places, each once."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self.forms: list[Any] = []
        self._write = write
        self._numbers: dict[Hashable, int] = {}
        self._kept: list[Any] = []  # so that ids stay their own

    def number(self, key: Hashable, *parts: Any) -> int:
        """The number of the thing that `key` tells apart from others, which is made of `parts`."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.forms)
            self.forms.append(self._write(*parts))
            self._kept.append(parts)
        return found


def document_of(recording: Recording, graph: Graph, writer: PythonWriter) -> dict[str, Any]:
    """All of a log that is not a value or a time, ready for JSON."""
    rows = recording.rows
    operations = _Table(_operation_form)
    places = _Table(lambda code, instruction: (*line_of_code(code, instruction), instruction))
    arguments = _Table(lambda args, kwargs: [writer.write(args), writer.write(kwargs)])
    shapes = _Table(lambda shape: writer.write(tuple(shape)))
    words = _Table(lambda word: word)

    def place(code: CodeType | None, instruction: int) -> int:
        return -1 if code is None else places.number((id(code), instruction), code, instruction)

    def argument(row: Row) -> int:
        if not row.args and not row.kwargs:
            return -1
        return arguments.number(_key_of(row), row.args, row.kwargs)

    failure = recording.failure
    decisions = decided(graph)
    columns: dict[str, list[Any]] = {
        "operation": [operations.number(id(row.operation), row.operation) for row in rows],
        "argument": [argument(row) for row in rows],
        "module_call": [row.module_call for row in rows],
        "place": [place(row.code, row.instruction) for row in rows],
        "output_index": [row.output_index for row in rows],
        "shape": [
            shapes.number((tuple(row.shape), *map(type, row.shape)), row.shape) for row in rows
        ],
        "dtype": [words.number(row.dtype, word_of(row.dtype)) for row in rows],
        "gradfunc": [
            -1 if row.gradfunc is None else words.number(row.gradfunc, row.gradfunc) for row in rows
        ],
    }
    return {
        "model": recording.model_name,
        "rows": {name: numbers_form(column) for name, column in columns.items()}
        | {"references": lists_form([references_form(row.references) for row in rows])},
        "storages": numbers_form(renumbered(recording.storages)),
        "module_calls": [
            (call.address, call.pass_num, call.parent, place(call.code, call.instruction))
            for call in recording.module_calls
        ],
        "module_classes": recording.module_classes,
        "module_entries": recording.module_entries,
        "module_exits": recording.module_exits,
        "module_params": recording.module_params,
        "inputs": [(writer.write(path), number) for path, number in recording.inputs],
        "outputs": [(writer.write(path), number) for path, number in recording.outputs],
        "buffers": recording.buffers,
        "params": [
            (address, word_of(param.dtype), _param_shape(param), recording.is_trained(number))
            for number, (param, address) in enumerate(zip(recording.params,
                recording.param_addresses, strict=False))
        ],
        "booleans": list(recording.booleans.items()),
        "reads": sorted(recording.reads),
        "leaves": sorted(recording.leaves),
        "received": sorted(recording.received),
        "sent": sorted(recording.sent),
        "joint_params": sorted(recording.joint_params),
        "returns_data": recording.returns_data,
        "framework": recording.framework,
        "branches": recording.branches,
        "failure": None if failure is None else _failure_form(failure, operations, place),
        "graph": {
            "recorded": numbers_form(decisions.recorded),
            "reads": lists_form(decisions.reads),
            "first_of_layer": numbers_form(decisions.first_of_layer),
            "located_reads": [
                (number, [(_location(at), read) for at, read in own]) for number,
                own in decisions.located_reads.items()
            ],
            "is_exact": decisions.is_exact,
        },
        # Last, since they grow while the others are made.
        "operations": operations.forms,
        "arguments": arguments.forms,
        "places": places.forms,
        "shapes": shapes.forms,
        "words": words.forms,
    }  # fmt: skip


def _key_of(row: Row) -> Hashable:
    """What tells arguments apart from others: how they print, if that says all; otherwise which
    objects they are.
    """
    if is_told(row.args) and is_told(row.kwargs):
        return repr(row.args), repr(row.kwargs)
    return id(row.args), id(row.kwargs)


_TOLD = frozenset({int, bool, float, str, type(None), torch.dtype, torch.device})


def is_told(value: Any) -> bool:
    """Whether a value is plain: how it prints says all, and it keeps nothing else alive."""
    kind = type(value)
    if kind in _TOLD:
        return True
    if kind is tuple or kind is list:
        return all(map(is_told, value))
    return kind is dict and all(type(key) is str and is_told(item) for key, item in value.items())


def _operation_form(operation: Operation) -> Any:
    if BOUNDARIES.get(operation.name) is operation:
        return operation.name
    rest = [
        operation.kind.value,
        operation.written,
        operation.argument_names,
        operation.writes_if,
        operation.has_output,
    ]
    return [function_parts(operation), operation.name, operation.layer_type, *rest]


def function_parts(operation: Operation) -> list[Any]:
    """How the function of an operation may be found. It takes a while to find that out, so it is
    remembered with it.
    """
    known = _PARTS.get(operation)
    if known is None:
        known = _PARTS[operation] = reference_parts(operation.func)
    return known


_PARTS: WeakKeyDictionary[Operation, list[Any]] = WeakKeyDictionary()


def references_form(references: References) -> Any:
    """Which entries the arguments of a call were, ready for JSON."""
    if isinstance(references, dict):
        return {"at": [(_location(place), number) for place, number in references.items()]}
    return references


def _location(place: Any) -> Any:
    return list(place) if isinstance(place, tuple) else place


def _param_shape(param: torch.nn.Parameter) -> Any:
    return (
        None
        if isinstance(param, torch.nn.UninitializedParameter)
        else [int(size) for size in param.shape]
    )


def _failure_form(
    failure: Failure, operations: _Table, place: Callable[[CodeType | None, int], int]
) -> list[Any]:
    operation = (
        -1
        if failure.operation is None
        else operations.number(id(failure.operation), failure.operation)
    )
    where = place(failure.code, failure.instruction)
    return [
        failure.message,
        failure.module_call,
        where,
        operation,
        failure.arguments,
        references_form(failure.references),
    ]


def renumbered(storages: Iterable[int]) -> list[int]:
    """The numbers of memory, small; what has none of its own keeps a negative one."""
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(storage, len(numbers) if storage >= 0 else -1 - len(numbers))
        for storage in storages
    ]
