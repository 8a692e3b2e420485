"""The call that made the tensor: the function, its arguments and its parameters."""

from collections.abc import Callable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlens._history.backward import parameter_gradients
from torchlens._history.field import EntryFields, field, once, size_texts
from torchlens._history.log import picked
from torchlens._recording.functions import argument_names
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import References, located
from torchlens._recording.user_code import SourceLine, source_line
from torchlens._text.lazy_import import lazy_function

if TYPE_CHECKING:
    from torchlens._graph.costs import flops_of_all
else:
    flops_of_all = lazy_function("torchlens._graph.costs", "flops_of_all")

_Place = TypeVar("_Place", int, str)
_Value = TypeVar("_Value")


class EntryCalls(EntryFields):
    """The call that made the tensor: the function, its arguments and its parameters."""

    __slots__ = ()

    # -- the operation -----------------------------------------------------------------------------

    @property
    def _is_boundary(self) -> bool:
        return self._row.operation in (INPUT, OUTPUT, BUFFER)

    @property
    def func_applied(self) -> Callable[..., Any] | None:
        """The torch callable; None for inputs, outputs and buffers."""
        return None if self._is_boundary else self._row.operation.func

    @field
    def func_applied_name(self) -> list[str]:
        """The callable's name as torch spells it: `max_pool2d`, `relu_`, `__iadd__`."""
        return [operation.name for operation in self._rows.operation]

    @property
    def func_call_stack(self) -> list[SourceLine]:
        """The line of your code that called it, then those that called the modules around it,
        innermost first.
        """
        return self._log.call_stack(self._entry)

    @field
    def source(self) -> list[str | None]:
        """The innermost line of your code that led to it, as text; None if there is none."""
        places: list[tuple[CodeType | None, int]] = list(
            zip(self._rows.code, self._rows.instruction, strict=True)
        )
        if any(code is None for code, _ in places):
            rows = zip(places, self._log.rows(self._numbers), strict=True)
            places = [
                place if place[0] is not None else self._log.innermost_place(row)
                for place, row in rows
            ]
        # By the id of the code, because hashing a code object reads all of it.
        keys = [(id(code), instruction) for code, instruction in places]
        lines = {
            key: None if code is None else str(source_line(code, instruction))
            for key, (code, instruction) in dict(zip(keys, places, strict=True)).items()
        }
        return list(map(lines.__getitem__, keys))

    @field
    def func_time_elapsed(self) -> list[float]:
        """Seconds that the call took."""
        return list(self._rows.seconds)

    @field
    def flops(self) -> list[int | None]:
        """Floating-point operations: 0 if free by convention, None if not known."""
        return flops_of_all(self._log.recording, self._log.rows(self._numbers))

    @field
    def flops_backward(self) -> list[int | None]:
        """Floating-point operations of its part in a backward pass from the outputs; 0 if no
        gradient reaches it.
        """
        return self._log.flops_backward(self._numbers)

    @property
    def func_argnames(self) -> tuple[str, ...]:
        """The names of the callable's parameters, if torch provides them."""
        return () if self._is_boundary else argument_names(self._row.operation.func)

    @field
    def func_position_args_non_tensor(self) -> list[list[Any]]:
        """Its positional arguments other than tensors."""
        calls = zip(self._rows.args, self._rows.references, strict=True)
        return [_plain_positions(args, references) if args else [] for args, references in calls]

    @field
    def func_keyword_args_non_tensor(self) -> list[dict[str, Any]]:
        """Its keyword arguments other than tensors."""
        calls = zip(self._rows.references, self._rows.kwargs, strict=True)
        return [
            dict(_non_tensors(references, kwargs.items())) if kwargs else {}
            for references, kwargs in calls
        ]

    @field
    def function_is_inplace(self) -> list[bool]:
        """Whether the call writes to its first argument."""
        return [operation.is_inplace for operation in self._rows.operation]

    @field
    def gradfunc(self) -> list[str | None]:
        """The name of its node in autograd's graph: `ConvolutionBackward0`; None if it has no
        gradient.
        """
        return list(self._rows.gradfunc)

    @field
    def is_part_of_iterable_output(self) -> list[bool]:
        """Whether it is one of several results of a call, as with `split`."""
        return [index is not None for index in self._rows.output_index]

    @field
    def iterable_output_index(self) -> list[int | None]:
        """Which of several results of a call it is, from 0; None if there is only one."""
        return list(self._rows.output_index)

    @property
    def creation_args(self) -> tuple[Any, ...] | None:
        """The positional arguments as they were at the call, with `save_function_args=True`; None
        otherwise.
        """
        saved = self._log.saved_arguments(self._entry)
        return None if saved is None else saved[0]

    @property
    def creation_kwargs(self) -> dict[str, Any] | None:
        """The keyword arguments as they were at the call, with `save_function_args=True`; None
        otherwise.
        """
        saved = self._log.saved_arguments(self._entry)
        return None if saved is None else saved[1]

    # -- parameters --------------------------------------------------------------------------------

    @property
    def parent_params(self) -> list[torch.nn.Parameter]:
        """The parameters it was computed with."""
        return [self._log.parameter(number) for number in self._log.graph.params[self._entry]]

    @field
    def parent_param_addresses(self) -> list[list[str]]:
        """The addresses of the parameters it was computed with: `features.6.weight`."""
        addresses = self._log.recording.param_addresses
        return [[addresses[number] for number in own] for own in _param_numbers(self)]

    @property
    def parent_param_grads(self) -> list[torch.Tensor | None]:
        """For each of its parameters, the gradient summed over all operations; None if no backward
        pass sent one.
        """
        found = parameter_gradients(self._log)
        return [found.get(number) for number in self._log.graph.params[self._entry]]

    @field
    def parent_param_shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of the parameters it was computed with."""
        shapes = _of_params(self, lambda params: [tuple(param.shape) for param in params])
        return list(map(list, shapes))

    @field
    def computed_with_params(self) -> list[bool]:
        """Whether it was computed with parameters of the model."""
        return list(map(bool, _param_numbers(self)))

    @field
    def num_param_tensors(self) -> list[int]:
        """How many parameters it was computed with, counted as tensors."""
        return list(map(len, _param_numbers(self)))

    @field
    def num_params_total(self) -> list[int]:
        """How many numbers are in the parameters it was computed with."""
        return _of_params(self, lambda params: sum(param.numel() for param in params))

    @field
    def parent_params_fsize(self) -> list[int]:
        """The bytes of the parameters it was computed with."""
        return _of_params(
            self, lambda params: sum(param.numel() * param.element_size() for param in params)
        )

    @field
    def parent_params_fsize_nice(self) -> list[str]:
        """The size of the parameters it was computed with, as text."""
        return size_texts(EntryCalls.parent_params_fsize.of(self))


def _plain_positions(args: tuple[Any, ...], references: References) -> list[Any]:
    if type(references) is tuple:  # one for each argument; None is not a tensor
        if None not in references:
            return []
        pairs = zip(args, references, strict=False)
        return [arg for arg, reference in pairs if reference is None]
    return [arg for _, arg in _non_tensors(references, enumerate(args))]


def _non_tensors(
    references: References, arguments: Iterable[tuple[_Place, Any]]
) -> list[tuple[_Place, Any]]:
    """The arguments that are neither tensors nor lists of nothing but tensors."""
    tensors = {location for location, _ in located(references)}

    def is_tensors(place: _Place, argument: Any) -> bool:
        if not isinstance(argument, list | tuple) or not argument:
            return place in tensors
        return all((place, index) in tensors for index in range(len(argument)))

    return [(place, argument) for place, argument in arguments if not is_tensors(place, argument)]


def _param_numbers(entries: EntryFields) -> "list[tuple[int, ...]]":
    return picked(entries._log.graph.params, entries._numbers)


def _of_params(
    entries: EntryFields, make: Callable[[list[torch.nn.Parameter]], _Value]
) -> list[_Value]:
    """The result of `make` for the parameters of each entry."""
    params = entries._log.recording.params
    return once(_param_numbers(entries), lambda own: make([params[number] for number in own]))
