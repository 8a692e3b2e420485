"""The part of a call that a journal tells of, as a history: its tensors with their operations,
modules and parents.
"""

from typing import Any

from torchlens._recording.operations import BOUNDARIES, BUFFER, INPUT, OUTPUT, Operation
from torchlens._recording.recording import ModuleCall, Recording, Row, located
from torchlens._text.plain_text import shown
from torchlens._trace.document import function_parts, references_form
from torchlens._trace.document_reading import references_of, shape_of_form
from torchlens._trace.files import TraceFiles
from torchlens._trace.format import dtype_named
from torchlens._trace.python_values import function_of
from torchlens._trace.stored_tensors import stored_tensor
from torchlens._trace.tensors import word_of
from torchlens.errors import TraceError


def row_line(
    recording: Recording, addresses: dict[int, str], call: int, number: int, note: Any
) -> dict[str, Any]:
    """What the journal says of a row whose value was written."""
    row = recording.rows[number]
    operation = row.operation
    modules = []
    at = row.module_call
    while at > 0:
        record = recording.module_calls[at]
        modules.append(
            [record.address, record.pass_num, recording.module_classes.get(record.address, "")]
        )
        at = record.parent
    return {
        "call": call, "row": number, "value": note, "operation": operation.name,
        "type": operation.layer_type,
        "function": (
            None if BOUNDARIES.get(operation.name) is operation else function_parts(operation)
        ),
        "modules": modules[::-1], "references": references_form(row.references),
        "shape": [int(size) for size in row.shape],
        "dtype": word_of(row.dtype), "model": recording.model_name,
        "address": addresses.get(number),
    }  # fmt: skip


def recording_of_journal(files: TraceFiles, call: int) -> Recording:
    """A recording of the rows that the journal has; what they were given beside tensors is not
    known.
    """
    lines = sorted(files.unfinished[call], key=lambda line: line["row"])
    numbers = {line["row"]: place for place, line in enumerate(lines)}
    calls = [ModuleCall("", 1, -1, None, 0)]
    classes = {"": str(lines[0]["model"])}
    call_of: dict[tuple[tuple[str, int], ...], int] = {(): 0}
    rows, values = [], []
    inputs: list[tuple[Any, int]] = []
    outputs: list[tuple[Any, int]] = []
    buffers: list[tuple[str, int]] = []
    for place, line in enumerate(lines):
        operation = _operation_of(line)
        references = references_of(line["references"], line["row"])
        known = {at: numbers[read] for at, read in located(references) if read in numbers}
        module = _module_call(line["modules"], calls, classes, call_of)
        shape, dtype = shape_of_form(tuple(line["shape"])), dtype_named(line["dtype"])
        rows.append(Row(operation, (), None, known, module, None, 0, 0.0, None, shape, dtype, None))
        values.append(stored_tensor(files, line["value"]))
        _, *path = str(line["address"] or "").split(".")
        for kind, found in ((INPUT, inputs), (OUTPUT, outputs)):
            if operation is kind:
                found.append((tuple(path), place))
        if operation is BUFFER:
            buffers.append((".".join(path), place))
    return Recording(
        model_name=classes[""], rows=rows, values=values, versions=[-1] * len(rows),
        storages=list(range(len(rows))),
        regions={}, writes=[], inputs=inputs, outputs=outputs, buffers=buffers, params=[],
        param_addresses=[],
        module_params={}, outside_storages=[], module_calls=calls, module_classes=classes,
        module_entries=[],
        module_exits=[], booleans={}, leaves=set(), saved_args={}, gradients={}, is_copy=True,
    )  # fmt: skip


def _operation_of(line: dict[str, Any]) -> Operation:
    name, kind = line["operation"], line["type"]
    if not isinstance(name, str) or not isinstance(kind, str):
        raise TraceError(
            f"An operation must have a name and a type, not {shown(name)} and {shown(kind)}."
        )
    if line["function"] is None:
        if name not in BOUNDARIES:
            raise TraceError(f"There is no operation {shown(name)} without a function.")
        return BOUNDARIES[name]
    return Operation(function_of(line["function"]), name, kind)


def _module_call(
    modules: Any,
    calls: list[ModuleCall],
    classes: dict[str, str],
    call_of: dict[tuple[tuple[str, int], ...], int],
) -> int:
    """The number of the innermost of these module calls, each inside the one before it."""
    chain: tuple[tuple[str, int], ...] = ()
    for address, pass_num, kind in modules:
        above = call_of[chain]
        chain = (*chain, (str(address), int(pass_num)))
        if chain not in call_of:
            call_of[chain] = len(calls)
            calls.append(ModuleCall(str(address), int(pass_num), above, None, 0))
            classes.setdefault(str(address), str(kind))
    return call_of[chain]
