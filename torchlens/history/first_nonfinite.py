"""Finding the first operation that made a NaN or an Inf, in the saved values and then in the gradients.

Infinity is often meant: a mask filled with `-inf`, a mask handed in. What was asked for, by a constant among the arguments
or by a tensor from outside that holds it, is no finding, nor is what merely hands it on. A NaN always is. What does not go
on to an output (`where` puts something else in its place) is told only if there is nothing worse.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchlens.capture.gradients import Gradients
from torchlens.capture.operations import BUFFER, INPUT, OUTPUT
from torchlens.capture.recording import Row
from torchlens.capture.user_code import warn_caller
from torchlens.graph.operation_kinds import UNINITIALISED
from torchlens.history.backward import parameter_gradients
from torchlens.history.log import Log
from torchlens.history.nonfinite import NonFinite, ValueRange, is_finite, value_range

__all__ = ["first_nonfinite"]


def first_nonfinite(log: Log, include_constants: bool) -> NonFinite | None:
    """The first operation whose result, or else whose gradient, is not finite though what it was given is."""
    num_entries = len(log.graph.recorded)
    unsaved = [entry for entry in range(num_entries) if not log.is_saved(entry) and _is_number(log, entry)]
    if not any(map(log.is_saved, range(num_entries))):
        raise ValueError("No tensor of this log is saved, so there is nothing to look at. Log with layers_to_save='all'.")
    origins, lasting = _value_origins(log, include_constants)
    kept = [origin for origin in origins if origin.entry in lasting]
    found = kept[0] if kept else _gradient_origin(log)
    if found is None and origins:
        found = origins[0]._replace(note=f"{origins[0].note} All that was computed from it is finite again.".strip())
    if found is not None:
        return _finding(log, found, len(unsaved))
    if unsaved:
        warn_caller(
            f"All saved tensors are finite, but {len(unsaved)} of {num_entries} entries are not saved and were not looked "
            "at. Log with layers_to_save='all' to check them too."
        )
    return None


class _Origin(NamedTuple):
    """An operation whose result or gradient is not finite, and what it was given."""

    entry: int
    phase: str
    result: ValueRange
    inputs: list[ValueRange]
    note: str


# -- values ------------------------------------------------------------------------------------------------------------


def _value_origins(log: Log, include_constants: bool) -> tuple[list[_Origin], set[int]]:
    """Operations that made NaN or Inf of something else, in order, and the entries from which it went on to an output."""
    found: list[_Origin] = []
    strange: dict[int, ValueRange] = {}
    params = _ranges_of_params(log)
    for entry in range(len(log.graph.recorded)):
        value = log.value(entry) if log.is_saved(entry) else None
        if not isinstance(value, torch.Tensor) or is_finite(value):
            continue
        row = log.row(entry)
        result = value_range("result", value)
        given = [strange[parent] for parent in log.graph.parents[entry] if parent in strange]
        strange[entry] = result
        is_handed_on = any(_explains(each, result) for each in given)
        is_asked_for = row.operation.layer_type in UNINITIALISED or (
            not include_constants and _is_asked_for(row, result, len(log.recording.params), value)
        )
        if not is_handed_on and not is_asked_for:
            own = [params[number] for number in log.graph.params[entry] if number in params]
            inputs = [*_ranges_of_values(log, log.graph.parents[entry]), *own]
            found.append(_Origin(entry, "forward", result, inputs, _note_of(log, entry, given, own)))
    return found, _lasting(log, strange)


def _lasting(log: Log, strange: Iterable[int]) -> set[int]:
    """The entries that are not finite all the way to an output, as far as that is known."""
    outputs = set(log.graph.outputs)
    lasting: set[int] = set()
    for entry in reversed(list(strange)):
        children = log.graph.children[entry]
        if entry in outputs or any(child in lasting or not log.is_saved(child) for child in children):
            lasting.add(entry)
    return lasting


def _is_asked_for(row: Row, result: ValueRange, num_params: int, value: torch.Tensor) -> bool:
    constants = list(_numbers((row.args, row.kwargs)))
    if result.num_nan:
        return any(map(math.isnan, constants))
    if row.operation in (INPUT, BUFFER) or any(map(math.isinf, constants)):
        return True
    # A tensor that is no entry, like a mask that is a plain attribute: its values are not known.
    return _reads_elsewhere(row, num_params) and not bool((value == math.inf).any())


def _reads_elsewhere(row: Row, num_params: int) -> bool:
    """Whether an argument may be a tensor that is neither an entry nor a parameter."""
    if isinstance(row.references, dict):
        return any(number < -num_params for number in row.references.values())
    return any(number is None and arg is None for number, arg in zip(row.references, row.args, strict=False))


def _explains(given: ValueRange, result: ValueRange) -> bool:
    """Whether what was given accounts for the result: NaN for anything, Inf for Inf."""
    return bool(given.num_nan or (given.num_inf and not result.num_nan))


def _note_of(log: Log, entry: int, given: list[ValueRange], params: list[ValueRange]) -> str:
    operation = log.row(entry).operation
    if operation in (INPUT, BUFFER):
        return f"It came in like this: {', '.join(log.boundary_addresses.get(entry, ()))}."
    broken = [each.name for each in params if not each.is_finite]
    if broken:
        return f"Not finite before: {', '.join(broken)}."
    if given:
        return "It was given Inf that was asked for, and made NaN of it."
    unsaved = [log.label(parent) for parent in log.graph.parents[entry] if not log.is_saved(parent)]
    if unsaved:
        return f"Not saved, so it may have come from there: {', '.join(unsaved)}."
    return ""


# -- gradients ---------------------------------------------------------------------------------------------------------


def _gradient_origin(log: Log) -> _Origin | None:
    gradients = log.recording.gradients
    if not isinstance(gradients, Gradients):
        return None
    of_params = parameter_gradients(log)
    entry_of = log.graph.entry_of
    for number in dict.fromkeys(number for _, number in gradients.arrivals if number in entry_of):
        entry = entry_of[number]
        gradient = gradients[number]
        if not is_finite(gradient):
            return _sender(log, entry, value_range(f"gradient sent to {log.label(entry)}", gradient))
        for param in log.graph.params[entry]:
            if param in of_params and not is_finite(of_params[param]):
                name = f"gradient sent to parameter {log.recording.param_addresses[param]}"
                inputs = [value_range("gradient received", gradient), *_ranges_of_values(log, log.graph.parents[entry])]
                return _Origin(entry, "backward", value_range(name, of_params[param]), inputs, "")
    return None


def _sender(log: Log, entry: int, result: ValueRange) -> _Origin:
    """The gradient of `entry` was made by the backward of what reads it."""
    gradients, recorded = log.recording.gradients, log.graph.recorded
    readers = [child for child in log.graph.children[entry] if recorded[child] in gradients]
    if not readers or log.row(entry).operation is OUTPUT:
        note = "It was made outside the model, by what was computed from this layer: the loss."
        return _Origin(entry, "backward", result, _ranges_of_values(log, [entry]), note)
    received = [
        value_range(f"gradient received by {log.label(child)}", gradients[recorded[child]]) for child in readers
    ]  # fmt: skip
    inputs = [*received, *_ranges_of_values(log, log.graph.parents[readers[-1]])]
    names = ", ".join(log.label(child) for child in readers)
    note = f"The backward of one of these made it: {names}." if len(readers) > 1 else ""
    return _Origin(readers[-1], "backward", result, inputs, note)


# -- what a finding says -----------------------------------------------------------------------------------------------


def _finding(log: Log, origin: _Origin, num_unchecked: int) -> NonFinite:
    entry = origin.entry
    lines, chain = log.call_stack(entry), log.module_chain(entry)
    return NonFinite(
        phase=origin.phase,
        label=log.label(entry),
        operation=log.row(entry).operation.layer_type,
        module=log.recording.module_calls[chain[-1]].address if chain else "",
        source=str(lines[0]) if lines else None,
        result=origin.result,
        inputs=tuple(origin.inputs),
        note=origin.note,
        num_unchecked=num_unchecked,
    )


def _ranges_of_values(log: Log, entries: Iterable[int]) -> list[ValueRange]:
    values = [(log.label(entry), log.value(entry)) for entry in entries if log.is_saved(entry)]
    return [
        value_range(label, value)
        for label, value in values
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    ]


def _ranges_of_params(log: Log) -> dict[int, ValueRange]:
    """The parameters that are not finite."""
    recording = log.recording
    return {
        number: value_range(f"parameter {recording.param_addresses[number]}", parameter)
        for number, parameter in enumerate(recording.params)
        if not is_finite(parameter)
    }


def _is_number(log: Log, entry: int) -> bool:
    dtype = log.row(entry).dtype
    return dtype.is_floating_point or dtype.is_complex


def _numbers(value: Any) -> Iterator[float]:
    """The real numbers among arguments, also inside lists and dicts."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
