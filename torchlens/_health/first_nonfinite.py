"""Finding the first operation that made a NaN or an Inf, in the saved values and then in the
gradients.

The rules are those of `torchlens._health.nonfinite`. A value that reaches no output (because
`where` replaces it) is reported only if there is nothing worse.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from typing import NamedTuple

import torch

from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._health.nonfinite import (
    FROM_OUTSIDE,
    Given,
    NonFinite,
    NonFiniteOrigin,
    Origins,
    numbers_in,
)
from torchlens._health.tensor_statistics import ValueRange, has_numbers, is_finite, value_range
from torchlens._history.backward import parameter_gradients
from torchlens._history.log import Log
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import reads_elsewhere
from torchlens._recording.user_code import warn_caller


class _Coverage(NamedTuple):
    """Which entries with real or complex numbers can be checked, and which cannot."""

    saved: list[int]
    unsaved: list[int]
    valueless: dict[int, str]  # entry → why it has no values

    @property
    def num_unchecked(self) -> int:
        return len(self.unsaved) + len(self.valueless)


def first_nonfinite(log: Log, include_constants: bool) -> NonFinite | None:
    """The first operation whose result, or else whose gradient, is not finite although its inputs
    are.
    """
    coverage = _coverage(log)
    origins = _value_origins(log, include_constants)
    found = None if origins.lasting() else _gradient_origin(log, origins)
    if found is None and origins.found:
        found = _worst(log, origins)
    if found is not None:
        return replace(found, num_unchecked=coverage.num_unchecked)
    if coverage.num_unchecked:
        _warn_of_unchecked(coverage, len(log.graph.recorded))
    return None


def _coverage(log: Log) -> _Coverage:
    """Which entries can be checked; raises if there are none."""
    entries = range(len(log.graph.recorded))
    if not any(map(log.is_saved, entries)):
        raise ValueError(
            "This log has no saved tensors, so there is nothing to check. Log with "
            "layers_to_save='all'."
        )
    numbers = [entry for entry in entries if _is_number(log, entry)]
    saved = list(filter(log.is_saved, numbers))
    unsaved = list(filterfalse(log.is_saved, numbers))
    valueless = log.valueless_entries()
    valueless = {entry: valueless[entry] for entry in numbers if entry in valueless}
    if saved and len(valueless) == len(saved):
        raise ValueError(
            "The tensors of this log have no values (they are "
            f"{', '.join(dict.fromkeys(valueless.values()))}), so there is no NaN to find. Log the "
            "model with its weights, on a device that holds them."
        )
    return _Coverage(saved, unsaved, valueless)


def _worst(log: Log, origins: Origins) -> NonFinite:
    """The first origin that came through to an output or a gradient; if none did, the first."""
    lasting = origins.lasting()  # of gradients as well, now that they were checked
    for origin in origins.found:
        if origin.number in lasting:
            return _of_origin(log, origin)
    found = _of_origin(log, origins.found[0])
    note = f"{found.note} All that was computed from it is finite again.".strip()
    return replace(found, note=note)


def _warn_of_unchecked(coverage: _Coverage, num_entries: int) -> None:
    parts = []
    if coverage.valueless:
        parts.append(f"{len(coverage.valueless)} of {num_entries} entries have no values")
    if coverage.unsaved:
        parts.append(f"{len(coverage.unsaved)} of {num_entries} entries are not saved")
    cure = " Log with layers_to_save='all' to check them too." if coverage.unsaved else ""
    warn_caller(
        f"All saved tensors are finite, but {' and '.join(parts)} and were not checked.{cure}"
    )


# -- values
# --------------------------------------------------------------------------------------------------


def _value_origins(log: Log, include_constants: bool) -> Origins:
    """The saved values judged by the rules, in order."""
    origins = Origins(include_constants)
    for entry in range(len(log.graph.recorded)):
        row = log.row(entry)
        if row.operation is OUTPUT:
            for parent in log.graph.parents[entry]:
                origins.add_output(parent)
        value = log.value(entry) if log.is_saved(entry) else None
        if not isinstance(value, torch.Tensor):
            origins.add_unseen(entry, log.graph.parents[entry])
            continue
        if row.operation in (INPUT, BUFFER):
            name = ", ".join(log.boundary_addresses.get(entry, ()))
            origins.add_source(entry, name, value, is_input=row.operation is INPUT)
        elif row.operation is not OUTPUT:
            constants = partial(numbers_in, (row.args, row.kwargs))
            given, first = partial(_given, log, entry), None
            if row.output_index:
                first = log.graph.entry_of.get(
                    log.graph.recorded[entry] - row.output_index, entry - row.output_index
                )
            origins.add_result(entry, row.operation.layer_type, value, given, constants, first)
    return origins


def _given(log: Log, entry: int) -> list[Given]:
    """What an operation was given: its parents, its parameters, and tensors that are neither."""
    recording = log.recording
    found = [
        Given(parent, log.label(parent), value if isinstance(value, torch.Tensor) else None)
        for parent in log.graph.parents[entry]
        for value in [log.value(parent) if log.is_saved(parent) else None]
    ]
    for number in log.graph.params[entry]:
        name = f"parameter {recording.param_addresses[number]}"
        found.append(Given(-1 - number, name, log.parameter(number), is_parameter=True))
    if reads_elsewhere(log.row(entry).references, len(recording.params)):
        found.append(Given(None, "a tensor that is no part of the log", None))
    return found


def _of_origin(log: Log, origin: NonFiniteOrigin) -> NonFinite:
    entry = origin.node
    unsaved = [log.label(parent) for parent in log.graph.parents[entry] if not log.is_saved(parent)]
    note = origin.note
    if unsaved and not note:
        note = f"Not saved, so it may have come from there: {', '.join(unsaved)}."
    return _finding(log, entry, "forward", origin.result, origin.inputs, note)


# -- gradients
# --------------------------------------------------------------------------------------------------


def _gradient_origin(log: Log, origins: Origins) -> NonFinite | None:
    """The operation whose backward made the first gradient that is not finite.

    None if there is none, or if a value that the operation read is to blame, which is then among
    the `origins`.
    """
    gradients = log.recording.gradients
    if not isinstance(gradients, Gradients):
        return None
    of_params = parameter_gradients(log)
    entry_of = log.graph.entry_of
    for number in dict.fromkeys(number for _, number in gradients.arrivals if number in entry_of):
        entry = entry_of[number]
        if not is_finite(gradients[number]):
            return _origin_of_gradient(log, entry, gradients[number], origins)
        for param in log.graph.params[entry]:
            if param in of_params and not is_finite(of_params[param]):
                sent = (param, of_params[param])
                return _origin_of_parameter_gradient(log, entry, gradients[number], sent, origins)
    return None


def _origin_of_gradient(
    log: Log, entry: int, gradient: torch.Tensor, origins: Origins
) -> NonFinite | None:
    """The origin of the gradient of an entry; None if a value that its readers read is to blame."""
    readers = _readers(log, entry)
    if any(origins.add_gradient(log.graph.parents[reader])[0] for reader in readers):
        return None
    sent = value_range(f"gradient sent to {log.label(entry)}", gradient)
    return _sender(log, entry, readers, sent)


def _origin_of_parameter_gradient(
    log: Log,
    entry: int,
    received: torch.Tensor,
    sent: tuple[int, torch.Tensor],
    origins: Origins,
) -> NonFinite | None:
    """The entry that `sent` a parameter, by its number, a gradient that is not finite; None if a
    value that it read is to blame.
    """
    parents, (param, gradient) = log.graph.parents[entry], sent
    if origins.add_gradient(parents)[0]:
        return None
    name = f"gradient sent to parameter {log.recording.param_addresses[param]}"
    inputs = [value_range("gradient received", received), *_ranges_of_values(log, parents)]
    return _finding(log, entry, "backward", value_range(name, gradient), inputs, "")


def _readers(log: Log, entry: int) -> list[int]:
    """What reads an entry and got a gradient, so that it may have made that of the entry."""
    gradients, recorded = log.recording.gradients, log.graph.recorded
    if log.row(entry).operation is OUTPUT:
        return []
    return [child for child in log.graph.children[entry] if recorded[child] in gradients]


def _sender(log: Log, entry: int, readers: list[int], result: ValueRange) -> NonFinite:
    """The gradient of `entry` was made by the backward of what reads it."""
    gradients, recorded = log.recording.gradients, log.graph.recorded
    if not readers:
        found = _finding(
            log, entry, "backward", result, _ranges_of_values(log, [entry]), FROM_OUTSIDE
        )
        return replace(found, is_from_outside=True)
    received = [
        value_range(f"gradient received by {log.label(child)}",
        gradients[recorded[child]]) for child in readers
    ]  # fmt: skip
    inputs = [*received, *_ranges_of_values(log, log.graph.parents[readers[-1]])]
    names = ", ".join(log.label(child) for child in readers)
    note = f"The backward of one of these made it: {names}." if len(readers) > 1 else ""
    return _finding(log, readers[-1], "backward", result, inputs, note)


# -- what a finding says
# -----------------------------------------------------------------------------------------------


def _finding(
    log: Log, entry: int, phase: str, result: ValueRange, inputs: Iterable[ValueRange], note: str
) -> NonFinite:
    lines, chain = log.call_stack(entry), log.module_chain(entry)
    return NonFinite(
        phase=phase,
        label=log.label(entry),
        operation=log.row(entry).operation.layer_type,
        module=log.recording.module_calls[chain[-1]].address if chain else "",
        source=str(lines[0]) if lines else None,
        result=result,
        inputs=tuple(inputs),
        note=note,
    )


def _ranges_of_values(log: Log, entries: Iterable[int]) -> list[ValueRange]:
    values = [(log.label(entry), log.value(entry)) for entry in entries if log.is_saved(entry)]
    return [
        value_range(label, value)
        for label, value in values
        if isinstance(value, torch.Tensor) and has_numbers(value)
    ]


def _is_number(log: Log, entry: int) -> bool:
    dtype = log.row(entry).dtype
    return dtype.is_floating_point or dtype.is_complex
