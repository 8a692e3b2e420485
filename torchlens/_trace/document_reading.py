"""A recording and what was decided about its graph, made of the JSON that `document.py` describes.

A file may come from a stranger: whatever is a number of something is compared with how many there
are, and nothing refers to what comes after it, so that no graph goes round in a circle.
"""

from collections.abc import Sequence
from itertools import chain
from types import CodeType
from typing import Any

import numpy as np
import torch

from torchlens._graph.build import Decisions
from torchlens._recording.operations import BOUNDARIES, BUFFER, INPUT, OUTPUT, Kind, Operation
from torchlens._recording.recording import (
    Branch,
    Failure,
    ModuleCall,
    Recording,
    References,
    located,
    make_row,
)
from torchlens._recording.user_code import code_of_line
from torchlens._text.plain_text import printable, shown
from torchlens._trace.columns import (
    check_numbers,
    lists_of,
    numbers_of,
    refer_back,
    times_of,
    whole_numbers_of,
)
from torchlens._trace.format import dtype_named
from torchlens._trace.python_values import PythonReader, function_of
from torchlens.errors import TraceError

_FAR = 1 << 40  # no log has as many of anything
_FRAMEWORKS = ("torch", "jax")


_NAMED = {INPUT: "inputs", OUTPUT: "outputs", BUFFER: "buffers"}


def recording_of(document: dict[str, Any], seconds: Any, reader: PythonReader) -> Recording:
    """The recording, without values. `seconds` is the column of the times of its rows."""
    operations = [_operation_of(form) for form in document["operations"]]
    arguments = [_arguments_of(form, reader) for form in document["arguments"]]
    codes = list(map(_code_of, document["places"]))
    shapes = [shape_of_form(reader.read(form)) for form in document["shapes"]]
    words = document["words"]
    _check_words(words)
    calls = [
        ModuleCall(str(address), pass_num, parent, *_code_at(codes, place))
        for address, pass_num, parent, place in document["module_calls"]
    ]
    check_numbers([call.pass_num for call in calls], _FAR)
    check_numbers([call.parent for call in calls], len(calls), -1)
    if any(bool(call.address) != bool(number) for number, call in enumerate(calls)):
        raise TraceError("Each module but the model itself must have an address.")
    if not calls or any(
        not 0 <= call.parent < number for number, call in enumerate(calls) if number
    ):
        raise TraceError("A call of a module must be inside one that came before it.")
    columns = document["rows"]
    operation_of = whole_numbers_of(columns["operation"], len(operations))
    argument_of = whole_numbers_of(columns["argument"], len(arguments), -1)
    dtype_of = whole_numbers_of(columns["dtype"], len(words))
    index_of = numbers_of(columns["output_index"])
    references = _all_references(columns["references"])
    count = len(operation_of)
    storages, seconds = whole_numbers_of(document["storages"], _FAR, -_FAR), times_of(seconds)
    _check_counts(arguments, argument_of, references)
    check_numbers([index for index in index_of if index is not None], _FAR)
    all_args, all_kwargs = zip(*arguments, ((), None), strict=True)  # the last is for -1
    all_codes, all_instructions = zip(*codes, (None, 0), strict=True)
    place_of = whole_numbers_of(columns["place"], len(codes), -1)
    columns_of_rows = (
        map(operations.__getitem__, operation_of),
        map(all_args.__getitem__, argument_of),
        map(all_kwargs.__getitem__, argument_of),
        references,
        whole_numbers_of(columns["module_call"], len(calls)),
        map(all_codes.__getitem__, place_of),
        map(all_instructions.__getitem__, place_of),
        seconds,
        index_of,
        map(shapes.__getitem__, whole_numbers_of(columns["shape"], len(shapes))),
        map({number: dtype_named(words[number]) for number in set(dtype_of)}.__getitem__, dtype_of),
        map(
            [*map(printable, words), None].__getitem__,
            whole_numbers_of(columns["gradfunc"], len(words), -1),
        ),
    )
    rows = list(map(make_row, zip(*columns_of_rows, strict=True)))
    if len(storages) != count:
        raise TraceError("There must be as many numbers of memory as there are rows.")
    named = {word: {number for _, number in document[word]} for word in _NAMED.values()}
    boundaries = {place for place, operation in enumerate(operations) if operation in _NAMED}
    for number in [number for number, place in enumerate(operation_of) if place in boundaries]:
        word = _NAMED[rows[number].operation]
        if number not in named[word]:
            raise TraceError(f"One of the {word} has no name.")
    params = [_param_of(*form[1:]) for form in document["params"]]
    failure = document["failure"]
    return Recording(
        model_name=printable(str(document["model"])),
        rows=rows,
        values=[None] * count,
        versions=[-1] * count,
        storages=storages,
        regions={},
        writes=[],
        inputs=_paths(document["inputs"], reader, count),
        outputs=_paths(document["outputs"], reader, count),
        buffers=[(str(address), number) for address, number in _pairs(document["buffers"], count)],
        params=params,
        param_addresses=[str(form[0]) for form in document["params"]],
        module_params={
            address: tuple(_checked(numbers, len(params)))
            for address, numbers in document["module_params"].items()
        },
        outside_storages=[],
        module_calls=calls,
        module_classes=_classes(document["module_classes"], calls),
        module_entries=_of_calls(document["module_entries"], len(calls), count),
        module_exits=_of_calls(document["module_exits"], len(calls), count),
        booleans={
            number: bool(value)
            for number, value in document["booleans"]
            if _checked([number], count)
        },
        leaves=set(_checked(document["leaves"], count)),
        saved_args={},
        gradients={},
        failure=None
        if failure is None
        else _failure_of(failure, operations, codes, len(calls), count),
        reads=set(_checked(document["reads"], count)),
        branches=[
            Branch(parent, at, _checked(own, count)) for parent, at, own in document["branches"]
        ],
        returns_data=bool(document["returns_data"]),
        joint_params=set(_checked(document["joint_params"], _FAR)),
        received=set(_checked(document["received"], count)),
        sent=set(_checked(document["sent"], count)),
        framework=_framework(document["framework"]),
        is_copy=True,
    )


