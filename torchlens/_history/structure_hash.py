"""What a model does, as text that is the same wherever it does the same, and the hash of it.

One line for each parameter and each entry says all that belongs to the structure: operations in
their order, their arguments, shapes and dtypes, what they read, the addresses of modules,
parameters and buffers. Left out is what may differ between two runs of one model: values, times,
devices, the names of inputs and of Python's variables, classes of modules, lines of code.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch

from torchlens._history.argument_words import argument_position, structural_words
from torchlens._history.entry_graph import located_parents
from torchlens._history.field import ManyEntries
from torchlens._history.log import Log
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Row, located
from torchlens._recording.trees import path_text

_FORMAT = "torchlens structure 1"  # the number rises if the same structure gets another text
_DIGITS = 32


def structure_hash(log: Log) -> str:
    """32 hexadecimal digits, equal for equal structures."""
    text = "\n".join((_FORMAT, *structure_lines(log)))
    return sha256(text.encode(errors="backslashreplace")).hexdigest()[:_DIGITS]


def structure_lines(log: Log) -> list[str]:
    """The structure of a log, one line for each parameter and each entry."""
    return [*_param_lines(log), *_entry_lines(log)]


def _param_lines(log: Log) -> Iterator[str]:
    recording = log.recording
    for address, param in zip(recording.param_addresses, recording.params, strict=False):
        is_lazy = isinstance(param, torch.nn.UninitializedParameter)
        yield f"parameter {address} {_form(None if is_lazy else param.shape, param.dtype)}"


def _entry_lines(log: Log) -> Iterator[str]:
    entries = ManyEntries(log, range(len(log.graph.recorded)))
    outputs = _output_paths(log)
    for part in entries.in_parts():
        reads = located_parents(part)
        for entry, row, own in zip(part._numbers, log.rows(part._numbers), reads, strict=True):
            yield f"{entry} {_source_or_call(log, entry, row, own, outputs)}"


def _source_or_call(
    log: Log, entry: int, row: Row, reads: list[tuple[Any, int]], outputs: dict[int, list[str]]
) -> str:
    form = _form(row.shape, row.dtype)
    if row.operation is INPUT:
        return f"input {form}"
    if row.operation is BUFFER:
        return f"buffer {' '.join(log.boundary_addresses.get(entry, ()))} {form}"
    if row.operation is OUTPUT:
        read = " ".join(f"#{parent}" for _, parent in reads)
        return f"{' '.join(outputs.get(entry, ()))} {read} {form}"
    index = "" if row.output_index is None else f"[{row.output_index}]"
    given = ", ".join([*_operands(log, row, reads), *structural_words(row)])
    module = log.module_pass(row.module_call) if row.module_call else ""
    return f"{row.operation.layer_type}({given}){index} {form} {module}".rstrip()


def _operands(log: Log, row: Row, reads: list[tuple[Any, int]]) -> list[str]:
    """The tensors that a call is given, in the order of its arguments."""
    addresses = log.recording.param_addresses
    found = [(argument_position(row, location), f"#{parent}") for location, parent in reads]
    for location, number in located(row.references):
        if number < 0:
            is_param = -1 - number < len(addresses)
            word = addresses[-1 - number] if is_param else "constant"
            found.append((argument_position(row, location), word))
    return [f"{_place(place)}:{word}" for place, word in sorted(found, key=_by_place)]


def _by_place(operand: tuple[tuple[Any, ...], str]) -> list[tuple[bool, Any]]:
    """Positions before keywords, which are not comparable with them."""
    return [(isinstance(part, str), part) for part in map(_comparable, operand[0])]


def _comparable(part: Any) -> int | str:
    return part if isinstance(part, int | str) else str(part)


def _place(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))


def _output_paths(log: Log) -> dict[int, list[str]]:
    entry_of = log.graph.entry_of
    found: dict[int, list[str]] = {}
    for path, number in log.recording.outputs:
        if number in entry_of:
            found.setdefault(entry_of[number], []).append(path_text("output", path))
    return found


def _form(shape: Sequence[Any] | None, dtype: Any) -> str:
    sizes = "?" if shape is None else "×".join(map(str, shape)) or "scalar"
    return f"{sizes} {str(dtype).removeprefix('torch.')}"
