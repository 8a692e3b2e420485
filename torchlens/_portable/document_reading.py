"""Rebuilds a recording and the decisions about its graph from the documents of `documents.py`.

Files are not trusted. Each index is checked against the length of its list, and may refer only to
earlier elements, so that no graph has a cycle.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, prod
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._capture.options import CaptureOptions, Transform
from torchlens._graph.build import Decisions
from torchlens._portable.documents import TIMES
from torchlens._portable.python_values import PythonReader
from torchlens._portable.stored_tensors import TensorSource, damage_reported, stored_tensor
from torchlens._portable.tensor_notes import dtype_named
from torchlens._recording.operations import BOUNDARIES, BUFFER, INPUT, OUTPUT, Kind, Operation
from torchlens._recording.origin import Origin
from torchlens._recording.recording import (
    Branch,
    Failure,
    ModuleCall,
    Recording,
    References,
    located,
    make_row,
)
from torchlens._recording.stored import StoredMapping, StoredParams, StoredValue
from torchlens._recording.trees import Path as TensorPath
from torchlens._recording.user_code import code_of_line
from torchlens._text.plain_text import printable, shown
from torchlens.errors import TraceError

# No live log has a version this high, so a value that was changed since it was saved stays one.
CHANGED = 1 << 62
_FAR = 1 << 40  # more than any count in a log
_FRAMEWORKS = ("torch", "jax")
_BOUNDARY_WORDS = {INPUT: "inputs", OUTPUT: "outputs", BUFFER: "buffers"}


def recording_of(graph: dict[str, Any], seconds: Any, reader: PythonReader) -> Recording:
    """The recording, without values. `seconds` has the times of its rows."""
    operations = [_operation_of(form, reader) for form in graph["operations"]]
    codes = list(map(_code_of, graph["places"]))
    calls = _module_calls(graph["module_calls"], codes)
    operation_numbers = _numbers(graph["rows"]["operation"], len(operations))
    count = len(operation_numbers)
    rows_of = partial(_numbers, end=count)
    _check_boundaries(graph, operations, operation_numbers)
    params = [_param_of(*form[1:]) for form in graph["params"]]
    return Recording(
        model_name=printable(str(graph["model"])),
        rows=_rows(graph, operations, codes, len(calls), _times(seconds, count), reader),
        values=[None] * count,
        versions=[-1] * count,
        storages=_numbers(graph["storages"], _FAR, -_FAR, count),
        regions={},
        writes=[],
        inputs=_paths(graph["inputs"], reader, count),
        outputs=_paths(graph["outputs"], reader, count),
        buffers=[(str(address), number) for address, number in _pairs(graph["buffers"], count)],
        params=params,
        param_addresses=[str(form[0]) for form in graph["params"]],
        module_params={
            address: tuple(_numbers(numbers, len(params)))
            for address, numbers in graph["module_params"].items()
        },
        outside_storages={},
        module_calls=calls,
        module_classes=_classes(graph["module_classes"], calls),
        module_aliases={str(key): str(address) for key, address in graph["module_aliases"].items()},
        module_entries=_of_calls(graph["module_entries"], len(calls), count),
        module_exits=_of_calls(graph["module_exits"], len(calls), count),
        module_parts=_parts_of_calls(graph["module_parts"], reader, len(calls), count),
        booleans={
            row: bool(value) for value, row in _pairs(map(reversed, graph["booleans"]), count)
        },
        saved_args={},
        gradients={},
        failure=_failure_of(graph["failure"], operations, codes, len(calls), count),
        branches=[Branch(parent, at, rows_of(own)) for parent, at, own in graph["branches"]],
        returns_data=bool(graph["returns_data"]),
        joint_params=set(_numbers(graph["joint_params"], _FAR)),
        other_params={
            number: tuple(_numbers(own, len(params)))
            for own, number in _pairs(map(reversed, graph["other_params"]), count)
        },
        framework=_framework(graph["framework"]),
        is_copy=True,
        reads=set(rows_of(graph["reads"])),
        leaves=set(rows_of(graph["leaves"])),
        received=set(rows_of(graph["received"])),
        sent=set(rows_of(graph["sent"])),
        edited=set(rows_of(graph["edited"])),
    )


def _rows(
    graph: dict[str, Any],
    operations: Sequence[Operation],
    codes: Sequence[tuple[CodeType, int]],
    num_calls: int,
    seconds: list[float],
    reader: PythonReader,
) -> list[Any]:
    columns, words = graph["rows"], graph["words"]
    if type(words) is not list or not all(type(word) is str for word in words):
        raise TraceError("The words of a log must be text.")
    arguments = [_arguments_of(form, reader) for form in graph["arguments"]]
    shapes = [_shape_of(reader.read(form)) for form in graph["shapes"]]
    references = list(map(references_of, columns["references"], range(len(seconds))))
    argument_numbers = _numbers(columns["argument"], len(arguments), -1)
    dtype_numbers = _numbers(columns["dtype"], len(words))
    dtypes = {number: dtype_named(words[number]) for number in set(dtype_numbers)}
    _check_counts(arguments, argument_numbers, references)
    indexes = columns["output_index"]
    _numbers([index for index in indexes if index is not None], _FAR)
    # The last element of each is found by index -1.
    args, kwargs = zip(*arguments, ((), None), strict=True)
    code, instruction = zip(*codes, (None, 0), strict=True)
    places = _numbers(columns["place"], len(codes), -1)
    gradfuncs = _numbers(columns["gradfunc"], len(words), -1)
    fields = (
        map(operations.__getitem__, columns["operation"]),
        map(args.__getitem__, argument_numbers),
        map(kwargs.__getitem__, argument_numbers),
        references,
        _numbers(columns["module_call"], num_calls),
        map(code.__getitem__, places),
        map(instruction.__getitem__, places),
        seconds,
        indexes,
        map(shapes.__getitem__, _numbers(columns["shape"], len(shapes))),
        map(dtypes.__getitem__, dtype_numbers),
        map([*map(printable, words), None].__getitem__, gradfuncs),
    )
    return list(map(make_row, zip(*fields, strict=True)))


def decisions_of(graph: dict[str, Any], recording: Recording) -> Decisions:
    """The decisions about the graph of a recording."""
    form = graph["graph"]
    recorded = _numbers(form["recorded"], len(recording.rows))
    if len(set(recorded)) != len(recorded):
        raise TraceError("Each entry of a graph must be a row of its own.")
    reads = _reads_of_entries(form["reads"], len(recorded))
    firsts = _firsts_of_layers(form["first_of_layer"], len(recorded))
    located_reads = {
        number: [(_location_of(at), read) for at, read in own]
        for number, own in form["located_reads"]
    }
    _check_rows_read(recording, set(recorded), located_reads)
    return Decisions(recorded, reads, firsts, located_reads, bool(form["is_exact"]))


def _reads_of_entries(form: Any, count: int) -> list[tuple[int, ...]]:
    """For each entry the entries that it reads, all of them earlier."""
    reads = list(map(tuple, form))
    if len(reads) != count:
        raise TraceError("Each entry of a graph must say what it reads.")
    for entry, own in enumerate(reads):
        for read in own:
            if type(read) is not int or not 0 <= read < entry:
                raise TraceError(f"Entry {entry} reads {shown(read)}, which is not before it.")
    return reads


def _firsts_of_layers(form: Any, count: int) -> list[int]:
    """For each entry the first entry of its layer."""
    firsts = _numbers(form, max(count, 1), count=count)
    if any(first > entry or firsts[first] != first for entry, first in enumerate(firsts)):
        raise TraceError("A layer must begin with its first entry.")
    return firsts


def _check_rows_read(
    recording: Recording, recorded: set[int], located_reads: dict[int, list[tuple[Any, int]]]
) -> None:
    """Checks that entries read only rows that are entries too."""
    read_rows = [read for own in located_reads.values() for _, read in own]
    if len(recorded) < len(recording.rows):
        for number in recorded - located_reads.keys():
            read_rows += [read for _, read in located(recording.rows[number].references)]
    if any(type(read) is not int or (read >= 0 and read not in recorded) for read in read_rows):
        raise TraceError("An operation of the graph reads a row that is not in it.")


# -- checks and parts ------------------------------------------------------------------------------


def _numbers(numbers: Any, end: int, start: int = 0, count: int | None = None) -> list[int]:
    """Whole numbers from `start` on and less than `end`, `count` of them."""
    found = list(numbers)
    is_right = set(map(type, found)) <= {int} and count in (None, len(found))
    if not is_right or (found and not (min(found) >= start and max(found) < end)):
        raise TraceError(f"Numbers must be from {start} to {end - 1}, not {shown(found)}.")
    return found


def _times(seconds: Any, count: int) -> list[float]:
    if len(seconds) != count or not set(map(type, seconds)) <= {int, float}:
        raise TraceError("The times of a call must be numbers, one for each row.")
    if not all(map(isfinite, seconds)):
        raise TraceError("The times of a call must be finite.")
    return list(map(float, seconds))


def _operation_of(form: Any, reader: PythonReader) -> Operation:
    if isinstance(form, str):
        if form not in BOUNDARIES:
            raise TraceError(f"There is no operation {shown(form)} without a function.")
        return BOUNDARIES[form]
    parts, name, layer_type, kind, written, names, writes_if, has_output = form
    if not (isinstance(name, str) and isinstance(layer_type, str)) or not isinstance(
        writes_if, int | None
    ):
        raise TraceError(f"An operation must have a name and a type, not {shown(form)}.")
    return Operation(
        reader.function(parts), name, layer_type, Kind(kind), tuple(_numbers(written, _FAR)),
        tuple(map(str, names)), writes_if, bool(has_output),
    )  # fmt: skip


def _arguments_of(form: Any, reader: PythonReader) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    args, kwargs = map(reader.read, form)
    is_dict = isinstance(kwargs, dict | None) and all(isinstance(key, str) for key in kwargs or ())
    if not isinstance(args, tuple) or not is_dict:
        raise TraceError("The arguments of a call must be a tuple and a dictionary.")
    return args, kwargs


def _code_of(form: Any) -> tuple[CodeType, int]:
    file, line, function, text, instruction = form
    _numbers([line, instruction], 1 << 31)
    code = code_of_line(printable(str(file)), line, printable(str(function)), str(text))
    return code, instruction


def _shape_of(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise TraceError(f"A shape must consist of whole numbers, not {shown(shape)}.")
    is_known = all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    return torch.Size(shape) if is_known else shape


def references_of(form: Any, number: int) -> References:
    """The references of a row: earlier rows, or values from outside the log."""
    if type(form) is not dict:
        for one in form:
            if one is not None and (type(one) is not int or not -_FAR < one < number):
                raise TraceError(
                    f"Row {number} refers to {shown(one)}, which does not come before it."
                )
        return tuple(form)
    given = {_location_of(place): one for place, one in form["at"]}
    _numbers(given.values(), number, -_FAR)
    return given


def _location_of(form: Any) -> Any:
    place = tuple(form) if type(form) is list else form
    hash(place)
    return place


def _check_counts(
    arguments: Sequence[Any], argument_numbers: Sequence[int], references: Sequence[References]
) -> None:
    """Checks that no operation has more tensors than arguments."""
    given = [len(own) if type(own) is tuple else 0 for own in references]
    for argument, count in set(zip(argument_numbers, given, strict=True)):
        if argument >= 0 and len(arguments[argument][0]) < count:
            raise TraceError("An operation was given more tensors than it has arguments.")


def _check_boundaries(
    graph: dict[str, Any], operations: Sequence[Operation], numbers: Sequence[int]
) -> None:
    """Checks that each input, output and buffer has a name."""
    named = {word: {row for _, row in graph[word]} for word in _BOUNDARY_WORDS.values()}
    words = {place: _BOUNDARY_WORDS[one] for place, one in enumerate(operations)
             if one in _BOUNDARY_WORDS}  # fmt: skip
    for row, place in enumerate(numbers):
        if place in words and row not in named[words[place]]:
            raise TraceError(f"One of the {words[place]} has no name.")


def _module_calls(forms: Any, codes: Sequence[tuple[CodeType, int]]) -> list[ModuleCall]:
    calls = [
        ModuleCall(str(address), pass_num, parent, *_code_at(codes, place))
        for address, pass_num, parent, place in forms
    ]
    _numbers([call.pass_num for call in calls], _FAR)
    if not calls:
        raise TraceError("A log must have a call of the model.")
    _numbers([calls[0].parent], 1, -1)
    for number, call in enumerate(calls[1:], start=1):
        _numbers([call.parent], number)  # the parent is an earlier call
    if any(bool(call.address) != bool(number) for number, call in enumerate(calls)):
        raise TraceError("Each module but the model itself must have an address.")
    return calls


def _framework(name: Any) -> str:
    if name not in _FRAMEWORKS:
        raise TraceError(
            f"The framework of a log must be one of {', '.join(_FRAMEWORKS)}, not {shown(name)}."
        )
    return str(name)


def _param_of(dtype: str, shape: Any, needs_grad: Any) -> torch.nn.Parameter:
    sizes, kind = _numbers(shape or [], _FAR), dtype_named(dtype)
    if prod(max(size, 1) for size in sizes) * kind.itemsize >= 1 << 62:
        raise TraceError(f"A parameter cannot have the shape {shown(shape)}.")
    can_learn = kind.is_floating_point or kind.is_complex
    empty = torch.empty(sizes, dtype=kind, device="meta")
    return torch.nn.Parameter(empty, needs_grad is True and can_learn)


def _classes(form: Any, calls: Sequence[ModuleCall]) -> dict[str, str]:
    classes = {str(address): str(kind) for address, kind in form.items()}
    for call in calls:
        if call.address not in classes:
            raise TraceError(f"The class of the module {shown(call.address)} is missing.")
    return classes


def _paths(form: Any, reader: PythonReader, count: int) -> list[tuple[Any, int]]:
    found = [(reader.read(path), number) for path, number in _pairs(form, count)]
    if not all(isinstance(path, tuple) for path, _ in found):
        raise TraceError("The place of an input or output must be a path.")
    return found


def _pairs(form: Any, count: int) -> list[tuple[Any, int]]:
    pairs = [(what, number) for what, number in form]
    _numbers([number for _, number in pairs], count)
    return pairs


def _of_calls(form: Any, num_calls: int, count: int) -> list[tuple[int, list[int]]]:
    _numbers([call for call, _ in form], num_calls, 1)  # the model itself has no such record
    return [(call, _numbers(numbers, count, -_FAR)) for call, numbers in form]


def _parts_of_calls(
    form: Any, reader: PythonReader, num_calls: int, count: int
) -> list[tuple[int, TensorPath, int]]:
    calls = _numbers([call for call, _, _ in form], num_calls, 1)
    places = _paths([(path, number) for _, path, number in form], reader, count)
    return [(call, *place) for call, place in zip(calls, places, strict=True)]


def _failure_of(
    form: Any, operations: Sequence[Operation], codes: Sequence[Any], num_calls: int, count: int
) -> Failure | None:
    if form is None:
        return None
    message, call, place, operation, arguments, references = form
    _numbers([call], num_calls)
    _numbers([operation], len(operations), -1)
    code, instruction = _code_at(codes, place)
    failed = None if operation == -1 else operations[operation]
    given = references_of(references, count)
    return Failure(str(message), call, code, instruction, failed, str(arguments), given)


def _code_at(codes: Sequence[tuple[CodeType, int]], place: Any) -> tuple[CodeType | None, int]:
    (number,) = _numbers([place], len(codes), -1)
    return (None, 0) if number == -1 else codes[number]


# -- one call --------------------------------------------------------------------------------------


class StoredGradients(StoredMapping, Gradients):
    """The gradients of a loaded history."""

    def __init__(self) -> None:
        Gradients.__init__(self)


class _Decoded(StoredValue):
    """A value that is built from JSON on access."""

    __slots__ = ("_make", "_path")

    def __init__(self, path: Path, make: Callable[[], Any]) -> None:
        self._path = path
        self._make = make

    def read(self) -> Any:
        with damage_reported(self._path):
            return self._make()


def fill_recording(
    recording: Recording,
    document: dict[str, Any],
    files: TensorSource,
    reader: PythonReader,
) -> None:
    """Fills a recording with the stored data of one call."""
    tensor, count = partial(stored_tensor, files), len(recording.rows)
    recording.values = _values(document["values"], count, files, reader)
    for row in _numbers(document["changed"], count):
        recording.values[row] = _Decoded(files.path, lambda: None)
        recording.versions[row] = CHANGED
    recording.saved_args = StoredMapping({
        row: _Decoded(files.path, partial(_call_arguments, form, reader))
        for form, row in _pairs(map(reversed, document["arguments"]), count)
    })  # fmt: skip
    if document["params"] is not None:
        stored = dict(enumerate(map(tensor, document["params"][: len(recording.params)])))
        with_values = {n: value for n, value in stored.items() if isinstance(value, StoredValue)}
        recording.params = StoredParams(recording.params, with_values)
    recording.gradients = _gradients_of(document["gradients"], tensor, recording)
    for name, time in zip(TIMES, _times([document[name] for name in TIMES], 4), strict=True):
        setattr(recording, name, time)
    seed = document["random_seed"]
    recording.random_seed = seed if isinstance(seed, int) else None
    recording.origin = _origin_of(document.get("origin") or {})
    recording.warnings = [str(message) for message in document["warnings"]]


def _origin_of(form: Any) -> Origin:
    """Where the log came from, as far as the file says it."""
    names = form.get("versions", {}).items()
    weights, inputs = (
        None if form.get(what) is None else printable(str(form[what]))
        for what in ("weights", "inputs")
    )
    versions = {printable(str(name)): printable(str(number)) for name, number in names}
    return Origin(weights, inputs, versions)


def _values(forms: Any, count: int, files: TensorSource, reader: PythonReader) -> list[Any]:
    def value(form: Any) -> Any:
        if type(form) is dict and "value" in form:
            return _Decoded(files.path, partial(reader.read, form["value"]))
        return None if form is None else stored_tensor(files, form)

    if len(forms) != count:
        raise TraceError("A call must have a value, or none, for each row of its graph.")
    return list(map(value, forms))


def _call_arguments(form: Any, reader: PythonReader) -> tuple[Any, Any]:
    args, kwargs = reader.read(form)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TraceError("The arguments of a call must be a tuple and a dictionary.")
    return args, kwargs


def _gradients_of(form: Any, tensor: Callable[[Any], Any], recording: Recording) -> Any:
    count = len(recording.rows)

    def numbered(pairs: Any, end: int) -> dict[int, Any]:
        return {number: what for what, number in _pairs(map(reversed, pairs), end)}

    own = {row: tensor(note) for row, note in numbered(form["own"], count).items()}
    if "collected" not in form:
        return StoredMapping(own)
    rest, gradients = form["collected"], StoredGradients()
    dict.update(gradients, own)
    parameters = numbered(rest["parameters"], len(recording.params))
    gradients.parameters = StoredMapping({n: tensor(note) for n, note in parameters.items()})
    gradients.arrivals = _pairs(rest["arrivals"], count)
    gradients.owners = dict(_pairs(rest["owners"], count))
    gradients.uncertain, gradients.complete = set(rest["uncertain"]), set(rest["complete"])
    gradients.has_checkpoint = bool(rest["has_checkpoint"])
    gradients.missing = {n: str(why) for n, why in numbered(rest["missing"], count).items()}
    gradients.outside = list(map(_run_of, rest["outside"]))
    gradients.watch.runs = list(map(_run_of, rest["runs"]))
    return gradients


def _run_of(form: Any) -> NodeRun:
    run = NodeRun(*form)
    numbers: list[Any] = [
        value for value in run if value is not run.name and value is not run.parameter
    ]
    if not isinstance(run.name, str) or not all(
        type(number) in (int, float) and isfinite(number) for number in numbers
    ):
        raise TraceError(f"A run of a node must be a name and numbers, not {shown(form)}.")
    return run


def options_of(form: Any, random_seed: int | None, reader: PythonReader) -> CaptureOptions:
    """The options of the log."""
    if form is None:
        return CaptureOptions(random_seed=random_seed)
    transform: Any = form["transform"]
    if isinstance(transform, dict) and "detach" in transform:
        postfunc = reader.read(transform["postfunc"])
        transform = Transform(bool(transform["detach"]), str(transform["device"]), postfunc)
    elif transform is not None:
        transform = reader.read(transform)
    return CaptureOptions(
        transform=transform,
        keeps_args=bool(form["keeps_args"]),
        keeps_gradients=bool(form["keeps_gradients"]),
        random_seed=random_seed,
    )