def decisions_of(document: dict[str, Any], count: int) -> Decisions:
    """What was decided about the graph of a recording with that many rows."""
    form = document["graph"]
    recorded = whole_numbers_of(form["recorded"], count)
    reads = list(map(tuple, lists_of(form["reads"])))
    if not refer_back(form["reads"], reads, 0):
        if not set(map(type, chain.from_iterable(reads))) <= {int}:
            raise TraceError("What an entry reads must be given as numbers.")
        for entry, own in enumerate(reads):
            if own and not (min(own) >= 0 and max(own) < entry):
                raise TraceError(
                    f"Entry {entry} reads {shown(own)}, which does not come before it."
                )
    firsts = whole_numbers_of(form["first_of_layer"], max(len(recorded), 1))
    entry_of = set(recorded)
    if len(entry_of) != len(recorded) or not len(recorded) == len(reads) == len(firsts):
        raise TraceError("Each entry of a graph must be one row, with what it reads and its layer.")
    first = np.array(firsts, np.int64)
    if not np.all((first <= np.arange(len(first))) & (first[first] == first)):
        raise TraceError("A layer must begin with its first entry.")
    located_reads = {
        number: [(_place_of(at), read) for at, read in own if _is_read(read, entry_of)]
        for number, own in form["located_reads"]
    }
    return Decisions(recorded, reads, firsts, located_reads, bool(form["is_exact"]))


def check_reads(recording: Recording, decisions: Decisions) -> None:
    """Sees that what operations were given is in the graph, where they are."""
    if len(decisions.recorded) == len(recording.rows):  # all of them are in it
        return
    known = set(decisions.recorded)
    for number in decisions.recorded:
        references = recording.rows[number].references
        given = (
            references if type(references) is tuple else [read for _, read in located(references)]
        )
        for read in given:
            if (
                read is not None
                and read >= 0
                and read not in known
                and number not in decisions.located_reads
            ):
                raise TraceError("An operation of the graph reads a row that is not in it.")


def _is_read(read: Any, known: set[int]) -> bool:
    if type(read) is not int or (read >= 0 and read not in known):
        raise TraceError("An operation of the graph reads a row that is not in it.")
    return True


def _operation_of(form: Any) -> Operation:
    if isinstance(form, str):
        if form not in BOUNDARIES:
            raise TraceError(f"There is no operation {shown(form)} without a function.")
        return BOUNDARIES[form]
    parts, name, layer_type, kind, written, names, writes_if, has_output = form
    if (
        not isinstance(name, str)
        or not isinstance(layer_type, str)
        or not isinstance(writes_if, int | None)
    ):
        raise TraceError(f"An operation must have a name and a type, not {shown(form)}.")
    return Operation(
        function_of(parts), name, layer_type, Kind(kind), tuple(_checked(written, _FAR)),
        tuple(map(str, names)), writes_if,
        bool(has_output),
    )  # fmt: skip


