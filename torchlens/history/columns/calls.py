"""Columns of the call that made the tensor: the function, its arguments and its parameters."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlens.capture.recording import Row, located
from torchlens.history.columns.making import Entries, nice_sizes, once
from torchlens.history.log import Log, picked, source_line
from torchlens.lazy_import import lazy_function

if TYPE_CHECKING:
    from torchlens.graph.costs import flops_of_all
else:
    flops_of_all = lazy_function("torchlens.graph.costs", "flops_of_all")

_Place = TypeVar("_Place", int, str)
_Value = TypeVar("_Value")


# -- the operation -----------------------------------------------------------------------------------------------------


def func_applied_name(log: Log, entries: Entries) -> list[str]:
    return [row.operation.name for row in log.rows(entries)]


def source(log: Log, entries: Entries) -> list[str | None]:
    """The innermost line of the user's code that led to each operation; None where there is none."""
    found: list[str | None] = []
    known: dict[tuple[int, int], str] = {}  # by id: hashing a code object means reading it all
    for row in log.rows(entries):
        code, instruction = (row.code, row.instruction) if row.code is not None else log.innermost_place(row)
        if code is None:
            found.append(None)
            continue
        line = known.get((id(code), instruction))
        if line is None:
            line = known[id(code), instruction] = str(source_line(code, instruction))
        found.append(line)
    return found


def func_time_elapsed(log: Log, entries: Entries) -> list[float]:
    return [row.seconds for row in log.rows(entries)]


def flops(log: Log, entries: Entries) -> list[int | None]:
    return flops_of_all(log.recording, log.rows(entries))


def flops_backward(log: Log, entries: Entries) -> list[int | None]:
    return log.flops_backward(entries)


def func_position_args_non_tensor(log: Log, entries: Entries) -> list[list[Any]]:
    found: list[list[Any]] = []
    for row in log.rows(entries):
        args, references = row.args, row.references
        if not args:
            found.append([])
        elif type(references) is not tuple:  # tensors inside arguments
            found.append([arg for _, arg in _non_tensors(row, enumerate(args))])
        elif None in references:
            found.append([args[place] for place, reference in enumerate(references) if reference is None])
        else:
            found.append([])
    return found


def func_keyword_args_non_tensor(log: Log, entries: Entries) -> list[dict[str, Any]]:
    return [dict(_non_tensors(row, row.kwargs.items())) if row.kwargs else {} for row in log.rows(entries)]


def _non_tensors(row: Row, arguments: Iterable[tuple[_Place, Any]]) -> list[tuple[_Place, Any]]:
    """Those that are no tensor and no list of nothing but tensors, which stand there as None."""
    tensors = {location for location, _ in located(row.references)}

    def is_tensors(place: _Place, argument: Any) -> bool:
        if not isinstance(argument, list | tuple) or not argument:
            return place in tensors
        return all((place, index) in tensors for index in range(len(argument)))

    return [(place, argument) for place, argument in arguments if not is_tensors(place, argument)]


def function_is_inplace(log: Log, entries: Entries) -> list[bool]:
    return once([row.operation for row in log.rows(entries)], lambda operation: operation.is_inplace)


def gradfunc(log: Log, entries: Entries) -> list[str | None]:
    return [row.gradfunc for row in log.rows(entries)]


def is_part_of_iterable_output(log: Log, entries: Entries) -> list[bool]:
    return [row.output_index is not None for row in log.rows(entries)]


def iterable_output_index(log: Log, entries: Entries) -> list[int | None]:
    return [row.output_index for row in log.rows(entries)]


# -- parameters --------------------------------------------------------------------------------------------------------


def _of_params(log: Log, entries: Entries, make: Callable[[list[torch.nn.Parameter]], _Value]) -> list[_Value]:
    """What `make` makes of the parameters of each entry."""
    params, numbers = log.recording.params, log.graph.params
    return once(picked(numbers, entries), lambda own: make([params[number] for number in own]))


def parent_param_addresses(log: Log, entries: Entries) -> list[list[str]]:
    addresses, params = log.recording.param_addresses, log.graph.params
    return [[addresses[number] for number in own] if own else [] for own in picked(params, entries)]


def parent_param_shapes(log: Log, entries: Entries) -> list[list[tuple[int, ...]]]:
    return list(map(list, _of_params(log, entries, lambda own: [tuple(parameter.shape) for parameter in own])))


def computed_with_params(log: Log, entries: Entries) -> list[bool]:
    return list(map(bool, picked(log.graph.params, entries)))


def num_param_tensors(log: Log, entries: Entries) -> list[int]:
    return list(map(len, picked(log.graph.params, entries)))


def num_params_total(log: Log, entries: Entries) -> list[int]:
    return _of_params(log, entries, lambda own: sum(parameter.numel() for parameter in own))


def parent_params_fsize(log: Log, entries: Entries) -> list[int]:
    return _of_params(log, entries, lambda own: sum(parameter.numel() * parameter.element_size() for parameter in own))


def parent_params_fsize_nice(log: Log, entries: Entries) -> list[str]:
    return nice_sizes(parent_params_fsize(log, entries))
