"""Columns of the call that made the tensor: the function, its arguments and its parameters."""

from collections.abc import Callable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlens._history.columns.making import Entries, nice_sizes, once
from torchlens._history.log import Log, picked
from torchlens._recording.recording import References, located
from torchlens._recording.user_code import source_line
from torchlens._text.lazy_import import lazy_function

if TYPE_CHECKING:
    from torchlens._graph.costs import flops_of_all
else:
    flops_of_all = lazy_function("torchlens._graph.costs", "flops_of_all")

_Place = TypeVar("_Place", int, str)
_Value = TypeVar("_Value")


# -- the operation
# --------------------------------------------------------------------------------------------------


def func_applied_name(log: Log, entries: Entries) -> list[str]:
    return [operation.name for operation in log.fields(entries).operation]


def source(log: Log, entries: Entries) -> list[str | None]:
    """The innermost line of the user's code that led to each operation; None where there is
    none.
    """
    fields = log.fields(entries)
    places: Iterable[tuple[CodeType | None, int]] = zip(
        fields.code, fields.instruction, strict=True
    )
    if any(code is None for code in fields.code):
        rows = zip(places, log.rows(entries), strict=True)
        places = [log.innermost_place(row) if place[0] is None else place for place, row in rows]
    places = list(places)
    keys = [
        (id(code), instruction) for code, instruction in places
    ]  # hashing a code object means reading it all
    lines = {
        key: None if code is None else str(source_line(code, instruction))
        for key, (code, instruction) in dict(zip(keys, places, strict=True)).items()
    }
    return list(map(lines.__getitem__, keys))


def func_time_elapsed(log: Log, entries: Entries) -> list[float]:
    return list(log.fields(entries).seconds)


def flops(log: Log, entries: Entries) -> list[int | None]:
    return flops_of_all(log.recording, log.rows(entries))


def flops_backward(log: Log, entries: Entries) -> list[int | None]:
    return log.flops_backward(entries)


def func_position_args_non_tensor(log: Log, entries: Entries) -> list[list[Any]]:
    fields = log.fields(entries)
    found: list[list[Any]] = []
    for args, references in zip(fields.args, fields.references, strict=True):
        if not args:
            found.append([])
        elif type(references) is not tuple:  # tensors inside arguments
            found.append([arg for _, arg in _non_tensors(references, enumerate(args))])
        elif None in references:
            found.append(
                [arg for arg, reference in zip(args, references, strict=False) if reference is None]
            )
        else:
            found.append([])
    return found


def func_keyword_args_non_tensor(log: Log, entries: Entries) -> list[dict[str, Any]]:
    fields = log.fields(entries)
    calls = zip(fields.references, fields.kwargs, strict=True)
    return [
        dict(_non_tensors(references, kwargs.items())) if kwargs else {}
        for references, kwargs in calls
    ]


def _non_tensors(
    references: References, arguments: Iterable[tuple[_Place, Any]]
) -> list[tuple[_Place, Any]]:
    """Those that are no tensor and no list of nothing but tensors, which stand there as None."""
    tensors = {location for location, _ in located(references)}

    def is_tensors(place: _Place, argument: Any) -> bool:
        if not isinstance(argument, list | tuple) or not argument:
            return place in tensors
        return all((place, index) in tensors for index in range(len(argument)))

    return [(place, argument) for place, argument in arguments if not is_tensors(place, argument)]


def function_is_inplace(log: Log, entries: Entries) -> list[bool]:
    return once(log.fields(entries).operation, lambda operation: operation.is_inplace)


def gradfunc(log: Log, entries: Entries) -> list[str | None]:
    return list(log.fields(entries).gradfunc)


def is_part_of_iterable_output(log: Log, entries: Entries) -> list[bool]:
    return [index is not None for index in log.fields(entries).output_index]


def iterable_output_index(log: Log, entries: Entries) -> list[int | None]:
    return list(log.fields(entries).output_index)


# -- parameters
# --------------------------------------------------------------------------------------------------


def _of_params(
    log: Log, entries: Entries, make: Callable[[list[torch.nn.Parameter]], _Value]
) -> list[_Value]:
    """What `make` makes of the parameters of each entry."""
    params, numbers = log.recording.params, log.graph.params
    return once(picked(numbers, entries), lambda own: make([params[number] for number in own]))


def parent_param_addresses(log: Log, entries: Entries) -> list[list[str]]:
    addresses, params = log.recording.param_addresses, log.graph.params
    return [[addresses[number] for number in own] if own else [] for own in picked(params, entries)]


def parent_param_shapes(log: Log, entries: Entries) -> list[list[tuple[int, ...]]]:
    return list(
        map(
            list,
            _of_params(log, entries, lambda own: [tuple(parameter.shape) for parameter in own]),
        )
    )


def computed_with_params(log: Log, entries: Entries) -> list[bool]:
    return list(map(bool, picked(log.graph.params, entries)))


def num_param_tensors(log: Log, entries: Entries) -> list[int]:
    return list(map(len, picked(log.graph.params, entries)))


def num_params_total(log: Log, entries: Entries) -> list[int]:
    return _of_params(log, entries, lambda own: sum(parameter.numel() for parameter in own))


def parent_params_fsize(log: Log, entries: Entries) -> list[int]:
    return _of_params(
        log,
        entries,
        lambda own: sum(parameter.numel() * parameter.element_size() for parameter in own),
    )


def parent_params_fsize_nice(log: Log, entries: Entries) -> list[str]:
    return nice_sizes(parent_params_fsize(log, entries))