def _arguments_of(form: Any, reader: PythonReader) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    args, kwargs = map(reader.read, form)
    if (
        not isinstance(args, tuple)
        or not isinstance(kwargs, dict | None)
        or not all(isinstance(k, str) for k in kwargs or ())
    ):
        raise TraceError("The arguments of a call must be a tuple and a dictionary.")
    return args, kwargs


def _code_of(form: Any) -> tuple[CodeType, int]:
    file, line, function, text, instruction = form
    check_numbers([line, instruction], 1 << 31)
    return code_of_line(
        printable(str(file)), line, printable(str(function)), str(text)
    ), instruction


def shape_of_form(shape: Any) -> tuple[int, ...]:
    """A shape, after seeing that it is one."""
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise TraceError(f"A shape must consist of whole numbers, not {shown(shape)}.")
    return (
        torch.Size(shape)
        if all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
        else shape
    )


def _framework(name: Any) -> str:
    if name not in _FRAMEWORKS:
        raise TraceError(
            f"The framework of a log must be one of {', '.join(_FRAMEWORKS)}, not {shown(name)}."
        )
    return str(name)


def _check_words(words: Any) -> None:
    if type(words) is not list or not all(type(word) is str for word in words):
        raise TraceError("The words of a log must be text.")


def _param_of(dtype: str, shape: Any, needs_grad: Any) -> torch.nn.Parameter:
    sizes = _checked(shape or [], 1 << 40)
    kind = dtype_named(dtype)
    size = kind.itemsize
    for one in sizes:
        size *= max(one, 1)
    if size >= 1 << 62:
        raise TraceError(f"A parameter cannot have the shape {shown(shape)}.")
    can_learn = kind.is_floating_point or kind.is_complex
    return torch.nn.Parameter(
        torch.empty(sizes, dtype=kind, device="meta"), needs_grad is True and can_learn
    )


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
    check_numbers([number for _, number in form], count)
    return form


def _of_calls(form: Any, num_calls: int, count: int) -> list[tuple[int, list[int]]]:
    check_numbers([call for call, _ in form], num_calls, 1)  # the model itself has no such record
    check_numbers([number for _, numbers in form for number in numbers], count, -_FAR)
    return [(call, numbers) for call, numbers in form]


def _failure_of(
    form: Any, operations: list[Operation], codes: list[Any], num_calls: int, count: int
) -> Failure:
    message, call, place, operation, arguments, references = form
    check_numbers([call], num_calls)
    code, instruction = _code_at(codes, place)
    return Failure(
        str(message),
        call,
        code,
        instruction,
        _at(operations, operation),
        str(arguments),
        references_of(references, count),
    )


def references_of(form: Any, number: int) -> References:
    """What a row was given: rows before it, or what is outside the log."""
    if type(form) in (list, tuple):
        for one in form:
            if one is not None and (type(one) is not int or not -_FAR < one < number):
                raise TraceError(
                    f"Row {number} refers to {shown(one)}, which does not come before it."
                )
        return tuple(form)
    given = {_place_of(place): one for place, one in form["at"]}
    check_numbers(list(given.values()), number, -_FAR)
    return given


def _all_references(form: Any) -> list[References]:
    """What each row was given; mostly a few numbers, and these are looked at all at once."""
    lists = lists_of(form)
    if set(map(type, lists)) <= {list, tuple} and refer_back(
        form, lists, 1 - _FAR, may_be_none=True
    ):
        return list(map(tuple, lists))
    return [references_of(own, number) for number, own in enumerate(lists)]


def _check_counts(
    arguments: Sequence[Any], argument_of: Sequence[int], references: Sequence[References]
) -> None:
    """Sees that no operation was given more tensors than it has arguments."""
    given = [len(own) if type(own) is tuple else 0 for own in references]
    if max(given, default=0) <= min((len(args) for args, _ in arguments), default=0):
        return
    pairs = set(zip(argument_of, given, strict=True))
    if any(len(arguments[argument][0]) < count for argument, count in pairs if argument >= 0):
        raise TraceError("An operation was given more tensors than it has arguments.")


def _place_of(form: Any) -> Any:
    place = tuple(form) if type(form) is list else form
    hash(place)
    return place


def _code_at(codes: Sequence[tuple[CodeType, int]], place: Any) -> tuple[CodeType | None, int]:
    return _at(codes, place) or (None, 0)


def _at(things: Sequence[Any], number: Any) -> Any:
    """The thing with a number; None for -1."""
    if type(number) is not int or not -1 <= number < len(things):
        raise TraceError(
            f"There are {len(things)} things to refer to, and no number {shown(number)} among them."
        )
    return None if number == -1 else things[number]


def _checked(numbers: Any, end: int, start: int = 0) -> list[int]:
    check_numbers(numbers, end, start)
    return list(numbers)
